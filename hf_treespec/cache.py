"""`TreeCache`: a target's keys and values while trees are verified.

Prefill runs in the ordinary cache of transformers, which keeps a sliding layer short. `TreeCache.adopt` then takes its
layers over into growable buffers, so that a round costs O(N): append the tree, keep the accepted path, no copy of the
prefix. `release` hands the result back in the very objects that the caller owns.

Slots of one layer before and after a round whose tree has N = 5 nodes and whose accepted path is 0 → 2 → 4:

    before   │ p p p p p p │ . . . . .           p: a committed token's key and value
    append   │ p p p p p p │ 0 1 2 3 4           `update`, called by the model's forward
    keep     │ p p p p p p   0 2 4 │ . .         `keep([[0, 2, 4]])`, in place

Rows of a batch go at their own pace: a tree starts for all rows at one slot behind the longest row, and the mask hides
each row's gap. It knows nothing of masks; `lengths`, `filled` and `offset` are what a mask needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ._compat import DummyLayer
from .errors import UnsupportedModelError

# Room for this many tokens is added when a buffer is full, at least; a third of its length otherwise. Growth copies the
# prefix, so it must be rare (amortised O(1) a token); chosen by eye.
MIN_GROWTH = 256


class TreeLayer(DynamicLayer):
    """Keys and values of one layer in buffers (B, H, capacity, D); the first `length` slots are live.

    `offset` counts the slots that a sliding layer has dropped before its first live one: slot i of the buffer holds
    the token that stood at i + `offset` of the sequence.
    """

    def __init__(self, source: DynamicLayer, spare: int) -> None:
        super().__init__()
        self.source = source
        self.window: int | None = getattr(source, "sliding_window", None)
        self.offset = 0
        self.length = 0
        self.capacity = 0
        if source.is_initialized and source.keys is not None and source.keys.numel():
            keys, values = source.keys, source.values
            self.offset = int(getattr(source, "cumulative_length", keys.shape[-2])) - keys.shape[-2]
            self._allocate(keys, values, keys.shape[-2] + spare)
            source.keys = source.values = None  # one copy of the prefix at a time
            self.update(keys, values)

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        self.device, self.dtype, self.capacity = keys.device, keys.dtype, capacity
        self._buffers = tuple(x.new_empty((*x.shape[:-2], capacity, x.shape[-1])) for x in (keys, values))
        self.is_initialized = True
        self.length = 0

    # Views are made when somebody looks, so that to cut the cache is to write one number for each layer.

    @property
    def keys(self) -> Any:
        """(B, H, length, D), the live slots; None before there are any."""
        return self._buffers[0].narrow(-2, 0, self.length) if self.is_initialized else None

    @keys.setter
    def keys(self, none: None) -> None:
        """Where a layer of transformers is made, it has none."""

    @property
    def values(self) -> Any:
        """As `keys`."""
        return self._buffers[1].narrow(-2, 0, self.length) if self.is_initialized else None

    @values.setter
    def values(self, none: None) -> None:
        """As `keys`."""

    def reserve(self, count: int, keep_from: int) -> None:
        """Makes room for `count` more slots; a sliding layer first drops what lies before sequence slot `keep_from`."""
        if self.length + count <= self.capacity or not self.is_initialized:
            return
        drop = 0 if self.window is None else max(0, min(self.length, keep_from - self.window - self.offset))
        live = self.length - drop
        if drop == 0 or live + count + MIN_GROWTH // 2 > self.capacity:  # else the next round would move again
            capacity = live + count + max(MIN_GROWTH, live // 3)
            fresh = tuple(b.new_empty((*b.shape[:-2], capacity, b.shape[-1])) for b in self._buffers)
        else:
            fresh = self._buffers
        for new, old in zip(fresh, self._buffers, strict=True):
            kept = old[..., drop : self.length, :]
            new[..., :live, :] = kept.clone() if new is old else kept  # source and destination overlap
        self._buffers, self.capacity = fresh, int(fresh[0].shape[-2])
        self.offset += drop
        self.length = live

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends (B, H, q, D) keys and values; returns views of all live ones, (B, H, length, D)."""
        if not self.is_initialized:
            self._allocate(key_states, value_states, key_states.shape[-2] + MIN_GROWTH)
        start, count = self.length, key_states.shape[-2]
        self.reserve(count, keep_from=0)  # never drops here: a mask made before the forward counts on `offset`
        self.length = start + count
        keys, values = self._buffers
        keys.narrow(-2, start, count).copy_(key_states)
        values.narrow(-2, start, count).copy_(value_states)
        return keys.narrow(-2, 0, self.length), values.narrow(-2, 0, self.length)

    def move(self, row: int, source: torch.Tensor, target: int) -> None:
        """Copies sequence slots `source` (n,) int64 of one row to those from `target` on."""
        index = source - self.offset if self.offset else source
        for buffer in self._buffers:
            live = buffer[row]
            live.narrow(1, target - self.offset, len(index)).copy_(live.index_select(1, index))

    def cut(self, length: int) -> None:
        """Drops every slot from sequence slot `length` on."""
        if self.is_initialized:
            self.length = length - self.offset

    def give_back(self) -> None:
        """Writes the live keys and values into the layer that was adopted, as plain decoding would have left them."""
        if not self.is_initialized:
            return
        source, length = self.source, self.length
        first = 0 if self.window is None else max(0, length - self.window + 1)
        if not source.is_initialized:
            source.lazy_initialization(self.keys, self.values)
        source.keys, source.values = (buffer[..., first:length, :] for buffer in self._buffers)
        if hasattr(source, "cumulative_length"):
            source.cumulative_length = self.offset + length

    def get_seq_length(self, *args: Any) -> int:
        return self.offset + self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` slots (a number <= 0), or cuts at a positive length (older callers)."""
        total = self.offset + self.length
        keep = total + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, total)
        if self.is_initialized:
            self.length = max(0, keep - self.offset)

    def reset(self) -> None:
        self.offset = self.length = 0


class TreeCache(DynamicCache):
    """The layers of a `DynamicCache` as `TreeLayer`s, for the time of one call.

    Attributes:
        lengths: (B,) int64, committed tokens of each row in the cache.
        filled: slots in use, the longest row's length; the next tree starts here.
        tree_layers: those that keep keys of their own.
    """

    def __init__(self, source: DynamicCache, *, spare: int = MIN_GROWTH) -> None:
        """Takes over `source` (which is empty until `release`).

        Args:
            source: the cache after prefill.
            spare: slots to allocate behind the prefix at once, so that a short call never grows a buffer.

        Raises:
            UnsupportedModelError: a layer does not keep every key (recurrent, quantised, offloaded, static, ...).
        """
        super().__init__()
        check_cache(source)
        self.source = source
        rows = {int(layer.keys.shape[0]) for layer in source.layers if getattr(layer, "keys", None) is not None}
        self.layers = [layer if type(layer) is DummyLayer else TreeLayer(layer, spare) for layer in source.layers]
        self.layer_class_to_replicate = None
        self.tree_layers = [layer for layer in self.layers if isinstance(layer, TreeLayer)]
        self.filled = max((layer.get_seq_length() for layer in self.tree_layers), default=0)
        self.lengths = np.full(rows.pop() if rows else 1, self.filled, np.int64)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use, counting a tree that was appended and not yet kept."""
        return max((layer.get_seq_length() for layer in self.tree_layers if layer.is_initialized), default=0)

    @property
    def even(self) -> bool:
        """Whether all rows are of one length: no gaps before the next tree."""
        return bool(self.lengths.min() == self.filled)

    def reserve(self, count: int) -> None:
        """Makes room for `count` nodes in every layer. Call it before a mask is made: sliding layers move here."""
        oldest = int(self.lengths.min())
        for layer in self.tree_layers:
            layer.reserve(count, keep_from=oldest)

    def keep(self, rows: Sequence[Sequence[int]]) -> None:
        """Keeps, of the tree just appended, the nodes `rows[b]` of each row b (ascending, root first), drops the rest."""
        start = self.filled
        for row, (end, nodes) in enumerate(zip(self.lengths.tolist(), rows, strict=True)):
            in_place = next((i for i, node in enumerate(nodes) if start + node != end + i), len(nodes))
            if in_place < len(nodes):
                source = torch.tensor([start + node for node in nodes[in_place:]])
                for layer in self.tree_layers:
                    if layer.is_initialized:
                        source = source.to(layer.device)  # one transfer for all layers of a device
                        layer.move(row, source, end + in_place)
        self.lengths = self.lengths + np.array([len(nodes) for nodes in rows], np.int64)
        self.filled = int(self.lengths.max())
        if self.get_seq_length() > self.filled:  # not after a plain round: a write to each layer costs more than a look
            self.truncate()

    def shorten(self, length: int) -> bool:
        """Drops committed tokens beyond the first `length` of each row, and a tree that was appended.

        Returns False, with nothing changed, if a sliding layer has dropped what would then be its last token. It may
        miss the oldest keys of its window, which only a drafting model can bear.
        """
        if any(layer.offset >= length for layer in self.tree_layers if layer.offset):
            return False
        self.lengths = np.minimum(self.lengths, length)
        self.filled = int(self.lengths.max())
        self.truncate()
        return True

    def truncate(self) -> None:
        """Drops a tree that was appended and never kept (a round that failed halfway)."""
        for layer in self.tree_layers:
            layer.cut(self.filled)

    def release(self) -> DynamicCache:
        """Gives the committed keys and values back to the adopted cache and returns it. This cache is then spent."""
        self.truncate()
        for layer in self.tree_layers:
            layer.give_back()
        return self.source


class CacheView(TreeCache):
    """Some layers of a `TreeCache`, the very same ones, for a model that has only these.

    Nodes are appended through it behind the committed prefix; `truncate` drops them before the whole cache goes on.
    """

    def __init__(self, whole: TreeCache, layers: Sequence[int]) -> None:
        DynamicCache.__init__(self)
        self.whole = whole
        self.layers = [whole.layers[i] for i in layers]
        self.layer_class_to_replicate = None
        self.tree_layers = [layer for layer in self.layers if isinstance(layer, TreeLayer)]

    @property
    def lengths(self) -> np.ndarray:  # type: ignore[override]
        return self.whole.lengths

    @property
    def filled(self) -> int:  # type: ignore[override]
        return self.whole.filled


def check_cache(cache: Any) -> None:
    """Raises `UnsupportedModelError` unless a tree can be appended to every layer of `cache` and cut back."""
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
        raise UnsupportedModelError(f"{kind} cannot hold a tree; tree_spec needs a DynamicCache that is not offloaded.")
    fit = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in fit:
            raise UnsupportedModelError(
                f"layer {index} of this model caches with {type(layer).__name__}, which cannot hold a tree: it does not "
                "keep every key. Decode without tree_spec."
            )
