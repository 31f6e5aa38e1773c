"""One forward of the target over a whole tree: mask, positions, logits of every node.

The mask of one layer kind, for P = 4 cached slots of which the first is left padding, over the tree of `tree.py`'s
drawing (1 = attends; the same picture is a test):

              cached      tree
             0 1 2 3   0 1 2 3 4 5
    node 0   . 1 1 1   1 . . . . .
    node 1   . 1 1 1   1 1 . . . .
    node 2   . 1 1 1   1 . 1 . . .
    node 3   . 1 1 1   1 1 . 1 . .
    node 4   . 1 1 1   1 1 . . 1 .
    node 5   . 1 1 1   1 . 1 . . 1

Sliding and chunked windows are cut by sequence slots (cached length + depth), never by where a node lies in the cache.
It knows nothing of acceptance.

Legend: B rows, N nodes with the root, P cached slots of a layer, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from . import _compat, attention
from .cache import TreeCache, TreeLayer
from .tree import TokenTree

# kinds of `config.layer_types` that hold no keys of their own
_NO_KEYS = ("moe", "mlp", "dummy")


@dataclasses.dataclass(frozen=True)
class Verified:
    """What one target forward says about a tree.

    Attributes:
        tree: the tree, B rows of N nodes.
        logits: (B, N, V) in the model's dtype, on its device: scores of the token that follows each node.
        hidden_states: as the model returned them, one (B, N, H) a layer (first the embeddings), or None. Layers that
            nobody asked for may be None.
        attentions: as the model returned them, one (B, heads, N, P + N) a layer, or None.
    """

    tree: TokenTree
    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclasses.dataclass(frozen=True)
class ForwardArguments:
    """What the target's forward gets in every round besides ids, mask, positions and cache.

    Attributes:
        constant: passed on as they are.
        columns: (1, 1) tensors, repeated for each node.
    """

    constant: dict[str, Any] = dataclasses.field(default_factory=dict)
    columns: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Layers that share one mask: how far back a query sees, and the first of these layers in the cache."""

    window: int | None
    chunk: int | None
    layer: int

    @property
    def limited(self) -> bool:
        return self.window is not None or self.chunk is not None


class Verifier:
    """Runs trees through `model` on top of `cache`.

    Args:
        model: the target (or a drafting model: the rules are the same).
        cache: its keys and values, one token short of the text for each row.
        last_position: (..., B, 1) position id of the last cached token of each row; leading axes as the model has
            them (multi-axis rotary positions).
        padding: (B, P) with 0 where a cached slot must not be seen, or None.
        arguments: what every forward gets besides.
        layer: only this layer's mask is asked for: the model's layers run one by one, each on a cache of its own.

    Attributes:
        rows_are_plain: no layer has a window or chunks: a node sees its ancestors and the whole prefix.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        last_position: torch.Tensor,
        padding: torch.Tensor | None = None,
        arguments: ForwardArguments | None = None,
        layer: int | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.arguments = arguments or ForwardArguments()
        self.device, self.dtype = last_position.device, model.dtype
        self.cache_key = _compat.cache_key(model)
        self._next_position = last_position + 1
        self._start = cache.lengths.copy()
        self._padding = None if padding is None or bool((padding != 0).all()) else padding.to(self.device) == 0
        config = _compat.text_config(model)
        self._kinds = _kinds(config, layer)
        self.rows_are_plain = not any(kind.limited for kind in self._kinds.values())
        folded = attention.implementation(model) == attention.NAME and attention.folds(self.device)
        heads = getattr(config, "num_attention_heads", 1)
        self._fold = heads // (getattr(config, "num_key_value_heads", None) or heads) if folded else 1

    @torch.no_grad()
    def forward(self, tree: TokenTree, start: int = 0) -> Verified:
        """Appends the tree to the cache and returns what the target thinks of every node.

        Call `cache.keep` (or `cache.truncate`) afterwards.

        Args:
            start: nodes before this one went through an earlier forward of the same round and are in the cache; logits
                and the like are those of the nodes from `start` on.
        """
        self.cache.reserve(len(tree) - start)
        outputs = self.model(
            input_ids=torch.from_numpy(tree.tokens[:, start:]).to(self.device),
            attention_mask=self.mask(tree, start),
            position_ids=self.positions(tree, start),
            use_cache=True,
            return_dict=True,
            **{self.cache_key: self.cache},
            **self.arguments.constant,
            **{name: column.expand(-1, len(tree) - start) for name, column in self.arguments.columns.items()},
        )
        return Verified(tree, outputs.logits, outputs.get("hidden_states"), outputs.get("attentions"))

    def positions(self, tree: TokenTree, start: int = 0) -> torch.Tensor:
        """(..., B, N) position ids: those of the text plus the node's depth."""
        ahead = torch.from_numpy((self.cache.lengths - self._start)[:, None] + tree.depths[:, start:])
        return self._next_position + ahead.to(self.device)

    def mask(self, tree: TokenTree, start: int = 0) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """The additive mask (B, 1, N, P + N) in the model's dtype, or one for each layer kind where it has several.

        None for a lone root that sees everything: the forward is then the one of plain decoding.
        """
        if len(tree) == 1 and self.rows_are_plain and self._padding is None and self.cache.even:
            return None
        masks = {name: self._mask(tree, start, kind) for name, kind in self._kinds.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, tree: TokenTree, start: int, kind: _Kind) -> torch.Tensor:
        layer = self.cache.layers[kind.layer]
        offset = layer.offset if isinstance(layer, TreeLayer) else 0
        slot = self.cache.lengths[:, None] + tree.depths  # (B, N) where each node would stand in the text
        query = slot[:, start:]
        seen = tree.ancestors[:, start:]
        if kind.limited:
            seen = seen & _in_reach(kind, query[:, :, None], slot[:, None, :])
        lowest = torch.finfo(self.dtype).min
        prefix = self.cache.filled - offset
        shape = (tree.rows, self._fold, query.shape[1], prefix + len(tree))  # a copy for each group of heads
        mask = torch.zeros(shape, dtype=self.dtype, device=self.device)
        mask.narrow(-1, prefix, len(tree)).masked_fill_(torch.from_numpy(~seen).to(self.device)[:, None], lowest)
        cached = self._hidden_prefix(kind, query, offset)
        if cached is not None:
            mask.narrow(-1, 0, prefix).masked_fill_(cached[:, None], lowest)
        return mask.view(tree.rows, 1, -1, prefix + len(tree))

    def _hidden_prefix(self, kind: _Kind, query: np.ndarray, offset: int) -> torch.Tensor | None:
        """(B, N or 1, P) True where a cached slot must not be seen; None if all are."""
        hidden: torch.Tensor | None = None
        if self.cache.even and self._padding is None and not kind.limited:
            return None
        slots = torch.arange(offset, self.cache.filled, device=self.device)
        if not self.cache.even:  # the gap between a row's end and the longest row's
            ends = torch.from_numpy(self.cache.lengths).to(self.device)
            hidden = (slots >= ends[:, None])[:, None, :]
        if self._padding is not None:
            padded = torch.zeros((len(self._padding), 1, len(slots)), dtype=torch.bool, device=self.device)
            known = self._padding[:, offset:]  # as long as the prompt; what follows is never padding
            padded[:, 0, : known.shape[1]] = known
            hidden = padded if hidden is None else hidden | padded
        if kind.limited:
            far = ~_in_reach(kind, torch.from_numpy(query).to(self.device)[:, :, None], slots)
            hidden = far if hidden is None else hidden | far
        return hidden


def _in_reach(kind: _Kind, query: Any, key: Any) -> Any:
    """Whether a query at one sequence slot sees a key at another, by the layer's window alone."""
    if kind.window is not None:
        return key > query - kind.window
    return key // kind.chunk == query // kind.chunk


def _kinds(config: Any, only: int | None = None) -> dict[str, _Kind]:
    """The masks that a model wants, by the names of `config.layer_types`; or the mask of one layer."""
    types = getattr(config, "layer_types", None)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if types is None:
        types = ["sliding_attention" if window is not None else "chunked_attention" if chunk else "full_attention"]
    kinds: dict[str, _Kind] = {}
    for layer, name in enumerate(types) if only is None else [(only, types[min(only, len(types) - 1)])]:
        if name not in _NO_KEYS and name not in kinds:
            kinds[name] = _Kind(
                window=window if "sliding" in name else None, chunk=chunk if "chunked" in name else None, layer=layer
            )
    return kinds


def root_of_prompt(outputs: Any, last_token: int) -> Verified:
    """The prompt's forward as the verification of a tree that is only a root: the prompt's last token."""
    return Verified(
        TokenTree.root_only(last_token), outputs.logits[:, -1:], outputs.get("hidden_states"), outputs.get("attentions")
    )
