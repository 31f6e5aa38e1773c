"""`hf-treespec datastore`: build makes a datastore from files of text, info says what one holds.

It refuses to know how a datastore is laid out (`datastore.py`), and what is drafted from it (`drafters/datastore.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import datastore, terminal
from .demo_model import HUB_ID
from .fingerprint import fingerprint
from .loading import UserError, load_tokenizer

FIELD = "text"
# A longer text is cut into tokens piece by piece, each up to the end of a line.
PIECE = 2**20  # characters
BATCH = 2**22  # characters that the tokenizer is given at once


def add_commands(commands: Any, progress: Callable[[str], None]) -> None:
    """Adds `datastore build` and `datastore info` to the subparsers of `hf-treespec`."""
    group = commands.add_parser("datastore", help="earlier texts to draft from: build one, see what one holds")
    group = group.add_subparsers(title="commands", metavar="COMMAND", required=True)

    build = group.add_parser("build", help="make a datastore from files of text")
    build.set_defaults(command=run_build, progress=progress)
    build.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="UTF-8: in .jsonl each line's field is a text, any other file is one text; - reads one from stdin",
    )
    build.add_argument("--out", type=Path, required=True, metavar="PATH", help="the datastore")
    build.add_argument("--model", metavar="ID_OR_PATH", help=f"whose tokenizer; default: {HUB_ID}, embedded")
    build.add_argument("--field", metavar="NAME", help=f"of .jsonl files; default: {FIELD}")
    build.add_argument("--force", action="store_true", help="replace what stands at PATH")
    build.add_argument("--json", action="store_true", help="what was made as one JSON document on stdout")

    info = group.add_parser("info", help="say what a datastore holds, and check it")
    info.set_defaults(command=run_info)
    info.add_argument("path", type=Path, metavar="PATH")
    info.add_argument("--json", action="store_true", help="one JSON document on stdout")


def drafter_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `--datastore` of the decoding commands means for their drafter.

    Raises:
        UserError: another drafter is asked for, which takes none.
    """
    takes = {"auto": "datastore", "union": "datastore", "datastore": "path"}
    drafter = args.drafter or "auto"
    for other, given in {
        f"--drafter {drafter}": drafter not in takes,
        "--assistant-model": args.assistant_model is not None,
        "--head": args.head is not None,
    }.items():
        if given:
            raise UserError(f"--datastore is for the drafters auto, union and datastore, not for {other}")
    return {takes[drafter]: args.datastore}


def run_build(args: argparse.Namespace) -> int:
    datastore.check_free(args.out, args.force)  # before anything takes time
    files = [_File(name, args.field or FIELD) for name in args.files]
    if args.field is not None and not any(file.lines for file in files):
        raise UserError(f"--field {args.field} is for .jsonl files, and none is given")
    args.progress(f"loading the tokenizer of {args.model or HUB_ID} ...")
    tokenizer = load_tokenizer(args.model)
    texts = (text for file in files for text in file.texts())
    datastore.build(
        args.out,
        tokenized(texts, tokenizer, args.progress),
        vocabulary=len(tokenizer),
        fingerprint=fingerprint(tokenizer),
        sources=[file.name for file in files],
        overwrite=args.force,
    )
    _tell(datastore.Datastore.open(args.out), args.json)
    return 0


def run_info(args: argparse.Namespace) -> int:
    store = datastore.Datastore.open(args.path)
    store.verify()
    _tell(store, args.json)
    return 0


def _tell(store: datastore.Datastore, as_json: bool) -> None:
    header, size = store.header, store.path.stat().st_size
    if as_json:
        print(json.dumps({"path": str(store.path), "bytes": size, **dataclasses.asdict(header)}, indent=2))
        return
    shown = ", ".join(header.sources[:8]) + (f" and {len(header.sources) - 8} more" if len(header.sources) > 8 else "")
    rows = {
        "datastore": f"{store.path} ({size / 1e6:.1f} MB)",
        "holds": f"{header.tokens - header.texts} tokens in {header.texts} text{'s' * (header.texts != 1)}",
        "from": shown or "not said",
        "tokenizer": f"{header.vocabulary} tokens, fingerprint {header.fingerprint}",
        "format": f"{header.version}, {header.dtype}, sorted by {header.context} tokens",
    }
    for name, value in rows.items():
        print(f"{name:<10} {terminal.inert(value)}")


class _File:
    """One of the files to read, known to exist; "-" is stdin."""

    def __init__(self, name: str, field: str) -> None:
        self.name, self.field = "stdin" if name == "-" else name, field
        self.path = None if name == "-" else Path(name)
        self.lines = self.path is not None and self.path.suffix.lower() == ".jsonl"
        if self.path is not None and not self.path.exists():
            raise UserError(f"there is no file {name!r}")
        if self.path is not None and self.path.is_dir():
            raise UserError(f"{name!r} is a folder; name files")

    def texts(self) -> Iterator[str]:
        """Its texts, none of them empty.

        Raises:
            UserError: it cannot be read, is not UTF-8, holds no text, or a line is not what it should be.
        """
        try:
            data = sys.stdin.buffer.read() if self.path is None else self.path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {self.name!r}: {error.strerror or error}") from error
        try:
            whole = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.name!r} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
            ) from error
        found = False
        for text in self._lines(whole) if self.lines else [whole]:
            if text.strip():
                found = True
                yield text
        if not found:
            raise UserError(f"{self.name!r} holds no text")

    def _lines(self, whole: str) -> Iterator[str]:
        for number, line in enumerate(whole.split("\n"), 1):
            if not line.strip():
                continue
            where = f"{self.name!r}, line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where}: not JSON ({error})") from error
            if not isinstance(value, dict):
                raise UserError(f"{where}: not a JSON object")
            if self.field not in value:
                known = ", ".join(map(repr, value)) or "none"
                raise UserError(f"{where}: no field {self.field!r} (its fields: {known}); choose one with --field")
            if not isinstance(value[self.field], str):
                raise UserError(f"{where}: field {self.field!r} is {type(value[self.field]).__name__}, not text")
            yield value[self.field]


def tokenized(texts: Iterator[str], tokenizer: Any, progress: Callable[[str], None]) -> Iterator[list[int]]:
    """Token ids of each text, without special tokens around it."""
    done = 0
    for batch in _batches(texts):
        pieces = [piece for text in batch for piece in cut(text)]
        ids = iter(tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])
        for text in batch:
            yield [token for _ in cut(text) for token in next(ids)]
        done += sum(map(len, batch))
        progress(f"{done / 1e6:.1f} million characters read")


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def cut(text: str) -> list[str]:
    """`text` in pieces of about `PIECE` characters, cut where a line begins with a visible character.

    There a tokenizer would cut too, as a rule; elsewhere a word's tokens could change.
    """
    pieces = []
    begin = 0
    while len(text) - begin > 2 * PIECE:
        end = text.find("\n", begin + PIECE) + 1
        while end and end < len(text) and text[end].isspace():
            end = text.find("\n", end) + 1
        if not end:
            break
        pieces.append(text[begin:end])
        begin = end
    return [*pieces, text[begin:]]
