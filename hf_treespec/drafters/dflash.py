"""`dflash`: trees from a block drafter (DFlash, Chen et al. 2026), of transformers' own classes.

One forward of the drafting model gives a whole block: position d of it says what stands at depth d, whatever stands
before. So there is no more to compute for a tree than for a chain: the score of a path is the product of its tokens'
probabilities, each at its position, and a heap finds the best paths (`positions.py`).

    block     root   m     m     m           root   1: a .6  b .3   2: c .5  d .4   3: e .9
                ↓    ↓     ↓     ↓           best first: a .6  ac .30  b .3  ace .27  ad .24  …
    position         1     2     3

The model keeps keys and values of the text's states ("context"), not of the block: each round appends the states that
were committed, and drops the block again, as the contract of transformers' `DFlashCache` says.

Legend: B positions of a block with the root, V vocabulary, q the drafter's probability.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import _compat
from ..errors import CheckpointError, DrafterError
from ..tree import TokenTree
from .base import Budget, DraftContext, Prompt, register_drafter
from .checkpoint import Checkpoint, Format, pretrained, register_format
from .growth import draft_warpers, log_q
from .head import HeadDrafter, check_target
from .positions import best_first


@register_drafter("dflash")
class DFlashDrafter(HeadDrafter):
    """Drafts with a DFlash model: one forward of it gives the whole tree.

    Args:
        model: the drafting model; by default the call's `assistant_model`.
    """

    uses_assistant_model = True

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        if _compat.dflash_cache() is None:
            raise DrafterError(
                "drafter 'dflash' needs a transformers that has DFlashCache (5.15 or later); update transformers."
            )
        if model is None:
            raise DrafterError("drafter 'dflash' needs a model: pass assistant_model=... or DFlashDrafter(model).")
        if not _compat.is_dflash(model):
            raise DrafterError(
                f"{type(model).__name__} is not a DFlash drafter of transformers: it drafts no blocks. Use tree_spec="
                "'model' for a causal LM."
            )
        self.model: Any = model
        self.hidden_layers = tuple(layer + 1 for layer in model.config.target_layer_ids)  # 0 is the embeddings

    @classmethod
    def made_for(cls, assistant_model: PreTrainedModel) -> bool:
        return _compat.is_dflash(assistant_model)

    def start(self, prompt: Prompt) -> None:
        check_fits(self.model, prompt.target)
        super().start(prompt)
        config = self.model.config
        self._embed = _bare_embedding(prompt.target)
        self._head: Any = prompt.target.get_output_embeddings()
        self._head_device, self._head_dtype = next(self._head.parameters()).device, prompt.target.dtype
        self._warpers = draft_warpers(prompt)
        self._cache = _compat.dflash_cache()(config=config)
        self._cache.activate_past_recording()  # so that a block can be dropped from layers with a window
        self._limit = _compat.rope_boundary(config)[0]

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.forwards = 0
        block = self.model.config.block_size
        if self._limit is not None and self._unread.position + len(self._unread.tokens) + block > self._limit:
            return TokenTree.root_only(context.last_token)  # beyond what the drafting model can read
        return best_first(context, self._block(context.last_token), budget)

    @torch.no_grad()
    def _block(self, root: int) -> torch.Tensor:
        """(B - 1, V) log q of the tokens at depths 1 to B - 1, from one forward that also reads what was committed."""
        self.forwards += 1
        model, config, pairs = self.model, self.model.config, self._take_unread()
        tokens = torch.tensor([[root] + [config.mask_token_id] * (config.block_size - 1)])
        embeds = self._embed(tokens.to(self._embed.weight.device))
        self._cache.set_previous_accepted_tokens(len(pairs.tokens))
        outputs = model(
            noise_embeds=embeds.to(model.device, model.dtype),
            context_hidden_states=pairs.states[None].to(model.device, model.dtype),
            position_ids=pairs.position
            + torch.arange(len(pairs.tokens) + config.block_size, device=model.device)[None],
            **{_compat.cache_key(model): self._cache},
        )
        self._cache.crop(-config.block_size)
        states = outputs.last_hidden_state[0, 1:].to(self._head_device, self._head_dtype)
        return log_q(self._head(states), self._warpers)


def _bare_embedding(target: PreTrainedModel) -> Any:
    """The target's embedding without a norm of its own: DFlash models were trained on what lies below that norm."""
    embedding: Any = target.get_input_embeddings()
    if getattr(embedding, "embed_norm", None) is None:
        return embedding
    bare = copy.copy(embedding)  # the target's own stays as it is
    bare._modules = {**embedding._modules, "embed_norm": torch.nn.Identity()}
    return bare


def check_fits(model: Any, target: PreTrainedModel) -> None:
    """Raises `DrafterError` unless a DFlash model was made for a target of this size."""
    config, what = model.config, f"the DFlash drafter {type(model).__name__}"
    check_target(
        what,
        target,
        hidden_size=config.hidden_size,
        vocab_size=None,
        layers=max(config.target_layer_ids, default=0) + 1,
    )
    size = _compat.text_config(target).vocab_size
    if not 0 <= config.mask_token_id < size:
        raise DrafterError(
            f"{what} masks with token {config.mask_token_id}, but {type(target).__name__} has {size} tokens: it belongs "
            "to another target."
        )


@register_format
class DFlashFormat(Format):
    name = "dflash"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        kind = _compat.architecture(checkpoint.config)
        if kind is None:
            return "dflash" in str(checkpoint.config.get("architectures")).lower()
        return hasattr(kind, "forward") and _compat.is_dflash(kind)

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        config = self._kind(checkpoint).config_class.from_dict(checkpoint.config)
        return {
            "class": self._kind(checkpoint).__name__,
            "block size": config.block_size,
            "mask token": config.mask_token_id,
            "layers": config.num_hidden_layers,
            "hidden size": config.hidden_size,
            "target's states it reads": [layer + 1 for layer in config.target_layer_ids],
            "taken from the target": ["embed_tokens", "lm_head"],
        }

    def load(self, checkpoint: Checkpoint, target: PreTrainedModel | None, **options: Any) -> DFlashDrafter:
        model = pretrained(checkpoint, self._kind(checkpoint), target)
        if target is not None:
            check_fits(model, target)
        return DFlashDrafter(model, **options)

    def _kind(self, checkpoint: Checkpoint) -> Any:
        kind = _compat.architecture(checkpoint.config)
        if kind is None:
            raise CheckpointError(
                f"{checkpoint.source} is a DFlash drafter of class {checkpoint.config['architectures'][0]}, which is not "
                "one of this transformers' own; classes that bring their own code are not run. Newer releases may have "
                "it."
            )
        return kind
