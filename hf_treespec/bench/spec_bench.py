"""Spec-Bench (Xia et al. 2024): 480 prompts of six tasks, decoded by several arms in turn.

The first arm is the yardstick (plain decoding, say). Arms take turns prompt by prompt, in an order that rotates, so that
a machine that slows down slows all of them. Seconds are wall clock of the whole `generate`, the prompt included; the
speed-up of a task is the ratio of summed seconds. Texts are compared token by token with the yardstick's.

Measure with nothing else running, and say the thread count. The benchmark is for measuring only: tune on other prompts.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.recycling import Tables, exchange_tables
from ..errors import OptionError
from ..stats import DecodeStats

# Spec-Bench's own grouping of its categories (MT-bench has eight).
TASKS = {
    "mt_bench": ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}


@dataclasses.dataclass(frozen=True)
class Question:
    """One prompt: the first turn of a Spec-Bench question."""

    number: int
    task: str
    text: str


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to decode: `arguments` for `generate` on top of what all arms share; `model` if it is not the target."""

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: PreTrainedModel | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """One prompt decoded by one arm: wall clock in `seconds`, new `tokens`, whether they are the yardstick's."""

    question: Question
    arm: str
    seconds: float
    tokens: int
    same: bool
    stats: DecodeStats | None


def load(path: str | Path, prompts: int, tasks: Sequence[str] = tuple(TASKS)) -> list[Question]:
    """`prompts` questions of each task, evenly spaced over its categories.

    Args:
        path: Spec-Bench's `question.jsonl`.

    Raises:
        OptionError: no such file or task, or a line that is no question.
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise OptionError(f"there is no task {unknown[0]!r}; Spec-Bench has {', '.join(TASKS)}.")
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [(int(row["question_id"]), str(row["category"]), str(row["turns"][0])) for row in lines]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise OptionError(f"{path} is not Spec-Bench's question.jsonl: {error!r}") from error
    found = []
    for task in tasks:
        own = [Question(number, task, text) for number, category, text in rows if category in TASKS[task]]
        step = max(1, len(own) // max(1, prompts))
        found += own[::step][:prompts]
    return found


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    arms: Sequence[Arm],
    *,
    new_tokens: int = 128,
    repeats: int = 1,
    seed: int = 0,
    **shared: Any,
) -> Iterator[Result]:
    """Decodes every question with every arm in turn, and yields as it goes.

    Args:
        new_tokens: `max_new_tokens` of every call.
        repeats: how often each is timed; `seconds` is the median.
        seed: of torch's generator, before each call.
        shared: further arguments of `generate` for all arms, e.g. `do_sample=True`.
    """
    for arm in arms:  # first use: self-checks, threads, caches
        arguments = {**shared, **arm.arguments, "max_new_tokens": 4}
        _decode(arm.model or model, tokenizer, questions[0].text, seed, arguments)
    # an arm has learnt from its own earlier questions only, and from none of them twice
    tables: dict[str, Tables] = {arm.name: {} for arm in arms}
    for number, question in enumerate(questions):
        times: dict[str, list[float]] = {arm.name: [] for arm in arms}
        texts: dict[str, Any] = {}
        learnt: dict[str, Tables] = {}
        for repeat in range(repeats):
            turn = (number + repeat) % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                target = arm.model or model
                exchange_tables(target, {width: table.copy() for width, table in tables[arm.name].items()})
                arguments = {**shared, **arm.arguments, "max_new_tokens": new_tokens}
                seconds, new, stats = _decode(target, tokenizer, question.text, seed, arguments)
                learnt[arm.name] = exchange_tables(target)
                times[arm.name].append(seconds)
                texts[arm.name] = new, stats
        tables = learnt
        for arm in arms:
            new, stats = texts[arm.name]
            same = new == texts[arms[0].name][0]
            yield Result(question, arm.name, statistics.median(times[arm.name]), len(new), same, stats)


def _decode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, seed: int, arguments: dict[str, Any]
) -> tuple[float, list[int], DecodeStats | None]:
    messages = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    torch.manual_seed(seed)
    began = time.perf_counter()
    out = model.generate(**inputs, **arguments)
    new = out[0, inputs["input_ids"].shape[1] :].tolist()  # the read that waits for a device
    return time.perf_counter() - began, new, getattr(out, "tree_spec", None)


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row a task and arm (and task "all"): tokens per round, tokens/s, speed-up, host milliseconds, same texts."""
    arms = list(dict.fromkeys(r.arm for r in results))
    rows = []
    for task in (*dict.fromkeys(r.question.task for r in results), "all"):
        own = [r for r in results if task in (r.question.task, "all")]
        yardstick = sum(r.seconds for r in own if r.arm == arms[0])
        for arm in arms:
            mine = [r for r in own if r.arm == arm]
            seconds, stats = sum(r.seconds for r in mine), [r.stats for r in mine if r.stats is not None]
            rounds = sum(s.rounds for s in stats)
            rows.append(
                {
                    "task": task,
                    "arm": arm,
                    "prompts": len(mine),
                    "tokens_per_second": sum(r.tokens for r in mine) / seconds,
                    "speed_up": yardstick / seconds,
                    "tokens_per_round": sum(s.committed - 1 for s in stats) / rounds if rounds else 1.0,
                    "host_ms_per_round": 1000 * sum(s.seconds["host"] for s in stats) / rounds if rounds else 0.0,
                    "draft_ms_per_round": 1000 * sum(s.seconds["draft"] for s in stats) / rounds if rounds else 0.0,
                    "same_text": sum(r.same for r in mine),
                }
            )
    return rows
