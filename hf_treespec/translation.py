"""One text in two tokenizers: what an assistant with a tokenizer of its own reads, and what its drafts say to the target.

    target's ids    │ The │ un │ believ │ able │                    committed
    text            │ T h e   u n b e l i e v a b l e│   s t o r y     drafted
    assistant's ids │ The │ unbe │ lievable │         │ st │ ory       read, drafted

Going over to the assistant is free: it may read any tokens. Coming back is not, since the target's committed tokens stand:
a drafted path counts only where the target's tokenizer, given the end of the committed text and the path, writes the
committed tokens again and then others. (Universal assisted generation, Intel Labs and Hugging Face 2024; string-level exact
match in Timor et al. 2025, arXiv 2502.05202. What they do for a chain is done here for every path of a tree.)

Texts are never tokenised from their start: a window of the last tokens is written again, and must come out as it went in.
Special tokens end a window. One that both tokenizers have goes over as it is; others are nothing to the assistant.
It knows nothing of models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .errors import DrafterError
from .tree import TokenTree

# Tokens before a change that are tokenised again, and how many of the last of them must come out as they were: what stands
# before may differ, since a window may start within a word or a character. Words are seldom longer.
WINDOW, REPRODUCED = 16, 8
# A character has at most four bytes. More tokens that give none are not the beginning of one.
MOST_PENDING = 4
_UNFINISHED = "\ufffd"  # what decoders write for bytes that are not (yet) a character


class Translation:
    """The text of one call while it grows.

    Args:
        tokenizer, assistant_tokenizer: fast tokenizers of the target and of the assistant.
        ids: what the text begins with, in the target's tokens, padding left out.

    Attributes:
        ids: the text so far in the assistant's tokens. Its end may be other than what it was: "un" becomes "unbe".
    """

    def __init__(self, tokenizer: Any, assistant_tokenizer: Any, ids: Sequence[int] = ()) -> None:
        self._target, self._assistant = _Codec(tokenizer), _Codec(assistant_tokenizer)
        self._committed: list[int] = []  # the target's tokens since the last special one
        self._pending = 0  # the last ones of these, which are not whole characters yet
        self.ids = self._assistant.opening()
        self._start = len(self.ids)  # of the assistant's tokens since the last special one
        self.read(ids)

    def read(self, tokens: Sequence[int]) -> None:
        """The text grows by the target's `tokens`."""
        fresh: list[int] = []
        for token in tokens:
            if token in self._target.special:
                self._append(fresh, final=True)
                self._special(token)
                fresh = []
            else:
                fresh.append(token)
        self._append(fresh)

    def _special(self, token: int) -> None:
        same = self._assistant.special_id(self._target.special[token])
        if same is not None and self.ids[-1:] != [same]:  # an opening may stand there already
            self.ids.append(same)
        self._committed, self._pending, self._start = [], 0, len(self.ids)

    def _append(self, tokens: list[int], final: bool = False) -> None:
        """Ordinary tokens; `final` ones are never continued."""
        if not tokens and not self._pending:
            return
        known = len(self._committed) - self._pending
        self._committed += tokens
        context = self._committed[max(0, known - WINDOW) : known]
        before = self._target.text(context)
        after = self._target.text(context + self._committed[known:])
        self._pending = 0
        if after.endswith(_UNFINISHED) and not final:
            for pending in range(1, MOST_PENDING + 1):
                whole = self._target.text(context + self._committed[known : len(self._committed) - pending])
                if len(self._committed) - pending >= known and not whole.endswith(_UNFINISHED):
                    after, self._pending = whole, pending
                    break
        if after.startswith(before):
            self._write(after[len(before) :])
        else:  # a decoder that rewrites what stood there
            self._rewrite()

    def _write(self, text: str) -> None:
        """The assistant's text grows by `text`."""
        if not text:
            return
        own = self.ids[self._start :]
        for size in (WINDOW, 2 * WINDOW, 4 * WINDOW):  # a window that starts within a word may come out otherwise
            window = own[-size:]
            before = self._assistant.text(window)
            if self._assistant.encode([before])[0][0] == window:
                after = self._assistant.encode([before + text])[0][0]
                self.ids[len(self.ids) - len(window) :] = after
                return
            if len(window) == len(own):
                break
        self._rewrite()

    def _rewrite(self) -> None:
        """The whole text since the last special token once more."""
        text = self._target.text(self._committed[: len(self._committed) - self._pending])
        self.ids[self._start :] = self._assistant.encode([text])[0][0]

    # ---------------------------------------------------------------- back

    def tree(self, drafted: TokenTree, root: int, vocabulary: int) -> TokenTree:
        """A tree of the assistant's tokens below the text's end, as one of the target's.

        A node's score is that of the drafted path which first reaches the end of its characters; where two paths share a
        node, the better one's.

        Args:
            root: the target's last committed token.
            vocabulary: the target's tokens; what its tokenizer has beyond them is cut.
        """
        paths = self._texts(drafted)
        tree = _Trie(root)
        known = len(self._committed) - self._pending
        window, pending = self._committed[max(0, known - WINDOW) : known], self._committed[known:]
        before = self._target.text(window)
        texts = list(dict.fromkeys(text for text, _ in paths))
        encoded = dict(zip(texts, self._target.encode([before + text for text in texts]), strict=True))
        for text, reached in paths:
            ids, ends = encoded[text]
            again = sum(end <= len(before) for end in ends) if before else 0
            if not _reproduces(ids[:again], window) or ids[again : again + len(pending)] != pending:
                continue
            first = again + len(pending)
            scores = [_score(reached, end - len(before)) for end in ends[first:]]
            tree.add(list(itertools.takewhile(lambda t: t < vocabulary, ids[first:])), scores)
        return tree.tree()

    def _texts(self, drafted: TokenTree) -> list[tuple[str, list[tuple[int, float]]]]:
        """For each path to a leaf: the text that it adds, and after each of its tokens the characters reached and the
        path's score. A path ends before a special token, and its text before a character that is not whole."""
        own = self.ids[self._start :][-WINDOW:]
        before = self._assistant.text(own)
        tokens, parents = drafted.tokens[0].tolist(), drafted.parents[0].tolist()
        scores = drafted.scores[0].tolist()
        paths: list[list[int] | None] = [own]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            above = paths[parent]
            paths.append(None if above is None or not self._assistant.speaks(token) else [*above, token])
        alive = [n for n in range(1, len(paths)) if paths[n] is not None]
        written = dict(zip(alive, self._assistant.texts([paths[n] for n in alive]), strict=True))
        inner = {parents[n] for n in alive}
        result = []
        for leaf in alive:
            if leaf in inner:
                continue
            text = written[leaf].rstrip(_UNFINISHED)
            if not text.startswith(before) or len(text) == len(before):
                continue
            reached: list[tuple[int, float]] = []
            node = leaf
            while node > 0:
                reached.append((len(written[node].rstrip(_UNFINISHED)) - len(before), scores[node]))
                node = parents[node]
            result.append((text[len(before) :], reached[::-1]))
        return result


def _score(reached: list[tuple[int, float]], end: int) -> float:
    return next((score for characters, score in reached if characters >= end), reached[-1][1])


def _reproduces(ids: list[int], window: list[int]) -> bool:
    """Whether `ids` end as `window` does."""
    count = min(len(window), REPRODUCED)
    return ids[len(ids) - count :] == window[len(window) - count :] if len(ids) >= count else False


class _Trie:
    """Paths of the target's tokens, merged."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.scores = [root], [-1], [1.0]
        self.places: dict[tuple[int, int], int] = {}

    def add(self, path: list[int], scores: list[float]) -> None:
        node = 0
        for token, score in zip(path, scores, strict=False):
            child = self.places.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(score)
            self.scores[child] = max(self.scores[child], score)
            node = child

    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents, self.scores)


class _Codec:
    """One tokenizer, without special tokens and without beautification.

    Raises:
        DrafterError: the tokenizer cannot say which characters a token stands for.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DrafterError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which drafter 'universal' needs to know a token's "
                "characters. Load it with AutoTokenizer.from_pretrained(..., use_fast=True), or use tree_spec='union'."
            )
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special: dict[int, str] = {i: str(t) for i, t in added.items() if t.special}
        self.special.update(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self._ids = {text: i for i, text in self.special.items()}
        self._size = len(tokenizer)

    def special_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def speaks(self, token: int) -> bool:
        """Whether a token stands for text."""
        return token < self._size and token not in self.special

    def opening(self) -> list[int]:
        """What the tokenizer puts before every text, e.g. a BOS token."""
        return list(itertools.takewhile(self.special.__contains__, self.tokenizer("a")["input_ids"]))

    def text(self, ids: list[int]) -> str:
        return self.texts([ids])[0]

    def texts(self, sequences: Sequence[Any]) -> list[str]:
        if not sequences:
            return []
        return self.tokenizer.batch_decode(  # type: ignore[no-any-return]
            list(sequences), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def encode(self, texts: list[str]) -> list[tuple[list[int], list[int]]]:
        """For each text its ids, and where the characters of each end."""
        if not texts:
            return []
        found = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = [[end for _, end in offsets] for offsets in found["offset_mapping"]]
        return list(zip(found["input_ids"], ends, strict=True))
