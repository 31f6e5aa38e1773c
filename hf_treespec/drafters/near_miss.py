"""Near misses: what the target said beside the path that it took. A source of `union`; no weights, no extra rows.

A round ends where the target wants another token than was drafted. What it said about the drafted ones is computed all
the same, and is often right one token later:

    drafted            the ── big ── red ── house
    the target's       the ── large                     its own choice instead of "big"

    substituted        the ── large ── red              what the target said after the token that was replaced
    delayed            the ── large ── big              what else it thought likely there comes after all ...
    resumed            the ── large ── big ── red       ... and the draft goes on behind it, as far as it was verified

Guesses made in a wrong context that come true are what parallel decoding lives on (Jacobi iterations: Santilli et al.
2023, §3; Fu et al. 2024, §3); here they cost no forward of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from ..tree import TokenTree
from .source import Answers, Odds, Source

# Guesses read at each node.
_WIDTH = 4
# Kinds of guesses: how they came about, their rank (0, 1, 2 and later), and the probability that the target gave them.
# Priors: means over SmolLM2-135M's greedy answers to instruction prompts, rounded.
_SUBSTITUTED, _DELAYED, _RESUMED = 0, 15, 30
_LEVELS = (0.1, 0.3, 0.6, 0.9)
_PRIORS = (
    *(0.05, 0.06, 0.1, 0.1, 0.18, 0.03, 0.07, 0.07, 0.07, 0.07, 0.03, 0.05, 0.05, 0.05, 0.05),
    *(0.08, 0.05, 0.08, 0.08, 0.08, 0.03, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
    *(0.3, 0.35, 0.45, 0.65, 0.77, 0.03, 0.1, 0.1, 0.1, 0.1, 0.02, 0.05, 0.05, 0.05, 0.05),
)

# Where to read: a node of the last verified tree, and the kind of what is read there.
Place = tuple[int, int]


class NearMissSource(Source):
    """The state is the places to read; none where the text has left what was verified."""

    width = _WIDTH + 1  # the target's choice is no near miss

    def __init__(self) -> None:
        self.odds = Odds(_PRIORS)
        self._root: tuple[Place, ...] = ()
        self._chosen: int | None = None
        # the last verified tree, and by node the target's likeliest tokens and their chances
        self._tree = TokenTree.root_only(0)
        self._tokens: list[list[int]] = []
        self._chances: list[list[float]] = []

    def read(self, token: int) -> None:
        """Nothing: what counts is where the target stood, which `look` is told."""

    def root(self) -> tuple[Place, ...]:
        return self._root

    def step(self, state: tuple[Place, ...], token: int) -> tuple[Place, ...]:
        found = (self._tree.child(node, token) for node, _ in state)
        return tuple((child, _RESUMED) for child in found if child is not None)

    def guesses(self, state: tuple[Place, ...]) -> dict[int, float]:
        return {token: self.odds.chance[kind] for token, kind in self._near(state)}

    def learn(self, states: Sequence[tuple[Place, ...]], answers: Answers) -> None:
        asked = [(node, *guess) for node, state in enumerate(states) if state for guess in self._near(state)]
        if asked:
            nodes, tokens, kinds = np.array(asked).T
            self.odds.count_all(kinds, answers.at(nodes, tokens))

    def look(self, answers: Answers) -> None:
        node, self._chosen = answers.end
        self._root = ()
        if self._chosen is None or answers.count < len(answers.tree):
            return
        best, chances = answers.best
        self._tokens, self._chances = best[:, : self.width].tolist(), chances[:, : self.width].tolist()
        self._tree = answers.tree
        replaced = self._likeliest_child(node)
        substituted = () if replaced is None else ((replaced, _SUBSTITUTED),)
        self._root = (*substituted, (node, _DELAYED))

    def _likeliest_child(self, node: int) -> int | None:
        """Of the drafted children of a node, the one that the target thought likeliest."""
        likely = (child for token in self._tokens[node] if (child := self._tree.child(node, token)) is not None)
        others = (child for child, parent in enumerate(self._tree.parents[0].tolist()) if parent == node)
        return next(likely, None) or next(others, None)

    def _near(self, state: tuple[Place, ...]) -> Iterator[tuple[int, int]]:
        """(token, kind) of each guess, each token once."""
        seen: set[int] = set()
        for node, way in state:
            rank = 0
            for token, chance in zip(self._tokens[node], self._chances[node], strict=True):
                if rank == _WIDTH or (way == _DELAYED and token == self._chosen):
                    continue
                if token not in seen:
                    seen.add(token)
                    yield token, way + 5 * min(rank, 2) + bisect_right(_LEVELS, chance)
                rank += 1
