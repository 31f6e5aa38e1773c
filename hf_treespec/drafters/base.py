"""The drafter contract, the registry, and everything that a drafter may see.

A drafter proposes a `TokenTree`; it never sees the accept rule, and nothing that it does can change the text.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import difflib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ..errors import DrafterError
from ..tree import TokenTree

if TYPE_CHECKING:
    from ..accept import NoiseWindow
    from ..cache import TreeCache
    from ..verify import Verified

ENTRY_POINTS = "hf_treespec.drafters"


@dataclasses.dataclass(frozen=True)
class Budget:
    """How large a tree this round may be. A larger one is cut to its best-scoring nodes.

    Attributes:
        max_nodes: drafted nodes, the root not counted; at least 1 (a drafter is not asked for nothing).
        max_depth: drafted tokens on one path; never more than decoding could still commit.
        max_children: continuations of one node; 1 asks for a chain.
        min_gain: tokens that another forward of the drafter's own model must promise to be worth its time.
        min_score: nodes of lower path scores would be cut anyway.
    """

    max_nodes: int
    max_depth: int
    max_children: int
    min_gain: float = 0.5  # OPT-Tree's default (Wang et al. 2024), where nothing was measured
    min_score: float = 0.0


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What stays fixed during a call of `generate`.

    Attributes:
        target: the model whose output is reproduced.
        ids: (B, T) int64 prompt ids; T = 0 where the prompt was given as embeddings only.
        attention_mask: (B, T) with 0 at padding, or None.
        do_sample: whether the target samples.
        processors: logits processors and warpers of the call. They may be stateful: do not call unknown ones.
        assistant_model: the `assistant_model=` of the call, or None.
        max_nodes: the largest tree of the call, for preallocation.
        verified: the prompt's forward (a tree of one root): logits, and hidden states where `hidden_layers` asks.
        tokenizer: the `tokenizer=` of the call, or None. Only for checks and translations: a drafter works on ids.
        cache: the target's keys and values; while a tree is drafted, those of the text without the root. What a drafter
            appends behind them it cuts off again before it returns.
        last_position: (..., B, 1) position id of the last token in `cache` when the call starts.
        assistant_tokenizer: the `assistant_tokenizer=` of the call, or None. For drafters that translate.
    """

    target: PreTrainedModel
    ids: torch.Tensor
    attention_mask: torch.Tensor | None
    do_sample: bool
    processors: LogitsProcessorList
    assistant_model: PreTrainedModel | None
    max_nodes: int
    verified: Verified
    tokenizer: Any = None
    cache: TreeCache | None = None
    last_position: torch.Tensor | None = None
    assistant_tokenizer: Any = None


@dataclasses.dataclass(frozen=True)
class Commit:
    """What one round added to the text, for each of B rows (one, for now).

    Attributes:
        tokens: for each row its new tokens, in order. The last one is the row's next root.
        path: for each row and each of its new tokens the node of `verified.tree` that it follows: the root, then accepted
            nodes. These nodes are now in the target's cache.
        bonus: for each row its last token, where the target added it itself; None where decoding stopped on a drafted one.
        verified: the round's tree with the logits (and hidden states) of all its nodes, rejected ones too.
    """

    tokens: list[list[int]]
    path: list[list[int]]
    bonus: list[int | None]
    verified: Verified


@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What `draft` may look at.

    Attributes:
        ids: (B, t) int64, prompt and committed tokens. Treat as read-only.
        last_tokens: for each row the root of the tree that is asked for. `last_token` is the first row's.
        noise: the window on the target's coming draws, or None in greedy decoding. `noise.peek(d - 1)` is the draw
            with which the target will choose a token at depth d; children = top tokens of log q - log(draw).
        remaining: tokens that decoding may still commit.
    """

    ids: torch.Tensor
    last_tokens: list[int]
    noise: NoiseWindow | None
    remaining: int

    @property
    def last_token(self) -> int:
        return self.last_tokens[0]


class Drafter(abc.ABC):
    """Proposes trees. To write one, subclass and:

    * implement `draft`, the only method that you must;
    * keep what belongs to one call (caches, counters) in attributes that `start` sets anew: each call of `generate`
      runs on a shallow copy of the drafter, so several calls, also from several threads, do not meet;
    * keep what is shared between calls (weights, tables) in attributes set by `__init__`, and guard what you change;
    * return a tree whose root is `context.last_token`; it may be `TokenTree.root_only(...)`, which drafts nothing;
    * give path scores that fall along a path: the loop cuts a tree by them;
    * do not touch the target, the ids or torch's default generator.

    `hf_treespec.check_drafter(drafter, target)` tests all of this.

    Attributes:
        name: set by `register_drafter`; stands in statistics and messages.
        hidden_layers: indices into the target's `hidden_states` (0 is the embeddings) that `observe` needs; the loop
            then asks the target for hidden states.
        forwards: of its own model in the last `draft`, so that a level's price can be measured; 0 for drafters without.
        uses_assistant_model: whether the call's `assistant_model` is for this drafter.
        uses_assistant_tokenizer: whether it translates between the call's `tokenizer` and `assistant_tokenizer`.
        needs: what must be given to it besides the target, in words; "" where it drafts by its name alone.
    """

    name: ClassVar[str] = "unnamed"
    hidden_layers: tuple[int, ...] = ()
    forwards: int = 0
    uses_assistant_model: ClassVar[bool] = False
    uses_assistant_tokenizer: ClassVar[bool] = False
    needs: ClassVar[str] = ""

    @classmethod
    def made_for(cls, assistant_model: PreTrainedModel) -> bool:
        """Whether `auto` takes this drafter where the call's `assistant_model` is this one. Plain models go to `model`."""
        return False

    @abc.abstractmethod
    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        """Proposes a tree below the last committed token."""

    def start(self, prompt: Prompt) -> None:  # noqa: B027 - optional hook
        """Called once a call, after the prompt's forward. Raise `DrafterError` if the target does not fit."""

    def read_prompt(self) -> None:  # noqa: B027 - optional hook
        """Called once a call, right before the first `draft`, and never in a call in which nothing is drafted.

        The place for a model of one's own to read the text so far: the loop tells its price from that of drafting.
        """

    def observe(self, commit: Commit) -> None:  # noqa: B027 - optional hook
        """Called after every round, the prompt's (which commits the first token) included. Also in plain rounds, so keep
        it cheap: put aside what the next draft will need, and compute it there."""

    def for_call(self) -> Drafter:
        """The drafter of one call: a shallow copy, so that `start` may set its own attributes."""
        return copy.copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Drafter:
        # `generate` deep-copies its config on every call; weights and tables are shared, state lives in `for_call`
        return self


_registry: dict[str, type[Drafter]] = {}
D = TypeVar("D", bound=type[Drafter])


def register_drafter(name: str) -> Callable[[D], D]:
    """Class decorator: makes a drafter known as `tree_spec="<name>"`.

    Raises:
        DrafterError: the name is taken, or is "auto".
    """

    def register(cls: D) -> D:
        if name == "auto" or _registry.get(name, cls) is not cls:
            raise DrafterError(f"drafter name {name!r} is taken; choose another.")
        cls.name = name
        _registry[name] = cls
        return cls

    return register


def drafter_names(*, alone: bool = False) -> list[str]:
    """Every registered name, sorted; installed packages with an entry point in `hf_treespec.drafters` included.

    Args:
        alone: only those that need no further file or model: `tree_spec="<name>"` is enough.
    """
    for point in entry_points(group=ENTRY_POINTS):
        if point.name not in _registry:
            point.load()  # its module registers itself
    return sorted(name for name, kind in _registry.items() if not alone or _drafts_alone(kind))


def _drafts_alone(kind: type[Drafter]) -> bool:
    """Whether it says so, and its constructor agrees."""
    if kind.needs or kind.uses_assistant_model:
        return False
    arguments = inspect.signature(kind).parameters.values()
    return all(a.default is not a.empty or a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments)


def drafter_class(name: str) -> type[Drafter]:
    """The class behind a registered name.

    Raises:
        DrafterError: no such drafter.
    """
    # installed packages are looked for, which takes milliseconds, only where the name is not known
    if name not in _registry and name not in (known := drafter_names()):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DrafterError(f"there is no drafter {name!r}; known are {', '.join(known)}.{hint}")
    return _registry[name]


def drafter_for(assistant_model: PreTrainedModel | None) -> str:
    """The name that `auto` stands for."""
    if assistant_model is None:
        return "union"
    return next((name for name in drafter_names() if _registry[name].made_for(assistant_model)), "model")


def make_drafter(name: str, **options: Any) -> Drafter:
    """A drafter by its registered name; `options` go to its constructor.

    Raises:
        DrafterError: no such drafter, or options that its constructor does not take.
    """
    kind = drafter_class(name)
    try:
        return kind(**options)
    except TypeError as error:
        raise DrafterError(f"drafter {name!r} does not take drafter_options={options!r}: {error}") from error
