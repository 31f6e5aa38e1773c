"""`hydra`: heads that also read the drafted tokens above their node (Ankner et al. 2024, §3).

    state ─[prefix layer]─ s ┬─ head 0 (s, e(root))         ─ q of the token after the root
                             ├─ head 1 (s, e(root), e(a))   ─ q of the token after a, for each a that head 0 found
                             └─ …                             e: the target's embeddings

Head i runs once a round, over the best nodes of depth i. Hydra++ (`prefix-mlp`) puts one more decoder layer between the
target's states and the heads, which reads all states in order and keeps keys and values of its own.

Legend: D heads, L blocks in each, h the target's hidden size, V its vocabulary, W nodes that go through a head together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaModel, PreTrainedModel

from .. import _compat
from ..errors import DrafterError
from ..tree import TokenTree
from .base import Budget, DraftContext, Prompt, register_drafter
from .growth import Growth, check_growth, draft_warpers, log_q
from .head import HeadDrafter, Pairs, check_target, device_of, place_beside
from .positions import FixedTree, best_first


class ResBlock(torch.nn.Module):
    """A x + SiLU(W x + b): A is the identity where the block keeps the width, else a layer of its own."""

    def __init__(self, hidden_size: int, pieces: int = 1) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(pieces * hidden_size, hidden_size)
        self.res_connection = torch.nn.Linear(pieces * hidden_size, hidden_size) if pieces > 1 else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., pieces·h) to (..., h)."""
        residual: torch.Tensor = self.res_connection(x)
        return residual + torch.nn.functional.silu(self.linear(x))


class HydraHeads(torch.nn.Module):
    """D heads and perhaps a layer before them, under the names (sic) of the published checkpoints.

    Args:
        hidden_size: h.
        vocab_size: V.
        heads: D.
        layers: L, 1 or more.
        grounded: head i reads the embeddings of the i + 1 tokens from the root to its node; else only the state.
        prefix: of the layer before the heads (`prefix-mlp`); None where there is none (`mlp`).
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        heads: int,
        layers: int = 1,
        grounded: bool = True,
        prefix: LlamaConfig | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.layers, self.grounded = layers, grounded
        self.prefix_embeding_layer: Any = None
        if prefix is not None:
            self.prefix_embeding_layer = LlamaModel(prefix)
            self.prefix_embeding_layer.embed_tokens = torch.nn.Identity()  # it reads states, not tokens

        def spaced(*parts: torch.nn.Module) -> torch.nn.Sequential:
            """With the dropout that the published names of a head behind a prefix layer count before each part."""
            if prefix is not None:
                parts = tuple(x for part in parts for x in (torch.nn.Dropout(0.0), part))
            return torch.nn.Sequential(*parts)

        self.hydra_mlp = torch.nn.ModuleList()
        self.hydra_lm_head = torch.nn.ModuleList()
        for i in range(heads):
            first = ResBlock(hidden_size, i + 2 if grounded else 1)
            self.hydra_mlp.append(spaced(first, *(ResBlock(hidden_size) for _ in range(layers - 1))))
            output = torch.nn.Linear(hidden_size, vocab_size)
            self.hydra_lm_head.append(output if prefix is None else spaced(output))

    def __len__(self) -> int:
        """D."""
        return len(self.hydra_mlp)

    def forward(self, head: int, x: torch.Tensor) -> torch.Tensor:
        """(W, V) logits of one head from (W, (head + 2)·h) states and embeddings, or (W, h) where it is not grounded."""
        logits: torch.Tensor = self.hydra_lm_head[head](self.hydra_mlp[head](x))
        return logits


@register_drafter("hydra")
class HydraDrafter(HeadDrafter):
    """Drafts with Hydra heads, loaded with `load_drafter`.

    Args:
        heads: the heads.
        wave: nodes of one depth that go through that depth's head; the best ones.
        min_gain: the next head runs only while these nodes hold this many expected tokens (the sum of their path
            scores). By default the budget says, from what a head costs here.
        tree: a fixed shape instead, as for `medusa`.
        state: index into the target's `hidden_states` of the state that the heads read.

    Raises:
        DrafterError: no heads, or options out of their range.
    """

    def __init__(
        self,
        heads: HydraHeads | None = None,
        wave: int = 8,
        min_gain: float | None = None,
        tree: Any = None,
        state: int = -1,
    ) -> None:
        if heads is None:
            raise DrafterError(
                "drafter 'hydra' needs trained heads: load them with hf_treespec.load_drafter(path, target=model)."
            )
        check_growth(wave, min_gain)
        self.heads, self.wave, self.min_gain, self.hidden_layers = heads.eval(), wave, min_gain, (state,)
        self.reads_all = heads.prefix_embeding_layer is not None
        self.tree = None if tree is None else FixedTree(tree, len(heads))

    def check(self, what: str, target: PreTrainedModel) -> None:
        """Raises `DrafterError` unless `what`, these heads, fit the target."""
        (state,) = self.hidden_layers
        sizes = {"hidden_size": self.heads.hidden_size, "vocab_size": self.heads.vocab_size}
        check_target(what, target, **sizes, layers=max(state, -state - 1))

    def start(self, prompt: Prompt) -> None:
        self.check("this Hydra head", prompt.target)
        self._device = place_beside(self.heads, prompt.target)
        self._embed = prompt.target.get_input_embeddings()
        self._embed_device = device_of(self._embed, prompt.target)
        self._vocabulary = prompt.verified.logits.shape[-1]
        self._warpers = draft_warpers(prompt)
        prefix = self.heads.prefix_embeding_layer
        self._cache = None if prefix is None else DynamicCache(config=prefix.config)
        super().start(prompt)

    def read_prompt(self) -> None:
        if self._cache is not None:
            self._read(self._take_unread())

    @torch.no_grad()
    def _read(self, pairs: Pairs) -> None:
        """Brings `_state` (1, h), what the heads read, to the last of these pairs."""
        states = pairs.states.to(self._device)
        self._state = states[-1:]
        if self._cache is not None:
            prefix = self.heads.prefix_embeding_layer
            read = prefix(
                inputs_embeds=states[None],
                position_ids=torch.arange(pairs.position, pairs.position + len(states), device=self._device)[None],
                use_cache=True,
                **{_compat.cache_key(prefix): self._cache},
            )
            self._state = read.last_hidden_state[0, -1:]

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.forwards = 0
        unread = self._take_unread()
        if unread.tokens:
            self._read(unread)
        budget = dataclasses.replace(budget, max_depth=min(budget.max_depth, len(self.heads)))
        with torch.no_grad():
            if self.tree is not None:
                return self.tree.grow(context, budget, self._level)
            if not self.heads.grounded:
                rows = [self._level(depth, []) for depth in range(budget.max_depth)]
                return best_first(context, torch.cat(rows), budget)
            growth = _Levels(context, budget, wave=self.wave, min_gain=self.min_gain)
            growth.run(lambda nodes: self._level(growth.depths[nodes[0]], [growth.above(n) for n in nodes]))
            return growth.best()[0]

    def _level(self, depth: int, paths: list[list[int]]) -> torch.Tensor:
        """(W, V) log q after nodes of one depth, given the tokens from the root to each; (1, V) if not grounded."""
        self.forwards += 1
        x = self._state
        if self.heads.grounded:
            embedded = self._embed(torch.tensor(paths, device=self._embed_device)).flatten(1).to(x.device, x.dtype)
            x = torch.cat([x.expand(len(paths), -1), embedded], dim=-1)
        return log_q(self.heads(depth, x), self._warpers, self._vocabulary)


class _Levels(Growth):
    """Growth in which a wave is the best nodes of the next depth: each head runs once, its weights are read once."""

    def _next_wave(self) -> list[int]:
        wave = super()._next_wave()
        self._frontier.clear()
        return wave

    def above(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        path: list[int] = []
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]
