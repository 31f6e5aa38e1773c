"""Hydra heads on disk: `hydra_lm_head.pt` of the reference (github.com/zankner/Hydra), a state dict of `hydra_head`.

Heads, blocks, `grounded` and the prefix layer are read off the tensors. Not read are copies of the target's embeddings
(`input_embed_fn.weight`, and the prefix layer's, which it never uses).
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from transformers import LlamaConfig, PreTrainedModel

from .. import _compat
from ..errors import CheckpointError, DrafterError
from .checkpoint import Checkpoint, Format, compare, fill, register_format
from .head import place_beside
from .hydra import HydraDrafter, HydraHeads

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?weight")
_LAYER = "prefix_embeding_layer.layers.0."  # sic
_ROTARY = f"{_LAYER}self_attn.rotary_emb.inv_freq"
_COPIES = ("input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight")
_NOT_READ = (*_COPIES, _ROTARY)
_KNOWN = ("mlp", "prefix-mlp")
# The reference's layer rotates with this base whatever the target's is.
_ROTARY_BASE = 10000.0


@register_format
class HydraFormat(Format):
    """The architectures `mlp` and `prefix-mlp` (Hydra++). `eagle-attn` and `cross-attn` are refused."""

    name: ClassVar[str] = "hydra"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        named = ("hydra_mlp.", "hydra_lm_head.", "prefix_embeding_layer.")
        return "hydra_head_arch" in checkpoint.config or any(n.startswith(named) for n in checkpoint.shapes)

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        architecture, state = _architecture(checkpoint), _state(checkpoint)
        facts: dict[str, Any] = {
            "layout": architecture if architecture in _KNOWN else f"{architecture}, which is not supported",
            "target": checkpoint.config.get("base_model_name_or_path"),
        }
        if architecture not in _KNOWN:
            return facts
        heads = _empty(checkpoint, _prefix_config(checkpoint, None))
        facts |= {
            "heads": len(heads),
            "layers of a head": heads.layers,
            "grounded": heads.grounded,
            "target's hidden size": heads.hidden_size,
            "target's vocabulary": heads.vocab_size,
            "target's states it reads": "the last, after the norm"
            if state == -1
            else f"the one that is {-state - 1} before the last",
            "taken from the target": ["embed_tokens"] if heads.grounded else [],
        }
        said = checkpoint.config.get("hydra_num_heads")
        if said is not None and said != len(heads):
            facts["heads by the config"] = said
        return facts

    def load(self, checkpoint: Checkpoint, target: PreTrainedModel | None, **options: Any) -> HydraDrafter:
        architecture = _architecture(checkpoint)
        if architecture not in _KNOWN:
            raise DrafterError(
                f"{checkpoint.source} holds a Hydra head of the architecture {architecture!r}, which is not supported; "
                "'mlp' and 'prefix-mlp' are."
            )
        if target is None and architecture == "prefix-mlp":
            raise DrafterError(
                f"{checkpoint.source} holds a layer that is built like one of its target's, and does not say how: pass "
                "load_drafter(..., target=model)."
            )
        state = _state(checkpoint)
        if target is not None:  # told before a layer is built from the sizes of a target that is another
            heads = _empty(checkpoint, _prefix_config(checkpoint, None))
            HydraDrafter(heads, state=state).check(f"the Hydra head of {checkpoint.source}", target)
        heads = _empty(checkpoint, _prefix_config(checkpoint, target))
        drafter = HydraDrafter(heads, state=state, **options)
        fill(heads, checkpoint.load(n for n in checkpoint.shapes if n not in _NOT_READ), checkpoint.source)
        if target is not None:
            place_beside(heads, target)
        heads.requires_grad_(False)
        return drafter


def _architecture(checkpoint: Checkpoint) -> str:
    """By the tensors, or by the config where they are of another architecture."""
    for start, name in (("prefix_embeding_layer.", "prefix-mlp"), ("hydra_mlp.", "mlp")):
        if any(tensor.startswith(start) for tensor in checkpoint.shapes):
            return name
    return str(checkpoint.config.get("hydra_head_arch"))


def _state(checkpoint: Checkpoint) -> int:
    """Index of the target's state that the heads read: the config counts from the last one backwards."""
    offset = checkpoint.config.get("hidden_state_offset", 0)
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise CheckpointError(
            f"config.json of {checkpoint.source} has hidden_state_offset={offset!r}, which is no whole number from 0."
        )
    return -offset - 1


def _empty(checkpoint: Checkpoint, prefix: LlamaConfig | None) -> HydraHeads:
    """Heads without weights that are as the file has them.

    Raises:
        CheckpointError: tensors are missing, unexpected or of differing shapes.
    """
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name not in _NOT_READ}
    blocks = [(found, name) for name in shapes if (found := _BLOCK.fullmatch(name))]
    outputs = [(found, name) for name in shapes if (found := _OUTPUT.fullmatch(name))]
    for tensors, what in ((blocks, "hydra_mlp.0.….linear.weight"), (outputs, "hydra_lm_head.0.….weight")):
        if not tensors:
            raise CheckpointError(f"the weights of {checkpoint.source} do not fit: missing {what}.")
    last = max(int(found[2]) for found, _ in blocks)
    with torch.device("meta"):
        heads = HydraHeads(
            hidden_size=shapes[blocks[0][1]][0],
            vocab_size=shapes[outputs[0][1]][0],
            heads=1 + max(int(found[1]) for found, _ in [*blocks, *outputs]),
            layers=last + 1 if prefix is None else (last + 1) // 2,
            grounded=any(".res_connection." in name for name in shapes),
            prefix=prefix,
        )
    compare(heads, shapes, checkpoint.source)
    if prefix is not None:  # its rotary frequencies are no weights: they have to be real
        layer = heads.prefix_embeding_layer
        layer.rotary_emb = type(layer.rotary_emb)(config=prefix)
    return heads


def _prefix_config(checkpoint: Checkpoint, target: PreTrainedModel | None) -> LlamaConfig | None:
    """The shape of the prefix layer, None without one: a decoder layer of the target's sizes.

    Without a target it is good for comparing shapes only.
    """
    shapes = checkpoint.shapes
    if not any(name.startswith("prefix_embeding_layer.") for name in shapes):
        return None
    queries = shapes.get(f"{_LAYER}self_attn.q_proj.weight", (2, 2))
    keys = shapes.get(f"{_LAYER}self_attn.k_proj.weight", queries)
    config = None if target is None else _compat.text_config(target)
    if _ROTARY in shapes:
        head_dim = 2 * shapes[_ROTARY][0]
    elif config is not None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    else:
        head_dim = 2
    for name, rows in (("q_proj", queries[0]), ("k_proj", keys[0])):
        if rows % head_dim or queries[1] % max(1, rows // head_dim):
            raise CheckpointError(
                f"{checkpoint.source}: {_LAYER}self_attn.{name}.weight has {rows} rows, which are no attention heads of "
                f"{head_dim} for a layer of {queries[1]}."
            )
    return LlamaConfig(
        vocab_size=1,
        hidden_size=queries[1],
        intermediate_size=shapes.get(f"{_LAYER}mlp.gate_proj.weight", queries)[0],
        num_hidden_layers=1,
        num_attention_heads=max(1, queries[0] // head_dim),
        num_key_value_heads=max(1, keys[0] // head_dim),
        head_dim=head_dim,
        hidden_act=getattr(config, "hidden_act", None) or "silu",
        max_position_embeddings=getattr(config, "max_position_embeddings", 2048),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=_rotary(checkpoint, config),
        attention_bias=f"{_LAYER}self_attn.q_proj.bias" in shapes,
        mlp_bias=f"{_LAYER}mlp.gate_proj.bias" in shapes,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _rotary(checkpoint: Checkpoint, config: Any) -> dict[str, Any]:
    """How the prefix layer rotates: as the target, but where the file has the reference's frequencies, with their base."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_type" not in rope:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", _ROTARY_BASE)}
    if _ROTARY not in checkpoint.shapes:
        return rope
    frequencies = checkpoint.load([_ROTARY])[_ROTARY].float()
    expected = _ROTARY_BASE ** -(torch.arange(len(frequencies)) / len(frequencies))
    if not torch.allclose(frequencies, expected, rtol=0.01, atol=0):  # they may be saved in half precision
        raise CheckpointError(
            f"{checkpoint.source}: {_ROTARY} are not the frequencies of base {_ROTARY_BASE:g} that the reference uses."
        )
    return {**rope, "rope_theta": _ROTARY_BASE}
