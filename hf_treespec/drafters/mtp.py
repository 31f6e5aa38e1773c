"""`mtp`: trees from the multi-token prediction layers that a model was trained with (DeepSeek-V3, §2.2).

K layers, of transformers' own `MtpModel`. Layer k reads a token together with the state that stands before it: layer 0
the target's last state, layer k the output of layer k - 1. Its output predicts what comes k + 2 tokens after the first
state of that chain, so the children of a node at depth d come from layer d:

    layer 0   (g_t-1, x_t)                     → children of the root x_t
    layer 1   (h0_t-1, x_t)…  (h0_t, a)        → children of the node a, a child of the root
    layer 2   … (h1_t, a)  (h1_t+1, b)         → children of b, a child of a

where h0_t is layer 0's output at the root. So layer d runs over the path down to a node of depth d, each node with the
output of the layer above it in this drawing at the node's parent, under a tree mask and on keys of its own.

What a layer computed for an accepted node of depth d <= k is what it would compute from the committed text, since the
chain below it ends in a state of the target that was known: it stays in the cache. The rest is read in the next round.
(transformers drafts one chain, and computes the last K positions of every layer anew when fewer than K - 1 tokens were
accepted.)

Legend: K layers, W nodes, h the target's hidden size. A token's index counts from the first pair's token.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .. import _compat
from ..attention import tree_attention_on
from ..cache import TreeCache, check_cache
from ..errors import DrafterError, UnsupportedModelError
from ..tree import TokenTree
from ..verify import Verifier
from .base import Budget, Commit, DraftContext, Prompt, register_drafter
from .growth import Growth, Slots, check_growth, draft_warpers, log_q
from .head import HeadDrafter, check_target

# Committed tokens are read so many at a time: the mask of a forward is this times the text's length.
CHUNK = 512


@register_drafter("mtp")
class MtpDrafter(HeadDrafter):
    """Drafts with the target's own MTP layers.

    Args:
        mtp_model: transformers' `MtpModel`; by default it is loaded from where the target was loaded from, once for a
            target.
        wave: nodes that are expanded together.
        min_gain: another wave runs only while the nodes that it would expand hold this many expected tokens (the sum of
            their path scores). By default the budget says.
        recursive: go on below depth K with the last layer on its own outputs, as serving systems do with models of one
            layer. It was not trained for that, but chains of it are often right. Without it trees end at depth K, where
            transformers' own chains end.
    """

    hidden_layers = (-1,)
    needs = "a target with layers that predict several tokens"

    def __init__(
        self,
        mtp_model: PreTrainedModel | None = None,
        wave: int = 4,
        min_gain: float | None = None,
        recursive: bool = False,
    ) -> None:
        check_growth(wave, min_gain)
        self.mtp_model, self.wave, self.min_gain, self.recursive = mtp_model, wave, min_gain, recursive

    def start(self, prompt: Prompt) -> None:
        super().start(prompt)
        self._mtp: Any = self.mtp_model if self.mtp_model is not None else _loaded(prompt.target)
        _check(self._mtp, prompt.target)
        self._device = next(self._mtp.layers.parameters()).device
        with tree_attention_on(self._mtp):
            self._levels = [
                _Level(self._mtp, layer, self._pairs.position, self._device) for layer in range(len(self._mtp.layers))
            ]
        self._text: list[int] = []  # tokens by index; those of unread pairs follow
        self._target_vocabulary = prompt.verified.logits.shape[-1]
        self._warpers = draft_warpers(prompt)

    def observe(self, commit: Commit) -> None:
        """Keeps what the layers computed for the accepted path from states that were known."""
        path: list[int] = []
        if self._levels[0].slots is not None:
            place = 0
            for token in commit.tokens[0][:-1]:  # the last one is the next root
                child = self._tree.child(place, token)
                if child is None:
                    break
                place = child
                path.append(self._nodes[child])
        for level in self._levels:
            if level.slots is not None:
                kept = level.keep(path, len(self._text))
                self._hand_on(level, kept)
        super().observe(commit)

    def read_prompt(self) -> None:
        self._hear()
        with torch.no_grad(), tree_attention_on(self._mtp):
            for level in self._levels:
                # a layer reads outputs of the one below, and each leaves the root's pair to the draft
                while (count := min(CHUNK, len(level.states), len(self._text) - level.read - 1)) > 0:
                    self._read_chunk(level, count)

    def _hear(self) -> None:
        """Takes the unread pairs into the text, and their states to the first layer."""
        pairs = self._take_unread()
        self._text += pairs.tokens
        self._levels[0].states = torch.cat([self._levels[0].states, pairs.states.to(self._device)])

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.forwards = 0
        self._hear()
        reach, depth = min(len(self._levels), len(self._text)), budget.max_depth  # layer k skips the first k tokens
        if not self.recursive or reach < len(self._levels):
            depth = min(depth, reach)
        budget = Budget(budget.max_nodes, depth, budget.max_children, budget.min_gain)
        with torch.no_grad(), tree_attention_on(self._mtp):
            self._growth = Growth(context, budget, wave=self.wave, min_gain=self.min_gain)
            self._growth.run(self._expand)
        self._tree, place = self._growth.best()
        self._nodes = {i: node for node, i in place.items()}
        return self._tree

    def _expand(self, nodes: list[int]) -> torch.Tensor:
        """(W, V) log q after each of `nodes`, each from the layer of its depth."""
        depths = self._growth.depths
        for depth in sorted({depths[n] for n in nodes}):
            self._run(self._level_of(depth), [n for n in nodes if depths[n] == depth])
        states = torch.stack([self._level_of(depths[n]).output(n) for n in nodes])
        logits = self._mtp._project_to_logits(states)  # transformers' own: it knows scaled and padded heads
        return log_q(logits, self._warpers, self._target_vocabulary)

    def _level_of(self, depth: int) -> _Level:
        return self._levels[min(depth, len(self._levels) - 1)]

    def _run(self, level: _Level, nodes: list[int]) -> None:
        """Puts `nodes` through a layer, with what it lacks of the paths down to them and of the text."""
        growth, chain = self._growth, 0
        start = 0 if level.slots is None else len(level.slots.tokens)
        states: list[torch.Tensor] = []
        if level.slots is None:
            while len(self._text) - level.read > CHUNK:
                self._read_chunk(level, CHUNK)
            level.slots = Slots(growth, self._text[level.read :])
            level.slots.add([0])
            chain = len(level.slots.tokens)
            states.append(level.states[:chain])
        missing: set[int] = set()
        for node in nodes:
            while node not in level.slots.of:
                missing.add(node)
                node = growth.parents[node]
        for depth in sorted({growth.depths[n] for n in missing}):
            level.slots.add([n for n in sorted(missing) if growth.depths[n] == depth])
        for node in sorted(missing, key=level.slots.of.__getitem__):
            before = self._levels[level.layer - 1] if growth.depths[node] <= level.layer else level
            states.append(before.output(growth.parents[node])[None])
        if not states:
            return
        level.outputs = torch.cat([level.outputs, self._forward(level, level.slots.tree(), start, torch.cat(states))])
        self._hand_on(level, level.outputs[:chain])

    def _read_chunk(self, level: _Level, count: int) -> None:
        tokens = self._text[level.read : level.read + count]
        outputs = self._forward(level, TokenTree.chain(tokens[0], tokens[1:]), 0, level.states[:count])
        level.cache.keep([range(count)])
        level.read += count
        level.states = level.states[count:]
        self._hand_on(level, outputs)

    def _hand_on(self, level: _Level, outputs: torch.Tensor) -> None:
        """A layer's outputs at committed tokens are what the next one reads with the tokens that follow."""
        if level.layer + 1 < len(self._levels):
            above = self._levels[level.layer + 1]
            above.states = torch.cat([above.states, outputs])

    def _forward(self, level: _Level, tree: TokenTree, start: int, states: torch.Tensor) -> torch.Tensor:
        """(n, h): the layer's outputs at the nodes from `start` on; `states` (n, h) are what it reads with them."""
        self.forwards += 1
        mtp = self._mtp
        tokens = torch.from_numpy(tree.tokens[:, start:]).to(mtp.embed_tokens.weight.device)
        embeds = mtp.embed_tokens(tokens).to(states)
        positions = level.verifier.positions(tree, start)
        level.cache.reserve(len(tree) - start)
        outputs: torch.Tensor = mtp.layers[level.layer](
            embeds,
            states[None],
            position_embeddings=_compat.mtp_position_embeddings(mtp, level.layer, embeds, positions),
            attention_mask=level.verifier.mask(tree, start),
            position_ids=positions,
            **{_compat.cache_key(mtp.layers[level.layer]): level.cache},
        )
        return (mtp.shared_post_norm(outputs) if mtp.use_shared_post_norm else outputs)[0]


class _Level:
    """One layer in one call: its keys and values, what it has still to read, and what it computed this round.

    Attributes:
        read: index of the first token that is not in its cache. Layer k never sees the first k tokens.
        states: (n, h), what it reads with the tokens from `read` on, as far as they are known.
        slots: what went through it this round, or None.
        outputs: (slots, h).
    """

    def __init__(self, mtp: Any, layer: int, position: int, device: torch.device) -> None:
        self.layer = layer
        self.cache = TreeCache(DynamicCache(config=mtp.config))
        last = torch.full((1, 1), position + layer, device=device)
        self.verifier = Verifier(mtp, self.cache, last, layer=layer)
        self.read = layer
        self.states = self._none = torch.empty((0, mtp.config.hidden_size), dtype=mtp.dtype, device=device)
        self.slots: Slots | None = None
        self.outputs = self._none

    def output(self, node: int) -> torch.Tensor:
        """(h,)"""
        assert self.slots is not None
        return self.outputs[self.slots.of[node]]

    def keep(self, path: list[int], length: int) -> torch.Tensor:
        """Ends the round: keeps the text (`length` tokens) and what it may of `path`, whose outputs it returns."""
        assert self.slots is not None
        kept: list[int] = []
        for depth, node in enumerate(path, 1):
            if depth > self.layer or node not in self.slots.of:
                break
            kept.append(self.slots.of[node])
        chain = length - self.read
        self.cache.keep([[*range(chain), *kept]])
        self.read += chain + len(kept)
        self.states = self.states[chain + len(kept) :]
        outputs = self.outputs[kept]
        self.slots, self.outputs = None, self._none
        return outputs


_models: weakref.WeakKeyDictionary[PreTrainedModel, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _loaded(target: PreTrainedModel) -> Any:
    """The target's `MtpModel`, loaded from where the target came from on its first use."""
    kind = type(target).__name__
    mtp_class = _compat.mtp_class()
    if mtp_class is None:
        raise DrafterError("drafter 'mtp' needs a transformers that has MtpModel (5.14 or later); update transformers.")
    if not getattr(_compat.text_config(target), "num_mtp_layers", None):
        raise DrafterError(
            f"drafter 'mtp' needs a target with MTP layers, and the config of {kind} has no num_mtp_layers. Use "
            "tree_spec=True."
        )
    instead = "Use MtpDrafter(mtp_model) with one that is loaded, or another drafter."
    if not target.config.name_or_path:
        raise DrafterError(f"{kind} was not loaded from anywhere, so there are no MTP layers to load. {instead}")
    with _lock:
        model = _models.get(target)
        if model is None:
            device = next(target.get_decoder().layers[-1].parameters()).device
            try:
                model = mtp_class.from_pretrained(target, device_map={"": device}).eval()
            except (OSError, RuntimeError, ValueError, TypeError) as error:
                raise DrafterError(
                    f"the MTP layers of {kind} cannot be loaded from {target.config.name_or_path!r}: {error} {instead}"
                ) from error
            _models[target] = model
    return model


def _check(mtp: Any, target: PreTrainedModel) -> None:
    what = f"mtp_model={type(mtp).__name__}"
    mtp_class = _compat.mtp_class()
    if mtp_class is None or not isinstance(mtp, mtp_class):
        raise DrafterError(f"{what} is no MtpModel of transformers; leave it out to load the target's own.")
    check_target("the MTP model", target, hidden_size=mtp.config.hidden_size, vocab_size=mtp.config.vocab_size)
    if getattr(mtp.config, "is_heterogeneous", False):
        raise DrafterError(
            f"the MTP layers of {type(target).__name__} differ in shape, which 'mtp' does not handle yet."
        )
    try:
        check_cache(DynamicCache(config=mtp.config))
    except UnsupportedModelError as error:
        raise DrafterError(f"the MTP layers of {type(target).__name__} cannot draft a tree: {error}") from error
