"""The only file that knows versions of transformers (5.0 and later).

What moved between releases is asked of the objects at hand, never of a version number.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers import cache_utils as _cache_utils
from transformers import modeling_layers as _modeling_layers
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import utils as _generation_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .errors import UnsupportedModelError


class _NoDummyLayer:
    """Stands in where transformers has no layers that share another layer's keys (before 5.15)."""


DummyLayer: type = getattr(_cache_utils, "DummyLayer", _NoDummyLayer)


def cache_key(model: PreTrainedModel) -> str:
    """What `forward` calls its cache: `cache` since 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def text_config(model: PreTrainedModel) -> Any:
    """The config of the part that decodes text (a vision-language model has it nested)."""
    return model.config.get_text_config(decoder=True)


def states_argument(layers: tuple[int, ...]) -> list[int] | bool:
    """`output_hidden_states` for these layers alone (since 5.23; the others are then None), or for all of them."""
    try:
        from transformers.utils.output_capturing import selected_hidden_states  # noqa: F401 - asked for, not used
    except ImportError:
        return True
    return list(layers)


def prefill(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> Any:
    """The prompt's forward exactly as `generate` does it: chunks, a user's cache, embeddings, images.

    `_prefill` got `is_first_iteration` after 5.0; where it is absent the prompt is always a first iteration.
    """
    parameters = inspect.signature(model._prefill).parameters
    first = {"is_first_iteration": True} if "is_first_iteration" in parameters else {}
    return model._prefill(input_ids, generation_config, model_kwargs, **first)


def optimize_for_decode(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """transformers' own switch of expert kernels for the decoding stage; absent in early 5.x."""
    method = getattr(model, "_optimize_model_for_decode", None)
    return method() if method is not None else contextlib.nullcontext()


def decoder_output(cache: Any, **fields: Any) -> GenerateDecoderOnlyOutput:
    """`GenerateDecoderOnlyOutput`, whose cache field was renamed together with the argument."""
    key = "cache" if "cache" in inspect.signature(GenerateDecoderOnlyOutput).parameters else "past_key_values"
    return GenerateDecoderOnlyOutput(**{key: cache}, **fields)


def prepared_cache(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> Any:
    """The cache that `generate` prepared or a user passed; early 5.x leaves it to the model, so one is put there."""
    found = (model_kwargs.get(key) for key in ("cache", "past_key_values"))
    cache = next((cache for cache in found if cache is not None), None)
    if cache is None:
        cache = model_kwargs[cache_key(model)] = DynamicCache(config=text_config(model))
    return cache


def default_positions(model: PreTrainedModel, mask: torch.Tensor | None, cached: int) -> torch.Tensor:
    """(1, t) position ids of the cached tokens, where `generate` did not prepare any (before 5.4).

    Raises:
        UnsupportedModelError: the model has several axes of positions, which such a release computes out of sight.
    """
    if "mrope_section" in str(getattr(text_config(model), "rope_parameters", None)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has multi-axis positions that this release of transformers does not show; "
            "update transformers, or decode without tree_spec."
        )
    return torch.arange(cached)[None] if mask is None else (mask.long().cumsum(-1) - 1).clamp_min(0)


def prompt_only_arguments() -> tuple[str, ...]:
    """Arguments that `generate` drops after the prompt's forward (images and the like)."""
    return tuple(getattr(_generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))


def mtp_class() -> Any:
    """transformers' `MtpModel`, or None (before 5.14)."""
    return getattr(_modeling_layers, "MtpModel", None)


def dflash_cache() -> Any:
    """transformers' `DFlashCache`, or None (before 5.15)."""
    return getattr(_cache_utils, "DFlashCache", None)


def is_dflash(model: Any) -> bool:
    """Whether a model (or its class) drafts blocks as transformers' DFlash drafters do."""
    return {"noise_embeds", "context_hidden_states"} <= set(inspect.signature(model.forward).parameters)


def reads_shared_kv(model: Any) -> bool:
    """Whether a model (or its class) is an assistant that attends to the keys and values of another (since 5.8)."""
    return (
        hasattr(model, "create_attention_masks") and "shared_kv_states" in inspect.signature(model.forward).parameters
    )


def shared_kv_layers(target: PreTrainedModel) -> dict[str, int]:
    """The layers whose keys and values a target offers to assistants: kind (of `config.layer_types`) to index."""
    attentions: Any = (getattr(layer, "self_attn", None) for layer in getattr(target.get_decoder(), "layers", ()))
    return {a.layer_type: a.layer_idx for a in attentions if getattr(a, "store_full_length_kv", False)}


def architecture(config: dict[str, Any]) -> Any:
    """The class of transformers that a checkpoint's config names, or None."""
    return getattr(transformers, str((config.get("architectures") or [None])[0]), None)


def mtp_position_embeddings(mtp: Any, layer: int, embeds: torch.Tensor, positions: torch.Tensor) -> Any:
    """What an MTP layer gets as `position_embeddings`; in later releases the layers of a model may differ in it."""
    if mtp.rotary_emb is None:
        return None
    kind = {"layer_type": mtp.config.layer_types[layer]} if getattr(mtp, "has_per_layer_rope", False) else {}
    return mtp.rotary_emb(embeds, position_ids=positions, **kind)


def register_attention(name: str, function: Any) -> None:
    """Makes `function` known as attention implementation `name`, with the masks of `sdpa` for ordinary forwards."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def sdpa_attention() -> Any:
    """transformers' own `sdpa` attention function."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"]


def rope_boundary(config: Any) -> tuple[int | None, bool]:
    """The position from which rotary frequencies (or a position table) change, and whether they change at every step.

    "dynamic" recomputes its frequencies at each new maximum beyond `max_position_embeddings`; "longrope" switches
    once, at `original_max_position_embeddings` (transformers/modeling_rope_utils.py, `dynamic_rope_update`).
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [rope] if "rope_type" in rope or not rope else [v for v in rope.values() if isinstance(v, dict)]
    limit = getattr(config, "max_position_embeddings", None)
    moving = any(s.get("rope_type") == "dynamic" for s in sets)
    for s in sets:
        if s.get("rope_type") == "longrope":
            limit = s.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", limit
            )
    return limit, moving
