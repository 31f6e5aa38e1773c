"""What `hf-treespec profile` measures: what rows cost here, what drafts are worth, and which sizes follow.

Three runs of the real loop, greedy, over the same prompts:

    cost    rounds of fixed sizes, in shuffled turns                         T(n), seconds of a round with n rows
    sized   rounds as large as the loop chooses, as everybody gets them      sizes, tokens per second ρ
    full    every tree verified as it was drafted, however large             S(n), tokens that the n best nodes bring

S is had twice. Promised: the mean of the n best path scores, each calibrated by the rounds before it, which is what the
loop goes by. Came true: a tree that was verified whole tells what each of its parts would have given. Conclusions rest on
the latter, by the rule of `budget.py`: more nodes pay where S rises by more than ρ times the seconds that they cost.

It refuses to know how trees are drafted and verified, how results are drawn (`profile_view.py`), and what to expect: every
number and every sentence comes from these runs, on this machine, with whatever else ran on it.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .budget import Sizer
from .costs import CostModel, monotone
from .drafters.base import Budget, DraftContext, Drafter
from .drafters.recycling import exchange_tables
from .loading import UserError
from .stats import RoundRecord
from .streaming import stream
from .tree import FloatArray, TokenTree

# Short ones of three kinds: text that comes again, free text, and code.
PROMPTS = {
    "edit": "Rewrite this note in the past tense:\n\nThe ship leaves the harbour at noon. The ship passes the island at "
    "three, and the crew waves to the people on the island. At six the ship reaches the harbour of the next town.",
    "chat": "What should I think about before I plant a small vegetable garden?",
    "code": "Write a Python class Stack with the methods push, pop, peek and is_empty, each with a docstring.",
}
ROWS = (1, 2, 4, 8, 16, 32, 64)  # and on by doubling where the options allow more nodes
TURNS = 7  # measurements of each size; their median counts
WARM_UP_TOKENS = 8
TOO_SHORT = "the answer ends before all sizes could be measured; give another PROMPT, or more --max-new-tokens"

Rounds = dict[str, list[RoundRecord]]


@dataclasses.dataclass
class Profile:
    """What was measured, and what follows. Arrays by nodes begin with 0 nodes, which is plain decoding.

    Attributes:
        drafter: its name.
        samples: seconds of rounds, drafting left out, by rows.
        context: cached tokens in the middle of these measurements.
        sized: for each prompt the rounds of the loop, with its own sizes.
        full: for each prompt the rounds whose trees were verified whole.
        promised: by nodes, tokens a round beyond the model's own; up to the largest tree that the options allow.
        came_true: by nodes, accepted tokens a round.
        cost: (rows + 1,) T by rows: medians made monotone; index 0 repeats one row.
        gain: by nodes, S: the concave curve nearest to `came_true`.
        groups: the loop's rounds by prompt, then plain ones, drafted ones and all.
        sizes: rounds of the loop by the nodes that they verified.
        drafting: seconds of the drafter in a round that drafts.
        speeds: by nodes, tokens per second, were all rounds of this size.
        best: nodes of the fastest such size.
        loop: its tokens per second.
        rate: ρ, what a second is worth: tokens per second of the loop, and no less than the best size gives.
    """

    drafter: str
    samples: dict[int, list[float]]
    context: int
    sized: Rounds
    full: Rounds
    promised: FloatArray
    came_true: FloatArray

    def __post_init__(self) -> None:
        costs = CostModel()
        for rows, seconds in self.samples.items():
            for _ in range(3):  # they are medians already, not to be doubted
                costs.observe(rows, 0, statistics.median(seconds))
        self.most = len(self.promised) - 1
        self.cost = costs.curve(max(self.samples), 0)
        falling = monotone((-np.diff(self.came_true)).tolist(), [1.0] * self.most)
        self.gain = np.concatenate([[0.0], np.cumsum(np.negative(falling))])
        rounds = self.rounds = list(chain(*self.sized.values()))
        plain, drafted = [r for r in rounds if not r.drafted], [r for r in rounds if r.drafted]
        self.groups = {**self.sized, "plain rounds": plain, "drafted rounds": drafted, "all rounds": rounds}
        self.sizes = dict(sorted(Counter(record.drafted for record in rounds).items()))
        self.drafting = statistics.median(r.seconds["draft"] for r in drafted or chain(*self.full.values()))
        prices = self.prices = self.cost[1 : self.most + 2] + self.drafting * (np.arange(self.most + 1) > 0)
        self.speeds = (1 + self.gain) / prices
        self.best = int(np.argmax(self.speeds))
        self.loop = speed(rounds)["tokens_per_second"]
        self.rate = max(self.loop, float(self.speeds[self.best]))

    def step(self, nodes: int, more: int) -> dict[str, float]:
        """What it takes for `more` nodes to pay where `nodes` are verified."""
        brings, price = float(self.gain[more] - self.gain[nodes]), float(self.prices[more] - self.prices[nodes])
        return {
            "from_nodes": nodes,
            "to_nodes": more,
            "price_seconds": price,
            "brings_tokens": brings,
            "worth_seconds": brings / self.rate,
            "pays_above_tokens": self.rate * price,
            "pays_below_seconds_a_row": brings / self.rate / (more - nodes),
        }

    def steps(self) -> list[dict[str, float]]:
        """To the next node after the best size, and to a larger tree: twice the rows, or the best that there is."""
        larger = min(2 * self.best + 1, self.most) if self.best else 1 + int(np.argmax(self.speeds[1:]))
        return [self.step(self.best, n) for n in sorted({self.best + 1, larger}) if self.best < n <= self.most]

    def conclusions(self) -> list[str]:
        """What would have to be true for larger trees to pay, in sentences."""
        size = f"{self.best} node{'s' * (self.best != 1)}" if self.best else "plain decoding"
        told = [
            f"Of all fixed sizes, {size} would be the fastest here, at {self.speeds[self.best]:.1f} tokens/s; the loop, "
            f"which chooses round by round, makes {self.loop:.1f}."
        ]
        if self.best == self.most:
            told.append("That is as large as the options allow (--max-nodes).")
        for step in self.steps():
            one, brings, needed = step["to_nodes"] == self.best + 1, step["brings_tokens"], step["pays_above_tokens"]
            name = f"Node {self.best + 1}" if one else f"A tree of {step['to_nodes']}"
            cost = f"{milliseconds(step['price_seconds'])} more{'' if self.best else ' with its drafting'}"
            goal = f"where it brings {needed:.2g} tokens"
            if one:  # what a node brings is its chance
                goal = f"where its chance is above {100 * needed:.0f} %" if needed < 1 else "at no chance"
            if brings < 5e-4:
                told.append(f"{name} costs {cost} and brought nothing here: it pays {goal}.")
                continue
            row, worth = milliseconds(step["pays_below_seconds_a_row"]), milliseconds(step["worth_seconds"])
            told.append(
                f"{name} costs {cost} and brings {brings:.2g} tokens, worth {worth}: it pays where a row costs less than "
                f"{row}, or {goal}."
            )
        return told

    def to_dict(self, *, rounds: bool = False) -> dict[str, Any]:
        """Everything, ready for JSON; with `rounds`, every round's record too."""
        runs = {"sized": self.sized, "full": self.full} if rounds else {}
        records = {run: {n: [r.to_dict() for r in own] for n, own in of.items()} for run, of in runs.items()}
        return {
            "drafter": self.drafter,
            "cost": {
                "context": self.context,
                "rows": list(self.samples),
                "samples": list(self.samples.values()),
                "medians": [statistics.median(seconds) for seconds in self.samples.values()],
                "seconds": [float(self.cost[rows]) for rows in self.samples],
            },
            "tokens_by_nodes": {name: getattr(self, name).tolist() for name in ("promised", "came_true", "gain")},
            "tokens_per_second_by_nodes": self.speeds.tolist(),
            "sizes": {str(nodes): count for nodes, count in self.sizes.items()},
            "speed": {name: speed(own) for name, own in self.groups.items()},
            "drafting_seconds": self.drafting,
            "rate": self.rate,
            "best_nodes": self.best,
            "steps": self.steps(),
            "conclusions": self.conclusions(),
            **({"records": records} if rounds else {}),
        }


def speed(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Sums over rounds, and their rates; 0 for none."""
    tokens, seconds = sum(len(r.committed) for r in records), sum(sum(r.seconds.values()) for r in records)
    return {
        "rounds": len(records),
        "tokens": tokens,
        "seconds": seconds,
        "nodes_per_round": sum(r.drafted for r in records) / max(1, len(records)),
        "tokens_per_round": tokens / max(1, len(records)),
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }


def milliseconds(seconds: float) -> str:
    """To about two digits."""
    return f"{1000 * seconds:.{2 if seconds < 1e-2 else 1 if seconds < 0.1 else 0}f} ms"


# ---------------------------------------------------------------- measuring


def measure(
    model: Any,
    inputs: dict[str, dict[str, Any]],
    options: dict[str, Any],
    helper: dict[str, Any],
    max_new_tokens: int,
    say: Callable[[str], None],
) -> Profile:
    """Runs it all.

    Args:
        inputs: of `generate`, for each prompt by its name.
        options: of `tree_spec`.
        helper: arguments of `generate` for an assistant, if any.
        say: told what is going on.

    Raises:
        UserError: the options draft nothing, or the answers are too short.
    """
    most = options.get("max_nodes", ROWS[-1] - 1)
    if most == 0:
        raise UserError("--max-nodes 0 drafts nothing, and leaves nothing to profile")
    rows = list(ROWS)
    while rows[-1] < most + 1:
        rows.append(2 * rows[-1])
    greedy = {"do_sample": False, "max_new_tokens": max_new_tokens}
    shared = {**greedy, **helper}
    longest = max(inputs.values(), key=lambda own: int(own["input_ids"].shape[1]))
    learnt = exchange_tables(model)  # no run profits from what another one has read
    runs: list[Rounds] = [{}, {}]
    try:
        for _ in stream(model, tree_spec=options, **{**longest, **shared, "max_new_tokens": WARM_UP_TOKENS}):
            pass
        say(f"timing rounds of {', '.join(map(str, rows))} rows ...")
        samples, context = measure_cost(model, {**longest, **greedy}, rows)
        for run, changed in zip(runs, ({}, {"max_nodes": most, "fallback": False}), strict=True):
            exchange_tables(model)
            for name, own in inputs.items():
                say(f"decoding {name!r} with {'whole trees' if changed else 'sizes that the loop chooses'} ...")
                rounds = stream(model, tree_spec={**options, **changed}, **own, **shared)
                run[name] = list(rounds)[1:]
    finally:
        exchange_tables(model, learnt)
    sized, full = runs
    promised, came_true = expected(list(chain(*full.values())), most)
    return Profile(rounds.stats.drafter, samples, context, sized, full, promised, came_true)


class Filled(Drafter):
    """Proposes binary trees with as many rows as `sizes` has in its last place, filled with tokens of the text."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        rows = np.arange(self.sizes[-1])
        known = np.unique(context.ids[0, -256:].cpu().numpy())
        return TokenTree([context.last_token, *known[rows[1:] % len(known)]], (rows + 1) // 2 - 1)


def measure_cost(model: Any, arguments: dict[str, Any], rows: Sequence[int]) -> tuple[dict[int, list[float]], int]:
    """Seconds of real rounds by rows, drafting left out, and the median of the tokens cached before them.

    Sizes take turns in shuffled order; the first turn warms up. An answer that ends too soon is begun again.
    """
    shuffled = random.Random(0)
    todo = [size for _ in range(TURNS + 1) for size in shuffled.sample(rows, len(rows))]  # taken from the end
    samples: dict[int, list[float]] = {size: [] for size in rows}
    contexts: list[int] = []
    spec = {"drafter": Filled(todo), "max_nodes": rows[-1] - 1, "fallback": False}
    while todo:
        before, context = len(todo), int(arguments["input_ids"].shape[1]) - 1
        rounds = stream(model, tree_spec=spec, **arguments)
        for record in rounds:
            if record.index and record.drafted + 1 == todo[-1]:  # near the answer's end a tree may be cut
                todo.pop()
                if len(todo) < TURNS * len(rows):
                    samples[record.drafted + 1].append(record.seconds["verify"] + record.seconds["host"])
                    contexts.append(context)
            context += len(record.committed)
            if not todo:
                break
        rounds.close()
        if len(todo) == before:
            raise UserError(TOO_SHORT)
    return samples, int(statistics.median(contexts))


def expected(records: Sequence[RoundRecord], most: int) -> tuple[FloatArray, FloatArray]:
    """(most + 1,) mean tokens that the n best nodes promised, and that they brought, by n. Trees must be whole."""
    sizer = Sizer(CostModel())
    promised, came_true = np.zeros((2, most + 1))
    for record in records:
        tree = record.tree
        if len(tree) == 1:
            continue
        scores = np.array(sizer.calibrated(tree))
        order = np.argsort(-scores, kind="stable")  # parents before children: n of them are a tree
        sums = np.cumsum(scores[order[1:]])
        promised[1 : len(tree)] += sums
        promised[len(tree) :] += sums[-1]
        accepted = record.path[1:]
        if record.bonus is None:  # decoding stopped on a drafted token, which is in no path
            last = tree.child(record.path[-1], record.committed[-1])
            accepted = accepted if last is None else [*accepted, last]
        for place in np.argsort(order)[accepted]:
            came_true[place:] += 1
        sizer.learn(tree, record.committed)
    count = max(1, len(records))
    return np.asarray(promised / count, np.float32), np.asarray(came_true / count, np.float32)
