"""Drafters without a model: sources that guess the next token at any node, and the best-first tree over them.

A `Source` is a table with a cursor: it knows the text so far, and for any continuation of it offers a few tokens, each
with its chance to be the target's own. `SourceDrafter` grows one tree over several of them: at each node the guesses of
all sources are merged, where two name the same token their chances combine as 1 - Π (1 - a_s) (noisy-or), and the node
with the best path score is expanded next. Best first is optimal for a given number of nodes: E[accepted] is the sum of
path probabilities.

Chances are learnt while decoding: each source counts how often guesses of a kind came true (`Odds`).
"""

from __future__ import annotations

import abc
import heapq
from collections.abc import Hashable, Sequence
from typing import Any

from ..tree import TokenTree
from ..verify import Verified
from .base import Budget, Commit, DraftContext, Drafter, Prompt

# A path less likely than this is not worth a row in any cost model (a row costs over 1 % of a pass).
MIN_SCORE = 0.01
# How many observations a prior is worth, and the count at which old ones begin to fade: text changes its kind.
PRIOR_WEIGHT, MEMORY = 8.0, 200.0


class Odds:
    """How often guesses of each kind came true: a mean for each kind, with a prior, the past fading slowly."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._hits = [p * PRIOR_WEIGHT for p in prior]
        self._tries = [PRIOR_WEIGHT] * len(prior)

    def __getitem__(self, kind: int) -> float:
        return self._hits[kind] / self._tries[kind]

    def count(self, kind: int, hit: bool) -> None:
        self._hits[kind] += hit
        self._tries[kind] += 1.0
        if self._tries[kind] > MEMORY:
            self._hits[kind] *= 0.5
            self._tries[kind] *= 0.5


class Source(abc.ABC):
    """Guesses the next token at any node of a tree. One object a call; its state moves with the text."""

    @abc.abstractmethod
    def read(self, token: int) -> None:
        """The text grows by `token`."""

    @abc.abstractmethod
    def root(self) -> Hashable:
        """Where the text stands now."""

    @abc.abstractmethod
    def step(self, state: Any, token: int) -> Hashable:
        """Where it would stand if `token` followed `state`."""

    @abc.abstractmethod
    def guesses(self, state: Any) -> dict[int, float]:
        """Tokens that may follow `state`, each with its chance in (0, 1]."""

    def look(self, verified: Verified) -> None:  # noqa: B027 - optional hook
        """Every round: the target's logits at all nodes, rejected ones too."""


class SourceDrafter(Drafter):
    """The best-first tree over the sources that `sources` makes at the start of a call."""

    @abc.abstractmethod
    def sources(self, prompt: Prompt) -> list[Source]:
        """Fresh sources that have read nothing yet."""

    def start(self, prompt: Prompt) -> None:
        self._sources = self.sources(prompt)
        for token in prompt.ids[0].tolist():
            for source in self._sources:
                source.read(token)

    def observe(self, commit: Commit) -> None:
        for source in self._sources:
            for token in commit.tokens[0]:  # read first: were its guesses right, before it is told what was right?
                source.read(token)
            source.look(commit.verified)

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        tokens, parents, scores, depths = [context.last_token], [-1], [1.0], [0]
        # (-score, order, parent, token); states are made when a node is expanded, since most never are
        frontier: list[tuple[float, int, int, int]] = []
        states: list[Sequence[Any]] = [[source.root() for source in self._sources]]
        self._expand(frontier, 0, 1.0, states[0], budget.max_children)
        while frontier and len(tokens) <= budget.max_nodes:
            negative, _, parent, token = heapq.heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            depths.append(depths[parent] + 1)
            states.append([s.step(state, token) for s, state in zip(self._sources, states[parent], strict=True)])
            if depths[-1] < budget.max_depth:
                self._expand(frontier, len(tokens) - 1, -negative, states[-1], budget.max_children)
        return TokenTree(tokens, parents, scores)

    def _expand(
        self, frontier: list[tuple[float, int, int, int]], node: int, score: float, states: Sequence[Any], children: int
    ) -> None:
        """Puts the likeliest continuations of a node on the frontier."""
        chances = self._sources[0].guesses(states[0])
        for source, state in zip(self._sources[1:], states[1:], strict=True):
            chances = dict(chances)
            for token, chance in source.guesses(state).items():
                other = chances.get(token)
                chances[token] = chance if other is None else 1.0 - (1.0 - other) * (1.0 - chance)
        best = heapq.nlargest(children, chances, key=chances.__getitem__) if len(chances) > children else chances
        for token in best:
            path_score = score * chances[token]
            if path_score >= MIN_SCORE:
                heapq.heappush(frontier, (-path_score, len(frontier) + (node << 20), node, token))
