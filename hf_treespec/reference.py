"""The slow versions, and what tests need: an oracle, a drafter that does as told, and a check for drafters.

Shipped so that third parties can test their drafters and processors the way this library tests itself. Nothing here is
fast, and nothing here shares code with the loop beyond the types that it checks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from . import _compat
from .accept import default_generator
from .drafters.base import Budget, Commit, DraftContext, Drafter, Prompt
from .errors import DrafterError
from .tree import TokenTree


@torch.no_grad()
def path_logits(model: PreTrainedModel, ids: torch.Tensor, tree: TokenTree) -> torch.Tensor:
    """What the target says after each node's path, by an uncached forward for each node.

    Args:
        ids: (1, t) int64, the text; its last token is the tree's root.
        tree: one row.

    Returns:
        (N, V) logits in the model's dtype.
    """
    rows = []
    for node in range(len(tree)):
        path = torch.tensor([tree.tokens[0, tree.path(node)[1:]].tolist()], dtype=torch.long, device=ids.device)
        rows.append(model(input_ids=torch.cat([ids, path], 1), use_cache=False).logits[0, -1])
    return torch.stack(rows)


@torch.no_grad()
def plain_decode(
    model: PreTrainedModel,
    ids: torch.Tensor,
    max_new_tokens: int,
    *,
    processors: Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = (),
    do_sample: bool = False,
    eos_token_id: int | None = None,
) -> torch.Tensor:
    """Plain decoding without a cache, one whole forward a token; `torch.multinomial` where it samples.

    Args:
        ids: (1, T) int64 prompt.
        processors: called in order with (ids so far (1, t), scores (1, V) float32).

    Returns:
        (1, T + new) int64.
    """
    for _ in range(max_new_tokens):
        scores = model(input_ids=ids, use_cache=False).logits[:, -1].float()
        for processor in processors:
            scores = processor(ids, scores)
        token = torch.multinomial(scores.softmax(-1), 1) if do_sample else scores.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], 1)
        if int(token) == eos_token_id:
            break
    return ids


class ScriptedDrafter(Drafter):
    """Proposes exactly what a test says, and remembers what it was shown.

    Args:
        script: called with (context, budget) for every tree; or the trees of successive rounds, after which nothing
            is drafted.

    Attributes:
        contexts, commits: what the last call's `draft` and `observe` were given, in order.
    """

    name = "scripted"

    def __init__(self, script: Callable[[DraftContext, Budget], TokenTree] | Sequence[TokenTree]) -> None:
        self.script = script
        self.contexts: list[DraftContext] = []
        self.commits: list[Commit] = []

    def start(self, prompt: Prompt) -> None:
        # the lists belong to the template that the test holds, so that it can read them after the call
        self.contexts.clear()
        self.commits.clear()
        self._trees = None if callable(self.script) else iter(self.script)

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.contexts.append(context)
        if callable(self.script):
            return self.script(context, budget)
        assert self._trees is not None
        return next(self._trees, None) or TokenTree.root_only(context.last_token)

    def observe(self, commit: Commit) -> None:
        self.commits.append(commit)


class _Watched(Drafter):
    """Passes everything on to a drafter and checks what it may not do."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.hidden_layers = inner.hidden_layers
        self.uses_assistant_model = inner.uses_assistant_model  # type: ignore[misc]
        self.uses_assistant_tokenizer = inner.uses_assistant_tokenizer  # type: ignore[misc]

    def for_call(self) -> Drafter:
        fresh = copy.copy(self)
        fresh.inner = self.inner.for_call()
        if fresh.inner is self.inner:
            raise DrafterError(f"drafter {self.name!r}: for_call must return a copy; calls would share their state.")
        return fresh

    def start(self, prompt: Prompt) -> None:
        self._device = prompt.ids.device
        self._forbid_drawing("start", self._device, lambda: self.inner.start(prompt))

    def read_prompt(self) -> None:
        self._forbid_drawing("read_prompt", self._device, self.inner.read_prompt)

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        before = context.ids.clone()
        tree = self._forbid_drawing("draft", context.ids.device, lambda: self.inner.draft(context, budget))
        if not isinstance(tree, TokenTree):
            raise DrafterError(f"drafter {self.name!r}: draft returned {type(tree).__name__}, not a TokenTree.")
        if not torch.equal(before, context.ids):
            raise DrafterError(f"drafter {self.name!r}: draft changed context.ids, which are the text itself.")
        pairs = list(zip(tree.parents[0, 1:].tolist(), tree.tokens[0, 1:].tolist(), strict=True))
        if len(set(pairs)) != len(pairs):
            raise DrafterError(f"drafter {self.name!r}: two siblings hold the same token; merge them.")
        for what, size, limit in (
            ("nodes", len(tree) - 1, budget.max_nodes),
            ("levels", int(tree.depths.max()), budget.max_depth),
        ):
            if size > limit:
                raise DrafterError(f"drafter {self.name!r}: drafted {size} {what} where the budget allows {limit}.")
        return tree

    def _forbid_drawing(self, where: str, device: torch.device, action: Callable[[], Any]) -> Any:
        generator = default_generator(device)
        state = generator.get_state()
        result = action()
        if not torch.equal(state, generator.get_state()):
            raise DrafterError(f"drafter {self.name!r}: {where} used torch's default generator; use one of its own.")
        return result


def check_drafter(
    drafter: Drafter,
    target: PreTrainedModel,
    *,
    prompts: Sequence[torch.Tensor] | None = None,
    max_new_tokens: int = 24,
    **generate_arguments: Any,
) -> None:
    """Raises `DrafterError` unless `drafter` keeps its contract and `target` gives the text of plain decoding with it.

    Runs greedy and sampled calls over budgets from one node to many, a chain, and prompts A, B, A; checks in each that
    the text is plain `generate`'s, that trees are well formed and within their budget, and that drafting leaves the
    text and torch's default generator alone. Use a float32 target.

    Args:
        prompts: (1, T) int64 each; two made-up ones by default.
        generate_arguments: passed to every call, e.g. `assistant_model=`.
    """
    if prompts is None:
        size = _compat.text_config(target).vocab_size
        seeds = ([3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [2, 7, 1, 8, 2, 8, 2, 7])
        prompts = [torch.tensor([[t % size for t in seed]], device=target.device) for seed in seeds]
    common = {"max_new_tokens": max_new_tokens, "pad_token_id": 0}
    budgets: tuple[dict[str, int], ...] = ({}, {"max_nodes": 1}, {"max_children": 1}, {"max_nodes": 40, "max_depth": 3})
    for budget in budgets:
        for sampled in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20}):
            for ids in (*prompts, prompts[0]):
                plain_arguments = {
                    k: v for k, v in generate_arguments.items() if k not in ("assistant_model", "assistant_tokenizer")
                }
                torch.manual_seed(0)
                plain = target.generate(ids, **common, **sampled, **plain_arguments)
                torch.manual_seed(0)
                spec = {"drafter": _Watched(drafter), "fallback": False, **budget}
                text = target.generate(ids, tree_spec=spec, **common, **sampled, **generate_arguments)
                if not torch.equal(plain, text):
                    raise DrafterError(
                        f"drafter {drafter.name!r}: with {budget or 'the default budget'} and {sampled} the text is not "
                        f"that of plain decoding: {text[0].tolist()} instead of {plain[0].tolist()}."
                    )
