"""EAGLE's heads as published: one module for EAGLE-1/2 and EAGLE-3, built from transformers' own layers.

    EAGLE-1/2 (Li et al. 2024a, §4.1)                    EAGLE-3 (Li et al. 2025, §3)

    state after the target's last norm ─┐                three states of the target ── fc ─┐   (only for true states)
    embedding of the next token ── cat ─ fc              the head's own last output ───────┤
                                         │               embedding of the next token ── cat (both normed) ─┐
                                      layer(s)                                             │  attention ───┘
                                         │               residual: the state ──────────── add, mlp
    next state ◄─────────────────────────┤               next state ◄──────────────────────┤
    target's lm_head ────────────────────┘               norm, own lm_head (fewer tokens) ─┘

Layers come from the model type that the head's config names, so that heads in the image of several targets need no code
of their own. What a checkpoint may or may not hold (biases, norms, embeddings, lm_head) is read off its tensor names.

Legend: n pairs, h the head's width, ht the target's, k taps, Vq tokens that the head can draft.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from .. import attention
from ..errors import CheckpointError
from .checkpoint import Checkpoint, fill
from .head import output_layer

# Left over from training: no part of the head, or no use in drafting.
_DROPPED = re.compile(r"(^|\.)(t2d|verifier_.*|.*rotary_emb\.inv_freq)$")


@dataclasses.dataclass(frozen=True)
class EagleSpec:
    """What an EAGLE checkpoint says about itself.

    Attributes:
        source: where it is; for messages.
        eagle3: the newer architecture.
        layout: who publishes heads like this.
        config: of the head's decoder layers.
        hidden_size, target_hidden_size: h, ht.
        vocab_size: of the target.
        draft_size: Vq.
        taps: indices into the target's `hidden_states`, None where the head leaves it to the default of the target's depth.
        other_taps: the same layers by the other convention of counting them, where the head names layers.
        norm_before_residual, norm_output: EAGLE-3.1 and speculators' variants of the data flow.
        names: the checkpoint's name of each of the module's tensors.
    """

    source: str
    eagle3: bool
    layout: str
    config: Any
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_size: int
    taps: tuple[int, ...] | None
    other_taps: tuple[int, ...] | None
    norm_before_residual: bool
    norm_output: bool
    names: Mapping[str, str]


def own_names(names: Iterable[str]) -> dict[str, str]:
    """The module's tensor name to the checkpoint's: `model.` dropped, `midlayer` is layer 0, training's rest left out."""
    return {
        re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model.")): name
        for name in names
        if not _DROPPED.search(name)
    }


def read_spec(checkpoint: Checkpoint) -> EagleSpec:
    """Raises `CheckpointError` where the config lacks a size, or asks for what this module does not do."""
    names = own_names(checkpoint.shapes)
    config = checkpoint.config
    speculators = isinstance(config.get("transformer_layer_config"), dict)
    layers = dict(config["transformer_layer_config"] if speculators else config)
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise CheckpointError(f"{checkpoint.source} has use_aux_hidden_state=false, which is not supported.")
    layer_config = _layer_config(checkpoint, layers)
    query = names.get("layers.0.self_attn.q_proj.weight")
    hidden = int(layer_config.hidden_size)
    eagle3 = query is not None and checkpoint.shapes[query][1] == 2 * hidden
    target_hidden = int(config.get("target_hidden_size") or hidden)
    head = names.get("lm_head.weight")
    map_ = names.get("d2t")
    vocabulary = int(layer_config.vocab_size)
    draft_size = checkpoint.shapes[head][0] if head else checkpoint.shapes[map_][0] if map_ else vocabulary
    taps, other = _taps(checkpoint, config, nested) if eagle3 else ((-1,), None)
    layout = "EAGLE-1/2" if not eagle3 else "speculators" if speculators else "ModelOpt"
    if eagle3 and any(".midlayer." in f".{name}" for name in checkpoint.shapes):
        layout = "SafeAILab/SpecForge"
    return EagleSpec(
        source=checkpoint.source,
        eagle3=eagle3,
        layout=layout,
        config=layer_config,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        vocab_size=vocabulary,
        draft_size=draft_size,
        taps=taps,
        other_taps=other,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_output=bool(config.get("norm_output", False)),
        names=names,
    )


def _layer_config(checkpoint: Checkpoint, fields: dict[str, Any]) -> Any:
    kind = fields.pop("model_type", "llama")
    for name in ("architectures", "auto_map", "torch_dtype", "dtype", "quantization_config", "transformers_version"):
        fields.pop(name, None)
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if not isinstance(fields.get(name), int):
            raise CheckpointError(f"config.json of {checkpoint.source} lacks the whole number {name!r}.")
    fields.setdefault("num_hidden_layers", 1)
    if not fields.get("rope_theta") and not fields.get("rope_parameters"):
        fields["rope_theta"] = 10000.0  # what training used where the config is silent, whatever the target's base is
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        config = AutoConfig.for_model(kind, **fields)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.source} has layers of model_type={kind!r}: {error}") from error
    config._attn_implementation = attention.NAME
    return config


def _taps(
    checkpoint: Checkpoint, config: Mapping[str, Any], nested: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Indices into `hidden_states` by the checkpoint's convention, and by the other one.

    Nested in `eagle_config`, a layer's number means its output (its index + 1); at the top level (speculators, vLLM) it
    means its input (its index). Both are found in published heads.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    ids = nested.get(key) or config.get(key)
    if not ids:
        return None, None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CheckpointError(f"config.json of {checkpoint.source} has {key}={ids!r}, which are no layer numbers.")
    inputs, outputs = tuple(ids), tuple(i + 1 for i in ids)
    return (outputs, inputs) if nested.get(key) else (inputs, outputs)


class EagleHead(nn.Module):
    """A head with its weights. It holds nothing of a call.

    Attributes:
        spec: what it is.
        vocabulary: (Vq,) int64, the target's ids of its tokens; None where they are the target's own.
    """

    vocabulary: torch.Tensor | None

    def __init__(self, spec: EagleSpec) -> None:
        super().__init__()
        self.spec, self.config = spec, spec.config
        layer_class, norm_class, rope_class = _classes(spec.config)
        self.rotary_emb = rope_class(spec.config)
        hidden, names = spec.hidden_size, spec.names
        eps = getattr(spec.config, "rms_norm_eps", 1e-6)
        with torch.device("meta"):
            self.layers = nn.ModuleList(layer_class(spec.config, i) for i in range(spec.config.num_hidden_layers))
            first: Any = self.layers[0]
            if spec.eagle3:
                first.hidden_norm = norm_class(hidden, eps)
                for name in ("q_proj", "k_proj", "v_proj"):
                    wide = nn.Linear(2 * hidden, getattr(first.self_attn, name).out_features, bias=False)
                    setattr(first.self_attn, name, wide)
                self.norm = norm_class(hidden, eps)
                count = sum(name.startswith("fc_norm.") for name in names)
                if count:
                    self.fc_norm = nn.ModuleList(norm_class(spec.target_hidden_size, eps) for _ in range(count))
            else:
                first.input_layernorm = nn.Identity()
            self.fc = nn.Linear(self._fc_width(), hidden)
            if "input_norm.weight" in names:
                self.input_norm = norm_class(self.fc.in_features, eps)
            if "embed_tokens.weight" in names:
                self.embed_tokens = nn.Embedding(spec.vocab_size, hidden)
            if "lm_head.weight" in names:
                self.lm_head = nn.Linear(hidden, spec.draft_size, bias=False)
            for path, module in self.named_modules():
                if isinstance(module, nn.Linear):
                    has = f"{path}.bias" in names
                    module.register_parameter("bias", nn.Parameter(torch.empty(module.out_features)) if has else None)
        self.register_buffer("vocabulary", None, persistent=False)

    def _fc_width(self) -> int:
        taps = 3 if self.spec.taps is None else len(self.spec.taps)
        return taps * self.spec.target_hidden_size if self.spec.eagle3 else 2 * self.spec.hidden_size

    def shapes(self, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shapes by the names of this module."""
        return {ours: checkpoint.shapes[theirs] for ours, theirs in self.spec.names.items() if ours != "d2t"}

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> EagleHead:
        """Raises `CheckpointError` with the names that are missing, unexpected or of another shape."""
        head = cls(read_spec(checkpoint))
        names = dict(head.spec.names)
        offsets = names.pop("d2t", None)
        tensors = checkpoint.load(names.values())
        fill(head, {ours: tensors[theirs] for ours, theirs in names.items()}, checkpoint.source)
        if offsets is not None and head.spec.draft_size != head.spec.vocab_size:
            head.vocabulary = _vocabulary(head.spec, checkpoint.load([offsets])[offsets])
        elif head.spec.draft_size != head.spec.vocab_size:
            raise CheckpointError(
                f"{checkpoint.source} drafts {head.spec.draft_size} of {head.spec.vocab_size} tokens and lacks d2t, "
                "which says which."
            )
        return head.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """True states of the target (n, k·ht) as the layers read them: (n, h)."""
        states = states.to(self.device, self.dtype)
        if not self.spec.eagle3:
            return states
        if hasattr(self, "fc_norm"):
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if hasattr(self, "input_norm"):
            states = self.input_norm(states)
        return self.fc(states)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor,
        states: torch.Tensor,
        target: PreTrainedModel,
        *,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        past_key_values: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step for n pairs.

        Args:
            input_ids: (1, n) tokens of the target. states: (1, n, h), fused or the head's own.
            target: its embeddings serve where the head has none.
            attention_mask: additive; None for n causal pairs on an empty cache, or one that sees everything.

        Returns:
            (1, n, h) what `logits` reads, and (1, n, h) the states that children of these tokens are paired with.
        """
        table = self.embed_tokens if hasattr(self, "embed_tokens") else target.get_input_embeddings()
        embeds = embedding(input_ids.to(table.weight.device), table.weight).to(states)
        rope = self.rotary_emb(states, position_ids)
        given = {"attention_mask": attention_mask, "position_embeddings": rope, "position_ids": position_ids}
        first: Any = self.layers[0]
        given[_cache_argument(first.self_attn)] = past_key_values
        if self.spec.eagle3:
            normed = first.hidden_norm(states)
            out = first.self_attn(hidden_states=torch.cat([first.input_layernorm(embeds), normed], -1), **given)[0]
            out = out + (normed if self.spec.norm_before_residual else states)
            out = out + first.mlp(first.post_attention_layernorm(out))
        else:
            out = _one(first(self.fc(torch.cat([embeds, states], -1)), **given))
        for layer in self.layers[1:]:
            out = _one(layer(out, **given))
        if not self.spec.eagle3:
            return out, out
        normed = self.norm(out)
        return normed, normed if self.spec.norm_output else out

    def logits(self, out: torch.Tensor, target: PreTrainedModel) -> torch.Tensor:
        """(n, Vq) from (n, h): by its own lm_head or the target's, whichever module that is (packed, quantised)."""
        if hasattr(self, "lm_head"):
            return self.lm_head(out)  # type: ignore[no-any-return]
        scores = output_layer(target)(out.to(target.dtype))
        return scores if self.vocabulary is None else scores[:, self.vocabulary]  # type: ignore[no-any-return]


def _one(result: Any) -> torch.Tensor:
    """A layer's hidden states; some releases return them in a tuple."""
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


def _cache_argument(module: nn.Module) -> str:
    """What an attention calls its cache; it was renamed in 5.24."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def _vocabulary(spec: EagleSpec, offsets: torch.Tensor) -> torch.Tensor:
    """(Vq,) target ids from `d2t`, which holds what to add to each draft id."""
    ids = torch.arange(len(offsets)) + offsets.long()
    if len(ids) != spec.draft_size or int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size:
        raise CheckpointError(
            f"d2t of {spec.source} maps {len(ids)} tokens to ids {int(ids.min())} to {int(ids.max())}; expected are "
            f"{spec.draft_size} tokens and ids below {spec.vocab_size}."
        )
    return ids


def _classes(config: Any) -> tuple[Any, Any, Any]:
    """transformers' decoder layer, norm and rotary embedding for the head's model type."""
    module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]

    def find(ending: str) -> Any:
        own = [
            v for k, v in vars(module).items() if k.endswith(ending) and getattr(v, "__module__", "") == module.__name__
        ]
        if not own:
            raise CheckpointError(f"heads with layers of model_type={config.model_type!r} are not supported.")
        return own[0]

    return find("DecoderLayer"), find("RMSNorm"), find("RotaryEmbedding")
