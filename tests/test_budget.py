"""Sizing: decisions never change the text, and they are close to the best ones for every shape of cost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import adversary, around, build, prompt
from transformers import PreTrainedModel

from hf_treespec import Budget, Drafter, NgramDrafter, TokenTree
from hf_treespec.bench.simulate import CURVES, Trace, noisy, record, run
from hf_treespec.budget import FIRST_DEPTH, LEAST_TRUST, LEAST_TRUST_IN_MODELS, Calibration, Sizer
from hf_treespec.costs import CostModel
from hf_treespec.knowledge import knowledge_of

# -------------------------------------------------------------------- the cost model


def test_costs_are_medians_rising_and_interpolated() -> None:
    costs = CostModel()
    for rows, seconds in ((1, 0.010), (4, 0.014), (8, 0.013), (16, 0.030)):  # 8 rows came out below 4: noise
        for i in range(5):
            costs.observe(rows, 100, seconds if i else seconds * 50)  # the first use is an outlier
    curve = costs.curve(20, 100)
    assert curve[1] == pytest.approx(0.010)
    assert curve[4] == pytest.approx(curve[8]) == pytest.approx(0.0135)
    assert curve[12] == pytest.approx((0.0135 + 0.030) / 2)
    assert (np.diff(curve) >= -1e-9).all()
    assert curve[20] > curve[16]  # beyond what was measured it goes on rising
    assert costs.measured() == {1: 5, 4: 5, 8: 5, 16: 5}


def test_costs_know_the_context() -> None:
    costs = CostModel()
    for step in range(200):
        for rows in (1, 8):
            costs.observe(rows, 10 * step, 0.01 * rows**0.5 * (1 + 0.0005 * 10 * step))
    for context in (0, 1000, 4000):
        assert costs.curve(8, context)[1] == pytest.approx(0.01 * (1 + 0.0005 * context), rel=0.1)


def test_costs_survive_saving() -> None:
    costs, again = CostModel(), CostModel()
    for rows in (1, 3, 9):
        costs.observe(rows, 10, rows * 0.01)
    again.load(costs.to_dict())
    np.testing.assert_allclose(costs.curve(12, 10), again.curve(12, 10))


# -------------------------------------------------------------------- the calibration


@pytest.mark.parametrize("w, v", [(0.0, 1.0), (-1.5, 1.0), (0.5, 0.4)])
def test_calibration_finds_the_true_chances(w: float, v: float) -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration()
    for _ in range(600):
        q = rng.uniform(0.05, 0.95, 1)
        truth = 1 / (1 + np.exp(-(w + v * np.log(q / (1 - q)))))
        calibration.observe([(float(q[0]), 0, bool(rng.random() < truth[0]))])
    q = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    truth = 1 / (1 + np.exp(-(w + v * np.log(q / (1 - q)))))
    np.testing.assert_allclose(calibration.chances(q.tolist(), [0] * 5), truth, atol=0.12)


def test_calibration_learns_fast_that_a_boaster_is_always_wrong() -> None:
    calibration = Calibration()
    for _ in range(8):
        calibration.observe([(0.99, 0, False)])
    assert calibration.chances([0.99], [0])[0] < 0.3


def test_calibration_keeps_order_and_is_finite_at_the_ends() -> None:
    calibration = Calibration()
    for q, hit in ((0.0, True), (1.0, False)) * 40:
        calibration.observe([(q, 0, hit)])
    chances = calibration.chances(np.linspace(0, 1, 50).tolist(), [0] * 50)
    assert np.isfinite(chances).all() and (np.diff(chances) >= 0).all()


# -------------------------------------------------------------------- the simulator


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """Texts whose next tokens the n-gram drafter guesses often, sometimes, and hardly ever."""
    root = Path(__file__).parent.parent
    texts = {"code": (root / "hf_treespec" / "decoding.py"), "licence": (root / "LICENSE")}
    ids: dict[str, int] = {}
    found = {}
    for name, path in texts.items():
        words = path.read_text(encoding="utf-8").replace("(", " ( ").replace(".", " . ").replace(",", " , ").split()
        tokens = [ids.setdefault(word, len(ids)) for word in words][:900]
        found[name] = record(tokens, 200, NgramDrafter(), Budget(48, 16, 4))
    noise = np.random.default_rng(0).integers(0, 40, 700).tolist()
    found["noise"] = record(noise, 200, NgramDrafter(), Budget(48, 16, 4))
    return found


FIXED = (0, 1, 2, 4, 8, 16, 32, 48)


@pytest.mark.parametrize("text", ["code", "licence", "noise"])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("scatter", [False, True])
def test_sizes_are_close_to_the_best_fixed_one(traces: dict[str, Trace], text: str, curve: str, scatter: bool) -> None:
    """Within 2 % of the best fixed size chosen in hindsight, once costs and calibration are known (the second call)."""
    cost = CURVES[curve]
    best = min(run(traces[text], cost, nodes)[0] for nodes in FIXED)
    sizer = Sizer(CostModel())
    measured = noisy(cost) if scatter else cost
    run(traces[text], measured, sizer)
    sizer.begin()
    seconds, sizes = run(traces[text], measured, sizer)
    if scatter:  # the same decisions at noiseless prices
        seconds = sum(cost(1 + n) for n in sizes)
    assert seconds <= 1.02 * best, f"{seconds / best:.3f} of the best fixed size, nodes {np.mean(sizes):.1f}"


@pytest.mark.parametrize("curve", CURVES)
def test_a_first_call_is_never_much_slower_than_plain(traces: dict[str, Trace], curve: str) -> None:
    """Nothing known beforehand, drafts that hardly ever help: at most 3 % over some 500 tokens."""
    plain, _ = run(traces["noise"], CURVES[curve], 0)
    seconds, _ = run(traces["noise"], CURVES[curve], Sizer(CostModel()))
    assert seconds <= 1.03 * plain


@pytest.mark.parametrize("tokens, allowed", [(64, 1.05), (256, 1.03)])
@pytest.mark.parametrize("curve", CURVES)
def test_an_adversary_costs_little(curve: str, tokens: int, allowed: float) -> None:
    """Always wrong, always sure, on a target that was never measured."""
    wrong = [TokenTree([0, *range(1, 33)], range(-1, 32), [1.0] + [0.99] * 32) for _ in range(tokens)]
    trace = Trace([0] * (tokens + 2), 1, wrong)
    plain, _ = run(trace, CURVES[curve], 0)
    seconds, sizes = run(trace, CURVES[curve], Sizer(CostModel()))
    assert seconds <= allowed * plain, f"{seconds / plain:.3f}, {sum(map(bool, sizes))} rounds drafted"
    assert any(sizes)  # it was tried


@pytest.mark.parametrize(
    "curve, drafting, least, lost, calls",
    [
        ("re-packed (CPU, float32)", 0.0, LEAST_TRUST, 0.01, 3),
        ("linear (CPU, packed weights)", 0.6, LEAST_TRUST_IN_MODELS, 0.003, 6),
    ],
    ids=["free drafts", "a model"],
)
def test_a_drafter_that_keeps_losing_is_tried_less_and_less(
    curve: str, drafting: float, least: float, lost: float, calls: int
) -> None:
    """From call to call, down to a quarter, a model further down; and as much as ever after it has won."""
    cost = CURVES[curve]
    drafting *= cost(1)
    wrong = [TokenTree([0, *range(1, 9)], range(-1, 8), [1.0] + [0.99] * 8) for _ in range(128)]
    useless, sizer, losses = Trace([0] * 130, 1, wrong), Sizer(CostModel()), []
    plain, _ = run(useless, cost, 0)
    for _ in range(10):
        sizer.begin()
        sizer.calibration = Calibration()  # it believes the boaster anew
        losses.append(run(useless, cost, sizer, drafting)[0] / plain - 1)
    assert losses[0] > 0.015 and sum(losses[-4:]) / 4 < lost and sizer.trust == least
    right = Trace([0] * 130, 1, [TokenTree([0] * 9, range(-1, 8), [1.0] + [0.99] * 8)] * 128)
    for _ in range(calls):
        sizer.begin()
        seconds, _ = run(right, cost, sizer, drafting)
    assert seconds < 0.5 * plain
    sizer.begin()
    assert sizer.trust == 1.0


def test_what_a_drafter_reads_of_the_prompt_is_charged_to_trust_alone() -> None:
    """A level is not thought dear and the account not spent; but where drafts never earn it back, they are trusted less."""
    sizers = {reading: Sizer(CostModel()) for reading in (0.0, 0.5)}
    for reading, sizer in sizers.items():
        sizer.begin()
        for _ in range(3):
            sizer.account(1, 100, 1, 0.0, 0.02, drafted=False)
        sizer.account(3, 100, 2, 0.002, 0.032, drafted=True, forwards=1, reading=reading)
    without, with_reading = sizers.values()
    assert with_reading.level_seconds == without.level_seconds == 0.002
    assert (with_reading.balance, with_reading.rate) == (without.balance, without.rate)
    assert with_reading.costs.curve(3, 100).tolist() == without.costs.curve(3, 100).tolist()
    for sizer in sizers.values():
        sizer.begin()
    assert (without.trust, with_reading.trust) == (1.0, 0.5)


def test_reading_is_told_from_drafting(monkeypatch: Any) -> None:
    """In the loop: it is part of what the drafter took, and no part of what a draft is thought to cost."""

    class Reader(Drafter):
        name = "reader"

        def read_prompt(self) -> None:
            time.sleep(0.2)

        def draft(self, context: Any, budget: Budget) -> TokenTree:
            self.forwards = 1
            return TokenTree.chain(context.last_token, [5])

    model = build("llama")
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    out = model.generate(prompt(), tree_spec=Reader(), return_dict_in_generate=True, **arguments)
    assert max(record.seconds["draft"] for record in out.tree_spec.records) >= 0.2
    sizer = knowledge_of(model, "reader", False)
    assert 0 < sizer.level_seconds < 0.1 and sizer.trust == 0.5
    assert all(seconds < 0.15 for samples in sizer.costs.to_dict().values() for _, seconds in samples)


@pytest.mark.parametrize("share, tries", [(0.9, 1), (0.2, 20)])
def test_forwards_that_could_never_be_paid_are_not_tried_again(share: float, tries: int) -> None:
    """One level and one row must be affordable together: at 0.9 of a pass and 0.3 for the row, only the first is."""
    sizer, plain, drafts = Sizer(CostModel()), 0.02, 0
    spent = 0.0
    for token in range(256):
        budget = sizer.budget(Budget(32, 8, 4), 100)
        drafted = budget.max_nodes > 0
        assert drafts or not drafted or budget.max_depth == FIRST_DEPTH
        drafts += drafted
        levels = budget.max_depth if drafted else 0
        drafting, rows = levels * share * plain, 2 if drafted else 1
        spent += drafting + (0.3 * plain if drafted else 0.0)
        sizer.account(
            rows, 100 + token, 1, drafting, plain * (1 + 0.3 * (rows - 1)) + drafting, drafted=drafted, forwards=levels
        )
    assert 1 <= drafts <= tries
    assert spent <= 0.03 * 256 * plain


def test_scores_are_drawn_towards_those_of_the_trees_before() -> None:
    """A tree that looks better than all before it is bigger than they were, but not as big as it asks for."""
    sizer = Sizer(CostModel(), balance=30.0)
    for rows in (1, 2, 4, 8, 16):
        for _ in range(5):
            sizer.costs.observe(rows, 0, 0.01 * (1 + 0.2 * (rows - 1)))

    def promise(nodes: int, score: float) -> list[float]:
        tree = TokenTree([0] * (nodes + 1), [-1] + [0] * nodes, [1.0] + [score] * nodes)
        cut = sizer.cut(tree, 0)
        return sizer.explain(tree, 0, len(cut) - 1).gain[1:]

    for _ in range(40):
        poor = promise(4, 0.1)
    assert poor == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.02)  # nothing to be drawn to
    good, mean = promise(6, 0.7), 0.1 + 0.6 / 32
    own = np.arange(1, 7) * 0.7
    drawn = 0.6 * own + 0.4 * np.cumsum([mean] * 4 + [0.7 / 32] * 2)
    np.testing.assert_allclose(good, drawn, atol=0.02)
    assert np.all(np.less(good, 0.75 * own))


# -------------------------------------------------------------------- in the loop


@pytest.mark.parametrize("do_sample", [False, True])
def test_any_decision_gives_the_same_text(do_sample: bool, monkeypatch: Any) -> None:
    """Sizes drawn at random, plain rounds in between: the text, and the generator's state after it, stay."""
    model = build("llama")
    arguments = {"max_new_tokens": 40, "do_sample": do_sample}
    torch.manual_seed(4)
    expected = model.generate(prompt(), **arguments)
    state = torch.get_rng_state()
    rng = np.random.default_rng(0)

    def anything(self: Sizer, tree: TokenTree, context: int) -> TokenTree:
        return tree.prune(int(rng.integers(0, 6)), 99, 99)

    def sometimes(self: Sizer, limits: Budget, context: int) -> Budget:
        return Budget(int(rng.integers(0, 3)) * 9, int(rng.integers(1, 5)), 8)

    monkeypatch.setattr(Sizer, "cut", anything)
    monkeypatch.setattr(Sizer, "budget", sometimes)
    for drafter in (around(expected, "truth_last"), adversary(expected), "ngram", "union", "model"):
        extra = {"assistant_model": model} if drafter == "model" else {}
        torch.manual_seed(4)
        text = model.generate(prompt(), tree_spec={"drafter": drafter, "debug": True}, **arguments, **extra)
        assert torch.equal(text, expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_slow_drafter_is_left_alone(llama: PreTrainedModel) -> None:
    """Measured, not assumed: the drafts are perfect, but each costs more than the tokens that it saves."""
    model = build("llama")
    expected = model.generate(prompt(), max_new_tokens=60, do_sample=False)
    drafter = around(expected, "chain")
    quick = drafter.script

    def slow(context: Any, limits: Any) -> TokenTree:
        time.sleep(0.05)
        return quick(context, limits)

    drafter.script = slow
    text = model.generate(prompt(), max_new_tokens=60, do_sample=False, tree_spec=drafter)
    assert torch.equal(text, expected)
    assert len(drafter.contexts) < 4


def test_knowledge_outlives_the_call_and_is_kept_apart(llama: PreTrainedModel) -> None:
    model = build("llama")
    arguments = {"max_new_tokens": 12, "tree_spec": "ngram"}
    model.generate(prompt(), do_sample=False, **arguments)
    greedy = knowledge_of(model, "ngram", False)
    assert sum(greedy.costs.measured().values()) >= 8
    assert knowledge_of(model, "ngram", False) is greedy
    assert knowledge_of(model, "ngram", True) is not greedy
    assert knowledge_of(model, "union", False).costs is greedy.costs
    assert knowledge_of(build("llama"), "ngram", False).costs is not greedy.costs


def test_costs_are_remembered_on_request(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("HF_TREESPEC_CACHE", str(tmp_path))
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    build("llama").generate(prompt(), tree_spec="ngram", **arguments)
    assert not list(tmp_path.rglob("*.json"))  # not asked for
    build("llama").generate(prompt(), tree_spec={"remember": True}, **arguments)
    (file,) = tmp_path.rglob("*.json")
    later = build("llama")
    known = knowledge_of(later, "union", False, remember=True)
    assert sum(known.costs.measured().values()) > 5
    file.write_text("{")
    broken = knowledge_of(build("llama"), "union", False, remember=True)
    assert not broken.costs.measured()
    assert str(file) in caplog.text


def test_a_size_that_looked_dear_once_is_tried_again(traces: dict[str, Trace]) -> None:
    """The machine was interrupted when two rows were first measured."""
    cost = CURVES["linear (CPU, packed weights)"]
    sizer = Sizer(CostModel())
    for _ in range(4):
        sizer.costs.observe(1, 0, cost(1))
    sizer.costs.observe(2, 0, 10 * cost(1))
    run(traces["code"], cost, sizer)
    sizer.begin()
    seconds, sizes = run(traces["code"], cost, sizer)
    assert max(sizes) > 1
    assert seconds < 1.1 * min(run(traces["code"], cost, nodes)[0] for nodes in FIXED)


def test_a_text_is_not_lost_where_costs_cannot_be_written(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    monkeypatch.setenv("HF_TREESPEC_CACHE", str(blocked))
    model = build("llama")
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    text = model.generate(prompt(), tree_spec={"remember": True}, **arguments)
    assert torch.equal(text, model.generate(prompt(), **arguments))
    assert str(blocked) in caplog.text
