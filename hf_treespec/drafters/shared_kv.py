"""`shared_kv`: trees from assistants that read the target's own keys and values (Gemma 4's, and its unified models').

The assistant has queries only. At each step it attends to what the target has cached, and reads a token with a state:
at the root the target's last state, below it its own output at the parent. It keeps nothing itself, and its position
stays that of the root, so any nodes go through it together, as rows of a batch with the same keys:

    root   (x_t, g_t-1)     → h(root), children a b …      g: the target's last state
    a      (a, h(root))     → h(a), children of a           h: the assistant's output, in the target's size
    b      (b, h(root))     → h(b), children of b

transformers' own `generate` cuts the keys one slot behind the last true one, so that a rejected token may be read, and
does not cut those of layers with a window at all; here the assistant reads the true ones: all of the text before the
root, and of a layer with a window what the target itself would read there at the root's place.

Legend: W nodes of a wave, V vocabulary, h the target's hidden size, T cached slots.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .. import _compat
from ..attention import tree_attention_on
from ..cache import TreeCache, TreeLayer
from ..errors import DrafterError
from ..tree import TokenTree
from .base import Budget, DraftContext, Prompt, register_drafter
from .checkpoint import Checkpoint, Format, pretrained, register_format
from .growth import Growth, check_growth, draft_warpers, log_q
from .head import HeadDrafter, check_target

# what an assistant reads, by the names of `config.layer_types`
KINDS = ("full_attention", "sliding_attention")


@register_drafter("shared_kv")
class SharedKvDrafter(HeadDrafter):
    """Drafts with an assistant that attends to the target's keys and values, as those of Gemma 4 do.

    Args:
        model: the assistant; by default the call's `assistant_model`.
        wave: nodes that one forward of the assistant expands.
        min_gain: another wave runs only while the nodes that it would expand hold this many expected tokens (the sum of
            their path scores). By default the budget says.
    """

    uses_assistant_model = True
    needs = "the assistant that was trained for the target"
    hidden_layers = (-1,)
    reads_all = False

    def __init__(self, model: PreTrainedModel | None = None, wave: int = 4, min_gain: float | None = None) -> None:
        check_growth(wave, min_gain)
        if model is None:
            raise DrafterError(
                "drafter 'shared_kv' needs an assistant: pass assistant_model=... or SharedKvDrafter(model). "
                "transformers has them since 5.8 (Gemma4Assistant...)."
            )
        if not _compat.reads_shared_kv(model):
            raise DrafterError(
                f"{type(model).__name__} does not read a target's keys and values; use tree_spec='model' for a causal LM."
            )
        self.model: Any = model
        self.wave, self.min_gain = wave, min_gain

    @classmethod
    def made_for(cls, assistant_model: PreTrainedModel) -> bool:
        return _compat.reads_shared_kv(assistant_model)

    def start(self, prompt: Prompt) -> None:
        assert prompt.cache is not None
        self._cache: TreeCache = prompt.cache
        self._places = check_fits(self.model, prompt.target)
        _check_shapes(self.model, self._cache, self._places)
        super().start(prompt)
        self._embed: Any = prompt.target.get_input_embeddings()
        self._warpers = draft_warpers(prompt)
        self._target_vocabulary = prompt.verified.logits.shape[-1]
        mask = prompt.attention_mask
        self._padding = None if mask is None or bool((mask != 0).all()) else mask

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.forwards = 0
        pairs = self._take_unread()
        device = self._embed.weight.device
        self._states = {-1: pairs.states[-1].to(device)}  # by node, what its children are read with
        self._position = torch.tensor([[pairs.position + len(pairs.tokens)]], device=self.model.device)
        self._keys = {kind: self._visible(place) for kind, place in self._places.items()}
        self._mask = None
        if self._padding is not None:
            self._mask = torch.nn.functional.pad(
                self._padding, (0, self._cache.filled - self._padding.shape[1]), value=1
            )
        with torch.no_grad(), tree_attention_on(self.model):
            self._growth = Growth(context, budget, wave=self.wave, min_gain=self.min_gain)
            self._growth.run(self._expand)
        del self._keys  # views of the target's buffers, which the next round may replace
        return self._growth.best()[0]

    def _visible(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, heads, T, size) keys and values of the target's layer, as far as its window reaches; views."""
        layer = self._cache.layers[place]
        assert isinstance(layer, TreeLayer)
        first = 0 if layer.window is None else max(0, layer.length + 1 - layer.window)
        return layer.keys[:, :, first:], layer.values[:, :, first:]

    def _expand(self, nodes: list[int]) -> torch.Tensor:
        """(W, V) log q after each of `nodes`, one row of a batch for each."""
        self.forwards += 1
        growth, rows = self._growth, len(nodes)
        tokens = torch.tensor([[growth.tokens[n]] for n in nodes], device=self._embed.weight.device)
        states = torch.stack([self._states[growth.parents[n]] for n in nodes])[:, None]
        embeds = torch.cat([self._embed(tokens), states.to(self._embed.weight.dtype)], dim=-1)
        outputs = self.model(
            inputs_embeds=embeds.to(self.model.dtype),
            attention_mask=None if self._mask is None else self._mask.expand(rows, -1).to(self.model.device),
            position_ids=self._position.expand(rows, -1),
            shared_kv_states={
                kind: tuple(part.expand(rows, -1, -1, -1).to(self.model.dtype) for part in parts)
                for kind, parts in self._keys.items()
            },
            use_cache=False,
        )
        self._states.update(zip(nodes, outputs.last_hidden_state[:, 0], strict=True))
        return log_q(outputs.logits[:, 0], self._warpers, self._target_vocabulary)


def check_fits(model: Any, target: PreTrainedModel) -> dict[str, int]:
    """The target's layers that an assistant reads, by kind.

    Raises:
        DrafterError: the target has none, or is not of the assistant's size.
    """
    what = f"the assistant {type(model).__name__}"
    text = _compat.text_config(model)
    check_target(what, target, hidden_size=model.config.backbone_hidden_size, vocab_size=text.vocab_size)
    places = _compat.shared_kv_layers(target)
    missing = [kind for kind in KINDS if kind not in places]
    if missing:
        raise DrafterError(
            f"{what} reads keys and values of layers that {type(target).__name__} does not share ({', '.join(missing)}). "
            "Use a Gemma 4 target, or another drafter."
        )
    return places


def _check_shapes(model: Any, cache: TreeCache, places: dict[str, int]) -> None:
    """Raises `DrafterError` unless the assistant's queries fit the target's keys."""
    layers: list[Any] = cache.layers
    for layer in model.model.layers:
        attention, kind = layer.self_attn, layer.self_attn.layer_type
        keys = layers[places[kind]].keys
        wanted = (_compat.text_config(model).num_attention_heads // attention.num_key_value_groups, attention.head_dim)
        found = (keys.shape[1], keys.shape[-1])
        if found != wanted:
            raise DrafterError(
                f"the assistant {type(model).__name__} reads {wanted[0]} heads of size {wanted[1]} in {kind}, but the "
                f"target has {found[0]} of size {found[1]}: it belongs to another target."
            )


@register_format
class SharedKvFormat(Format):
    name = "shared-kv"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        kind = _compat.architecture(checkpoint.config)
        return kind is not None and "backbone_hidden_size" in checkpoint.config and _compat.reads_shared_kv(kind)

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        config = _compat.architecture(checkpoint.config).config_class.from_dict(checkpoint.config)
        text = config.get_text_config()
        return {
            "class": checkpoint.config["architectures"][0],
            "layers": text.num_hidden_layers,
            "hidden size": text.hidden_size,
            "target's hidden size": config.backbone_hidden_size,
            "target's vocabulary": text.vocab_size,
            "target's states it reads": ["last"],
            "taken from the target": ["embed_tokens", "keys and values"],
        }

    def load(self, checkpoint: Checkpoint, target: PreTrainedModel | None, **options: Any) -> SharedKvDrafter:
        model = pretrained(checkpoint, _compat.architecture(checkpoint.config), target)
        if target is not None:
            check_fits(model, target)
        return SharedKvDrafter(model, **options)
