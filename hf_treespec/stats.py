"""What happened in a call: a `RoundRecord` for each round, summed up as `DecodeStats`.

Words: "accepted" are drafted tokens that the target agreed with; "committed" is accepted plus the bonus, the token that
the target adds itself in every round. Tokens per round counts the bonus.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .tree import FloatArray, IntArray, TokenTree


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Why a drafted tree was cut to the size that was verified: gain against price, both by nodes (0 to those drafted).

    Attributes:
        gain: tokens that the n best nodes promise, calibrated: S(n).
        seconds: of a round with n nodes, drafting left out: T(1 + n), as measured here so far.
        rate: tokens that a second is worth here: the n with the largest gain - rate * (seconds[n] - seconds[0]) is best.
        affordable: the most nodes that the account of earlier gains and losses can pay for.
        nodes: verified.
    """

    gain: list[float]
    seconds: list[float]
    rate: float
    affordable: int
    nodes: int


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """One round. Round 0 is the prompt's forward: its tree is the prompt's last token alone.

    Attributes:
        index: 0 for the prompt, then 1, 2, ...
        tokens: (N,) int64, the verified tree's tokens; node 0 is the root, committed before.
        parents: (N,) int64, -1 for the root.
        scores: (N,) float32, the drafter's path scores.
        path: for each committed token the node that it follows, root first: the nodes kept in the cache. A drafted token
            on which decoding stopped is committed, but its own node is not here.
        committed: tokens that this round added to the text, in order.
        bonus: the target's own token at the end; None where decoding stopped on a drafted token.
        seconds: wall clock, by part: "draft" (all that the drafter does), "verify" (the target's forward), "host" (all
            else).
        target_probability: with `stream(..., detail=True)`: for each node the target's probability of its token after its
            parent, of raw logits (temperature 1); 1 for the root. The bonus, where there is one, comes last. None else.
        target_rank: likewise, how many tokens the target thought likelier; 0 is its first choice.
        sizing: with `detail`, what the round's size was decided by; None where nothing was drafted or sized.
        draft: with `detail`, the tree as it was drafted, before it was cut, with the drafter's own scores; None where
            nothing was drafted.
    """

    index: int
    tokens: IntArray
    parents: IntArray
    scores: FloatArray
    path: list[int]
    committed: list[int]
    bonus: int | None
    seconds: dict[str, float]
    target_probability: list[float] | None = None
    target_rank: list[int] | None = None
    sizing: Sizing | None = None
    draft: TokenTree | None = None

    @property
    def accepted(self) -> int:
        """Drafted tokens that were committed."""
        return len(self.committed) - (self.bonus is not None)

    @property
    def drafted(self) -> int:
        """Nodes that were verified, the root not counted."""
        return len(self.tokens) - 1

    @property
    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents, self.scores)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        fields = dataclasses.asdict(dataclasses.replace(self, draft=None))
        if self.draft is not None:
            arrays = {name: getattr(self.draft, name)[0] for name in ("tokens", "parents", "scores")}
            fields["draft"] = {name: array.tolist() for name, array in arrays.items()}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}


@dataclasses.dataclass
class DecodeStats:
    """Sums over the rounds of a call. It stands as `.tree_spec` on what `generate` returns.

    Attributes:
        drafter: its name.
        records: every round, the prompt's (index 0) first.
    """

    drafter: str
    records: list[RoundRecord] = dataclasses.field(default_factory=list)

    @property
    def decoding(self) -> list[RoundRecord]:
        """The rounds after the prompt's forward."""
        return self.records[1:]

    @property
    def rounds(self) -> int:
        """Target forwards after the prompt's."""
        return len(self.decoding)

    @property
    def drafted(self) -> int:
        """Drafted nodes verified."""
        return sum(r.drafted for r in self.decoding)

    @property
    def accepted(self) -> int:
        """Drafted tokens committed."""
        return sum(r.accepted for r in self.decoding)

    @property
    def committed(self) -> int:
        """New tokens, the first one (which the prompt's forward gives) included."""
        return sum(len(r.committed) for r in self.records)

    @property
    def tokens_per_round(self) -> float:
        """Tokens committed per target forward after the prompt's, the bonus counted; 1 is plain decoding."""
        return sum(len(r.committed) for r in self.decoding) / max(1, self.rounds)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """At index d - 1: of the rounds whose tree reached depth d, the share that accepted a node there."""
        offered: list[int] = []
        taken: list[int] = []
        for record in self.decoding:
            deepest = int(record.tree.depths.max())
            for counts, reached in ((offered, deepest), (taken, record.accepted)):
                counts.extend([0] * (deepest - len(counts)))
                for depth in range(reached):
                    counts[depth] += 1
        return [t / o for t, o in zip(taken, offered, strict=True)]

    @property
    def seconds(self) -> dict[str, float]:
        """Wall clock by part: "prefill", then "draft", "verify" and "host" of the rounds, and their sum "total"."""
        parts = {part: sum(r.seconds[part] for r in self.decoding) for part in ("draft", "verify", "host")}
        prefill = sum(self.records[0].seconds.values()) if self.records else 0.0
        return {"prefill": prefill, **parts, "total": prefill + sum(parts.values())}

    def explain(self) -> str:
        """Where the time went, and what a round gave for it, in two sentences."""
        seconds, rounds = self.seconds, max(1, self.rounds)
        share = {part: 100 * s / max(seconds["total"], 1e-9) for part, s in seconds.items()}
        plain = sum(r.drafted == 0 for r in self.decoding)
        return (
            f"Of {seconds['total']:.2f} s, {share['prefill']:.0f} % went into the prompt, {share['verify']:.0f} % into "
            f"{self.rounds} forwards of the target, {share['draft']:.0f} % into drafting and {share['host']:.0f} % into "
            f"all else. A round verified {self.drafted / rounds:.1f} drafted tokens ({plain} rounds were plain), accepted "
            f"{self.accepted / rounds:.2f} of them and so committed {self.tokens_per_round:.2f} tokens with its own."
        )

    def to_dict(self, *, rounds: bool = False) -> dict[str, Any]:
        """Numbers ready for JSON; with `rounds`, every record too."""
        names = ("drafter", "rounds", "drafted", "accepted", "committed", "tokens_per_round", "acceptance_by_depth")
        numbers = {name: getattr(self, name) for name in (*names, "seconds")}
        return {**numbers, "records": [r.to_dict() for r in self.records]} if rounds else numbers

    def __repr__(self) -> str:
        return (
            f"DecodeStats({self.drafter}: {self.committed} tokens in {self.rounds} rounds, "
            f"{self.tokens_per_round:.2f} tokens per round, {self.accepted} of {self.drafted} drafted accepted)"
        )


class Stopwatch:
    """Times the parts of one round. On CUDA a part is timed by events, read when the round has synchronised anyway.

    Attributes:
        reading: seconds of the part "read", in which the drafter reads the prompt; they belong to "draft" too.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began = time.perf_counter()
        self._parts: dict[str, float] = {"read": 0.0, "draft": 0.0, "verify": 0.0}
        self._events: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self._cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._events.append((name, first, last))
        else:
            began = time.perf_counter()
            yield
            self._parts[name] += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Seconds of "draft", "verify" and "host" since this watch was made."""
        total = time.perf_counter() - self._began
        for name, first, last in self._events:
            last.synchronize()
            self._parts[name] += first.elapsed_time(last) / 1000
        self.reading, draft, verify = self._parts.values()
        draft += self.reading
        return {"draft": draft, "verify": verify, "host": max(0.0, total - draft - verify)}
