"""Trees from heads that are asked depth by depth: best first over joint scores, or of a shape that is fixed beforehand.

Where a head's guess for a depth does not depend on the tokens above it (Medusa, Cai et al. 2024; ungrounded Hydra), all
nodes of a depth share one list of children, and the best tree needs no search beyond a heap (`best_first`).

Legend: D depths, Vq tokens that a head can draft, q its probability.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import DrafterError
from ..tree import TokenTree
from .base import Budget, DraftContext
from .growth import children

# Given a depth and the tokens of nodes there, from the root to the node: log q of what follows each, float32 (n, Vq),
# or (1, Vq) where it is the same for all of them.
Level = Callable[[int, list[list[int]]], torch.Tensor]


def best_first(
    context: DraftContext, scores: torch.Tensor, budget: Budget, vocabulary: torch.Tensor | None = None
) -> TokenTree:
    """The likeliest nodes of all that one row of scores for each depth allows; a path's score is the product of its q.

    Args:
        scores: (D, Vq) float32 log q of the tokens at depth 1 to D.
        vocabulary: (Vq,) the target's ids of the head's tokens, where they are not the first Vq of the target's.
    """
    last = min(len(scores), budget.max_depth)
    values, found = children(context, scores[:last], range(last), budget.max_children, vocabulary)
    tokens, parents, reached, depths = [context.last_token], [-1], [1.0], [0]
    offers: list[tuple[float, int, int]] = []  # (-score, parent, which of its children): the next ones of each list

    def offer(parent: int, rank: int) -> None:
        depth = depths[parent]
        if depth < last and rank < len(values[depth]) and values[depth][rank] > 0:
            heapq.heappush(offers, (-reached[parent] * min(1.0, values[depth][rank]), parent, rank))

    offer(0, 0)
    while offers and len(tokens) <= budget.max_nodes:
        score, parent, rank = heapq.heappop(offers)
        tokens.append(found[depths[parent]][rank])
        parents.append(parent)
        reached.append(-score)
        depths.append(depths[parent] + 1)
        offer(parent, rank + 1)
        offer(len(tokens) - 1, 0)
    return TokenTree(tokens, parents, reached)


class FixedTree:
    """The shape of a tree as a list of paths, each path the ranks of its children: Medusa's `medusa_choices`.

        [[0], [1], [0, 0], [0, 1]]    the two likeliest tokens, and the two likeliest after the first of them

    Args:
        paths: in any order, each with all paths that lead to it.
        deepest: tokens that the heads can draft on one path.

    Attributes:
        width: children of one node that have to be known.

    Raises:
        DrafterError: no such list, a path too deep, or one without the path above it.
    """

    def __init__(self, paths: Any, deepest: int) -> None:
        listed = _checked(paths, deepest)
        place = {(): 0} | {path: i for i, path in enumerate(listed, 1)}
        self.ranks = [0, *(path[-1] for path in listed)]
        self.parents = [-1, *(place[path[:-1]] for path in listed)]
        self.width = max(self.ranks) + 1
        self._levels: list[list[int]] = [[] for _ in range(len(listed[-1]) + 1)]
        for path, node in place.items():
            self._levels[len(path)].append(node)

    def grow(
        self, context: DraftContext, budget: Budget, level: Level, vocabulary: torch.Tensor | None = None
    ) -> TokenTree:
        """The tree of this shape with the tokens and joint scores of the heads, cut to the budget.

        A node that the heads give no probability is left out, with what stands below it.
        """
        paths: dict[int, list[int]] = {0: [context.last_token]}
        scores = {0: 1.0}
        for depth, below in enumerate(self._levels[1 : budget.max_depth + 1]):
            asked = [node for node in dict.fromkeys(self.parents[child] for child in below) if node in paths]
            if not asked:
                break
            rows = level(depth, [paths[node] for node in asked])
            values, tokens = children(context, rows, [depth] * len(rows), self.width, vocabulary)
            row = {node: i if len(rows) > 1 else 0 for i, node in enumerate(asked)}
            for child in below:
                parent, rank = self.parents[child], self.ranks[child]
                if parent in row and rank < len(values[row[parent]]) and values[row[parent]][rank] > 0:
                    paths[child] = [*paths[parent], tokens[row[parent]][rank]]
                    scores[child] = scores[parent] * min(1.0, values[row[parent]][rank])
        place = {node: i for i, node in enumerate(paths)}
        tree = TokenTree(
            [path[-1] for path in paths.values()],
            [place[self.parents[node]] if node else -1 for node in paths],
            list(scores.values()),
        )
        return tree.prune(budget.max_nodes, budget.max_depth, budget.max_children)


def _checked(paths: Any, deepest: int) -> list[tuple[int, ...]]:
    """The paths, each once, those above before those below, the likelier before the others."""
    is_list = isinstance(paths, Sequence) and not isinstance(paths, str) and len(paths) > 0
    if not is_list or not all(_is_path(path) for path in paths):
        raise DrafterError(f"tree={paths!r} must be a list of paths of child ranks, such as [[0], [1], [0, 0]].")
    listed = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    for path in listed:
        if len(path) > deepest:
            raise DrafterError(f"tree: the path {list(path)} is deeper than the {deepest} heads; leave it out.")
        if len(path) > 1 and path[:-1] not in listed:
            raise DrafterError(f"tree: the path {list(path)} lacks the path {list(path[:-1])} above it; list it too.")
    return listed


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, Sequence)
        and not isinstance(path, str)
        and len(path) > 0
        and all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path)
    )
