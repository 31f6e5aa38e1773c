"""`eagle`: trees from an EAGLE-1, EAGLE-2 or EAGLE-3 head (Li et al. 2024a, 2024b, 2025).

The head reads pairs of a state of the target and the token that followed (`head.py`), and keeps keys and values of all
true pairs. A round starts with the pairs that the target has just committed, then grows the tree in waves (`growth.py`):
a node's pair is its token and its parent's output. These pairs are guesses, and are dropped when the tree is grown: in
the next round the accepted path comes back with its true states.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from .. import _compat
from ..cache import TreeCache
from ..errors import DrafterError
from ..tree import TokenTree
from ..verify import Verifier
from .base import Budget, DraftContext, Drafter, Prompt, register_drafter
from .checkpoint import Checkpoint, Format, compare, register_format
from .eagle_head import EagleHead, EagleSpec, own_names, read_spec
from .growth import Growth, Slots, check_growth, draft_warpers, log_q
from .head import HeadDrafter, Pairs, check_target, place_beside

logger = logging.getLogger(__name__)

# Unread pairs go through the head together with the root, as a chain. More than these (a long stretch of plain
# decoding) are read before, so many at a time: the mask of a chain is quadratic.
CHAIN = 64
# Fewest and most pairs of a prompt by which the two conventions of counting layers are told apart.
PROBE = (8, 256)


@register_drafter("eagle")
class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-1, EAGLE-2 or EAGLE-3 head; load one with `hf_treespec.load_drafter`.

    Args:
        head: the head.
        taps: indices into the target's `hidden_states` that the head reads (EAGLE-3). By default what its checkpoint
            says; where that names layers, both conventions of counting them are tried on the first prompt.
        wave: nodes that one forward of the head expands. EAGLE-2 has 10.
        min_gain: as in `model`.
        target: to find the default taps by, which depend on its depth.
    """

    def __init__(
        self,
        head: EagleHead | None = None,
        *,
        taps: tuple[int, ...] | None = None,
        wave: int = 8,
        min_gain: float | None = None,
        target: PreTrainedModel | None = None,
    ) -> None:
        if head is None:
            raise DrafterError(
                "drafter 'eagle' needs a head: load one with hf_treespec.load_drafter(path, target=model)."
            )
        check_growth(wave, min_gain)
        self.head, self.wave, self.min_gain = head, wave, min_gain
        spec = head.spec
        self.taps = _default_taps(spec, target) if taps is None else tuple(taps)
        self._other = spec.other_taps if taps is None else None
        self._decided: list[tuple[int, ...]] = []  # shared by the copies of all calls
        self.hidden_layers = self.taps if self._other is None else tuple(dict.fromkeys(self.taps + self._other))
        if spec.eagle3 and len(self.taps) * spec.target_hidden_size != head.fc.in_features:
            raise DrafterError(f"taps={self.taps} are {len(self.taps)} states; the head's fc reads {head.fc.in_features}"
                               f" numbers, {head.fc.in_features // spec.target_hidden_size} states.")  # fmt: skip
        if target is not None:
            self.place(target)

    def for_call(self) -> EagleDrafter:
        fresh = copy.copy(self)
        if self._decided:
            fresh.taps = fresh.hidden_layers = self._decided[0]
            fresh._other = None
        return fresh

    def place(self, target: PreTrainedModel) -> None:
        """Checks the head against a target and puts it where the target's last layers are, in the target's dtype.

        Raises:
            DrafterError: it belongs to another target, or serves one on another device or in another dtype already.
        """
        spec = self.head.spec
        check_target(
            f"the head {spec.source}",
            target,
            hidden_size=spec.target_hidden_size,
            vocab_size=spec.vocab_size,
            layers=max(self.hidden_layers),
        )
        if not hasattr(self.head, "embed_tokens") and spec.hidden_size != spec.target_hidden_size:
            raise DrafterError(f"the head {spec.source} has no embed_tokens, and its width {spec.hidden_size} is not "
                               f"the target's {spec.target_hidden_size}.")  # fmt: skip
        place_beside(self.head, target)

    def start(self, prompt: Prompt) -> None:
        self.place(prompt.target)
        self._target = prompt.target
        own_ids = self.head.vocabulary is None
        self._warpers: LogitsProcessorList = draft_warpers(prompt, by_token=own_ids)
        self._spare = 8 * prompt.max_nodes
        super().start(prompt)

    def read_prompt(self) -> None:
        text, self._pairs = self._unread.split()
        self._columns = self._choose_taps(text)
        self._cache = TreeCache(DynamicCache(config=self.head.config), spare=len(text.tokens) + self._spare)
        before = torch.tensor([[text.position - 1]], device=self.head.device)
        self._verifier = Verifier(self.head, self._cache, before)
        self._read(text)

    def _choose_taps(self, pairs: Pairs) -> tuple[int, ...]:
        """Which of the known states this head reads: the convention under which it explains the prompt better."""
        if self._other is None or len(pairs.tokens) < PROBE[0]:
            return self.taps
        part = Pairs(pairs.states[-PROBE[1] :], pairs.tokens[-PROBE[1] :], 0)
        found = {layers: self._likelihood(part, layers) for layers in (self.taps, self._other)}
        best = max(found, key=lambda layers: found[layers])
        self._decided[:] = [best]
        say = logger.info if best == self.taps else logger.warning
        say(
            "The EAGLE head %s reads the target's states %s (mean log q on the prompt: %.2f, with %s: %.2f).",
            self.head.spec.source,
            best,
            found[best],
            *next((layers, score) for layers, score in found.items() if layers != best),
        )
        return best

    @torch.no_grad()
    def _likelihood(self, pairs: Pairs, layers: tuple[int, ...]) -> float:
        """Mean log q of a text's own tokens, with the states of these layers."""
        self._columns = layers
        ids = torch.tensor([pairs.tokens], device=self.head.device)
        positions = torch.arange(len(pairs.tokens), device=self.head.device)[None]
        states = self._states(pairs)[None]
        out, _ = self.head(ids, states, self._target, attention_mask=None, position_ids=positions)
        scores = torch.log_softmax(self.head.logits(out[0, :-1], self._target).float(), -1)
        following = ids[0, 1:]
        if self.head.vocabulary is not None:
            match = following[:, None] == self.head.vocabulary
            scores, following = scores[match.any(-1)], match.int().argmax(-1)[match.any(-1)]
        return float(scores.gather(1, following[:, None]).mean()) if len(following) else 0.0

    def _states(self, pairs: Pairs) -> torch.Tensor:
        """(n, h): true states as the head's layers read them, of the chosen taps among the known ones."""
        states = pairs.states
        if self._columns != self.hidden_layers:
            width = states.shape[1] // len(self.hidden_layers)
            parts = [self.hidden_layers.index(layer) * width for layer in self._columns]
            states = torch.cat([states[:, start : start + width] for start in parts], -1)
        return self.head.fuse(states)

    @torch.no_grad()
    def _read(self, pairs: Pairs) -> None:
        """Takes true pairs into the cache."""
        count = len(pairs.tokens)
        at_once = count if self._cache.filled == 0 and self._verifier.rows_are_plain else CHAIN
        states = self._states(pairs) if count else pairs.states
        for first in range(0, count, max(1, at_once)):
            chunk = slice(first, first + at_once)
            chain = TokenTree.chain(pairs.tokens[chunk][0], pairs.tokens[chunk][1:]) if at_once == CHAIN else None
            self._forward(pairs.tokens[chunk], states[chunk], chain, 0)
            self._cache.keep([range(len(pairs.tokens[chunk]))])

    def _forward(
        self, tokens: list[int], states: torch.Tensor, tree: TokenTree | None, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, h) for logits and (n, h) states for children, of the nodes of `tree` from `start` on; None: causal."""
        device = self.head.device
        self._cache.reserve(len(tokens))
        if tree is None:
            mask: Any = None
            positions = self._verifier.positions(TokenTree.root_only(0)) + torch.arange(len(tokens), device=device)
        else:
            mask, positions = self._verifier.mask(tree, start), self._verifier.positions(tree, start)
        out, following = self.head(
            torch.tensor([tokens], device=device),
            states[None],
            self._target,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
        )
        return out[0], following[0]

    @torch.no_grad()
    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.forwards = 0
        pairs = self._take_unread()
        if len(pairs.tokens) > CHAIN:
            text, pairs = pairs.split()
            self._read(text)
        growth = Growth(context, budget, wave=self.wave, min_gain=self.min_gain, vocabulary=self.head.vocabulary)
        slots = Slots(growth, pairs.tokens)
        known = self._states(pairs)  # by slot, what its children are paired with; before the first forward, its own

        def expand(nodes: list[int]) -> torch.Tensor:
            nonlocal known
            self.forwards += 1
            start = slots.add(nodes)
            states = known if start == 0 else known[[slots.parents[slots.of[n]] for n in nodes]]
            out, following = self._forward(slots.tokens[start:], states, slots.tree(), start)
            known = following if start == 0 else torch.cat([known, following])
            return log_q(self.head.logits(out[-len(nodes) :], self._target), self._warpers)

        growth.run(expand)
        self._cache.keep([range(len(pairs.tokens))])
        return growth.best()[0]


def _default_taps(spec: EagleSpec, target: PreTrainedModel | None) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high layer where the checkpoint names none (its reference code, `cnets.py`)."""
    if spec.taps is not None:
        return spec.taps
    if target is None:
        raise DrafterError(
            f"the head {spec.source} does not say which layers of its target it reads, and the default depends on the "
            "target: pass target=model, or taps=(…)."
        )
    layers = _compat.text_config(target).num_hidden_layers
    if layers < 6:
        raise DrafterError(f"the head {spec.source} reads by default layers 2, n//2 and n-3 of its target, which has only "
                           f"{layers}: pass taps=(…).")  # fmt: skip
    return (2, layers // 2, layers - 3)


# ---------------------------------------------------------------- files


class _EagleFormat(Format):
    eagle3: bool

    def recognises(self, checkpoint: Checkpoint) -> bool:
        names = own_names(checkpoint.shapes)
        fc, query = names.get("fc.weight"), names.get("layers.0.self_attn.q_proj.weight")
        if fc is None or query is None or "hidden_norm.weight" in names:  # the last is DFlash's
            return False
        wide = checkpoint.shapes[query][1] == 2 * checkpoint.shapes[fc][0]
        return wide == self.eagle3

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        head = EagleHead(read_spec(checkpoint))
        spec, names = head.spec, head.spec.names
        compare(head, head.shapes(checkpoint), checkpoint.source)
        verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
        absent = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in names]
        return {
            "layout": spec.layout,
            "target": verifier.get("name_or_path"),
            "layers": f"{spec.config.num_hidden_layers} of {spec.config.model_type}",
            "hidden size": spec.hidden_size,
            "target's hidden size": spec.target_hidden_size,
            "target's vocabulary": spec.vocab_size,
            "tokens it can draft": spec.draft_size,
            "target's states it reads": _told_taps(spec),
            "taken from the target": absent,
            "rope": getattr(spec.config, "rope_parameters", None) or {"rope_theta": 10000.0},
            "variants": [n for n in ("norm_before_residual", "norm_output") if getattr(spec, n)]
            + [n for n in ("fc_norm", "input_norm") if hasattr(head, n)],
        }

    def load(self, checkpoint: Checkpoint, target: PreTrainedModel | None, **options: Any) -> Drafter:
        return EagleDrafter(EagleHead.load(checkpoint), target=target, **options)


def _told_taps(spec: EagleSpec) -> str:
    if not spec.eagle3:
        return "the last, after the norm"
    if spec.taps is None:
        return "2, n//2, n-3 of n layers (it does not say)"
    return f"{spec.taps}, or {spec.other_taps} if these explain the first prompt better"


@register_format
class EagleFormat(_EagleFormat):
    name = "eagle"
    eagle3 = False


@register_format
class Eagle3Format(_EagleFormat):
    name = "eagle3"
    eagle3 = True
