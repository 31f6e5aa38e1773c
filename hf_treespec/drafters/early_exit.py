"""`early_exit`: the target drafts for itself, with some of its own layers. No weights besides the target's.

The drafting model is a view of the target that runs a subset of its decoder layers and shares everything else
(`layer_view.py`): the first few (LayerSkip, Elhoushi et al. 2024), or all but a block in the middle (Draft & Verify,
Zhang et al. 2023; SWIFT, Xia et al. 2024). It reads the text through the target's own keys and values of these layers, so
that it neither reads the prompt nor what was committed, and attends to what all layers made of them. What it appends
there while it drafts is cut off again.

Which subset is best depends on the target: one that was trained to exit early predicts well after a quarter of its
layers, an ordinary one hardly after three. So candidates are measured once, on the first prompt that is long enough.

Legend: L decoder layers of the target, T tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..attention import tree_attention_on
from ..cache import CacheView
from ..errors import DrafterError
from ..layer_view import decoder_layers, layer_bytes, layer_view
from ..tree import TokenTree
from ..verify import Verifier
from .base import Budget, DraftContext, Drafter, Prompt, register_drafter
from .growth import Growth, Slots, check_growth, draft_warpers, log_q

# Candidates are compared on at most so many of a prompt's last tokens, and not on fewer than the least.
MOST_TOKENS, LEAST_TOKENS = 128, 16
# Shares of the layers: kept before an exit, and skipped in the middle. With the target's own forward they add up to the
# cost that `choose_layers` promises.
EXITS, SKIPS = (0.25, 0.5, 0.75), (0.125, 0.25, 0.5)
# What a prompt too short to measure gets, for its own call: what SmolLM2-135M, an ordinary model, chose on every prompt.
DEFAULT_SKIP = 0.125
# The forwards of a draft among which the best number is looked for, when candidates are compared.
MOST_FORWARDS = 16

_chosen: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, ...]] = weakref.WeakKeyDictionary()


@register_drafter("early_exit")
class EarlyExitDrafter(Drafter):
    """Drafts with a subset of the target's own layers.

    Args:
        layers: a whole number keeps so many of the first layers; a sequence of ascending indices exactly these; None
            chooses by measurement at a target's first prompt of `LEAST_TOKENS` or more (see `choose_layers`). Shorter
            prompts before it skip an eighth of the layers, in the middle.
        wave, min_gain: as in `model`.
    """

    def __init__(self, layers: int | Sequence[int] | None = None, wave: int = 4, min_gain: float | None = None) -> None:
        check_growth(wave, min_gain)
        self.layers, self.wave, self.min_gain = _checked(layers), wave, min_gain

    def start(self, prompt: Prompt) -> None:
        assert prompt.cache is not None and prompt.last_position is not None
        layers = self._layers_for(prompt)
        self._model = layer_view(prompt.target, layers)  # anew: layers may have been packed since
        self._cache = CacheView(prompt.cache, layers)
        self._verifier = Verifier(self._model, self._cache, prompt.last_position, prompt.attention_mask)
        self._warpers = draft_warpers(prompt)
        self._vocabulary = prompt.verified.logits.shape[-1]

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.forwards = 0
        growth = Growth(context, budget, wave=self.wave, min_gain=self.min_gain)
        slots = Slots(growth, [context.last_token])
        try:
            with torch.no_grad(), tree_attention_on(self._model):
                growth.run(lambda nodes: self._expand(slots, nodes))
        finally:
            self._cache.truncate()
        return growth.best()[0]

    def _expand(self, slots: Slots, nodes: list[int]) -> torch.Tensor:
        """(W, V) log q after each of `nodes`."""
        self.forwards += 1
        start = slots.add(nodes)
        logits = self._verifier.forward(slots.tree(), start).logits[0]
        return log_q(logits, self._warpers, self._vocabulary)

    def _layers_for(self, prompt: Prompt) -> Sequence[int]:
        target, layers = prompt.target, self.layers
        if layers is None:
            return layers_of(target, prompt.ids, prompt.attention_mask)
        count = len(decoder_layers(target))
        kept = range(layers) if isinstance(layers, int) else layers
        if kept[-1] >= count:
            raise DrafterError(
                f"layers={self.layers!r} of drafter 'early_exit' asks for more than {type(target).__name__} has: "
                f"{count} layers, 0 to {count - 1}."
            )
        return kept


def _checked(layers: Any) -> int | tuple[int, ...] | None:
    def whole(value: Any, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    if layers is None or whole(layers, 1):
        return layers  # type: ignore[no-any-return]
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        kept = tuple(layers)
        if kept and all(whole(i, 0) for i in kept) and all(a < b for a, b in itertools.pairwise(kept)):
            return kept
    raise DrafterError(
        f"layers={layers!r} must be None, a whole number of first layers, or ascending indices of layers, e.g. "
        "[0, 1, 2, 5, 6, 7]."
    )


def layers_of(target: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[int, ...]:
    """The layers that draft for a loaded target: those chosen earlier, else measured now on a prompt, and remembered.

    Args:
        ids: (1, T) int64. mask: (1, >= T) with 0 at padding, or None.
    """
    if target in _chosen:
        return _chosen[target]
    text = ids[0]
    if mask is not None and len(text):
        text = text[mask[0, -ids.shape[1] :].to(ids.device) != 0]
    if len(text) < LEAST_TOKENS:
        return _without_middle(len(decoder_layers(target)), DEFAULT_SKIP)
    return _chosen.setdefault(target, choose_layers(target, text[None, -MOST_TOKENS:]))


def _without_middle(count: int, share: float) -> tuple[int, ...]:
    """All of `count` layers but a share in the middle: at least one is left out, and first and last stay."""
    out = min(max(1, round(count * share)), max(count - 2, 1))
    first = (count - out + 1) // 2
    return tuple(i for i in range(count) if not first <= i < first + out) or (0,)


def candidates(count: int) -> list[tuple[int, ...]]:
    """Subsets of `count` layers that are worth measuring: exits, then skipped middles."""
    exits = [tuple(range(max(1, min(round(count * share), count - 1)))) for share in EXITS]
    return list(dict.fromkeys([*exits, *(_without_middle(count, share) for share in SKIPS)]))


@torch.no_grad()
def choose_layers(target: PreTrainedModel, ids: torch.Tensor) -> tuple[int, ...]:
    """The candidate that promises most tokens in the time of a target's pass, judged by its predictions on a text.

    It costs one forward of the target and one of each candidate over `ids`: about as much as five forwards of the target
    (never more than seven) over at most `MOST_TOKENS` tokens, and the memory of their logits.

    Args:
        ids: (1, T) int64, a text without padding.
    """
    with tree_attention_on(target):
        wanted = target(input_ids=ids, use_cache=False, return_dict=True).logits[0].argmax(-1)  # (T,)
    layer, head = layer_bytes(target)
    count = len(decoder_layers(target))

    def promise(layers: tuple[int, ...]) -> float:
        view = layer_view(target, layers)
        with tree_attention_on(view):
            guesses = view(input_ids=ids, use_cache=False, return_dict=True).logits[0].topk(4, dim=-1).indices
        hits = guesses == wanted[:, None]
        agreement = (float(hits[:, 0].float().mean()), float(hits.any(-1).float().mean()))
        return tokens_per_pass(*agreement, (layer * len(layers) + head) / (layer * count + head))

    return max(candidates(count), key=promise)


def tokens_per_pass(first: float, among_four: float, cost: float) -> float:
    """Tokens that a round commits in the time of one target pass, with the best number of drafting forwards F:

        max over F of (1 + a + a² + ... + a^F) / (1 + F · cost)

    where a, the chance that a level of the tree holds the target's token, lies between the drafter's best guess alone
    and its four best: a tree affords all four near its root and one far below.

    Args:
        first, among_four: how often the target's token is the drafter's first guess, and among its first four.
        cost: of a drafting forward, as a share of the target's.
    """
    chance = (first + among_four) / 2
    forwards = np.arange(1, MOST_FORWARDS + 1)
    return float(((1 + np.cumsum(chance**forwards)) / (1 + forwards * cost)).max())
