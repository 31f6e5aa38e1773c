"""What `return_dict_in_generate` asks for: scores, logits, hidden states, attentions of the committed tokens.

Shaped as plain decoding shapes them: one entry for each new token; the first one of hidden states and attentions covers
the prompt. Rows of rejected nodes are dropped, and attention columns are those of the node's own path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import _compat
from .cache import TreeCache
from .drafters.base import Commit


class Outputs:
    """Collects during a call; `scores` is also what stopping criteria are shown."""

    def __init__(self, config: Any) -> None:
        self.wanted = bool(config.return_dict_in_generate)

        def empty(name: str) -> tuple[Any, ...] | None:
            return () if self.wanted and getattr(config, name) else None

        self.scores = empty("output_scores")
        self.logits = empty("output_logits")
        self.hidden_states = empty("output_hidden_states")
        self.attentions = empty("output_attentions")

    @property
    def recorder(self) -> Any:
        """For `Picker`: takes the processed and the raw row of each token; None where nobody asked."""
        return self._record if self.scores is not None or self.logits is not None else None

    def _record(self, processed: torch.Tensor, raw: torch.Tensor) -> None:
        if self.scores is not None:
            self.scores += (processed,)
        if self.logits is not None:
            self.logits += (raw,)

    def prompt(self, outputs: Any) -> None:
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)

    def round(self, commit: Commit, cache: TreeCache) -> None:
        verified = commit.verified
        for node in commit.path[0]:
            if self.hidden_states is not None and verified.hidden_states is not None:
                self.hidden_states += (tuple(h[:, node : node + 1] for h in verified.hidden_states),)
            if self.attentions is not None and verified.attentions is not None:
                path, size = np.array(verified.tree.path(node)), len(verified.tree)
                windows = [getattr(layer, "window", None) for layer in cache.layers]
                rows = zip(verified.attentions, windows, strict=True)
                self.attentions += (tuple(_attention_row(a, node, path, size, w) for a, w in rows),)

    def result(self, ids: torch.Tensor, cache: Any) -> Any:
        if not self.wanted:
            return ids
        return _compat.decoder_output(
            cache,
            sequences=ids,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
        )


def _attention_row(
    attention: torch.Tensor | None, node: int, path: np.ndarray, size: int, window: int | None
) -> torch.Tensor | None:
    """(1, heads, 1, k) of (1, heads, N, P + N): a node's weights on what plain decoding would hold in this layer."""
    if attention is None:  # an implementation that returns no weights
        return None
    prefix = attention.shape[-1] - size
    columns = np.concatenate([np.arange(prefix), prefix + path])
    if window is not None:  # plain decoding's sliding layers hold no more
        columns = columns[-window:]
    return attention[:, :, node : node + 1, torch.from_numpy(columns).to(attention.device)]
