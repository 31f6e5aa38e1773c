"""Growing a tree with a network: best first, in waves.

A wave is the few best unexpanded nodes, which go through the drafting network together; their likeliest continuations
join the frontier. The tree that is returned holds the best nodes of all that were seen. (EAGLE-2, Li et al. 2024b, §4.1
expands and reranks so; OPT-Tree, Wang et al. 2024, for the rule that ends it.) What the network is, only `expand` knows.

When the target samples, the children of a node are the top tokens of log q + g, where g is the Gumbel noise with which
the target itself will choose at that position (Daliri et al. 2024 for the coupling; design in `accept.py`).

Legend: W nodes of a wave, V the target's vocabulary, Vq tokens that the network can draft, q its probability.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

from ..accept import HISTORY_FREE
from ..errors import DrafterError
from ..tree import TokenTree
from .base import Budget, DraftContext, Prompt

# Given nodes of the growing tree, (W, Vq) float32 log q of what follows each.
Expand = Callable[[list[int]], torch.Tensor]


class Growth:
    """The growing of one tree. Nodes are numbered as they are found; node 0 is the root.

    Args:
        wave: nodes that one call of `expand` gets at most.
        min_gain: another wave runs only while the nodes that it would expand hold this many expected tokens (the sum of
            their path scores); by default what the budget says.
        vocabulary: (Vq,) the target's ids of the network's tokens, where they are not the first Vq of the target's.
    """

    def __init__(
        self,
        context: DraftContext,
        budget: Budget,
        *,
        wave: int,
        min_gain: float | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        self.context, self.budget, self.wave, self.vocabulary = context, budget, wave, vocabulary
        self.min_gain = budget.min_gain if min_gain is None else min_gain
        self.tokens, self.parents, self.scores, self.depths = [context.last_token], [-1], [1.0], [0]
        self._frontier: list[tuple[float, int]] = []  # (-score, node), unexpanded

    def run(self, expand: Expand) -> None:
        """Grows the tree until another wave would not pay."""
        self._branch([0], expand([0]))
        for _ in range(self.budget.max_depth - 1):
            wave = self._next_wave()
            if not wave:
                break
            self._branch(wave, expand(wave))

    def _next_wave(self) -> list[int]:
        """The best unexpanded nodes that would make it into the tree, if they promise enough."""
        worth = heapq.nlargest(self.budget.max_nodes, self.scores[1:])
        floor = worth[-1] if len(worth) == self.budget.max_nodes else 0.0
        wave: list[int] = []
        while self._frontier and len(wave) < self.wave and -self._frontier[0][0] > floor * 0.999:
            node = heapq.heappop(self._frontier)[1]
            if self.depths[node] < self.budget.max_depth:
                wave.append(node)
        return wave if sum(self.scores[n] for n in wave) >= self.min_gain else []

    def _branch(self, nodes: list[int], scores: torch.Tensor) -> None:
        """Adds the likeliest children of each node, given log q (len(nodes), Vq)."""
        depths = [self.depths[n] for n in nodes]
        values, tokens = children(self.context, scores, depths, self.budget.max_children, self.vocabulary)
        for node, row_values, row_tokens in zip(nodes, values, tokens, strict=True):
            for value, token in zip(row_values, row_tokens, strict=True):
                if value > 0:
                    self._add(node, token, min(1.0, value) * self.scores[node])

    def _add(self, parent: int, token: int, score: float) -> None:
        heapq.heappush(self._frontier, (-score, len(self.tokens)))
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.depths.append(self.depths[parent] + 1)

    def best(self) -> tuple[TokenTree, dict[int, int]]:
        """The best nodes found, and where each of them stands in the tree: node to place."""
        order = sorted(range(1, len(self.tokens)), key=lambda n: (-self.scores[n], n))[: self.budget.max_nodes]
        kept = [0, *sorted(order)]
        place = {node: i for i, node in enumerate(kept)}
        tree = TokenTree(
            [self.tokens[n] for n in kept],
            [place[self.parents[n]] if n else -1 for n in kept],
            [self.scores[n] for n in kept],
        )
        return tree, place


def children(
    context: DraftContext,
    scores: torch.Tensor,
    depths: Sequence[int],
    count: int,
    vocabulary: torch.Tensor | None = None,
) -> tuple[list[list[float]], list[list[int]]]:
    """The likeliest tokens after some nodes, the likeliest first: their probabilities and ids, a list for each node.

    Args:
        scores: (n, Vq) float32 log q.
        depths: n, of the nodes; where the target samples, its noise at the depth below counts.
        count: tokens wanted for each; there are fewer where Vq is smaller.
        vocabulary: as in `Growth`.
    """
    if context.noise is not None:
        draws = torch.cat([context.noise.peek(depth) for depth in depths]).to(scores.device)
        draws = draws[:, : scores.shape[1]] if vocabulary is None else draws[:, vocabulary]
        scores = torch.log_softmax(scores - draws.log(), dim=-1)
    values, places = scores.topk(min(count, scores.shape[1]), dim=-1)
    tokens = places if vocabulary is None else vocabulary[places]
    return values.exp().tolist(), tokens.tolist()


class Slots:
    """What went through an autoregressive drafting network this round, in the order in which its cache holds it.

    First come the `unread` tokens: committed ones that the network has not read yet, a chain that ends in the root.
    Then the expanded nodes.

    Attributes:
        of: expanded node to slot.
        tokens: by slot.
        parents: by slot, the slot of the token before; -1 for the first.
    """

    def __init__(self, growth: Growth, unread: Sequence[int]) -> None:
        self._growth, self._unread = growth, list(unread)
        self.of: dict[int, int] = {}
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def add(self, nodes: list[int]) -> int:
        """Gives `nodes` their slots, the last ones; returns the first slot that has to go through the network."""
        start = len(self.tokens)
        if nodes == [0]:
            self.tokens += self._unread
            self.parents += range(-1, len(self._unread) - 1)
        else:
            self.tokens += [self._growth.tokens[n] for n in nodes]
            self.parents += [self.of[self._growth.parents[n]] for n in nodes]
        self.of.update(zip(nodes, range(len(self.tokens) - len(nodes), len(self.tokens)), strict=True))
        return start

    def tree(self) -> TokenTree:
        """Everything fed so far as one tree: what masks and positions are made from."""
        return TokenTree(self.tokens, self.parents)


def draft_warpers(prompt: Prompt, *, by_token: bool = True) -> LogitsProcessorList:
    """Those of the call's warpers that look at one row of scores: q is shaped as p will be.

    Args:
        by_token: include those that name tokens; for a network with the target's own token ids.
    """
    fit = [p for p in prompt.processors if type(p) in HISTORY_FREE]
    return LogitsProcessorList([p for p in fit if by_token or not isinstance(p, SuppressTokensLogitsProcessor)])


def log_q(logits: torch.Tensor, warpers: LogitsProcessorList, tokens: int | None = None) -> torch.Tensor:
    """(n, Vq) float32 log q from logits (n, V), over the first `tokens` of them."""
    scores = warpers(torch.empty((len(logits), 0), dtype=torch.long, device=logits.device), logits.float())
    return torch.log_softmax(scores[:, :tokens], dim=-1)


def check_growth(wave: int, min_gain: float | None) -> None:
    """Raises `DrafterError` for options that no growth can have."""
    if isinstance(wave, bool) or not isinstance(wave, int) or wave < 1:
        raise DrafterError(f"wave={wave!r} must be a whole number of nodes, 1 or more.")
    if min_gain is not None and not 0 <= min_gain <= 1:
        raise DrafterError(f"min_gain={min_gain!r} must lie in 0 to 1 expected tokens.")
