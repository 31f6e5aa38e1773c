"""Draws a `Profile`: tables, bars and a plot in the terminal, and a PNG. It refuses to measure and to conclude."""

from __future__ import annotations

import importlib.util
import statistics
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from . import terminal
from .loading import UserError, describe
from .profile import TURNS, Profile, milliseconds, speed


def show(profile: Profile, facts: dict[str, Any], screen: terminal.Screen) -> None:
    """Tells it all on `screen`."""
    worth = 1000 * profile.cost[1] * (1 + np.concatenate([[0.0], profile.gain]))
    points = [(float(rows), 1000 * statistics.median(seconds)) for rows, seconds in profile.samples.items()]
    screen.show(
        [
            [],
            [("What rows cost here, and what drafts are worth", "title")],
            [(_heading(profile, facts), "muted")],
            [],
            *_size_lines(profile, screen.width),
            [],
            [("Milliseconds of a round by its rows", "title")],
            [("● measured", "open"), ("   ", ""), ("+ what its tokens cost plainly: trees pay below", "kept")],
            *terminal.plot_lines(
                [("+", "kept", worth.tolist()), ("·", "open", (1000 * profile.cost).tolist())],
                [("●", "open", points)],
                list(profile.samples),
                screen.width,
            ),
            [],
            *_chosen_lines(profile, screen.width),
            [],
            *_speed_lines(profile),
            [],
            [("What would have to be true for larger trees to pay", "title")],
            *(line for sentence in profile.conclusions() for line in _wrapped(sentence, screen.width, "")),
        ]
    )


def _heading(profile: Profile, facts: dict[str, Any]) -> str:
    return f"{facts['model']}, {describe(facts['machine'])}, drafts by {profile.drafter}"


def _size_lines(profile: Profile, width: int) -> list[terminal.Line]:
    """The curves at the measured sizes and at the best one."""
    header = ("nodes", "rows", "ms", "T/T(1)", "promised", "came true", "tokens/s", "+1 ms", "brings", "worth")
    sizes = sorted({rows - 1 for rows in profile.samples} | {profile.best})
    rows = []
    for n in sizes:
        name, seconds = f"{n}{'*' * (n == profile.best)}", profile.cost[n + 1]
        cells = [name, f"{n + 1}", f"{1000 * seconds:.1f}", f"{seconds / profile.cost[1]:.2f}"]
        if n <= profile.most:
            cells += [f"{1 + profile.promised[n]:.2f}", f"{1 + profile.came_true[n]:.2f}", f"{profile.speeds[n]:.1f}"]
        if n < profile.most:
            step = profile.step(n, n + 1)
            cells += [f"{1000 * step['price_seconds']:.2f}", f"{step['brings_tokens']:.3f}"]
            cells.append(f"{1000 * step['worth_seconds']:.2f}")
        rows.append(cells + ["-"] * (len(header) - len(cells)))
    rounds = sum(map(len, profile.full.values()))
    notes = (
        f"ms: a round at {profile.context} cached tokens without drafting; median of {TURNS}, made never to fall.",
        f"promised, came true: tokens a round with the n best guesses, by their scores and in fact, in {rounds} rounds.",
        f"tokens/s: were all rounds of this size, with {milliseconds(profile.drafting)} of drafting. *: the fastest.",
        "+1 ms: what one more node costs, the first with drafting; the tokens that it brings in fact; and what those are "
        f"worth, in ms, at {profile.rate:.1f} tokens/s.",
    )
    table = terminal.table_lines(header, rows, ["good" if n == profile.best else "" for n in sizes])
    return [*table, *(line for note in notes for line in _wrapped(note, width, "muted"))]


def _wrapped(text: str, width: int, style: str) -> list[terminal.Line]:
    return [[(line, style)] for line in textwrap.wrap(text, width, subsequent_indent="  ")]


def _chosen_lines(profile: Profile, width: int) -> list[terminal.Line]:
    """The histogram of the sizes that the loop chose."""
    lines: list[terminal.Line] = [[(f"Nodes that the loop chose, in {len(profile.rounds)} rounds", "title")]]
    highs = [rows - 1 for rows in profile.samples]
    for low, high in zip([0, *(n + 1 for n in highs)], highs, strict=False):
        count = sum(count for nodes, count in profile.sizes.items() if low <= nodes <= high)
        name = f"{low}-{high}" if low < high else f"{low}" if low else "plain"
        bar = terminal.bar(count / len(profile.rounds), width - 20) if count else ""
        lines.append([(f"{name:>7} ", ""), (bar, "kept" if high else "muted"), (f" {count}", "")])
    return lines


def _speed_lines(profile: Profile) -> list[terminal.Line]:
    """How fast the loop was: by prompt, and by whether a round drafted."""
    header = ("", "rounds", "tokens", "nodes/round", "tokens/round", "tokens/s")
    rows = []
    for name, records in profile.groups.items():
        own = speed(records)
        means = [f"{own['nodes_per_round']:.1f}", f"{own['tokens_per_round']:.2f}", f"{own['tokens_per_second']:.1f}"]
        rows.append([name, f"{own['rounds']}", f"{own['tokens']}", *(means if records else "---")])
    return terminal.table_lines(header, rows, [""] * (len(rows) - 1) + ["good"])


# ---------------------------------------------------------------- PNG


def check_png(path: Path) -> None:
    """Raises `UserError` where `write_png` could not work: better now than after the measurements."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"--png {path} cannot be written: {reason}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--png needs matplotlib: pip install hf-treespec[bench]")


def write_png(profile: Profile, facts: dict[str, Any], path: Path) -> None:
    """The cost curve, the expected tokens, and tokens per second with the chosen sizes, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    figure.suptitle(_heading(profile, facts))
    cost, gain, speeds = figure.subplots(1, 3)
    plain, ticks = float(profile.cost[1]), list(profile.samples)
    rows = np.arange(1, profile.most + 2)  # of trees that may be drafted
    for size, seconds in profile.samples.items():
        cost.plot([size] * len(seconds), 1000 * np.array(seconds), ".", color="0.75", zorder=1)
    medians = [1000 * statistics.median(seconds) for seconds in profile.samples.values()]
    cost.plot(np.arange(1, len(profile.cost)), 1000 * profile.cost[1:], color="C1")
    cost.plot(ticks, medians, "o", color="C1", label="a round, without drafting (medians)")
    cost.plot(rows, 1000 * plain * (1 + profile.gain), "--", color="C2", label="what its tokens cost plainly")
    cost.set(title=f"Cost at {profile.context} cached tokens", ylabel="ms", ylim=(0, 1300 * profile.cost[-1]))
    gain.plot(rows, 1 + profile.promised, "--", color="C0", label="promised by calibrated scores")
    gain.plot(rows, 1 + profile.came_true, ".", color="C2", markersize=4, label="came true")
    gain.plot(rows, 1 + profile.gain, color="C2", label="came true, made concave")
    gain.set(title="Tokens of a round with the best guesses", ylabel="tokens")
    speeds.plot(rows, profile.speeds, color="C4", label="were all rounds of this size")
    chosen, counts = np.array([*profile.sizes.items()]).T
    area = 600 * counts / len(profile.rounds)
    speeds.scatter(1 + chosen, profile.speeds[chosen], area, color="C4", alpha=0.5, label="sizes chosen (area: rounds)")
    speeds.axhline(profile.loop, color="C2", linestyle="--", label="the loop with its own sizes")
    speeds.axhline(1 / plain, color="0.5", linestyle=":", label="plain decoding")
    speeds.set(title="Speed", ylabel="tokens/s", ylim=(0, 1.1 * profile.rate))
    for axes in (cost, gain, speeds):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.set_xlabel("rows of the forward: nodes with the root")
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UserError(f"--png {path} cannot be written: {error.strerror}") from error
