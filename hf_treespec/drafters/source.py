"""Drafters without a model: sources that guess the next token at any node, and the best-first tree over them.

A `Source` is a table with a cursor: it knows the text so far, and for any continuation of it offers a few tokens, each
with its chance to be the target's own. `SourceDrafter` grows one tree over several of them: at each node the guesses of
all sources are merged, where two name the same token their chances combine as 1 - Π (1 - a_s) (noisy-or), and the node
with the best path score is expanded next. Best first is optimal for a given number of nodes: E[accepted] is the sum of
path probabilities.

Chances are learnt while decoding: each source counts how often guesses of a kind came true (`Odds`). The target says so
at every node that it verified, rejected ones too: its own choice where it decodes greedily, its probability of the
guess where it samples (soft labels: the chance that `match` accepts the guess there, exactly).
"""

from __future__ import annotations

import abc
import functools
import heapq
import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TemperatureLogitsWarper

from ..accept import NoiseWindow
from ..tree import FloatArray, IntArray, TokenTree
from .base import Budget, Commit, DraftContext, Drafter, Prompt

# A path less likely than this is not worth a row in any cost model (a row costs over 1 % of a pass).
MIN_SCORE = 0.01
# How many observations a prior is worth, and the count at which old ones begin to fade: text changes its kind.
PRIOR_WEIGHT, MEMORY = 8.0, 200.0


# How little estimated chances are trusted to say which guess arrives first: the temperature of a softmax (0 would trust
# them wholly). Of 0.5, 1 and 1.5, on answers to instruction prompts, the first under which no drafter lost by coupling.
DOUBT = 1.5


class Odds:
    """How often guesses of each kind came true: a mean for each kind, with a prior, the past fading slowly.

    Attributes:
        chance: by kind, the mean now.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.chance = list(prior)
        self._hits = [p * PRIOR_WEIGHT for p in prior]
        self._tries = [PRIOR_WEIGHT] * len(prior)

    def count(self, kind: int, hit: float) -> None:
        """One guess of a kind: whether it came true, or the chance with which it does."""
        self._hits[kind] += hit
        self._tries[kind] += 1.0
        if self._tries[kind] > MEMORY:
            self._hits[kind] *= 0.5
            self._tries[kind] *= 0.5
        self.chance[kind] = self._hits[kind] / self._tries[kind]

    def count_all(self, kinds: NDArray[np.integer[Any]], hits: FloatArray) -> None:
        """Many guesses at once, flat arrays."""
        tries = np.bincount(kinds, minlength=len(self._tries))
        sums = np.bincount(kinds, hits, minlength=len(self._tries))
        for kind in np.flatnonzero(tries).tolist():
            self._tries[kind] += float(tries[kind]) - 1.0
            self.count(kind, float(sums[kind]))


class Answers:
    """What the target says at the nodes of a verified tree (one row): what sources learn from.

    Where it decodes greedily a token's chance is 1 or 0, whether it is the target's choice. Where it samples it is the
    target's probability; truncation (top-k, top-p) is left out, which moves it little and is a sort of the vocabulary for
    every node.

    Args:
        temperature: with which the target samples, or None.
        width: best tokens of each node that somebody will ask for.

    Attributes:
        tree: the verified tree; the first `count` of its nodes were scored.
    """

    def __init__(self, commit: Commit, temperature: float | None, width: int) -> None:
        self.tree, self._logits = commit.verified.tree, commit.verified.logits[0]
        self.count = min(len(self.tree), len(self._logits))
        self._commit, self._temperature, self._width = commit, temperature, width

    @property
    def end(self) -> tuple[int, int | None]:
        """The node behind which the walk left the tree, and the target's token there; None where decoding stopped."""
        return self._commit.path[0][-1], self._commit.bonus[0]

    @functools.cached_property
    def best(self) -> tuple[IntArray, FloatArray]:
        """(n, width) the likeliest tokens at each node, and their probabilities among each other (of raw logits)."""
        return top(self._logits.float(), self._width)

    @functools.cached_property
    def _picks(self) -> IntArray:
        picks: IntArray = self.best[0][:, 0].copy()
        picks[self._commit.path[0]] = self._commit.tokens[0]  # what processors made of it
        return picks

    @functools.cached_property
    def _probabilities(self) -> torch.Tensor:
        assert self._temperature is not None
        return (self._logits.float() / self._temperature).softmax(-1)

    def at(self, nodes: Any, tokens: Any) -> FloatArray:
        """The chance of each token after the node of the same place (arrays of shapes that fit each other)."""
        if self._temperature is None:
            hits: FloatArray = (self._picks[nodes] == tokens).astype(np.float32)
            return hits
        nodes, tokens = np.broadcast_arrays(nodes, tokens)
        index = (torch.from_numpy(np.array(a, dtype=np.int64)).to(self._logits.device) for a in (nodes, tokens))
        found: FloatArray = self._probabilities[tuple(index)].cpu().numpy()
        return found

    def among(self, nodes: Sequence[int], tokens: Sequence[Collection[int]]) -> list[float]:
        """The chance that one of `tokens[i]` follows `nodes[i]`."""
        if self._temperature is None:
            picks = self._picks.tolist()
            return [float(picks[node] in some) for node, some in zip(nodes, tokens, strict=True)]
        sizes = [len(some) for some in tokens]
        flat = self.at(np.repeat(nodes, sizes), np.array([token for some in tokens for token in some], np.int64))
        ends = np.cumsum([0, *sizes])
        totals = np.concatenate([[0.0], np.cumsum(flat, dtype=np.float64)])
        return np.minimum(1.0, totals[ends[1:]] - totals[ends[:-1]]).tolist()  # type: ignore[no-any-return]


_CHUNK = 128


def top(scores: torch.Tensor, count: int) -> tuple[IntArray, FloatArray]:
    """The best tokens of each row of (n, V) logits, (n, count), and their probabilities among each other.

    As `topk` gives them, but most of a large vocabulary is only looked at for its maximum.
    """
    rows, size = scores.shape
    if size % _CHUNK or size // _CHUNK <= count:
        best, tokens = scores.topk(min(count, size), dim=-1)
        found, chances = _read(tokens, best.softmax(-1))
        return found.astype(np.int64), chances
    # the count best tokens lie in the count chunks with the best maxima
    chunks = scores.view(rows, -1, _CHUNK)
    places = chunks.amax(-1).topk(count, dim=-1).indices
    best, within = chunks.gather(1, places[:, :, None].expand(-1, -1, _CHUNK)).flatten(1).topk(count, dim=-1)
    place, inside, chances = _read(places, within, best.softmax(-1))
    chunk, inside = np.divmod(inside.astype(np.int64), _CHUNK)
    return place[np.arange(rows)[:, None], chunk].astype(np.int64) * _CHUNK + inside, chances


def _read(*tensors: torch.Tensor) -> list[Any]:
    """Tensors of equal shape as arrays, from a device in one read (as float32: ids are exact)."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return list(torch.stack([tensor.float() for tensor in tensors]).cpu().numpy())


class Source(abc.ABC):
    """Guesses the next token at any node of a tree. One object a call; its state moves with the text.

    Attributes:
        width: how many of the target's likeliest tokens `look` reads at each node.
    """

    width: int = 1

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

    def learn(self, states: Sequence[Any], answers: Answers) -> None:  # noqa: B027 - optional hook
        """Every round, before the text grows: `states[node]` is where the target stood when it answered at a node."""

    def look(self, answers: Answers) -> None:  # noqa: B027 - optional hook
        """Every round, after the text has grown."""


class SourceDrafter(Drafter):
    """The best-first tree over the sources that `sources` makes at the start of a call."""

    @abc.abstractmethod
    def sources(self, prompt: Prompt) -> list[Source]:
        """Fresh sources that have read nothing yet."""

    def start(self, prompt: Prompt) -> None:
        self._sources = self.sources(prompt)
        self._temperature = _temperature(prompt)
        for token in prompt.ids[0].tolist():
            for source in self._sources:
                source.read(token)

    def observe(self, commit: Commit) -> None:
        answers = Answers(commit, self._temperature, max(source.width for source in self._sources))
        tokens, parents = answers.tree.tokens[0].tolist(), answers.tree.parents[0].tolist()
        for source in self._sources:
            states = [source.root()]
            for node in range(1, answers.count):
                states.append(source.step(states[parents[node]], tokens[node]))
            source.learn(states, answers)  # before it is told how the text goes on
            for token in commit.tokens[0]:
                source.read(token)
            source.look(answers)

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        tokens, parents, scores, depths = [context.last_token], [-1], [1.0], [0]
        # (-score, order, parent, token); states are made when a node is expanded, since most never are
        frontier: list[tuple[float, int, int, int]] = []
        states: list[Sequence[Any]] = [[source.root() for source in self._sources]]
        noise = _Noise(context.noise) if context.noise is not None else None
        least = max(MIN_SCORE, budget.min_score)

        def expand(node: int) -> None:
            """Puts the likeliest continuations of a node on the frontier."""
            chances = self._guesses(states[node])
            if noise is not None and chances:
                chances = coupled(chances, noise.row(depths[node]))
            likeliest = heapq.nlargest(budget.max_children, chances, key=chances.__getitem__)
            for token in likeliest if len(chances) > budget.max_children else chances:
                path_score = scores[node] * chances[token]
                if path_score >= least:
                    heapq.heappush(frontier, (-path_score, len(frontier) + (node << 20), node, token))

        expand(0)
        while frontier and len(tokens) <= budget.max_nodes:
            negative, _, parent, token = heapq.heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            depths.append(depths[parent] + 1)
            states.append([s.step(state, token) for s, state in zip(self._sources, states[parent], strict=True)])
            if depths[-1] < budget.max_depth and len(tokens) <= budget.max_nodes:
                expand(len(tokens) - 1)
        return TokenTree(tokens, parents, scores)

    def _guesses(self, states: Sequence[Any]) -> dict[int, float]:
        """What all sources say at one node, merged."""
        chances = self._sources[0].guesses(states[0])
        for source, state in zip(self._sources[1:], states[1:], strict=True):
            chances = dict(chances)
            for token, chance in source.guesses(state).items():
                other = chances.get(token)
                chances[token] = chance if other is None else 1.0 - (1.0 - other) * (1.0 - chance)
        return chances


class _Noise:
    """The target's coming draws on the CPU, each fetched once."""

    def __init__(self, window: NoiseWindow) -> None:
        self._window = window
        self._rows: list[FloatArray] = []

    def row(self, depth: int) -> FloatArray:
        """(V,): the draw with which the target will choose what follows a node at `depth`."""
        while len(self._rows) <= depth:
            self._rows.append(self._window.peek(len(self._rows))[0].cpu().numpy())
        return self._rows[depth]


def coupled(chances: dict[int, float], noise: FloatArray) -> dict[int, float]:
    """The chances of guesses, now that the draw with which the target will choose is known.

    The target takes the token whose e / p is smallest (`accept.py`): with p = a, one of the guesses arrives first, and is
    taken unless something that nobody guessed, which has the rest of the probability, arrives before it: with
    probability exp(-(1 - Σ a) · min e / a). Since a is an estimate, the first one only gets the lion's share of that, by
    a softmax of log a + g at temperature `DOUBT` (reference: coupled drafting, Daliri et al. 2024).
    """
    total = min(sum(chances.values()), 0.99)
    speeds = {token: chance / max(float(noise[token]), 1e-9) for token, chance in chances.items()}
    fastest = max(speeds.values())
    reach = math.exp(-(1.0 - total) / fastest)
    shares = {token: (speed / fastest) ** (1.0 / DOUBT) for token, speed in speeds.items()}
    scale = reach / sum(shares.values())
    return {token: share * scale for token, share in shares.items()}


def _temperature(prompt: Prompt) -> float | None:
    """The temperature with which the target samples; None where it decodes greedily."""
    if not prompt.do_sample:
        return None
    return next((float(p.temperature) for p in prompt.processors if type(p) is TemperatureLogitsWarper), 1.0)
