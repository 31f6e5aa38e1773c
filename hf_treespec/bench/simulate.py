"""Decoding without a model: a recorded text with the tree that was drafted at each of its positions, and a cost curve.

Deterministic, so that policies can be compared round by round: the same trees, the same acceptance, seconds from a
formula. What a policy commits at a position only depends on which nodes it verifies there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import LogitsProcessorList

from ..budget import Sizer
from ..drafters.base import Budget, Commit, DraftContext, Drafter, Prompt
from ..tree import TokenTree
from ..verify import Verified


@dataclasses.dataclass(frozen=True)
class Trace:
    """`trees[i]` was drafted when `text[: start + i + 1]` was committed; its root is the last of these tokens."""

    text: Sequence[int]
    start: int
    trees: Sequence[TokenTree]


def record(text: Sequence[int], start: int, drafter: Drafter, budget: Budget) -> Trace:
    """Lets a drafter that needs neither logits nor a model read `text` token by token, and keeps each of its trees."""
    own = drafter.for_call()
    nothing = Verified(TokenTree.root_only(int(text[start - 1])), torch.zeros(1, 1, 1))
    ids = torch.tensor([list(text[:start])])
    own.start(Prompt(None, ids, None, False, LogitsProcessorList(), None, budget.max_nodes, nothing))
    own.read_prompt()
    trees = []
    for token in text[start:]:
        own.observe(Commit([[token]], [[0]], [token], nothing))
        trees.append(own.draft(DraftContext(ids, [token], None, len(text)), budget))
    return Trace(text, start, trees)


def run(
    trace: Trace, cost: Callable[[int], float], policy: Sizer | int, drafting: float = 0.0
) -> tuple[float, list[int]]:
    """Decodes the trace; returns its seconds and the nodes verified in each round.

    Args:
        cost: seconds of a round with so many rows, drafting left out.
        policy: a sizer, or a fixed number of nodes.
        drafting: seconds that each draft takes, in one forward of a model; 0 for drafts that need none.
    """
    position, total = 0, 0.0
    sizes: list[int] = []
    while position < len(trace.trees) - 1:
        drafted = TokenTree.root_only(int(trace.text[trace.start + position]))
        most = len(trace.trees[position]) - 1
        spent = 0.0
        if isinstance(policy, int):
            if policy:
                drafted, spent = trace.trees[position], drafting
            tree = drafted.prune(policy, most + 1, most + 1)
        else:
            budget = policy.budget(Budget(max(1, most), 256, 256), position)
            if most and budget.max_nodes:
                drafted, spent = trace.trees[position], drafting
            tree = policy.cut(drafted, position)
        node = 0
        committed: list[int] = []
        while True:  # the walk: the recorded text is what the target says
            token = int(trace.text[min(trace.start + position + len(committed) + 1, len(trace.text) - 1)])
            committed.append(token)
            child = tree.child(node, token)
            if child is None or position + len(committed) >= len(trace.trees) - 1:
                break
            node = child
        seconds = cost(len(tree)) + spent
        if isinstance(policy, Sizer):
            asked = len(drafted) > 1
            if asked:
                policy.learn(drafted, committed)
            forwards = int(spent > 0)
            policy.account(len(tree), position, len(committed), spent, seconds, drafted=asked, forwards=forwards)
        total += seconds
        sizes.append(len(tree) - 1)
        position += len(committed)
    return total, sizes


CURVES: dict[str, Callable[[int], float]] = {
    "flat (GPU, dense weights)": lambda rows: 20e-3 * (1 + 0.003 * rows),
    "linear (CPU, packed weights)": lambda rows: 14e-3 * (1 + 0.055 * (rows - 1)),
    "re-packed (CPU, float32)": lambda rows: 40e-3 * (1 if rows == 1 else 1.4 + 0.027 * rows),
    "stepped (4-bit kernel that switches)": lambda rows: 20e-3 * (1 + 0.02 * rows if rows <= 4 else 1.6 + 0.004 * rows),
    "hopeless (every row costs one)": lambda rows: 20e-3 * rows,
}


def noisy(cost: Callable[[int], float], seed: int = 0, spread: float = 0.05) -> Callable[[int], float]:
    """A curve whose seconds scatter log-normally, with one in twenty several times too long."""
    rng = np.random.default_rng(seed)

    def measured(rows: int) -> float:
        outlier = 4.0 if rng.random() < 0.05 else 1.0
        return float(cost(rows) * np.exp(spread * rng.standard_normal()) * outlier)

    return measured
