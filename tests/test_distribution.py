"""Losslessness as a law: exact enumeration, and a seeded chi-square that is shown to fail on planted bugs.

Token equality under one seed (test_same_text.py) is the first net; these are the second. The law of what rounds emit is
compared with ancestral sampling from a table of p, for trees that are fixed, and for trees that look at the noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats
from transformers import LogitsProcessorList

from hf_treespec.accept import NoiseWindow, Picker, walk
from hf_treespec.tree import TokenTree
from hf_treespec.verify import Verified

V, LENGTH = 4, 3
Prefix = tuple[int, ...]
Law = dict[Prefix, float]


def table(seed: int) -> dict[Prefix, np.ndarray]:
    """p(. | prefix) for every prefix shorter than LENGTH."""
    rng = np.random.default_rng(seed)
    return {
        prefix: rng.dirichlet(np.full(V, 0.7))
        for length in range(LENGTH)
        for prefix in itertools.product(range(V), repeat=length)
    }


def ancestral(p: dict[Prefix, np.ndarray]) -> Law:
    law = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        law[text] = float(np.prod([p[text[:i]][text[i]] for i in range(LENGTH)]))
    return law


def verified(tree: TokenTree, prefix: Prefix, p: dict[Prefix, np.ndarray]) -> Verified:
    """The "model's" logits at every node; beyond LENGTH they are never looked at."""
    rows = []
    for node in range(len(tree)):
        at = prefix + tuple(tree.tokens[0, tree.path(node)[1:]].tolist())
        rows.append(np.log(p[at] if len(at) < LENGTH else np.full(V, 1 / V)))
    return Verified(tree, torch.tensor(np.array(rows), dtype=torch.float64)[None])


def total_variation(one: Law, other: Law) -> float:
    return sum(abs(one.get(t, 0.0) - other.get(t, 0.0)) for t in {*one, *other}) / 2


# -------------------------------------------------------------------- enumeration: trees fixed given the prefix


class _Enumerating:
    """Stands in for `Picker`: follows one branch of choices and remembers its probability and the roads not taken."""

    noise = None
    at_once = False

    def __init__(self, choices: Prefix) -> None:
        self.choices, self.taken, self.weight = choices, (), 1.0

    def pick(self, prefix: Any, logits: torch.Tensor) -> int:
        law = logits[0].exp()
        token = self.choices[len(self.taken)] if len(self.taken) < len(self.choices) else 0
        self.taken += (token,)
        self.weight *= float(law[token])
        return token


def emitted_law(p: dict[Prefix, np.ndarray], draft: Callable[[Prefix], TokenTree], walker: Any = walk) -> Law:
    """The law of the first LENGTH tokens when rounds follow each other, by replaying every branch of every choice."""
    law: Law = {}

    def rounds(prefix: Prefix, weight: float) -> None:
        if len(prefix) >= LENGTH:
            law[prefix[:LENGTH]] = law.get(prefix[:LENGTH], 0.0) + weight
            return
        pending: list[Prefix] = [()]
        while pending:
            picker = _Enumerating(pending.pop())
            text = prefix
            for _, token, _ in walker(verified(draft(prefix), prefix, p), picker, lambda: None):
                text += (token,)
                if len(text) == LENGTH:
                    break
            for i in range(len(picker.choices), len(picker.taken)):
                pending += [(*picker.taken[:i], other) for other in range(1, V)]
            rounds(text, weight * picker.weight)

    rounds((), 1.0)
    return law


def random_draft(seed: int) -> Callable[[Prefix], TokenTree]:
    """Some tree for each prefix: any function of the prefix will do."""

    def draft(prefix: Prefix) -> TokenTree:
        rng = np.random.default_rng([seed, *prefix])
        paths = [rng.integers(0, V, int(rng.integers(1, LENGTH - len(prefix) + 1))).tolist() for _ in range(3)]
        return TokenTree.from_paths(0, paths)

    return draft


@pytest.mark.parametrize("seed", range(4))
def test_enumerated_law_is_the_targets(seed: int) -> None:
    p = table(seed)
    assert total_variation(emitted_law(p, random_draft(seed)), ancestral(p)) < 1e-12


def _descends_to_the_likeliest(verified: Verified, picker: Any, prefix: Any) -> Any:
    """Planted: on a mismatch, the best child is taken instead of the target's own token."""
    for node, token, child in walk(verified, picker, prefix):
        if child is None and len(verified.tree) > 1:
            token = int(verified.tree.tokens[0, 1])
        yield node, token, child


def _stops_on_a_tie(verified: Verified, picker: Any, prefix: Any) -> Any:
    """Planted: a token that repeats the last one is drawn again from the root's row."""
    last = None
    for node, token, child in walk(verified, picker, prefix):
        if token == last:
            token = picker.pick(None, verified.logits[:, 0])
            child = None
        last = token
        yield node, token, child


@pytest.mark.parametrize("bug", [_descends_to_the_likeliest, _stops_on_a_tie])
def test_enumeration_sees_planted_bugs(bug: Any) -> None:
    p = table(0)
    assert total_variation(emitted_law(p, random_draft(0), bug), ancestral(p)) > 1e-3


# -------------------------------------------------------------------- enumeration: trees that look at the noise

LEVELS = torch.tensor([[0.2, 1.0, 0.7, 1.9], [1.5, 0.3, 0.9, 0.2], [0.6, 1.1, 0.1, 1.0]])


class _DiscreteNoise:
    """A noise window of given values. `redraw` plants the bug: what was peeked at and not drawn is drawn anew."""

    def __init__(self, values: Prefix, again: Prefix, *, redraw: bool) -> None:
        self.values, self.again, self.redraw = list(values), list(again), redraw

    def peek(self, index: int) -> torch.Tensor:
        return LEVELS[self.values[index]][None]

    def draw(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return LEVELS[self.values.pop(0)][None]

    def next_round(self) -> None:
        if self.redraw:
            self.values = self.again[len(self.again) - len(self.values) :]


def coupled_tree(peek: Callable[[int], torch.Tensor], p: dict[Prefix, np.ndarray], prefix: Prefix) -> TokenTree:
    """Drafts the coming token rightly only if the noise of the token after it is of one kind."""
    first = int((torch.tensor(p[prefix]) / peek(0)[0]).argmax())
    lucky = int(peek(1)[0].argmin()) < 2
    return TokenTree.chain(0, [first if lucky else (first + 1) % V])


def noisy_law(p: dict[Prefix, np.ndarray], *, coupled: bool, redraw: bool = False) -> Law:
    """The law of two tokens through the real walk and picker, over every sequence of discrete noise."""
    law: Law = {}
    for values in itertools.product(range(len(LEVELS)), repeat=2):
        for again in itertools.product(range(len(LEVELS)), repeat=2):
            noise: Any = _DiscreteNoise(values, again, redraw=redraw)
            picker = Picker(LogitsProcessorList(), noise, torch.device("cpu"))
            text: Prefix = ()
            while len(text) < 2:
                look = coupled and not text
                tree = coupled_tree(noise.peek, p, text) if look else TokenTree.root_only(0)
                for _, token, _ in walk(verified(tree, text, p), picker, lambda: torch.zeros(1, 0, dtype=torch.long)):
                    text += (token,)
                    if len(text) == 2:
                        break
                noise.next_round()
            law[text] = law.get(text, 0.0) + len(LEVELS) ** -4.0
    return law


def test_trees_may_look_at_noise_that_is_never_redrawn() -> None:
    """With one noise for each position the tree does not show in the law; redrawing what was seen does."""
    p = table(1)
    plain = noisy_law(p, coupled=False)
    assert total_variation(noisy_law(p, coupled=True), plain) < 1e-12
    assert total_variation(noisy_law(p, coupled=True, redraw=True), plain) > 1e-2


# -------------------------------------------------------------------- a seeded chi-square through the real classes

ROUNDS = 12_000
ALPHA = 1e-6


def sampled_counts(
    p: dict[Prefix, np.ndarray], picker_class: type[Picker] = Picker, *, coupled: bool, redraw: bool = False
) -> np.ndarray:
    """How often each text of LENGTH tokens comes out of the real walk, picker and noise window."""
    torch.manual_seed(11)
    noise = NoiseWindow((1, V), torch.device("cpu"))
    picker = picker_class(LogitsProcessorList(), noise, torch.device("cpu"))
    counts = np.zeros((V,) * LENGTH)
    rows: dict[tuple[Prefix, bytes], Verified] = {}
    draft = random_draft(3)
    for _ in range(ROUNDS):
        text: Prefix = ()
        while len(text) < LENGTH:
            if redraw:  # planted: what drafters have seen is forgotten between rounds
                noise._ahead.clear()
                torch.rand(1)
            tree = coupled_tree(noise.peek, p, text) if coupled else draft(text)
            key = (text, tree.tokens.tobytes() + tree.parents.tobytes())
            if key not in rows:
                rows[key] = verified(tree, text, p)
            for _, token, _ in walk(rows[key], picker, lambda: torch.zeros(1, 0, dtype=torch.long)):
                text += (token,)
                if len(text) == LENGTH:
                    break
        counts[text] += 1
    return counts


def p_value(counts: np.ndarray, p: dict[Prefix, np.ndarray]) -> float:
    law = ancestral(p)
    expected = np.array([law[t] * counts.sum() for t in itertools.product(range(V), repeat=LENGTH)])
    observed = counts.reshape(-1)
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(scipy_stats.chisquare(observed, expected).pvalue)


class _Unwarped(Picker):
    """Planted: every third token is drawn at another temperature, as if a row had missed its warper."""

    calls = 0

    def pick(self, prefix: Any, logits: torch.Tensor) -> int:
        self.calls += 1
        return super().pick(prefix, logits * 0.8 if self.calls % 3 == 0 else logits)


@pytest.mark.parametrize("coupled", [False, True])
def test_sampled_law_is_the_targets(coupled: bool) -> None:
    """False alarm: 1e-6, once and for all, since the seed is fixed."""
    p = table(2)
    assert ALPHA < 0.01 < p_value(sampled_counts(p, coupled=coupled), p)


def test_chi_square_sees_redrawn_noise() -> None:
    p = table(2)
    assert p_value(sampled_counts(p, coupled=True, redraw=True), p) < ALPHA


def test_chi_square_sees_a_missing_warper() -> None:
    p = table(2)
    assert p_value(sampled_counts(p, _Unwarped, coupled=False), p) < ALPHA
