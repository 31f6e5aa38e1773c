"""`recycling`: the target's own second thoughts. No weights (token recycling, Luo et al. 2024).

Every verify pass scores the whole vocabulary at every node, and all but one number is thrown away. Here the best few
tokens at each node, rejected nodes included, are kept as what may follow that node's token, the latest occurrence
winning. Drafts walk this table. It belongs to the target and stays warm from call to call.

A guess's chance is counted by its rank and by the probability that the target gave it when it was stored.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right

import numpy as np
import torch

from ..errors import DrafterError
from ..verify import Verified
from .base import Prompt, register_drafter
from .source import Odds, Source, SourceDrafter

_CHUNK = 128
# Stored probabilities with odds of their own, by rank 0, 1, 2-3, 4 and later. Priors: means over SmolLM2-135M's greedy
# answers to instruction prompts, rounded.
_LEVELS = (0.02, 0.1, 0.3, 0.6, 0.9)
_RANKS = (0, 1, 2, 2, 3)
_PRIOR = (
    (0.08, 0.12, 0.25, 0.4, 0.5, 0.6),
    (0.05, 0.08, 0.15, 0.2, 0.2, 0.2),
    (0.03, 0.06, 0.1, 0.1, 0.1, 0.1),
    (0.02, 0.04, 0.05, 0.05, 0.05, 0.05),
)


class Successors:
    """For each token of a vocabulary, the `width` best tokens that followed it in the target's latest opinion.

    Attributes:
        tokens: (V, width) int32, -1 where nothing is known.
        chances: (V, width) float32, their probabilities then among each other (of raw logits, before processors).
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        self.tokens = np.full((vocabulary, width), -1, np.int32)
        self.chances = np.zeros((vocabulary, width), np.float32)

    def store(self, tokens: np.ndarray, logits: torch.Tensor) -> None:
        """What follows each of `tokens` (n,), given logits (n, V)."""
        best, following = _top(logits.float(), self.tokens.shape[1])
        both = torch.stack([following.float(), best.softmax(-1)]).cpu().numpy()  # one read; ids below 2**24 are exact
        self.tokens[tokens], self.chances[tokens] = both[0].astype(np.int32), both[1]


def _top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`scores.topk(count)` of (n, V): exact, but most of a large vocabulary is only looked at for its maximum."""
    rows, size = scores.shape
    if size % _CHUNK or size // _CHUNK <= count:
        return scores.topk(count, dim=-1)
    # the count best tokens lie in the count chunks with the best maxima
    chunks = scores.view(rows, -1, _CHUNK)
    places = chunks.amax(-1).topk(count, dim=-1).indices
    best, within = chunks.gather(1, places[:, :, None].expand(-1, -1, _CHUNK)).flatten(1).topk(count, dim=-1)
    return best, places.gather(1, within // _CHUNK) * _CHUNK + within % _CHUNK


class RecyclingSource(Source):
    """The state is the last token."""

    def __init__(self, table: Successors) -> None:
        self.table = table
        self.odds = [Odds(prior) for prior in _PRIOR]
        self._last = 0

    def look(self, verified: Verified) -> None:
        tree = verified.tree
        nodes = tree.tokens[0][-verified.logits.shape[1] :]  # the prompt's forward has logits of its last token alone
        self.table.store(nodes, verified.logits[0])

    def read(self, token: int) -> None:
        for rank, (following, chance) in enumerate(self._row(self._last)):
            self.odds[_RANKS[min(rank, 4)]].count(bisect_right(_LEVELS, chance), following == token)
        self._last = token

    def root(self) -> int:
        return self._last

    def step(self, state: int, token: int) -> int:
        return token

    def guesses(self, state: int) -> dict[int, float]:
        return {
            following: self.odds[_RANKS[min(rank, 4)]][bisect_right(_LEVELS, chance)]
            for rank, (following, chance) in enumerate(self._row(state))
        }

    def _row(self, token: int) -> list[tuple[int, float]]:
        tokens = self.table.tokens[token]
        if tokens[0] < 0:
            return []
        return list(zip(tokens.tolist(), self.table.chances[token].tolist(), strict=True))


_tables: weakref.WeakKeyDictionary[object, dict[int, Successors]] = weakref.WeakKeyDictionary()


def table_of(target: object, vocabulary: int, width: int) -> Successors:
    """The table of a loaded target, made on first use. Calls share it; a row is written in one piece."""
    tables = _tables.setdefault(target, {})
    if width not in tables:
        tables[width] = Successors(vocabulary, width)
    return tables[width]


def check_width(width: int) -> int:
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= 64:
        raise DrafterError(f"width={width!r} must be a whole number of successors, 1 to 64.")
    return width


@register_drafter("recycling")
class RecyclingDrafter(SourceDrafter):
    """Drafts what the target itself thought likely after the same token, the last time that it stood somewhere.

    Args:
        width: successors kept for each token.
    """

    def __init__(self, width: int = 8) -> None:
        self.width = check_width(width)

    def sources(self, prompt: Prompt) -> list[Source]:
        return [RecyclingSource(table_of(prompt.target, prompt.verified.logits.shape[-1], self.width))]
