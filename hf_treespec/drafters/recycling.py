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
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import DrafterError
from ..tree import FloatArray, IntArray
from .base import Prompt, register_drafter
from .source import Answers, Odds, Source, SourceDrafter

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
# By rank, the first of its kinds.
_BY_RANK = np.array([5 * _RANKS[min(rank, 4)] for rank in range(64)])


# Contexts that a table holds before it starts afresh: about 60 MiB.
MAX_CONTEXTS = 2**18


class Successors:
    """The `width` tokens that the target last thought likeliest after each context: one token, or two.

    Attributes:
        place: context to row.
        tokens: (rows, width) int32, likeliest first.
        kinds: (rows, width) int8, of each as a guess: by its rank and the target's probability then.
    """

    def __init__(self, width: int) -> None:
        self._lock = threading.Lock()
        self.place: dict[Context, int] = {}
        self.tokens = np.zeros((1024, width), np.int32)
        self.kinds = np.zeros((1024, width), np.int8)

    def copy(self) -> Successors:
        other = Successors(1)
        other.place, other.tokens, other.kinds = dict(self.place), self.tokens.copy(), self.kinds.copy()
        return other

    def store(self, contexts: Sequence[Sequence[Context]], tokens: IntArray, chances: FloatArray) -> None:
        """What follows: row i of (n, width) tokens is known under each context of `contexts[i]`.

        Args:
            chances: (n, width), the target's probabilities, among each other (of raw logits).
        """
        kinds = _BY_RANK[: tokens.shape[1]] + np.searchsorted(_LEVELS, chances, side="right")
        source = [i for i, names in enumerate(contexts) for _ in names]
        with self._lock:
            if len(self.place) > MAX_CONTEXTS:
                self.place.clear()
            target = [self.place.setdefault(context, len(self.place)) for names in contexts for context in names]
            if len(self.place) > len(self.tokens):
                more = ((0, len(self.place)), (0, 0))
                self.tokens, self.kinds = np.pad(self.tokens, more), np.pad(self.kinds, more)
            self.tokens[target], self.kinds[target] = tokens[source], kinds[source]

    def rows(self, contexts: Sequence[Context]) -> tuple[list[int], NDArray[np.int32], NDArray[np.int8]]:
        """Which of `contexts` are known, and (m, width) tokens and kinds of these."""
        found = [(i, row) for i, context in enumerate(contexts) if (row := self.place.get(context)) is not None]
        places = [row for _, row in found]
        return [i for i, _ in found], self.tokens[places], self.kinds[places]

    def after(self, context: Context) -> list[tuple[int, int]]:
        """(token, kind), the likeliest first; nothing for a context that never occurred."""
        row = self.place.get(context)
        return [] if row is None else list(zip(self.tokens[row].tolist(), self.kinds[row].tolist(), strict=True))


class RecyclingSource(Source):
    """The state is the pair of the last two tokens."""

    def __init__(self, table: Successors) -> None:
        self.table = table
        self.width = table.tokens.shape[1]
        self.odds = [Odds(prior) for prior in _PRIORS]
        self._last = (-1, -1)
        self._before_root = -1  # the token before the root of the tree that is being verified

    def read(self, token: int) -> None:
        self._last = (self._last[1], token)

    def learn(self, states: Sequence[tuple[int, int]], answers: Answers) -> None:
        known, tokens, kinds = self.table.rows([*(state[1] for state in states), *states])
        if known:
            hits = answers.at(np.array(known)[:, None] % len(states), tokens)
            after_one = bisect_left(known, len(states))
            self.odds[0].count_all(kinds[:after_one].ravel(), hits[:after_one].ravel())
            self.odds[1].count_all(kinds[after_one:].ravel(), hits[after_one:].ravel())

    def look(self, answers: Answers) -> None:
        tree, (best, chances) = answers.tree, answers.best
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        scored = range(len(tree) - answers.count, len(tree))
        before = [tokens[parents[n]] if n else self._before_root for n in scored]
        contexts = [(tokens[n], (b, tokens[n])) for n, b in zip(scored, before, strict=True)]
        self.table.store(contexts, best[:, : self.width], chances[:, : self.width])
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
            for token, kind in self.table.after(context):
                chance = left * odds.chance[kind]
                taken += chance
                chances[token] = chances.get(token, 0.0) + chance
            left = max(0.0, left - taken)
        return chances


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
