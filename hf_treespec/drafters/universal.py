"""`universal`: trees from a causal LM with a tokenizer of its own.

The name is that of transformers' universal assisted generation (Intel Labs and Hugging Face 2024), which drafts chains.
The assistant reads the text in its own tokens and drafts a tree of them, as the drafter `model` does; `translation.py`
turns each path into the target's tokens and merges the paths into one tree. The text stays the target's own, greedy and
sampled, since what is accepted never depends on who drafted. What is lost is the coupling: the target's sampling noise
belongs to its own tokens, so drafts are the assistant's likeliest paths whether the target samples or not, and the hotter
it samples the fewer come true.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import DrafterError
from ..support import check_assistant_model
from ..translation import Translation
from ..tree import TokenTree
from .base import Budget, Commit, DraftContext, Prompt, register_drafter
from .growth import draft_warpers
from .model import ModelDrafter


@register_drafter("universal")
class UniversalDrafter(ModelDrafter):
    """Drafts with a causal LM whose tokenizer is not the target's.

    Args:
        model: the drafting model; by default the call's `assistant_model`.
        tokenizer, assistant_tokenizer: of the target and of the drafting model, both fast; by default the call's.
        wave, min_gain: as in `model`; counted in the drafting model's tokens.
    """

    uses_assistant_tokenizer = True
    needs = "a small model, and both tokenizers"

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        wave: int = 4,
        min_gain: float | None = None,
    ) -> None:
        super().__init__(model, wave, min_gain)
        self.tokenizer, self.assistant_tokenizer = tokenizer, assistant_tokenizer

    def start(self, prompt: Prompt) -> None:
        model = self.model or prompt.assistant_model
        given = {
            "assistant_model": model,
            "tokenizer": self.tokenizer or prompt.tokenizer,
            "assistant_tokenizer": self.assistant_tokenizer or prompt.assistant_tokenizer,
        }
        missing = [name for name, value in given.items() if value is None]
        if model is None or missing:
            raise DrafterError(
                f"drafter 'universal' needs {', '.join(f'{name}=' for name in missing)}: pass assistant_model=, tokenizer= "
                "(the target's) and assistant_tokenizer= to generate, or UniversalDrafter(model, tokenizer, "
                "assistant_tokenizer)."
            )
        check_assistant_model(model)
        if prompt.ids.shape[1] == 0:
            raise DrafterError(
                "drafter 'universal' cannot read a prompt that is only inputs_embeds; pass input_ids too, or use 'ngram'."
            )
        self._begin(model, prompt)
        self._warpers = draft_warpers(prompt, by_token=False)
        self._vocabulary_of_target = prompt.verified.logits.shape[-1]
        ids = prompt.ids[0]
        if prompt.attention_mask is not None:
            ids = ids[prompt.attention_mask[0, -len(ids) :].to(ids.device) != 0]
        self._translation = Translation(given["tokenizer"], given["assistant_tokenizer"])
        self._heard: list[int] = ids.tolist()  # the target's tokens that are not translated yet
        self._ids: list[int] = []  # the text as the model knows it: what it has read, then what it has not
        self._read = 0  # how many of these its cache holds
        self._has_cache = False

    def read_prompt(self) -> None:
        self._follow()

    def observe(self, commit: Commit) -> None:
        self._heard += commit.tokens[0]

    def _follow(self) -> None:
        """Brings the cache to the text as it is now. Its last token is always left unread: the next root.

        What the last draft computed is kept as far as the text went that way. Where the text's end was tokenised anew
        the cache is cut back, and only where that cannot be done everything is read again.
        """
        self._translation.read(self._heard)
        self._heard = []
        old, new, read = self._ids, list(self._translation.ids), self._read
        same = _common(old, new[:-1], read)
        kept: list[int] = []
        if self._slots:  # those of a draft: first what was unread, up to the old text's end, then its tree
            kept = list(range(same - read))
            if same == len(old):
                kept += self._along_tree(new[same:-1])
                same = read + len(kept)
        else:
            same = min(same, read)
        if self._has_cache and same < read:
            self._has_cache = same > 0 and self._cache.shorten(same)
        elif self._slots:
            self._cache.keep([kept])
        if not self._has_cache:
            same, self._has_cache = 0, 1 < len(new) < self._positions
            if self._has_cache:
                same = len(new) - 1
                self._prefill(torch.tensor([new[:-1]]))
        self._slots = {}
        self._ids, self._read, self._unread = new, same, new[same:]

    def _along_tree(self, tokens: list[int]) -> list[int]:
        """The slots of the last draft's nodes along `tokens`, as far as they were expanded."""
        slots: list[int] = []
        node = 0
        for token in tokens:
            child = self._tree.child(node, token)
            if child is None or child not in self._slots:
                break
            slots.append(self._slots[child])
            node = child
        return slots

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        if self._heard:  # not in the round in which the prompt was read
            self._follow()
        if not self._has_cache:
            self.forwards = 0
            return TokenTree.root_only(context.last_token)
        own = DraftContext(torch.tensor([self._ids]), self._ids[-1:], None, context.remaining)
        drafted = super().draft(own, budget)
        tree = self._translation.tree(drafted, context.last_token, self._vocabulary_of_target)
        return tree.prune(budget.max_nodes, budget.max_depth, budget.max_children)


def _common(old: list[int], new: list[int], likely: int) -> int:
    """Length of the common prefix; quick where it is at least `likely`."""
    start = likely if old[:likely] == new[:likely] else 0
    return next((i for i in range(start, min(len(old), len(new))) if old[i] != new[i]), min(len(old), len(new)))
