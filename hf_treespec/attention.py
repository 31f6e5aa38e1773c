"""Attention under a tree mask without copying keys and values for every query head.

With a mask, transformers expands grouped keys and values to all heads (`repeat_kv`): a copy of the whole prefix, in
every layer, in every round. Here the query heads of a group are folded into the query axis instead, which is exact:

    queries  (B, Hkv·g, N, D)  →  (B, Hkv, g·N, D)
    mask     (B, 1, N, K)      →  (B, 1, g·N, K)      g copies below each other
    keys     (B, Hkv, K, D)       as they lie in the cache

Legend: B rows, Hkv key/value heads, g query heads for each of them, N nodes, K cached and drafted slots, D head size.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from . import _compat

NAME = "hf_treespec_sdpa"


@functools.cache
def _shares_keys_on_cpu() -> bool:
    """Whether this torch's attention kernel for CPUs takes fewer key heads than query heads, without copies."""
    query, key = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 1, 8)
    try:
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, key)[0]
    except (RuntimeError, AttributeError):
        return False
    return bool(torch.equal(out, query))


def folds(device: torch.device) -> bool:
    """Whether `tree_attention` folds heads there: masks are then best made folded."""
    return device.type != "cpu" or not _shares_keys_on_cpu()


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `sdpa`, but under a mask no keys are copied for each head: see above.

    Args:
        query: (B, Hkv·g, N, D). key, value: (B, Hkv, K, D).
        attention_mask: None, bool or additive (B or 1, 1, N, K); or the additive mask folded for g, (B, 1, g·N, K).

    Returns:
        (B, N, Hkv·g, D) and None (no weights, as `sdpa`).
    """
    rows, heads, nodes, size = query.shape
    groups = heads // key.shape[1]
    plain_mask = attention_mask is None or attention_mask.dim() != 4 or attention_mask.shape[1] != 1
    if plain_mask or kwargs.get("position_bias") is not None:
        return _compat.sdpa_attention()(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert attention_mask is not None
    if attention_mask.is_floating_point() and attention_mask.dtype != query.dtype:
        attention_mask = attention_mask.to(query.dtype)
    if not folds(query.device):
        attention_mask = attention_mask[:, :, :nodes]
    else:
        query = query.reshape(rows, heads // groups, groups * nodes, size)
        if attention_mask.shape[2] != groups * nodes:  # an ordinary mask, or one folded for another group size
            attention_mask = attention_mask[:, :, :nodes].repeat(1, 1, groups, 1)
    shared = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=shared
    )
    return out.reshape(rows, heads, nodes, -1).transpose(1, 2).contiguous(), None


_compat.register_attention(NAME, tree_attention)


def implementation(model: PreTrainedModel) -> str:
    """The attention implementation of the text decoder now, e.g. "sdpa"."""
    return str(_compat.text_config(model)._attn_implementation)


class _Switches:
    """Which models run on `tree_attention` now, and for how many calls. One switch serves all threads on a model."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
        self.before: weakref.WeakKeyDictionary[PreTrainedModel, list[tuple[Any, str]]] = weakref.WeakKeyDictionary()

    def enter(self, model: PreTrainedModel) -> None:
        with self.lock:
            if not self.users.get(model):
                wanted = implementation(model)
                if wanted == "eager":
                    return
                configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
                configs[id(_compat.text_config(model))] = _compat.text_config(model)
                changed = [(c, wanted) for c in configs.values() if getattr(c, "_attn_implementation", None) == wanted]
                self.before[model] = changed
                for config, _ in changed:
                    config._attn_implementation = NAME
            self.users[model] = self.users.get(model, 0) + 1

    def leave(self, model: PreTrainedModel) -> None:
        with self.lock:
            if not self.users.get(model):
                return
            self.users[model] -= 1
            if not self.users[model]:
                del self.users[model]
                for config, wanted in self.before.pop(model):
                    config._attn_implementation = wanted


_switches = _Switches()


@contextlib.contextmanager
def tree_attention_on(model: PreTrainedModel) -> Iterator[None]:
    """Runs `model` on `tree_attention` (eager models stay eager), and puts its own implementation back at the end.

    A model of another implementation (sdpa, flash) runs on this one for the whole call; where no mask needs folding it
    is `sdpa` itself. Calls may overlap, also from several threads: the last one out restores.
    """
    _switches.enter(model)
    try:
        yield
    finally:
        _switches.leave(model)
