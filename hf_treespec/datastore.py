"""A datastore: earlier texts as token ids, sorted so that what followed any few tokens is found by binary search.

One file, memory-mapped: opening costs the same whatever its size, and a lookup reads the few pages that it needs
(retrieval as in REST, He et al. 2023, arXiv 2311.08252). Little-endian, each part aligned to 64 bytes:

    magic      8 bytes
    length     uint64, of the header
    header     JSON: everything in `Header`
    tokens     (n,) uint16 or uint32: all texts, each followed by one separator (the id `vocabulary`, which no text holds)
    starts     (vocabulary + 1,) uint32: where in `suffixes` the positions of each token begin
    suffixes   (n - texts,) uint32: positions of all tokens, sorted by the `CONTEXT` tokens from there on

A match never holds a separator, so that it cannot cross a text's boundary, and what follows a match ends there.

A suffix array proper would compare whole suffixes; nothing here matches more than `CONTEXT` tokens, and repeated texts,
which make whole suffixes dear to compare, cost nothing more this way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .errors import DatastoreError
from .fingerprint import fingerprint

MAGIC = b"\x89HFTSD\r\n"  # a first byte that no text has, and a line end that a transfer as text would break
FORMAT = 1
ALIGNMENT = 64
MAX_HEADER = 2**26
MAX_TOKENS = 2**32 - 1  # positions are uint32
# Longest match in tokens. In answers of SmolLM2-135M, matches of 10 to 14 tokens came true two times in three, of 15, 16 and
# more nine times in ten: longer ones have little to add, and each doubling costs another sort.
CONTEXT = 16
# Occurrences looked at where there are more. Shares are known to a sixteenth then; four times as many made no better drafts.
SAMPLE = 64
_FEW = 12  # up to here a loop is faster than numpy

Interval = tuple[int, int]  # of places in `suffixes`: the first, and one behind the last
NOWHERE: Interval = (0, 0)


@dataclasses.dataclass(frozen=True)
class Header:
    """What a datastore says about itself.

    Attributes:
        tokens: token ids in the file, one separator for each text included.
        texts: texts that they come from.
        vocabulary: ids are below it: the tokenizer's size, added tokens included.
        dtype: "uint16" or "uint32".
        context: tokens by which the positions are sorted.
        fingerprint: of the tokenizer, see `fingerprint`.
        sha256: of the three arrays, as they stand in the file.
        sources: what the texts were read from, for people.
        version: the file format's.
    """

    tokens: int
    texts: int
    vocabulary: int
    dtype: str
    context: int
    fingerprint: str
    sha256: str
    sources: tuple[str, ...] = ()
    version: int = FORMAT

    @property
    def counts(self) -> tuple[int, int, int]:
        """Entries of tokens, starts and suffixes."""
        return self.tokens, self.vocabulary + 1, self.tokens - self.texts


class Datastore:
    """An opened datastore: `Datastore.open(path)`.

    Attributes:
        path: of the file.
        header: what it says about itself.
        tokens, starts, suffixes: the arrays described above, read-only views of the mapped file.
    """

    def __init__(self, path: Path, header: Header, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self.path, self.header = path, header
        self.tokens, self.starts, self.suffixes = arrays
        # single entries of a memoryview are Python's own ints, three times as fast as numpy's
        self._token, self._start, self._suffix = (array.data for array in arrays)

    @classmethod
    def open(cls, path: str | os.PathLike[str], tokenizer: Any = None) -> Datastore:
        """Maps the file at `path`. Its header and size are checked here, the arrays' checksum only by `verify`.

        Args:
            tokenizer: refuse a datastore that was made with another one.

        Raises:
            DatastoreError: no such file, not a datastore, another format, not of the size that its header says, or
                another tokenizer's.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                header, offset = _read_header(file, path)
            data = np.memmap(path, np.uint8, mode="r")
        except OSError as error:
            raise DatastoreError(f"cannot open datastore {str(path)!r}: {error.strerror or error}.") from error
        dtypes = (header.dtype, "uint32", "uint32")
        arrays = []
        for dtype, count in zip(dtypes, header.counts, strict=True):
            end = offset + count * np.dtype(dtype).itemsize
            array = data[offset:end].view(np.ndarray).view(dtype)
            arrays.append(array if sys.byteorder == "little" else array.byteswap())
            offset = _aligned(end)
        store = cls(path, header, arrays)
        if tokenizer is not None:
            store.check_tokenizer(tokenizer)
        return store

    def __deepcopy__(self, memo: dict[int, Any]) -> Datastore:
        return self  # `generate` deep-copies the config that it may stand in

    def __reduce__(self) -> Any:
        return Datastore.open, (self.path,)

    def __repr__(self) -> str:
        return f"Datastore({str(self.path)!r}, tokens={self.header.tokens}, texts={self.header.texts})"

    # ---------------------------------------------------------------- checks

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises `DatastoreError` unless the texts were cut into tokens by this tokenizer."""
        found = fingerprint(tokenizer)
        if found != self.header.fingerprint:
            raise DatastoreError(
                f"datastore {str(self.path)!r} was made with another tokenizer: its fingerprint is "
                f"{self.header.fingerprint}, that of {type(tokenizer).__name__} {tokenizer.name_or_path!r} is {found}. "
                "Build one with this tokenizer: hf-treespec datastore build FILES --out PATH --model MODEL."
            )

    def check_vocabulary(self, size: int) -> None:
        """Raises `DatastoreError` unless a target with `size` logits can say every id; heads are often padded."""
        if self.header.vocabulary > size:
            raise DatastoreError(
                f"datastore {str(self.path)!r} holds ids of a vocabulary of {self.header.vocabulary} tokens, the target "
                f"has {size}. Build one with the target's tokenizer: hf-treespec datastore build FILES --out PATH "
                "--model MODEL."
            )

    def verify(self) -> None:
        """Reads the whole file and raises `DatastoreError` unless it holds what was written."""
        if _checksum((self.tokens, self.starts, self.suffixes)) != self.header.sha256:
            raise self.damaged("its checksum is not that of its contents")

    def damaged(self, what: str) -> DatastoreError:
        """The error for a file whose contents cannot be what was written."""
        return _damaged(self.path, what)

    # ---------------------------------------------------------------- lookups

    def token(self, token: int) -> Interval:
        """Where a token occurs."""
        if not 0 <= token < self.header.vocabulary:  # the separator is not a token
            return NOWHERE
        return self._start[token], self._start[token + 1]

    def narrow(self, interval: Interval, length: int, token: int) -> Interval:
        """Where `token` follows, among the occurrences of a match.

        Args:
            interval: all occurrences of a match of `length` tokens, 1 ≤ length < `CONTEXT`.
        """
        if not 0 <= token < self.header.vocabulary:
            return NOWHERE
        tokens, suffixes = self._token, self._suffix
        first, end = interval
        if end - first == 1:
            return interval if tokens[suffixes[first] + length] == token else NOWHERE

        def following(position: int) -> Any:
            return tokens[position + length]

        low = bisect_left(suffixes, token, first, end, key=following)
        if low == end or tokens[suffixes[low] + length] != token:
            return NOWHERE
        return low, bisect_right(suffixes, token, low, end, key=following)

    def find(self, tokens: Sequence[int]) -> Interval:
        """All places where `tokens` occur within one text.

        Args:
            tokens: 1 to `CONTEXT` of them.
        """
        if not 1 <= len(tokens) <= self.header.context:
            raise DatastoreError(f"a match has 1 to {self.header.context} tokens, not {len(tokens)}.")
        interval = self.token(tokens[0])
        for length in range(1, len(tokens)):
            interval = self.narrow(interval, length, tokens[length])
        return interval

    def following(self, interval: Interval, length: int) -> tuple[dict[int, int], int]:
        """What follows a match of `length` tokens: token to count, and how many occurrences were looked at.

        Of more than `SAMPLE` occurrences, so many are looked at, evenly. Ends of texts are not counted as tokens.
        """
        first, end = interval
        count = min(end - first, SAMPLE)
        counts: dict[int, int] = {}
        if count <= _FEW:
            tokens = self._token
            for position in self._suffix[first:end]:
                token = tokens[position + length]
                counts[token] = counts.get(token, 0) + 1
        else:
            places: Any = slice(first, end)
            if count < end - first:
                places = first + np.arange(count) * (end - first) // count
            counts = Counter(self.tokens[self.suffixes[places].astype(np.int64) + length].tolist())
        counts.pop(self.header.vocabulary, None)
        return counts, count


# -------------------------------------------------------------------- building


def build(
    path: str | os.PathLike[str],
    texts: Iterable[npt.ArrayLike],
    *,
    vocabulary: int,
    fingerprint: str,
    sources: Sequence[str] = (),
    overwrite: bool = False,
) -> Header:
    """Writes a datastore. The file appears when it is whole; a build that fails leaves nothing.

    Needs about 40 bytes of memory a token; ten million tokens take some fifteen seconds.

    Args:
        texts: token ids of each text; empty ones are passed over.
        vocabulary: the tokenizer's size, `len(tokenizer)`; ids must be below it.
        fingerprint: `fingerprint(tokenizer)`.
        sources: what the texts were read from, for people.
        overwrite: replace what stands at `path`.

    Raises:
        DatastoreError: the file exists, cannot be written, no text holds a token, or an id is out of range.
    """
    path = Path(path)
    check_free(path, overwrite)
    dtype = np.dtype(np.uint16 if vocabulary < 2**16 else np.uint32)
    pieces: list[npt.NDArray[Any]] = []
    for index, text in enumerate(texts):
        ids = np.asarray(text)
        if not ids.size:
            continue
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocabulary:
            raise DatastoreError(f"text {index} must be a list of token ids, 0 to {vocabulary - 1} each.")
        pieces += [ids.astype(dtype), np.array([vocabulary], dtype)]
    if not pieces:
        raise DatastoreError(f"there is no text to put into datastore {str(path)!r}.")
    count = len(pieces) // 2
    tokens = np.concatenate(pieces)
    del pieces
    if len(tokens) > MAX_TOKENS:
        raise DatastoreError(f"{len(tokens)} tokens are too many for one datastore; {MAX_TOKENS} fit.")
    order = context_order(tokens, vocabulary)
    suffixes = order[tokens[order] != vocabulary].astype(np.uint32)
    del order
    starts = np.zeros(vocabulary + 1, np.uint32)
    np.cumsum(np.bincount(tokens, minlength=vocabulary + 1)[:-1], out=starts[1:])
    arrays = (tokens, starts, suffixes)
    header = Header(
        tokens=len(tokens),
        texts=count,
        vocabulary=vocabulary,
        dtype=dtype.name,
        context=CONTEXT,
        fingerprint=fingerprint,
        sha256=_checksum(arrays),
        sources=tuple(sources),
    )
    _write(path, header, arrays)
    return header


def check_free(path: Path, overwrite: bool) -> None:
    """Raises `DatastoreError` unless a file may be written to `path`."""
    if path.is_dir():
        raise DatastoreError(f"cannot write datastore {str(path)!r}: it is a folder; name a file.")
    if path.exists() and not overwrite:
        raise DatastoreError(
            f"datastore {str(path)!r} exists; remove it, name another file, or overwrite it (--force)."
        )
    if not path.parent.is_dir():
        raise DatastoreError(f"cannot write datastore {str(path)!r}: there is no folder {str(path.parent)!r}.")


def context_order(tokens: npt.NDArray[Any], highest: int) -> npt.NDArray[np.int64]:
    """(n,) all positions, sorted by the next `CONTEXT` tokens (at least), equal ones by position.

    Prefix doubling (Manber and Myers 1993), begun with as many tokens as 64 bits hold: 4 ids of 16 bits, 3 of 17 to 21.

    Args:
        tokens: (n,) unsigned ids, none above `highest`.
    """
    bits = max(1, highest.bit_length())
    length = 64 // bits
    key = np.zeros(len(tokens), np.uint64)
    for ahead in range(length):
        key <<= np.uint64(bits)
        key[: max(0, len(tokens) - ahead)] |= tokens[ahead:]
    while True:
        order = np.argsort(key, kind="stable")
        if length >= CONTEXT:
            return order
        key = key[order]
        new = np.empty(len(key), bool)
        new[0] = False
        np.not_equal(key[1:], key[:-1], out=new[1:])
        rank = np.empty(len(key), np.uint32)
        rank[order] = np.cumsum(new, dtype=np.uint32)
        del order
        key = rank.astype(np.uint64) << np.uint64(32)
        key[: max(0, len(tokens) - length)] |= rank[length:]
        length *= 2


def _write(path: Path, header: Header, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Beside `path`, then renamed: what bears the name is always whole."""
    text = json.dumps(dataclasses.asdict(header)).encode()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + text)
            for array in arrays:
                file.write(bytes(_aligned(file.tell()) - file.tell()))
                file.write(_little_endian(array))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise DatastoreError(f"cannot write datastore {str(path)!r}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _little_endian(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).view(np.uint8).data


def _checksum(arrays: Sequence[npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(_little_endian(array))
    return digest.hexdigest()


# -------------------------------------------------------------------- reading the header


def _damaged(path: Path, what: str) -> DatastoreError:
    return DatastoreError(f"datastore {str(path)!r} is damaged: {what}. Build it again.")


def _read_header(file: BinaryIO, path: Path) -> tuple[Header, int]:
    """The header, and where the tokens begin. The file's size is what it says."""
    if file.read(len(MAGIC)) != MAGIC:
        raise DatastoreError(f"{str(path)!r} is not a datastore; make one with hf-treespec datastore build.")
    length = int.from_bytes(file.read(8), "little")
    size = os.fstat(file.fileno()).st_size
    if length > min(MAX_HEADER, size):
        raise _damaged(path, f"its header of {length} bytes cannot be")
    try:
        values = json.loads(file.read(length))
        version = values["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"its header cannot be read ({error!r})") from error
    if version != FORMAT:
        raise DatastoreError(
            f"datastore {str(path)!r} has format {version!r}, this version of hf_treespec reads format {FORMAT}. "
            "Build it again."
        )
    try:
        header = Header(**{**values, "sources": tuple(values["sources"])})
    except (TypeError, KeyError) as error:
        raise _damaged(path, f"its header cannot be read ({error!r})") from error
    for problem in _problems(header):
        raise _damaged(path, problem)
    begin = _aligned(file.tell())
    tokens, starts, suffixes = header.counts
    expected = _aligned(_aligned(begin + tokens * np.dtype(header.dtype).itemsize) + starts * 4) + suffixes * 4
    if size != expected:
        raise _damaged(path, f"it has {size} bytes, its header says {expected}")
    return header, begin


def _problems(header: Header) -> Iterator[str]:
    for name in ("tokens", "texts", "vocabulary", "context"):
        value = getattr(header, name)
        if type(value) is not int or value < 1:
            yield f"its header says {name}={value!r}"
    if header.dtype not in ("uint16", "uint32"):
        yield f"its header says dtype={header.dtype!r}"
    if header.tokens < 2 * header.texts:
        yield f"its header says {header.texts} texts in {header.tokens} tokens"
