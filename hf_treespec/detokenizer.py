"""Text from tokens as rounds bring them. It knows a tokenizer's `decode` and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Detokenizer:
    """Text from tokens as they come: what was given out is never taken back.

    Bytes of an unfinished character decode to U+FFFD: such an ending is held back, and so is, where the tokenizer
    tidies spaces up, the last word.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tidies = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self.ids: list[int] = []
        self.text = ""

    def add(self, tokens: Iterable[int]) -> str:
        """The text that is certain now and was not before."""
        self.ids.extend(tokens)
        text = self._decode().rstrip("\ufffd")
        if self._tidies:
            text = text[: text.rfind(" ") + 1]
        return self._give(text) if text.startswith(self.text) else ""

    def end(self) -> str:
        """The rest, finished or not."""
        return self._give(self._decode())

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self.ids, skip_special_tokens=self._skip))

    def _give(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new
