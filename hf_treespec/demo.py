"""What `hf-treespec demo` measures and tells: one prompt decoded plainly, as a chain and as a tree.

`measure` times whole calls of `generate`, prompt included, after a short warm-up of each, taking turns in another order
in every repeat, and compares the texts token by token. Nothing is drawn meanwhile: drawing takes longer than a round.
`show` then replays the rounds of the timed tree from its records, as slowly as an eye needs.

It refuses to know options, how models are loaded, and how lines are drawn.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import terminal
from .loading import describe
from .stats import DecodeStats, RoundRecord

# Copy and edit is where n-gram drafts are at their best. SmolLM2-135M does correct this one; where a misspelt word
# stands right elsewhere in the text, a tree holds both continuations and a chain only one.
PROMPT = (
    "Fix the typos in this text:\n\n"
    "The Sun is a star. The Sun is the closest star to teh Earth. The Earth goes around the Sun once a year, and the "
    "Moon goes arround the Earth once a month. Without the Sun there woud be no light on teh Earth, no light on the "
    "Moon and no life on the Earth."
)
WARM_UP_TOKENS = 8
SHOWN_ROUNDS = 3
SECONDS_OF_REPLAY, FASTEST, SLOWEST = 20.0, 0.4, 1.6  # the whole replay, and the limits of one round in it


@dataclasses.dataclass
class Arm:
    """One way to decode, and what came of it.

    Attributes:
        arguments: of `generate`, beyond those that all arms share.
        ids: the new tokens of the first run.
        stats: None for plain decoding.
        seconds: of each run.
        first_difference: the first place where a run differs from plain decoding, or None.
    """

    name: str
    arguments: dict[str, Any]
    ids: list[int] = dataclasses.field(default_factory=list)
    stats: DecodeStats | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    first_difference: int | None = None

    @property
    def same_text(self) -> bool:
        return self.first_difference is None

    @property
    def rounds(self) -> int:
        """Forwards after the prompt's, which gives the first token. Plain decoding takes one for each token."""
        return self.stats.rounds if self.stats else len(self.ids) - 1

    @property
    def tokens_per_round(self) -> float | None:
        return (len(self.ids) - 1) / self.rounds if self.rounds else None

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.median_seconds


def make_arms(options: dict[str, Any], helper: dict[str, Any]) -> list[Arm]:
    """Plain decoding, the chain that the tree's limits allow, and the tree; `helper` are arguments for an assistant."""
    return [
        Arm("plain", {"tree_spec": False}),  # said, since the model's own generation config may hold another value
        Arm("chain", {"tree_spec": {**options, "max_children": 1}, **helper}),
        Arm("tree", {"tree_spec": options or True, **helper}),
    ]


def measure(
    arms: list[Arm], model: Any, inputs: dict[str, Any], max_new_tokens: int, repeats: int, say: Callable[[str], None]
) -> None:
    """Runs every arm `repeats` times, greedily, and fills it in. The first is what the others are held against."""
    shared = {**inputs, "do_sample": False, "return_dict_in_generate": True}
    for arm in arms:
        model.generate(**shared, **arm.arguments, max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens))
    for repeat in range(repeats):
        for place in range(len(arms)):
            arm = arms[(place + repeat) % len(arms)]
            _synchronize(model.device)
            began = time.perf_counter()
            output = model.generate(**shared, **arm.arguments, max_new_tokens=max_new_tokens)
            _synchronize(model.device)
            arm.seconds.append(time.perf_counter() - began)
            ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            if not repeat:
                arm.ids, arm.stats = ids, getattr(output, "tree_spec", None)
            if arm.first_difference is None:
                arm.first_difference = _first_difference(arms[0].ids, ids)
        say("timed " + ", ".join(f"{arm.name} {arm.seconds[-1]:.2f} s" for arm in arms))


def _first_difference(ours: list[int], theirs: list[int]) -> int | None:
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def same_text(arms: list[Arm]) -> bool:
    return all(arm.same_text for arm in arms)


def document(arms: list[Arm], tokenizer: Any, facts: dict[str, Any], *, rounds: bool = False) -> dict[str, Any]:
    """Everything, ready for JSON; with `rounds`, every round's record too."""
    return {
        **facts,
        "same_text": same_text(arms),
        "arms": [_arm_document(arm, arms[0], tokenizer, rounds) for arm in arms],
    }


def _arm_document(arm: Arm, plain: Arm, tokenizer: Any, rounds: bool) -> dict[str, Any]:
    return {
        "name": arm.name,
        "tokens": len(arm.ids),
        "rounds": arm.rounds,
        "tokens_per_round": arm.tokens_per_round,
        "seconds": arm.median_seconds,
        "seconds_of_each_run": arm.seconds,
        "tokens_per_second": arm.tokens_per_second,
        "speedup": arm.tokens_per_second / plain.tokens_per_second,
        "same_text": arm.same_text,
        "first_difference": arm.first_difference,
        "text": tokenizer.decode(arm.ids, skip_special_tokens=True),
        "stats": arm.stats.to_dict(rounds=rounds) if arm.stats else None,
    }


# ---------------------------------------------------------------- telling


def show(arms: list[Arm], tokenizer: Any, facts: dict[str, Any], screen: terminal.Screen, speed: float | None) -> None:
    """Tells it all on `screen`; `speed` None replays nothing."""
    tree = arms[-1]
    assert tree.stats is not None
    screen.show(
        [
            [],
            [("One prompt decoded three ways: plainly, with a chain and with a tree of guesses", "title")],
            [(f"{facts['model']}, {describe(facts['machine'])}, drafts by {tree.stats.drafter}", "muted")],
            [],
            [("Prompt", "title")],
            [(terminal.inert(facts["prompt"]), "")],
            [],
            [("Each round guesses a tree of next tokens, and one forward pass checks all of it:", "")],
            legend_line(),
            [],
        ]
    )
    records = tree.stats.records
    if speed is not None:
        screen.replay(replay_frames(arms, tokenizer, facts["prompt"], screen, speed))
    decode = terminal.token_text(tokenizer)
    texts = terminal.texts_by_origin(tokenizer, records)
    for record in [r for r in tree.stats.decoding if r.accepted][:SHOWN_ROUNDS]:
        before = "".join(text for text, _ in texts[record.index - 1])
        drawing = terminal.tree_lines(record, decode, before or facts["prompt"], screen.width)
        screen.show([verdict_line(record, True), *drawing, []])
    screen.show(
        [
            [("The text", "title"), (f"  {tree.stats.accepted} of its {len(tree.ids)} tokens were guesses", "kept")],
            texts[-1],
            [],
            *_table(arms),
            [],
            *_notes(arms, facts),
        ]
    )


def replay_frames(
    arms: list[Arm], tokenizer: Any, prompt: str, screen: terminal.Screen, speed: float
) -> Iterator[tuple[list[terminal.Line], terminal.Line, float]]:
    """Two frames a round of the tree, the guesses and the verdict, at a pace that an eye can follow."""
    assert arms[-1].stats is not None
    records = arms[-1].stats.records
    decode = terminal.token_text(tokenizer)
    seconds = min(SLOWEST, max(FASTEST, SECONDS_OF_REPLAY / max(1, len(records) - 1))) / speed
    texts = terminal.texts_by_origin(tokenizer, records)
    frames = []
    for record, before, after in zip(records[1:], texts, texts[1:], strict=False):
        root = "".join(text for text, _ in before) or prompt
        for decided, text in ((False, before), (True, after)):
            drawing = terminal.tree_lines(record, decode, root, screen.width, decided=decided)
            frames.append((record, decided, drawing, text))
    height = max((len(drawing) for _, _, drawing, _ in frames), default=0)  # one for all: nothing below jumps
    for record, decided, drawing, text in frames:
        head = [*progress_lines(arms, record.index + decided, screen.width), [], verdict_line(record, decided)]
        blank: list[terminal.Line] = [[] for _ in range(height - len(drawing) + 1)]
        yield [*head, *drawing, *blank], text, seconds * (0.6 if decided else 0.4)


def progress_lines(arms: list[Arm], forwards: int, width: int) -> list[terminal.Line]:
    """How far each arm is after as many forwards, the prompt's included."""
    lines: list[terminal.Line] = [[(f"Tokens after {forwards} forward pass{'es' * (forwards != 1)}", "title")]]
    for arm in reversed(arms):
        records = arm.stats.records[:forwards] if arm.stats else []
        done = sum(len(record.committed) for record in records) if arm.stats else min(forwards, len(arm.ids))
        bar = terminal.bar(done / len(arm.ids), width - 14)
        lines.append([(f"{arm.name:<8}", "title"), (bar, "kept" if arm is arms[-1] else "muted"), (f" {done}", "")])
    return lines


def verdict_line(record: RoundRecord, decided: bool) -> terminal.Line:
    """One sentence on a round."""
    guesses = f"{record.drafted or 'no'} guess{'es' * (record.drafted != 1)}"
    cells: terminal.Line = [(f"Round {record.index}: ", "title"), (guesses, "open")]
    if not decided:
        return [*cells, (" to check in one forward", "")]
    cells += [(", one forward: ", ""), (f"{record.accepted} kept", "kept")]
    if record.bonus is not None:
        cells += [(" + ", ""), ("1 of the model's own", "own")]
    count = len(record.committed)
    return [*cells, (f" = {count} token{'s' * (count != 1)}", "title")]


def legend_line() -> terminal.Line:
    return [
        (f"{terminal.MARKS['kept']} guess kept (the model agrees)", "kept"),
        ("   ", ""),
        (f"{terminal.MARKS['own']} the model's own token", "own"),
        ("   ", ""),
        (f"{terminal.MARKS['dropped']} guess dropped", "dropped"),
    ]


def _table(arms: list[Arm]) -> list[terminal.Line]:
    header = ("", "tokens", "rounds", "tokens/round", "seconds", "tokens/s", "speed-up", "same text")
    plain = arms[0]
    rows = [
        (
            arm.name,
            f"{len(arm.ids)}",
            f"{arm.rounds}",
            "-" if arm.tokens_per_round is None else f"{arm.tokens_per_round:.2f}",
            f"{arm.median_seconds:.2f}",
            f"{arm.tokens_per_second:.1f}",
            f"{arm.tokens_per_second / plain.tokens_per_second:.2f}x",
            "-" if arm is plain else "yes" if arm.same_text else f"NO, token {arm.first_difference}",
        )
        for arm in arms
    ]
    return terminal.table_lines(
        header, rows, ["" if arm.same_text else "bad" for arm in arms[:-1]] + ["good" if arms[-1].same_text else "bad"]
    )


def _notes(arms: list[Arm], facts: dict[str, Any]) -> list[terminal.Line]:
    times = "once" if facts["repeats"] == 1 else f"{facts['repeats']} times in turns (medians)"
    told = (
        "A round is one forward pass after the prompt's. Seconds are the wall clock of",
        f"generate, prompt included, each arm timed {times} with nothing drawn meanwhile.",
    )
    notes: list[terminal.Line] = [[(line, "muted")] for line in told]
    if not same_text(arms) and facts["machine"]["dtype"] != "float32":
        reason = "a pass over a tree rounds differently from a pass over one token, and near-ties can flip."
        notes.append([(f"In {facts['machine']['dtype']}, {reason}", "bad")])
    return notes
