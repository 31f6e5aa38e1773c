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
import heapq
import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

from transformers import TemperatureLogitsWarper

from ..accept import NoiseWindow
from ..tree import FloatArray, TokenTree
from ..verify import Verified
from .base import Budget, Commit, DraftContext, Drafter, Prompt

# A path less likely than this is not worth a row in any cost model (a row costs over 1 % of a pass).
MIN_SCORE = 0.01
# How many observations a prior is worth, and the count at which old ones begin to fade: text changes its kind.
PRIOR_WEIGHT, MEMORY = 8.0, 200.0


# How little estimated chances are trusted to say which guess arrives first: the temperature of a softmax (0 would trust
# them wholly). Of 0.5, 1 and 1.5, on answers to instruction prompts, the first under which no drafter lost by coupling.
DOUBT = 1.5


class Odds:
    """How often guesses of each kind came true: a mean for each kind, with a prior, the past fading slowly."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._hits = [p * PRIOR_WEIGHT for p in prior]
        self._tries = [PRIOR_WEIGHT] * len(prior)

    def __getitem__(self, kind: int) -> float:
        return self._hits[kind] / self._tries[kind]

    def count(self, kind: int, hit: float) -> None:
        """One guess of a kind: whether it came true, or the chance with which it does."""
        self._hits[kind] += hit
        self._tries[kind] += 1.0
        if self._tries[kind] > MEMORY:
            self._hits[kind] *= 0.5
            self._tries[kind] *= 0.5


class Claim(NamedTuple):
    """What a source says at one place: the next token is one of `tokens`. `odds[kind]` is how often that holds."""

    odds: Odds
    kind: int
    tokens: Collection[int]


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

    def claims(self, state: Any) -> list[Claim]:
        """What it says of the token that follows `state`, for its odds to be learnt from the target's answer."""
        return []

    def look(self, verified: Verified) -> None:  # noqa: B027 - optional hook
        """Every round, after the text has grown: the target's logits at all nodes, rejected ones too."""


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
        self._learn(commit)
        for source in self._sources:
            for token in commit.tokens[0]:
                source.read(token)
            source.look(commit.verified)

    def _learn(self, commit: Commit) -> None:
        """Holds the sources' claims at all verified nodes against the target, before the text grows."""
        tree = commit.verified.tree
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        states: list[list[Any]] = []
        claims: list[tuple[int, Claim]] = []
        for node in range(min(len(tree), commit.verified.logits.shape[1])):
            if node == 0:
                states.append([source.root() for source in self._sources])
            else:
                before = zip(self._sources, states[parents[node]], strict=True)
                states.append([source.step(state, tokens[node]) for source, state in before])
            for source, state in zip(self._sources, states[node], strict=True):
                claims += [(node, claim) for claim in source.claims(state)]
        heat = self._temperature
        labels = self._hits(commit, claims) if heat is None else self._chances(commit.verified, claims, heat)
        for (_, claim), label in zip(claims, labels, strict=True):
            claim.odds.count(claim.kind, label)

    def _hits(self, commit: Commit, claims: Sequence[tuple[int, Claim]]) -> list[float]:
        """Whether each claim holds: the target's choice at the claim's node is among its tokens."""
        picks = commit.verified.logits[0].argmax(-1).tolist()
        for node, token in zip(commit.path[0], commit.tokens[0], strict=True):
            picks[node] = token  # what processors made of it
        return [float(picks[node] in claim.tokens) for node, claim in claims]

    def _chances(self, verified: Verified, claims: Sequence[tuple[int, Claim]], temperature: float) -> list[float]:
        """How likely each claim is to hold where the target samples. Truncation (top-k, top-p) is left out: it moves
        these chances little, and is a sort of the vocabulary for every node."""
        probabilities = (verified.logits[0].float() / temperature).softmax(-1)
        nodes = [node for node, claim in claims for _ in claim.tokens]
        found = probabilities[nodes, [token for _, claim in claims for token in claim.tokens]].tolist()
        ends = itertools.accumulate(len(claim.tokens) for _, claim in claims)
        return [
            min(1.0, sum(found[end - len(claim.tokens) : end])) for end, (_, claim) in zip(ends, claims, strict=True)
        ]

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        tokens, parents, scores, depths = [context.last_token], [-1], [1.0], [0]
        # (-score, order, parent, token); states are made when a node is expanded, since most never are
        frontier: list[tuple[float, int, int, int]] = []
        states: list[Sequence[Any]] = [[source.root() for source in self._sources]]
        noise = _Noise(context.noise) if context.noise is not None else None

        def expand(node: int) -> None:
            """Puts the likeliest continuations of a node on the frontier."""
            chances = self._guesses(states[node])
            if noise is not None and chances:
                chances = coupled(chances, noise.row(depths[node]))
            likeliest = heapq.nlargest(budget.max_children, chances, key=chances.__getitem__)
            for token in likeliest if len(chances) > budget.max_children else chances:
                path_score = scores[node] * chances[token]
                if path_score >= MIN_SCORE:
                    heapq.heappush(frontier, (-path_score, len(frontier) + (node << 20), node, token))

        expand(0)
        while frontier and len(tokens) <= budget.max_nodes:
            negative, _, parent, token = heapq.heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            depths.append(depths[parent] + 1)
            states.append([s.step(state, token) for s, state in zip(self._sources, states[parent], strict=True)])
            if depths[-1] < budget.max_depth:
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
