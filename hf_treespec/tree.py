"""`TokenTree`: a drafted tree as flat arrays. It knows tokens and shape, nothing of models.

One row of a tree over the root "the", with N = 6:

            0 the                index     0     1     2     3     4     5
           ╱     ╲               token    the   cat   dog   sat   ran   sat
        1 cat   2 dog            parent    -1     0     0     1     1     2
        ╱   ╲       ╲            depth      0     1     1     2     2     2
     3 sat  4 ran   5 sat        score    1.0    .6    .3    .4    .1    .2

    ancestors (row = node, column = itself or an ancestor; the tree part of the 4D mask)

        0   1 . . . . .
        1   1 1 . . . .
        2   1 . 1 . . .
        3   1 1 . 1 . .
        4   1 1 . . 1 .
        5   1 . 1 . . 1

Shape letters: B rows (sequences), N nodes with the root.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import TreeError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class TokenTree:
    """B trees of at most N nodes each. Node 0 is the root: the last committed token, not yet in the cache.

    Attributes:
        tokens: (B, N) int64, token ids of the target.
        parents: (B, N) int64, index of the parent; -1 for the root and for dead nodes.
        scores: (B, N) float32 in [0, 1], the drafter's estimate that the path to the node is accepted;
            1 for the root, never above the parent's, 0 for dead nodes.
        sizes: (B,) int64, live nodes of each row. Live nodes come first; the rest is padding ("dead").

    Parents stand before their children. Arrays are not copied: treat a tree as immutable.
    """

    def __init__(self, tokens: Any, parents: Any, scores: Any = None, sizes: Any = None) -> None:
        self.tokens: IntArray = np.atleast_2d(np.asarray(tokens, dtype=np.int64))
        self.parents: IntArray = np.atleast_2d(np.asarray(parents, dtype=np.int64))
        if self.tokens.shape != self.parents.shape or self.tokens.ndim != 2 or self.tokens.shape[1] == 0:
            raise TreeError(f"tokens {self.tokens.shape} and parents {self.parents.shape} must be equal and not empty.")
        rows, count = self.tokens.shape
        self.sizes: IntArray = np.full(rows, count, np.int64) if sizes is None else np.asarray(sizes, dtype=np.int64)
        self._check_shape()
        if scores is None:  # no opinion: every node is worth as much as its neighbour one level up, halved
            scores = np.exp2(-self.depths.astype(np.float32)) * self.alive
        self.scores: FloatArray = np.atleast_2d(np.asarray(scores, dtype=np.float32))
        if self.scores.shape != self.tokens.shape:
            raise TreeError(f"scores {self.scores.shape} must have the shape of tokens {self.tokens.shape}.")

    # ---------------------------------------------------------------- making

    @classmethod
    def root_only(cls, root: int | Sequence[int]) -> TokenTree:
        """A tree that drafts nothing: its verification is one step of plain decoding."""
        tokens = np.atleast_1d(np.asarray(root, dtype=np.int64))[:, None]
        return cls(tokens, np.full_like(tokens, -1), np.ones(tokens.shape, np.float32))

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int], scores: Sequence[float] | None = None) -> TokenTree:
        """One path below the root. `scores` are path scores, one for each token."""
        count = len(tokens)
        return cls([root, *tokens], np.arange(-1, count), None if scores is None else [1.0, *scores])

    @classmethod
    def from_paths(cls, root: int, paths: Sequence[Sequence[int]]) -> TokenTree:
        """The trie of several continuations of the root; common prefixes become common nodes."""
        tokens, parents = [root], [-1]
        seen: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                child = seen.get((node, token))
                if child is None:
                    child = seen[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls(tokens, parents)

    @classmethod
    def stack(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """Trees as rows of one, padded with dead nodes to the longest."""
        width = max(tree.tokens.shape[1] for tree in trees)

        def padded(name: str, fill: float) -> NDArray[Any]:
            arrays = [getattr(tree, name) for tree in trees]
            return np.concatenate([np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=fill) for a in arrays])

        sizes = np.concatenate([tree.sizes for tree in trees])
        return cls(padded("tokens", 0), padded("parents", -1), padded("scores", 0), sizes)

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        """N, the nodes of a row with its root and its dead nodes."""
        return int(self.tokens.shape[1])

    @property
    def rows(self) -> int:
        """B."""
        return int(self.tokens.shape[0])

    @cached_property
    def alive(self) -> BoolArray:
        """(B, N), True for live nodes."""
        return np.arange(len(self)) < self.sizes[:, None]

    @cached_property
    def ancestors(self) -> BoolArray:
        """(B, N, N), True where the column is the row's node itself or one of its ancestors."""
        reach = np.zeros((*self.parents.shape, len(self)), dtype=np.bool_)
        for row, parents in zip(reach, self.parents.tolist(), strict=True):
            for node, parent in enumerate(parents):
                if parent >= 0:
                    row[node] = row[parent]  # whole, since parents stand before children
                row[node, node] = True
        return reach

    @cached_property
    def depths(self) -> IntArray:
        """(B, N), edges to the root; 0 for the root and for dead nodes."""
        depths = np.zeros_like(self.parents)
        for row, parents in zip(depths, self.parents.tolist(), strict=True):
            found: list[int] = []
            for parent in parents:
                found.append(found[parent] + 1 if parent >= 0 else 0)
            row[:] = found
        return depths

    def child(self, node: int, token: int, row: int = 0) -> int | None:
        """The child of `node` that holds `token`, or None."""
        return self._children[row].get((node, token))

    @cached_property
    def _children(self) -> list[dict[tuple[int, int], int]]:
        """For each row (parent, token) to the child; of twins, the first."""
        rows = zip(self.parents.tolist(), self.tokens.tolist(), self.sizes.tolist(), strict=True)
        return [{(parents[i], tokens[i]): i for i in range(size - 1, 0, -1)} for parents, tokens, size in rows]

    def path(self, node: int, row: int = 0) -> list[int]:
        """Node indices from the root (included) to `node`."""
        return [int(index) for index in np.flatnonzero(self.ancestors[row, node])]

    def check(self, vocab_size: int | None = None) -> None:
        """Raises `TreeError` unless tokens are in the vocabulary and scores are falling probabilities."""
        for tokens, size in zip(self.tokens.tolist(), self.sizes.tolist(), strict=True):
            bad = None if vocab_size is None else next((t for t in tokens[:size] if not 0 <= t < vocab_size), None)
            if bad is not None:
                raise TreeError(f"token {bad} is not in the target's vocabulary of {vocab_size}.")
        for parents, scores in zip(self.parents.tolist(), self.scores.tolist(), strict=True):
            if not all(0 <= score <= 1 for score in scores):
                raise TreeError("scores must be finite and lie in [0, 1].")
            if any(p >= 0 and score > scores[p] * 1.0001 for p, score in zip(parents, scores, strict=True)):
                raise TreeError("a node's score is above its parent's; scores are probabilities of whole paths.")

    def _check_shape(self) -> None:
        """Cheap enough for every tree: whatever walks `parents` may rely on it."""
        sizes = self.sizes.tolist()
        if not all(1 <= size <= len(self) for size in sizes):
            raise TreeError(f"sizes {sizes} must lie in 1 to N={len(self)}: a row has at least its root.")
        for parents, size in zip(self.parents.tolist(), sizes, strict=True):
            if parents[0] != -1 or any(parent != -1 for parent in parents[size:]):
                raise TreeError("the root and dead nodes must have parent -1.")
            for node, parent in enumerate(parents[1:size], 1):
                if not 0 <= parent < node:
                    raise TreeError(f"node {node} has parent {parent}; parents must stand before children.")

    # ---------------------------------------------------------------- changing

    def prune(self, max_nodes: int, max_depth: int, max_children: int) -> TokenTree:
        """The best-scoring nodes within the limits (the root not counted); ties keep the drafter's order.

        Scores fall along a path, so what is kept is a tree again.
        """
        small = len(self) <= max_nodes + 1 and int(self.depths.max()) <= max_depth
        if small and (max_children >= len(self) or int(self.sibling_ranks.max()) < max_children):
            return self
        keep = self.alive & (self.depths <= max_depth)
        keep &= ~(self.ancestors & (self.sibling_ranks >= max_children)[:, None, :]).any(-1)
        # the least score on the path, so that no rounding lets a child outrank its parent; at equal scores the
        # stable order keeps parents first
        value = np.where(self.ancestors, self.scores[:, None, :], np.inf).min(-1)
        value = np.where(keep, value, -1.0)
        value[:, 0] = 2.0  # the root stays whatever its score
        order = np.argsort(-value, axis=1, kind="stable")[:, : max_nodes + 1]
        return TokenTree.stack([self.select(np.sort(o[keep[row, o]]), row=row) for row, o in enumerate(order)])

    def merge(self, other: TokenTree) -> TokenTree:
        """The union of two trees with equal roots (B = 1 each); a shared node takes the higher score."""
        tokens, parents = self.tokens[0].tolist(), self.parents[0].tolist()
        scores = self.scores[0].tolist()
        index = {(parents[i], tokens[i]): i for i in range(1, len(tokens))}
        place = [0]
        for token, parent, score in zip(
            other.tokens[0, 1:].tolist(), other.parents[0, 1:].tolist(), other.scores[0, 1:].tolist(), strict=True
        ):
            key = (place[parent], token)
            node = index.get(key)
            if node is None:
                node = index[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                scores.append(score)
            scores[node] = max(scores[node], score)
            place.append(node)
        return TokenTree(tokens, parents, scores)

    @cached_property
    def sibling_ranks(self) -> IntArray:
        """(B, N), how many siblings score better (or equal and stand before)."""
        ranks = np.zeros_like(self.parents)
        for row, families in zip(ranks, self._families, strict=True):
            for siblings in families:
                if len(siblings) > 1:
                    row[siblings] = range(len(siblings))
        return ranks

    @cached_property
    def _families(self) -> list[list[list[int]]]:
        """For each row and node its children, the best first (at equal scores the one that stands before)."""
        rows = []
        for parents, scores in zip(self.parents.tolist(), self.scores.tolist(), strict=True):
            families: list[list[int]] = [[] for _ in parents]
            for node, parent in enumerate(parents):
                if parent >= 0:
                    families[parent].append(node)
            for siblings in families:
                siblings.sort(key=lambda node: -scores[node])
            rows.append(families)
        return rows

    def select(self, nodes: IntArray, scores: FloatArray | None = None, row: int = 0) -> TokenTree:
        """The tree of some nodes of one row, which must hold the parents of all its nodes; in the order given.

        Args:
            nodes: indices, the root first, parents before children.
            scores: (N,) to take instead of the row's own.
        """
        place = np.full(len(self) + 1, -1, np.int64)
        place[nodes] = np.arange(len(nodes))
        parents = place[self.parents[row, nodes]]  # -1 reads the last entry, which stays -1
        tree = TokenTree(self.tokens[row, nodes], parents, (self.scores[row] if scores is None else scores)[nodes])
        # who stands above whom does not change: no need to walk up again
        tree.ancestors = self.ancestors[row : row + 1, nodes[:, None], nodes]
        tree.depths = self.depths[row : row + 1, nodes]
        return tree

    def depth_first(self, nodes: Collection[int] | None = None, scores: Sequence[float] | None = None) -> TokenTree:
        """One row, reordered: each node is followed by its best child's subtree, then the next child's.

        A path of best children is then a run of nodes, which the cache keeps without moving anything.

        Args:
            nodes: to keep, the parents of all of them included; all, if None.
            scores: for each node the score to take instead of the row's own, which still says who is best.
        """
        kept = range(len(self)) if nodes is None else set(nodes)
        order, waiting = [], [0]
        while waiting:
            order.append(waiting.pop())
            waiting += [child for child in reversed(self._families[0][order[-1]]) if child in kept]
        if scores is None and order == list(range(len(self))):
            return self
        return self.select(np.array(order), None if scores is None else np.array(scores, np.float32))

    def __repr__(self) -> str:
        return f"TokenTree(rows={self.rows}, nodes={self.sizes.tolist()}, depth={int(self.depths.max())})"
