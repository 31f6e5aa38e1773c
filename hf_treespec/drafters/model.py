"""`model`: trees from any causal LM, usually a small one given as `assistant_model=`.

The model keeps its own tree cache across rounds. A round starts with one forward over the tokens that it has not read
yet (the accepted tail and the root), then grows the tree in waves, one forward each (`growth.py`).

Legend: V vocabulary of the drafting model, q its probability.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from .. import _compat
from ..attention import tree_attention_on
from ..cache import TreeCache
from ..errors import DrafterError
from ..support import check_assistant
from ..tree import TokenTree
from ..verify import Verifier
from .base import Budget, Commit, DraftContext, Drafter, Prompt, drafter_for, register_drafter
from .checkpoint import Checkpoint, Format, pretrained, register_format
from .growth import Growth, Slots, check_growth, draft_warpers, log_q


@register_drafter("model")
class ModelDrafter(Drafter):
    """Drafts with a causal LM that shares the target's tokenizer.

    Args:
        model: the drafting model; by default the call's `assistant_model`.
        wave: nodes that one forward of the drafting model expands.
        min_gain: another wave runs only while the nodes that it would expand hold this many expected tokens (the sum of
            their path scores). By default the budget says, from what a wave costs here.
    """

    uses_assistant_model = True
    needs = "a small model with the target's tokenizer"

    def __init__(self, model: PreTrainedModel | None = None, wave: int = 4, min_gain: float | None = None) -> None:
        check_growth(wave, min_gain)
        self.model, self.wave, self.min_gain = model, wave, min_gain

    def start(self, prompt: Prompt) -> None:
        model = self.model or prompt.assistant_model
        if model is None:
            raise DrafterError("drafter 'model' needs a model: pass assistant_model=... or ModelDrafter(model).")
        check_assistant(prompt.target, model)
        if drafter_for(model) != ModelDrafter.name:
            raise DrafterError(
                f"assistant_model={type(model).__name__} is not a causal LM of its own but a head: use tree_spec="
                f"{drafter_for(model)!r}, or leave the drafter to tree_spec=True."
            )
        if prompt.ids.shape[1] == 0:
            raise DrafterError(
                f"drafter {self.name!r} cannot read a prompt that is only inputs_embeds; pass input_ids too, or use "
                "'ngram'."
            )
        self._begin(model, prompt)
        self._target_vocabulary = prompt.verified.logits.shape[-1]
        self._prompt = prompt.ids, prompt.attention_mask

    def _begin(self, model: PreTrainedModel, prompt: Prompt) -> None:
        """Everything of a call but its text."""
        self._model = model
        self._vocabulary = self._target_vocabulary = _compat.text_config(model).vocab_size
        self._positions = _compat.rope_boundary(_compat.text_config(model))[0] or sys.maxsize
        self._warpers = draft_warpers(prompt)
        self._spare = 4 * prompt.max_nodes
        self._unread: list[int] = []  # committed tokens that the model has not read, the root last
        self._tree = TokenTree.root_only(0)  # the last tree, before the loop cut it
        self._slots: dict[int, int] = {}  # its expanded nodes -> their slots behind the committed prefix

    def read_prompt(self) -> None:
        ids, mask = self._prompt
        later = torch.tensor([self._unread[:-1]], dtype=ids.dtype, device=ids.device)
        self._unread = self._unread[-1:]
        if mask is not None:
            mask = torch.cat([mask[:, -ids.shape[1] :], torch.ones_like(later, dtype=mask.dtype)], 1)
        ids = torch.cat([ids, later], 1)
        if ids.shape[1] < self._positions:
            self._prefill(ids, mask)

    def _prefill(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Reads (1, T) tokens; `mask` (1, >= T) has 0 at padding."""
        model = self._model
        ids = ids.to(model.device)
        cache = DynamicCache(config=_compat.text_config(model))
        mask = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :].to(ids.device)
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad(), tree_attention_on(model):
            model(
                # a target's padding tokens, which a smaller vocabulary lacks, read as token 0
                input_ids=torch.where(ids < self._vocabulary, ids, 0),
                attention_mask=None if bool(mask.all()) else mask,
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{_compat.cache_key(model): cache},
                **_last_logit_only(model),
            )
            self._cache = TreeCache(cache, spare=self._spare)
            self._verifier = Verifier(model, self._cache, positions[:, -1:], mask)

    def observe(self, commit: Commit) -> None:
        """Keeps what the last waves computed for the accepted path; the rest of it is read in the next round."""
        kept: list[int] = []
        if self._slots:
            node = 0
            for token in commit.tokens[0][:-1]:  # the last one is the next root, which is read at the round's start
                child = self._tree.child(node, token)
                if child is None or child not in self._slots:
                    break
                kept.append(self._slots[child])
                node = child
            self._cache.keep([[*range(self._slots[0] + 1), *kept]])
            self._slots = {}
        self._unread.extend(commit.tokens[0][len(kept) :])

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.forwards = 0
        if context.ids.shape[1] + budget.max_depth >= self._positions:  # beyond what the drafting model can read
            return TokenTree.root_only(context.last_token)
        with torch.no_grad(), tree_attention_on(self._model):
            growth = Growth(context, budget, wave=self.wave, min_gain=self.min_gain)
            slots = Slots(growth, self._unread)
            growth.run(lambda nodes: self._expand(slots, nodes))
        self._unread = []
        self._tree, place = growth.best()
        self._slots = {place[n]: slot for n, slot in slots.of.items() if n in place}
        return self._tree

    def _expand(self, slots: Slots, nodes: list[int]) -> torch.Tensor:
        """(W, V') log q after each of `nodes`, over the tokens that both vocabularies have."""
        self.forwards += 1
        start = slots.add(nodes)
        known = [t if t < self._vocabulary else 0 for t in slots.tokens]
        logits = self._verifier.forward(TokenTree(known, slots.parents), start).logits[0]
        return log_q(logits[-len(nodes) :], self._warpers, self._target_vocabulary)


def _last_logit_only(model: PreTrainedModel) -> dict[str, Any]:
    return {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}


@register_format
class CausalLmFormat(Format):
    """A whole causal LM of transformers: embeddings and all layers, and nothing that only heads have."""

    name = "causal-lm"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        kind = _compat.architecture(checkpoint.config)
        if not isinstance(kind, type) or not issubclass(kind, GenerationMixin) or _compat.reads_shared_kv(kind):
            return False
        parts = [name.split(".") for name in checkpoint.shapes]
        # an EAGLE head calls itself LlamaForCausalLM too, and so does a model with Medusa's heads beside its own
        if any({"fc", "midlayer"} & {*path[:2]} or path[0].startswith(("medusa", "hydra")) for path in parts):
            return False
        layers = {next((part for part in path if part.isdigit()), "") for path in parts} - {""}
        embeds = any("emb" in part or part == "wte" for path in parts for part in path)
        return embeds and len(layers) >= self._config(checkpoint, kind).num_hidden_layers

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        kind = _compat.architecture(checkpoint.config)
        config = self._config(checkpoint, kind)
        return {
            "class": kind.__name__,
            "layers": config.num_hidden_layers,
            "hidden size": config.hidden_size,
            "vocabulary": config.vocab_size,
            "quantised": (checkpoint.config.get("quantization_config") or {}).get("quant_method", "no"),
        }

    def load(self, checkpoint: Checkpoint, target: PreTrainedModel | None, **options: Any) -> ModelDrafter:
        model = pretrained(checkpoint, _compat.architecture(checkpoint.config), target)
        if target is not None:
            check_assistant(target, model)
        return ModelDrafter(model, **options)

    def _config(self, checkpoint: Checkpoint, kind: Any) -> Any:
        return kind.config_class.from_dict(checkpoint.config).get_text_config(decoder=True)
