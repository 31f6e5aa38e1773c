"""The one public endpoint, for gradio_client, HTTP and MCP: `decode`, with typed arguments and a typed result.

Everybody gets the limits of the page. It yields what is known so far about twice a second, so that a caller who leaves is
noticed, and at last the whole result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import gradio as gr
from document import Document
from engine import ARMS, Busy, Engine
from settings import Settings, SettingsError, check

from hf_treespec import TreeSpecError

PROGRESS_SECONDS = 0.5


class ArmResult(TypedDict):
    """One way to decode: all new tokens, the seconds of decoding with the prompt, and target passes, the prompt's too."""

    tokens: int
    seconds: float
    passes: int
    tokens_per_second: float
    tokens_per_pass: float
    finished: bool


class DecodeResult(TypedDict):
    """A race.

    `finished` is false in reports on the way and where the wall clock ended it; speed-ups are null until both arms have
    finished. `acceptance_by_depth` is of the tree: the share of rounds whose tree reached a depth and kept a guess there.
    """

    finished: bool
    text: str
    same_text: bool | None
    tree: ArmResult
    chain: ArmResult
    plain: ArmResult
    speedup_over_plain: float | None
    speedup_over_chain: float | None
    acceptance_by_depth: list[float]


def endpoint(engine: Engine, race: Any, turns: Iterator[int]) -> Callable[..., Iterator[DecodeResult]]:
    """The function behind `decode`."""
    default = Settings()

    def decode(
        prompt: str,
        drafter: str = engine.drafters[0] if default.drafter not in engine.drafters else default.drafter,
        new_tokens: int = default.new_tokens,
        nodes: int = default.nodes,
        depth: int = default.depth,
        children: int = default.children,
        sized: bool = default.sized,
        temperature: float = default.temperature,
        seed: int = default.seed,
        quantised: bool = default.quantised,
    ) -> Iterator[DecodeResult]:
        """Decode a prompt three ways (a drafted tree, a drafted chain, plainly) and compare speed; all write the same text.

        Args:
            prompt: Text for the model, put into its chat template.
            drafter: Who guesses: ngram, recycling, union, or another name that the page offers.
            new_tokens: Tokens to generate at most.
            nodes: Guesses a round at most.
            depth: Guesses on one path at most.
            children: Guesses for one place at most; the chain has 1.
            sized: Check only guesses that pay on this machine.
            temperature: 0 is greedy.
            seed: The same seed gives the same sampled text.
            quantised: Use 4-bit (NF4) weights.
        """
        values = {
            "prompt": prompt,
            "drafter": drafter,
            "new_tokens": new_tokens,
            "nodes": nodes,
            "depth": depth,
            "children": children,
            "sized": sized,
            "temperature": temperature,
            "seed": seed,
            "quantised": quantised,
        }
        try:
            settings = check(values, engine.limits, engine.drafters, nf4=engine.has_nf4)
            document = Document(settings)
            last = time.monotonic()
            for event in race(settings, turn=next(turns)):
                document.apply(event)
                if time.monotonic() - last >= PROGRESS_SECONDS:
                    last = time.monotonic()
                    yield result(document)
        except (SettingsError, Busy, TreeSpecError) as error:
            raise gr.Error(str(error), print_exception=False) from error
        yield result(document)

    # Gradio reads the result's type here; a generator's is that of what it yields.
    decode.__annotations__["return"] = DecodeResult
    return decode


def result(document: Document) -> DecodeResult:
    """What a document says, in numbers."""
    arms = {name: _arm(document.lanes[name]) for name in ARMS}
    return DecodeResult(
        finished=document.phase == "done",
        text=document.text,
        same_text=document.same_text,
        tree=arms["tree"],
        chain=arms["chain"],
        plain=arms["plain"],
        speedup_over_plain=_speedup(arms, "plain"),
        speedup_over_chain=_speedup(arms, "chain"),
        acceptance_by_depth=acceptance_by_depth(document.rounds),
    )


def _arm(lane: dict[str, Any]) -> ArmResult:
    tokens, seconds, passes = lane["tokens"], lane["seconds"], lane["forwards"]
    return ArmResult(
        tokens=tokens,
        seconds=seconds,
        passes=passes,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        tokens_per_pass=(tokens - 1) / (passes - 1) if passes > 1 else 0.0,
        finished=lane["finished"],
    )


def _speedup(arms: dict[str, ArmResult], other: str) -> float | None:
    tree, base = arms["tree"], arms[other]
    if not (tree["finished"] and base["finished"] and base["tokens_per_second"]):
        return None
    return tree["tokens_per_second"] / base["tokens_per_second"]


def acceptance_by_depth(rounds: list[dict[str, Any]]) -> list[float]:
    offered: list[int] = []
    taken: list[int] = []
    for drawn in rounds[1:]:
        depths = [0]
        for parent in drawn["parents"][1 : len(drawn["ids"]) - drawn["bonus"]]:
            depths.append(depths[parent] + 1)
        deepest = max(depths)
        for counts, reached in ((offered, deepest), (taken, len(drawn["kept"]))):
            counts.extend([0] * (deepest - len(counts)))
            for place in range(reached):
                counts[place] += 1
    return [t / o for t, o in zip(taken, offered, strict=True)]
