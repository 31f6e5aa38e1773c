"""`recycling`: the target's own second thoughts. No weights (after token recycling, Luo et al. 2024).

Every verify pass scores the whole vocabulary at every node, and all but one number is thrown away. Here the best few
tokens at each node, rejected nodes included, are kept as what may follow that node's token, the latest occurrence
winning; and once more as what may follow the last two tokens, which is rarer and surer. Drafts walk this table. It
belongs to the target and stays warm from call to call.

A guess's chance is counted by its rank and by the probability that the target gave it when it was stored. Where the last
two tokens are known, the last one alone speaks for what chance they leave.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..errors import DrafterError
from ..verify import Verified
from .base import Prompt, register_drafter
from .source import Claim, Odds, Source, SourceDrafter

_CHUNK = 128
# Kinds of guesses: by rank 0, 1, 2-3, 4 and later, and by stored probability. Priors: means over SmolLM2-135M's greedy
# answers to instruction prompts, rounded; after one token, and after two.
_RANKS, _LEVELS = (0, 1, 2, 2, 3), (0.1, 0.3, 0.6, 0.9)
_PRIORS = (
    (
        0.1,
        0.15,
        0.23,
        0.4,
        0.58,
        0.07,
        0.11,
        0.17,
        0.17,
        0.17,
        0.04,
        0.05,
        0.05,
        0.05,
        0.05,
        0.02,
        0.04,
        0.04,
        0.04,
        0.04,
    ),
    (0.1, 0.2, 0.35, 0.55, 0.75, 0.08, 0.13, 0.2, 0.2, 0.2, 0.04, 0.06, 0.06, 0.06, 0.06, 0.02, 0.04, 0.04, 0.04, 0.04),
)

Context = int | tuple[int, int]


# Contexts that a table holds before it starts afresh: about 60 MiB.
MAX_CONTEXTS = 2**18


class Successors:
    """The `width` tokens that the target last thought likeliest after each context: one token, or two.

    Attributes:
        place: context to row.
        tokens: (rows, width) int32, likeliest first.
        chances: (rows, width) float32, the target's probabilities then, among each other (of raw logits).
    """

    def __init__(self, width: int) -> None:
        self._lock = threading.Lock()
        self.place: dict[Context, int] = {}
        self.tokens = np.zeros((1024, width), np.int32)
        self.chances = np.zeros((1024, width), np.float32)

    def copy(self) -> Successors:
        other = Successors(1)
        other.place, other.tokens, other.chances = dict(self.place), self.tokens.copy(), self.chances.copy()
        return other

    def store(self, contexts: Sequence[Sequence[Context]], logits: torch.Tensor) -> None:
        """What follows, given logits (n, V): row i is known under each context of `contexts[i]`."""
        best, following = _top(logits.float(), self.tokens.shape[1])
        tokens, chances = torch.stack([following.float(), best.softmax(-1)]).cpu().numpy()  # one read; ids are exact
        source = [i for i, names in enumerate(contexts) for _ in names]
        with self._lock:
            if len(self.place) > MAX_CONTEXTS:
                self.place.clear()
            target = [self.place.setdefault(context, len(self.place)) for names in contexts for context in names]
            if len(self.place) > len(self.tokens):
                more = ((0, len(self.place)), (0, 0))
                self.tokens, self.chances = np.pad(self.tokens, more), np.pad(self.chances, more)
            self.tokens[target], self.chances[target] = tokens[source], chances[source]

    def after(self, context: Context) -> list[tuple[int, float]]:
        """(token, chance), the likeliest first; nothing for a context that never occurred."""
        row = self.place.get(context)
        return [] if row is None else list(zip(self.tokens[row].tolist(), self.chances[row].tolist(), strict=True))


def _top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`scores.topk(count)` of (n, V): exact, but most of a large vocabulary is only looked at for its maximum."""
    rows, size = scores.shape
    if size % _CHUNK or size // _CHUNK <= count:
        return scores.topk(min(count, size), dim=-1)
    # the count best tokens lie in the count chunks with the best maxima
    chunks = scores.view(rows, -1, _CHUNK)
    places = chunks.amax(-1).topk(count, dim=-1).indices
    best, within = chunks.gather(1, places[:, :, None].expand(-1, -1, _CHUNK)).flatten(1).topk(count, dim=-1)
    return best, places.gather(1, within // _CHUNK) * _CHUNK + within % _CHUNK


class RecyclingSource(Source):
    """The state is the pair of the last two tokens."""

    def __init__(self, table: Successors) -> None:
        self.table = table
        self.odds = [Odds(prior) for prior in _PRIORS]
        self._last = (-1, -1)
        self._before_root = -1  # the token before the root of the tree that is being verified

    def read(self, token: int) -> None:
        self._last = (self._last[1], token)

    def claims(self, state: tuple[int, int]) -> list[Claim]:
        contexts: tuple[Context, Context] = (state[1], state)
        return [
            Claim(odds, _kind(rank, stored), (token,))
            for odds, context in zip(self.odds, contexts, strict=True)
            for rank, (token, stored) in enumerate(self.table.after(context))
        ]

    def look(self, verified: Verified) -> None:
        tree = verified.tree
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        scored = range(len(tree) - verified.logits.shape[1], len(tree))  # the prompt's forward scores one token
        before = [tokens[parents[n]] if n else self._before_root for n in scored]
        contexts = [(tokens[n], (b, tokens[n])) for n, b in zip(scored, before, strict=True)]
        self.table.store(contexts, verified.logits[0])
        self._before_root = self._last[0]

    def root(self) -> tuple[int, int]:
        return self._last

    def step(self, state: tuple[int, int], token: int) -> tuple[int, int]:
        return state[1], token

    def guesses(self, state: tuple[int, int]) -> dict[int, float]:
        chances: dict[int, float] = {}
        left = 1.0
        for odds, context in ((self.odds[1], state), (self.odds[0], state[1])):
            taken = 0.0
            for rank, (token, stored) in enumerate(self.table.after(context)):
                chance = left * odds[_kind(rank, stored)]
                taken += chance
                chances[token] = chances.get(token, 0.0) + chance
            left = max(0.0, left - taken)
        return chances


def _kind(rank: int, chance: float) -> int:
    return 5 * _RANKS[min(rank, 4)] + bisect_right(_LEVELS, chance)


Tables = dict[int, Successors]
_tables: weakref.WeakKeyDictionary[object, Tables] = weakref.WeakKeyDictionary()


def table_of(target: object, width: int, vocabulary: int) -> Successors:
    """The table of a loaded target, made on first use. Calls share it."""
    width = min(width, vocabulary)
    return _tables.setdefault(target, {}).setdefault(width, Successors(width))


def exchange_tables(target: object, tables: Tables | None = None) -> Tables:
    """Gives a target other tables (none: it starts afresh) and returns those that it had.

    For measurements: an arm must not profit from what another one has learnt about the same text.
    """
    old = _tables.pop(target, {})
    _tables[target] = {} if tables is None else tables
    return old


@contextlib.contextmanager
def fresh_tables(target: object) -> Iterator[None]:
    """Within the block a target has learnt nothing from earlier texts, nor later ones from those of the block.

    For comparisons on one prompt, as the demos make them: who decodes it first must not teach the next.
    """
    before = exchange_tables(target)
    try:
        yield
    finally:
        exchange_tables(target, before)


def check_width(width: int) -> int:
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= 64:
        raise DrafterError(f"width={width!r} must be a whole number of successors, 1 to 64.")
    return width


@register_drafter("recycling")
class RecyclingDrafter(SourceDrafter):
    """Drafts what the target itself thought likely after the same tokens, the last time that it stood there.

    Args:
        width: successors kept for each context.
    """

    def __init__(self, width: int = 8) -> None:
        self.width = check_width(width)

    def sources(self, prompt: Prompt) -> list[Source]:
        return [RecyclingSource(table_of(prompt.target, self.width, prompt.verified.logits.shape[-1]))]
