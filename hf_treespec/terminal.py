"""Draws rounds, texts and tables: as plain lines anywhere, in colour and animated where rich is installed.

A tree is drawn from left to right, so that its kept path reads like the text that it is:

    … the closest star to ┬ ✓ the ┬ ✓ Earth ✓. ✓ The ◆ Moon
                          │       └ · Sun · is
                          └ · te ·h · Earth

A mark stands before every token, and the token follows as it is: with its space where it begins a word.

Everything is first made as lines of (text, style) cells and only then printed, with or without rich, so that both show
the same. Texts come from a model and are hostile until shown otherwise: `inert` lets no control character, escape
sequence or direction mark through, and nothing is ever read as markup.

It refuses to know models, generation and clocks: records and numbers come in, lines go out.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from .detokenizer import Detokenizer
from .stats import RoundRecord

Line = list[tuple[str, str]]
Decode = Callable[[int], str]

# The names of what a cell can be, and how rich shows it. The marks say the same without colour.
STYLES = {
    "": "",
    "title": "bold",
    "muted": "dim",
    "kept": "bold green",
    "own": "bold magenta",
    "dropped": "dim",
    "open": "yellow",
    "good": "bold green",
    "bad": "bold red",
}
MARKS = {"kept": "✓", "own": "◆", "dropped": "·", "open": "?"}

FOLDED, UNFOLDED = "→", "↳"  # a kept path that leaves the line, and where it goes on
TAIL = 28  # columns of the text so far that stand at a tree's root


# ---------------------------------------------------------------- text


def inert(text: str, keep: str = "\n\t\u200c\u200d") -> str:
    """`text` with every character that could steer a terminal shown as its escape, `\\x1b` for instance.

    Args:
        keep: let through: line ends, and the two joiners that emoji and several scripts are written with.
    """
    if text.isascii() and text.isprintable():
        return text
    steering = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        c.encode("unicode_escape").decode() if c not in keep and unicodedata.category(c) in steering else c
        for c in text
    )


def label(text: str) -> str:
    """A token on one line, with something to see where it has nothing to show."""
    if not text.strip(" "):
        return "␣" * len(text) or "∅"
    text = inert(text.replace("\n", "⏎").replace("\t", "⇥"), keep="")
    return "◌" + text if unicodedata.category(text[0]).startswith("M") else text  # it would sit on our own mark


def columns(text: str) -> int:
    """Terminal columns of printable `text`."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me", "Cf") else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def token_text(tokenizer: Any) -> Decode:
    """Decodes one token, remembering it."""
    known: dict[int, str] = {}

    def decode(token: int) -> str:
        if token not in known:
            known[token] = str(tokenizer.decode([token]))
        return known[token]

    return decode


def texts_by_origin(tokenizer: Any, records: Sequence[RoundRecord]) -> list[Line]:
    """The text up to and with each record, in cells of style "kept" (drafted) and "own" (the model's own tokens)."""
    detokenizer = Detokenizer(tokenizer)
    texts: list[Line] = []
    for record in records:
        cells = list(texts[-1]) if texts else []
        for place, token in enumerate(record.committed):
            cells.append((inert(detokenizer.add([token])), "kept" if place < record.accepted else "own"))
        texts.append(cells)
    texts[-1].append((inert(detokenizer.end()), "own"))
    return texts


# ---------------------------------------------------------------- trees


def tree_lines(record: RoundRecord, decode: Decode, before: str, width: int, *, decided: bool = True) -> list[Line]:
    """The tree of one round.

    Args:
        decode: gives the text of one token.
        before: the text so far; its end stands at the root.
        decided: False draws the guesses as they are before the model's verdict.
    """
    return _TreeDrawing(record, decode, width, decided).lines(before)


class _TreeDrawing:
    def __init__(self, record: RoundRecord, decode: Decode, width: int, decided: bool) -> None:
        self.width = width
        self.folded: list[int] = []  # nodes whose blocks go on in a line of their own
        parents, tokens = record.parents.tolist(), record.tokens.tolist()
        self.children: list[list[int]] = [[] for _ in [*tokens, 0]]  # the last one: the bonus
        self.kept = set(record.path[1:])
        if record.bonus is None:  # decoding stopped on a drafted token: it is in the text, but has no successor there
            last = record.tree.child(record.path[-1], record.committed[-1])
            self.kept |= {last} if last is not None else set()
        for node in sorted(range(1, len(tokens)), key=lambda n: n not in self.kept):
            self.children[parents[node]].append(node)
        state = ["kept" if node in self.kept else "dropped" for node in range(len(tokens))]
        if not decided:
            state = ["open"] * len(tokens)
        elif record.bonus is not None:
            self.children[record.path[-1]].append(len(tokens))
            tokens, state = [*tokens, record.bonus], [*state, "own"]
        self.cells = [(MARKS[s] + label(decode(t)), s) for t, s in zip(tokens, state, strict=True)]

    def lines(self, before: str) -> list[Line]:
        self.cells[0] = (_ending(before, max(4, min(TAIL, self.width // 3))), "title")
        lines = self._block(0, 0)
        while self.folded:
            block = self._block(self.folded.pop(0), 4)
            lines += [[(f"  {UNFOLDED} " if first else "    ", "muted"), *line] for line, first in _with_first(block)]
        return [_clip(line, self.width) for line in lines]

    def _block(self, node: int, column: int) -> list[Line]:
        """The lines of a node and all below it; the node's own cell begins the first."""
        cell, children = self.cells[node], self.children[node]
        end = column + columns(cell[0])
        if not children:
            return [[cell]]
        if len(children) == 1:
            if self._fold(children[0], end + 1):
                return [[cell, (f" {FOLDED}", "muted")]]
            return _joined(cell, " ", self._block(children[0], end + 1))
        lines: list[Line] = []
        for child, first in _with_first(children):
            last = child == children[-1]
            block = [[(FOLDED, "muted")]] if self._fold(child, end + 3) else self._block(child, end + 3)
            stem: Line = [cell] if first else [(" " * columns(cell[0]), "")]
            lines.append([*stem, (" ┬ " if first else " └ " if last else " ├ ", "muted"), *block[0]])
            below = (" " * columns(cell[0]) + ("   " if last else " │ "), "muted")
            lines += [[below, *line] for line in block[1:]]
        return lines

    def _fold(self, node: int, column: int) -> bool:
        """Whether a node of the kept path would leave the line; it is then drawn in the next."""
        if node not in self.kept and self.cells[node][1] != "own":
            return False  # a dropped branch is clipped
        fits = column + columns(self.cells[node][0]) + 2 <= self.width
        if not fits:
            self.folded.append(node)
        return not fits


def _joined(cell: tuple[str, str], by: str, block: list[Line]) -> list[Line]:
    pad = " " * (columns(cell[0]) + len(by))
    return [[cell, (by, ""), *line] if first else [(pad, ""), *line] for line, first in _with_first(block)]


def _with_first(items: Sequence[Any]) -> Iterable[tuple[Any, bool]]:
    return ((item, place == 0) for place, item in enumerate(items))


def _ending(text: str, width: int) -> str:
    """The last words of `text` that fit in `width` columns."""
    line = inert(text[-4 * width :].replace("\n", "⏎").replace("\t", " "), keep="").strip()
    if columns(line) <= width:
        return line or "(start)"
    while columns(line) > width - 2:
        line = line[1:]
    word = line.find(" ")
    return "… " + (line[word + 1 :] if 0 <= word < len(line) - 1 else line)


def _clip(line: Line, width: int) -> Line:
    if sum(columns(text) for text, _ in line) <= width:
        return line
    clipped: Line = []
    for text, style in line:
        room = width - 1 - sum(columns(t) for t, _ in clipped)
        if columns(text) > room:
            while columns(text) > room:
                text = text[:-1]
            return [*clipped, (text, style), ("…", "muted")]
        clipped.append((text, style))
    return clipped


# ---------------------------------------------------------------- bars and tables


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of `width` columns, at least one."""
    return "█" * max(1, round(min(1.0, share) * width))


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> list[Line]:
    """A table whose first column is aligned to the left, and all others to the right; `styles` has one a row."""
    widths = [max(columns(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str], style: str) -> Line:
        pads = [" " * (width - columns(cell)) for cell, width in zip(cells, widths, strict=True)]
        texts = [cells[0] + pads[0], *(pad + cell for cell, pad in zip(cells[1:], pads[1:], strict=True))]
        return [("  ".join(texts), style)]

    rule: Line = [("─" * (sum(widths) + 2 * (len(widths) - 1)), "muted")]
    return [line(header, "title"), rule, *(line(row, style) for row, style in zip(rows, styles, strict=True))]


# ---------------------------------------------------------------- plots


def plot_lines(
    curves: Sequence[tuple[str, str, Sequence[float]]],
    points: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    ticks: Sequence[int],
    width: int,
    height: int = 13,
) -> list[Line]:
    """Curves and points over an axis whose ticks stand at equal distances; values begin at zero. Later ones lie on top.

    Args:
        curves: (mark, style, values at 0, 1, 2, ...); a curve that is too short ends early.
        points: (mark, style, (x, value) pairs), x between the ticks.
        ticks: rising, two at least.
    """
    top = max(value for _, _, values in curves for value in values[ticks[0] : ticks[-1] + 1])
    top = max([top, *(value for _, _, pairs in points for _, value in pairs)]) or 1.0
    unit = 10.0 ** (math.floor(math.log10(top)) - 1)
    top = 2 * unit * math.ceil(top / unit / 2)  # two digits, and so has its half
    span = max(len(ticks) * 4, width - 9)
    grid: list[Line] = [[(" ", "")] * span for _ in range(height)]

    def put(column: int, value: float, cell: tuple[str, str]) -> None:
        grid[height - 1 - round(value / top * (height - 1))][column] = cell

    places = np.linspace(0, span - 1, len(ticks)).round()
    for mark, style, values in curves:
        for column, x in enumerate(np.interp(np.arange(span), places, ticks).tolist()):
            if x <= len(values) - 1:
                put(column, float(np.interp(x, np.arange(len(values)), values)), (mark, style))
    for mark, style, pairs in points:
        for x, value in pairs:
            put(round(float(np.interp(x, ticks, places))), value, (mark, style))
    lines: list[Line] = []
    for row, cells in enumerate(grid):
        named = row in (0, height - 1, (height - 1) // 2)
        name = f"{top * (height - 1 - row) / (height - 1):.4g}" if named else ""
        runs = [("".join(c for c, _ in run), style) for style, run in groupby(cells, key=lambda cell: cell[1])]
        lines.append([(f"{name:>7} {'┤' if named else '│'}", "muted"), *runs])
    axis = [" "] * (span + 9)
    for tick, place in zip(ticks, places.astype(int).tolist(), strict=True):
        start = min(9 + place - len(str(tick)) // 2, len(axis) - len(str(tick)))
        axis[start : start + len(str(tick))] = str(tick)
    foot = "".join("┴" if column in places else "─" for column in range(span))
    return [*lines, [(" " * 8 + "└" + foot, "muted")], [("".join(axis), "muted")]]


# ---------------------------------------------------------------- screens


class Screen(Protocol):
    """Where lines go."""

    width: int

    def show(self, lines: Iterable[Line]) -> None:
        """Prints lines; a line too long for the screen is wrapped."""

    def replay(self, frames: Iterable[tuple[list[Line], Line, float]]) -> None:
        """Shows (lines, text, seconds) frames one after the other in one place, and leaves nothing behind."""


class PlainScreen:
    """No colours, no redrawing. Needs nothing installed."""

    def __init__(self) -> None:
        self.width = min(110, shutil.get_terminal_size((100, 40)).columns)

    def show(self, lines: Iterable[Line]) -> None:
        for line in lines:
            print("".join(text for text, _ in line).rstrip())
        sys.stdout.flush()

    def replay(self, frames: Iterable[tuple[list[Line], Line, float]]) -> None:
        pass


class RichScreen:
    """Colours and animation by rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, markup=False, emoji=False)
        self.width = min(120, self.console.width)

    def show(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.console.print(self._text(line), width=self.width)

    def replay(self, frames: Iterable[tuple[list[Line], Line, float]]) -> None:
        from rich.console import Group
        from rich.live import Live

        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            for lines, text, seconds in frames:
                wrapped = list(self._text(text).wrap(self.console, self.width))
                room = max(1, self.console.height - len(lines) - 1)
                shown = wrapped if len(wrapped) <= room else wrapped[len(wrapped) - room :]
                live.update(Group(*map(self._text, lines), *shown), refresh=True)
                time.sleep(seconds)

    @staticmethod
    def _text(line: Line) -> Any:
        from rich.text import Text

        return Text.assemble(*((text, STYLES[style]) for text, style in line), no_wrap=False)
