"""`union`: everything that needs no weights, merged into one tree. What `auto` uses where no model is given."""

from __future__ import annotations

from .base import Prompt, register_drafter
from .ngram import NgramDrafter, NgramSource
from .recycling import RecyclingSource, check_width, table_of
from .source import Source, SourceDrafter


@register_drafter("union")
class UnionDrafter(SourceDrafter):
    """N-gram continuations and recycled tokens in one tree, each scored by how often its kind came true.

    Args:
        min_match: as in `ngram`.
        width: as in `recycling`.
    """

    def __init__(self, min_match: int = 1, width: int = 8) -> None:
        self.min_match = NgramDrafter(min_match).min_match
        self.width = check_width(width)

    def sources(self, prompt: Prompt) -> list[Source]:
        table = table_of(prompt.target, self.width, prompt.verified.logits.shape[-1])
        return [NgramSource(self.min_match), RecyclingSource(table)]
