"""A tokenizer's fingerprint: what tells two of them apart where their vocabularies are of the same size."""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import Any

_fingerprints: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


def fingerprint(tokenizer: Any) -> str:
    """32 hex digits, the same for tokenizers that cut texts into the same ids.

    Of a fast tokenizer: its model (vocabulary and merges), added tokens, normaliser and pre-tokenizer as it serialises
    them, fields without a value left out, since later versions of its library write more of those. Of any other: its
    vocabulary. What only wraps texts (templates, special tokens around them, padding) does not count.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    size, known = _fingerprints.get(tokenizer, (-1, ""))
    if size == len(tokenizer):
        return known
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts: Any = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    else:
        whole = json.loads(backend.to_str())
        parts = {name: _plain(whole[name]) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    found = hashlib.sha256(text.encode()).hexdigest()[:32]
    _fingerprints[tokenizer] = (len(tokenizer), found)
    return found


def _plain(value: Any) -> Any:
    """Fields without a value left out; merges written as pairs, whichever way the library writes them."""
    if isinstance(value, dict):
        kept = {name: _plain(part) for name, part in value.items() if part is not None and part is not False}
        if isinstance(kept.get("merges"), list):
            kept["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in kept["merges"]]
        return kept
    return [_plain(part) for part in value] if isinstance(value, list) else value
