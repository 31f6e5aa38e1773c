"""`model`: trees from any causal LM, usually a small one given as `assistant_model=`.

The model keeps its own tree cache across rounds. A round starts with one forward over the tokens that it has not read
yet (the accepted tail and the root), then grows the tree in waves: the best unexpanded nodes go through one forward
together, and their likeliest continuations join the frontier (best first in batches; OPT-Tree, Wang et al. 2024, for
the stopping rule). The tree that is returned holds the best nodes of all that were seen.

When the target samples, the children of a node are the top tokens of log q + g, where g is the Gumbel noise with which
the target itself will choose at that position (Daliri et al. 2024 for the coupling; design in `accept.py`).

Legend: W nodes of a wave, V vocabulary of the drafting model, q its probability.
"""

from __future__ import annotations

import heapq
import sys
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from .. import _compat
from ..accept import HISTORY_FREE
from ..attention import tree_attention_on
from ..cache import TreeCache
from ..errors import DrafterError
from ..support import check_assistant
from ..tree import TokenTree
from ..verify import Verifier
from .base import Budget, Commit, DraftContext, Drafter, Prompt, register_drafter


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

    def __init__(self, model: PreTrainedModel | None = None, wave: int = 4, min_gain: float | None = None) -> None:
        if not isinstance(wave, int) or wave < 1:
            raise DrafterError(f"wave={wave!r} must be a whole number of nodes, 1 or more.")
        if min_gain is not None and not 0 <= min_gain <= 1:
            raise DrafterError(f"min_gain={min_gain!r} must lie in 0 to 1 expected tokens.")
        self.model, self.wave, self.min_gain = model, wave, min_gain

    def start(self, prompt: Prompt) -> None:
        model = self.model or prompt.assistant_model
        if model is None:
            raise DrafterError("drafter 'model' needs a model: pass assistant_model=... or ModelDrafter(model).")
        check_assistant(prompt.target, model)
        if prompt.ids.shape[1] == 0:
            raise DrafterError(
                "drafter 'model' cannot read a prompt that is only inputs_embeds; pass input_ids too, or use 'ngram'."
            )
        self._model = model
        self._vocabulary = _compat.text_config(model).vocab_size
        self._target_vocabulary = prompt.verified.logits.shape[-1]
        self._positions = _compat.rope_boundary(_compat.text_config(model))[0] or sys.maxsize
        self._warpers = LogitsProcessorList([p for p in prompt.processors if type(p) in HISTORY_FREE])
        self._unread: list[int] = []  # committed tokens that the model has not read, the root last
        self._tree = TokenTree.root_only(0)  # the last tree, before the loop cut it
        self._slots: dict[int, int] = {}  # its expanded nodes -> their slots behind the committed prefix
        if prompt.ids.shape[1] < self._positions:
            self._prefill(prompt)

    def _prefill(self, prompt: Prompt) -> None:
        model, ids = self._model, prompt.ids.to(self._model.device)
        cache = DynamicCache(config=_compat.text_config(model))
        mask = prompt.attention_mask
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
            self._cache = TreeCache(cache, spare=4 * prompt.max_nodes)
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
            growth = _Growth(self, context, budget)
            growth.run(self._unread)
        self._unread = []
        self._tree, self._slots = growth.best()
        return self._tree

    def forward(self, tokens: list[int], parents: list[int], start: int) -> torch.Tensor:
        """(n, V) logits of the fed nodes from `start` on; those before it are in the cache already."""
        self.forwards += 1
        known = [t if t < self._vocabulary else 0 for t in tokens]
        return self._verifier.forward(TokenTree(known, parents), start).logits[0]

    def log_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """(n, V') log q over the tokens that both vocabularies have, warped as the target's scores will be."""
        scores = self._warpers(torch.empty((len(logits), 0), dtype=torch.long, device=logits.device), logits.float())
        return torch.log_softmax(scores[:, : self._target_vocabulary], dim=-1)


class _Growth:
    """The growing of one tree. Nodes are numbered as they are found; slots as they went through the model."""

    def __init__(self, drafter: ModelDrafter, context: DraftContext, budget: Budget) -> None:
        self.drafter, self.context, self.budget = drafter, context, budget
        self.tokens, self.parents, self.scores, self.depths = [context.last_token], [-1], [1.0], [0]
        self.frontier: list[tuple[float, int]] = []  # (-score, node), unexpanded
        self.slots: dict[int, int] = {}  # expanded node -> slot
        self.fed_tokens: list[int] = []  # by slot, what went through the model this round
        self.fed_parents: list[int] = []  # by slot, the slot of the token before; -1 for the first

    def run(self, unread: list[int]) -> None:
        self._feed(unread, list(range(-1, len(unread) - 1)), [0])
        for _ in range(self.budget.max_depth - 1):
            wave = self._next_wave()
            if not wave:
                break
            self._feed([self.tokens[n] for n in wave], [self.slots[self.parents[n]] for n in wave], wave)

    def _next_wave(self) -> list[int]:
        """The best unexpanded nodes that would make it into the tree, if they promise enough."""
        worth = heapq.nlargest(self.budget.max_nodes, self.scores[1:])
        floor = worth[-1] if len(worth) == self.budget.max_nodes else 0.0
        wave: list[int] = []
        while self.frontier and len(wave) < self.drafter.wave and -self.frontier[0][0] > floor * 0.999:
            node = heapq.heappop(self.frontier)[1]
            if self.depths[node] < self.budget.max_depth:
                wave.append(node)
        least = self.budget.min_gain if self.drafter.min_gain is None else self.drafter.min_gain
        return wave if sum(self.scores[n] for n in wave) >= least else []

    def _feed(self, tokens: list[int], parents: list[int], nodes: list[int]) -> None:
        """One forward over `tokens` below the slots `parents`; the last of them are the tree's `nodes`."""
        start = len(self.fed_tokens)
        self.fed_tokens += tokens
        self.fed_parents += parents
        logits = self.drafter.forward(self.fed_tokens, self.fed_parents, start)[-len(nodes) :]
        self.slots.update(zip(nodes, range(len(self.fed_tokens) - len(nodes), len(self.fed_tokens)), strict=True))
        self._branch(nodes, logits)

    def _branch(self, nodes: list[int], logits: torch.Tensor) -> None:
        """Adds the likeliest children of each node, given logits (len(nodes), V)."""
        scores = self.drafter.log_probabilities(logits)
        if self.context.noise is not None:
            draws = torch.cat([self.context.noise.peek(self.depths[n]) for n in nodes])[:, : scores.shape[1]]
            scores = torch.log_softmax(scores - draws.to(scores.device).log(), dim=-1)
        values, tokens = scores.topk(min(self.budget.max_children, scores.shape[1]), dim=-1)
        for node, row_values, row_tokens in zip(nodes, values.exp().tolist(), tokens.tolist(), strict=True):
            for value, token in zip(row_values, row_tokens, strict=True):
                if value > 0:
                    self._add(node, token, min(1.0, value) * self.scores[node])

    def _add(self, parent: int, token: int, score: float) -> None:
        heapq.heappush(self.frontier, (-score, len(self.tokens)))
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.depths.append(self.depths[parent] + 1)

    def best(self) -> tuple[TokenTree, dict[int, int]]:
        """The best nodes found, and the slots of those that were expanded, both renumbered."""
        order = sorted(range(1, len(self.tokens)), key=lambda n: (-self.scores[n], n))[: self.budget.max_nodes]
        kept = [0, *sorted(order)]
        place = {node: i for i, node in enumerate(kept)}
        tree = TokenTree(
            [self.tokens[n] for n in kept],
            [place[self.parents[n]] if n else -1 for n in kept],
            [self.scores[n] for n in kept],
        )
        return tree, {place[n]: slot for n, slot in self.slots.items() if n in place}


def _last_logit_only(model: PreTrainedModel) -> dict[str, Any]:
    return {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
