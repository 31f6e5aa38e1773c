"""`union`: everything that needs no weights, merged into one tree. What `auto` uses where no model is given."""

from __future__ import annotations

import os

from ..datastore import Datastore
from .base import Prompt, register_drafter
from .datastore import DatastoreSource, check_fits, open_store
from .near_miss import NearMissSource
from .ngram import NgramDrafter, NgramSource
from .recycling import RecyclingSource, check_width, table_of
from .source import Source, SourceDrafter


@register_drafter("union")
class UnionDrafter(SourceDrafter):
    """N-gram continuations, recycled tokens and near misses in one tree, each scored by how often its kind came true.

    Args:
        min_match: as in `ngram`.
        width: as in `recycling`.
        datastore: one source more: the file of a datastore of earlier texts, or an open `Datastore`; see `datastore`.
    """

    def __init__(
        self, min_match: int = 1, width: int = 8, datastore: str | os.PathLike[str] | Datastore | None = None
    ) -> None:
        self.min_match = NgramDrafter(min_match).min_match
        self.width = check_width(width)
        self.store = None if datastore is None else open_store(datastore, "union", "datastore")

    def sources(self, prompt: Prompt) -> list[Source]:
        table = table_of(prompt.target, self.width, prompt.verified.logits.shape[-1])
        sources: list[Source] = [NgramSource(self.min_match), RecyclingSource(table), NearMissSource()]
        if self.store is not None:
            check_fits(self.store, prompt)
            sources.append(DatastoreSource(self.store))
        return sources
