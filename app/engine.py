"""Models and races: one prompt decoded as a tree, as a chain and plainly, one after the other, timed where they work.

    Targets    the models on offer, loaded once: the embedded one (packed on a CPU), and its NF4 form where it can be had
    race()     a generator of `Started`, many `Step`s and `Finished`, all plain data: they may cross a process border

What is timed is decoding alone: for the tree and the chain the seconds of the library's own records, for plain decoding
those of `generate` between two tokens. Looking at rounds, sending them to a page and waiting for it is in nobody's time.
Arms take turns in who goes first, and none knows what another one has read.

It refuses to know pages, HTTP and JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import os
import platform
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
from plain import PlainRun
from rounds import Round, RoundViews
from settings import PROMPT, Limits, Settings, SettingsError
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import hf_treespec
from hf_treespec import TreeSpecError, UnsupportedModelError, make_drafter

logger = logging.getLogger("hf_treespec.app")

ARMS = ("tree", "chain", "plain")
WARM_UP_TOKENS, SETTLING_TOKENS = 48, 3
# A run that waits for another one to let go of the models: it has at most one round to finish.
LOCK_SECONDS = 20.0


class Busy(RuntimeError):
    """Another run holds the models."""


@dataclasses.dataclass(frozen=True)
class Started:
    settings: Settings
    order: tuple[str, ...]
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """An arm went on: `tokens` so far, in `seconds` of its own clock and `forwards` of the target."""

    arm: str
    seconds: float
    tokens: int
    forwards: int
    round: Round | None = None
    finished: bool = False


@dataclasses.dataclass(frozen=True)
class Finished:
    """The race is over.

    Attributes:
        reason: "done", or "limit" where the wall clock ended it.
        same_text: whether all arms that finished wrote the same tokens; None where fewer than two did.
        text: of the tree, or of whoever got furthest.
    """

    reason: str
    same_text: bool | None
    text: str


Event = Started | Step | Finished


@dataclasses.dataclass
class Target:
    """A loaded model and what is drafted with."""

    name: str
    model: Any
    tokenizer: Any
    quantisation: str | None

    def inputs(self, prompt: str) -> dict[str, Any]:
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        else:
            ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        ids = ids.to(self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def facts(self) -> dict[str, Any]:
        device = self.model.device
        cuda = device.type == "cuda"
        return {
            "model": self.name,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
            "kind": device.type,
            "weights": self.quantisation or str(self.model.dtype).removeprefix("torch."),
            "threads": None if cuda else torch.get_num_threads(),
            "torch": torch.__version__,
            "hf_treespec": hf_treespec.__version__,
        }


class Engine:
    """The models of one server, and the one race at a time that may run on them.

    Args:
        target: what decodes.
        quantised: gives the NF4 target on first use; None where it is not on offer.
        assistant: a small model with the target's tokenizer; adds the drafter "model" to the menu.
        limits: of every run.
    """

    def __init__(
        self, target: Target, *, quantised: Any = None, assistant: Any = None, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.assistant = assistant
        self._target, self._quantised = target, quantised
        self._nf4: Target | None = None
        self._lock = threading.Lock()
        alone = [name for name in hf_treespec.drafter_names(alone=True) if _can_be_made(name)]
        self.drafters = [*alone, *(["model"] if assistant is not None else [])]

    @property
    def has_nf4(self) -> bool:
        return self._quantised is not None

    def describe_drafters(self) -> dict[str, str]:
        """The menu: each drafter's name and first sentence."""
        documents = {name: make_drafter(name).__doc__ or "" for name in self.drafters}
        return {name: document.strip().split("\n")[0] for name, document in documents.items()}

    def warm_up(self) -> None:
        """A short decode with every drafter: costs are measured, and one that cannot draft here leaves the menu."""
        for name in list(self.drafters):
            settings = Settings(prompt=PROMPT, drafter=name, new_tokens=WARM_UP_TOKENS)
            try:
                for _ in self.race(settings, arms=("tree",)):
                    pass
            except TreeSpecError as error:
                logger.warning("drafter %r is not offered: %s", name, error)
                self.drafters.remove(name)

    def target(self, settings: Settings) -> Target:
        if not settings.quantised:
            return self._target
        if self._nf4 is None:
            self._nf4 = self._quantised()
        return self._nf4

    # ---------------------------------------------------------------- a race

    def race(self, settings: Settings, *, turn: int = 0, arms: tuple[str, ...] = ARMS) -> Generator[Event, None, None]:
        """Decodes with each arm. Close it to stop: whatever runs ends within a round.

        Args:
            turn: who goes first.

        Raises:
            SettingsError: the prompt has too many tokens.
            Busy: another race does not end.
            TreeSpecError: the library refuses; nothing was decoded then.
        """
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            raise Busy("Another run has not let go of the model yet; try again.")
        try:
            yield from self._race(settings, turn, arms)
        finally:
            self._lock.release()

    def _race(self, settings: Settings, turn: int, arms: tuple[str, ...]) -> Iterator[Event]:
        deadline = time.monotonic() + self.limits.seconds
        target = self.target(settings)
        inputs = target.inputs(settings.prompt)
        length = int(inputs["input_ids"].shape[1])
        if length > self.limits.prompt_tokens:
            raise SettingsError(f"The prompt has {length} tokens; this demo takes {self.limits.prompt_tokens} at most.")
        order = tuple(arms[(turn + place) % len(arms)] for place in range(len(arms)))
        yield Started(settings, order, {**target.facts(), "prompt_tokens": length})
        texts: dict[str, list[int]] = {arm: [] for arm in order}
        finished: list[str] = []
        self._settle(target, inputs, settings)
        for arm in order:
            run = _plain if arm == "plain" else _speculative
            with (
                hf_treespec.fresh_tables(target.model),
                contextlib.closing(run(target, arm, inputs, settings, self.assistant, texts[arm])) as steps,
            ):
                for step in steps:
                    yield step
                    if step.finished:
                        finished.append(arm)
                    elif time.monotonic() > deadline:
                        break
            if time.monotonic() > deadline:
                break
        same = None if len(finished) < 2 else all(texts[arm] == texts[finished[0]] for arm in finished)
        best = texts.get("tree") or max(texts.values(), key=len)
        text = str(target.tokenizer.decode(best, skip_special_tokens=True))
        yield Finished("done" if len(finished) == len(order) else "limit", same, text)

    def _settle(self, target: Target, inputs: dict[str, Any], settings: Settings) -> None:
        """A few tokens that nobody counts: whoever goes first must not pay for threads and pages that lie idle."""
        few = dataclasses.replace(settings, new_tokens=SETTLING_TOKENS)
        with hf_treespec.fresh_tables(target.model):
            for arm, run in (("tree", _speculative), ("plain", _plain)):
                for _ in run(target, arm, inputs, few, self.assistant, []):
                    pass


def _can_be_made(name: str) -> bool:
    """Whether a drafter that says it needs nothing is telling the truth: others' packages may register some."""
    try:
        make_drafter(name)
    except TreeSpecError as error:
        logger.warning("drafter %r is not offered: %s", name, error)
        return False
    return True


def _shared(settings: Settings) -> dict[str, Any]:
    """Arguments of `generate` that all arms get."""
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 50, "top_p": 1.0}
    return {**sampling, "max_new_tokens": settings.new_tokens}


def _plain(
    target: Target, arm: str, inputs: dict[str, Any], settings: Settings, assistant: Any, ids: list[int]
) -> Generator[Step, None, None]:
    """Plain `generate`. New tokens are appended to `ids`."""
    torch.manual_seed(settings.seed)
    with contextlib.closing(PlainRun(target.model, {**inputs, **_shared(settings)})) as run:
        for token in run:
            ids.append(token)
            yield Step(arm, run.seconds, len(ids), len(ids))
    yield Step(arm, run.seconds, len(ids), len(ids), finished=True)


def _speculative(
    target: Target, arm: str, inputs: dict[str, Any], settings: Settings, assistant: Any, ids: list[int]
) -> Generator[Step, None, None]:
    """The tree, or the chain that its limits allow. New tokens are appended to `ids`."""
    tree = arm == "tree"
    options = {
        "drafter": settings.drafter,
        "max_nodes": settings.nodes,
        "max_depth": settings.depth,
        "max_children": settings.children if tree else 1,
        "fallback": settings.sized,
    }
    helper = {"assistant_model": assistant} if settings.drafter == "model" else {}
    torch.manual_seed(settings.seed)
    began = time.perf_counter()
    rounds = hf_treespec.stream(target.model, tree_spec=options, detail=tree, **inputs, **helper, **_shared(settings))
    seconds = time.perf_counter() - began  # the preparations of `generate`, which plain decoding is charged for too
    view = RoundViews(target.tokenizer) if tree else None
    with contextlib.closing(rounds):
        for record in rounds:
            seconds += sum(record.seconds.values())
            ids += record.committed
            yield Step(arm, seconds, len(ids), record.index + 1, view.round(record, rounds) if view else None)
    yield Step(arm, seconds, len(ids), record.index + 1, finished=True)


# ---------------------------------------------------------------- loading


def load(
    model: str | None = None, assistant: str | None = None, *, limits: Limits | None = None, borrowed: bool = False
) -> Engine:
    """An engine ready to race.

    Args:
        model: a name or folder of transformers; None is the embedded SmolLM2-135M-Instruct, which needs no network.
        assistant: likewise, a small model with the same tokenizer.
        borrowed: the GPU is there only while a race runs, in processes forked from this one: everything is loaded now,
            and nothing is computed.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        _share_the_cores()
    target = _load_target(model, device)
    helper = None if assistant is None else AutoModelForCausalLM.from_pretrained(assistant).to(device).eval()
    can_quantise = all(importlib.util.find_spec(name) for name in ("bitsandbytes", "accelerate"))
    quantised = functools.partial(_load_target, model, device, nf4=True) if can_quantise else None
    engine = Engine(target, quantised=quantised, assistant=helper, limits=limits)
    if not borrowed:
        engine.warm_up()
    elif engine.has_nf4:
        engine.target(Settings(quantised=True))
    return engine


def _share_the_cores() -> None:
    """Half the cores for torch. Arms run on several threads of the server, each with torch's own helpers; where these are
    more than there are cores, OpenMP lets them sleep between operations, which halves the speed of single rows: plain
    decoding would look twice as slow as it is. The server needs a core too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // 2)))


def _load_target(name: str | None, device: str, *, nf4: bool = False) -> Target:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    if name is None:
        model, tokenizer = hf_treespec.demo_model(
            dtype=dtype, device=device, quantization_config=four_bit if nf4 else None
        )
    else:
        placed = {"quantization_config": four_bit, "device_map": {"": device}} if nf4 else {}
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **placed)
        model, tokenizer = model if nf4 else model.to(device), AutoTokenizer.from_pretrained(name)
    quantisation = "NF4" if nf4 else None
    if device == "cpu" and not nf4:
        try:
            hf_treespec.pack(model)
            quantisation = "packed float16"
        except UnsupportedModelError as error:
            logger.warning("the target runs unpacked, and rows are dearer: %s", error)
    return Target(name or "SmolLM2-135M-Instruct", model, tokenizer, quantisation)
