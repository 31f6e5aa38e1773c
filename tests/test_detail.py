"""What somebody who looks at rounds is told beyond the rounds: the target's view of each node, and why a size was chosen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import around, prompt
from transformers import PreTrainedModel

import hf_treespec
from hf_treespec import Drafter, RoundRecord, TokenTree, drafter_names, fresh_tables, stream
from hf_treespec.budget import Sizer
from hf_treespec.costs import CostModel
from hf_treespec.drafters import base
from hf_treespec.knowledge import knowledge_of

GREEDY = {"do_sample": False, "max_new_tokens": 20}


def uncached(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float()


def check_view(model: PreTrainedModel, record: RoundRecord, before: list[int]) -> None:
    """`before` is the text up to and with the record's root."""
    assert record.target_probability is not None and record.target_rank is not None
    tree = record.tree
    tokens = record.tokens.tolist()
    contexts = [[*before, *(tokens[n] for n in tree.path(p)[1:])] for p in record.parents.tolist()[1:]]
    wanted = list(zip(contexts, tokens[1:], strict=True))
    if record.bonus is not None:
        wanted.append(([*before, *record.committed[:-1]], record.bonus))
    assert len(record.target_probability) == len(record.target_rank) == 1 + len(wanted)
    assert (record.target_probability[0], record.target_rank[0]) == (1.0, 0)
    for place, (context, token) in enumerate(wanted, 1):
        logits = uncached(model, context)
        assert record.target_probability[place] == pytest.approx(float(logits.softmax(-1)[token]), abs=1e-4)
        assert record.target_rank[place] == int((logits > logits[token]).sum())


def test_details_are_those_of_uncached_forwards(llama: PreTrainedModel) -> None:
    text = llama.generate(prompt(), **GREEDY)
    drafted = {"drafter": around(text, "truth_last"), "max_children": 8, "fallback": False}
    ids = prompt()[0].tolist()
    for record in stream(llama, inputs=prompt(), tree_spec=drafted, detail=True, **GREEDY):
        check_view(llama, record, ids)
        if record.bonus is not None:  # greedy: its own token is its first choice
            assert record.target_rank is not None and record.target_rank[-1] == 0
        ids += record.committed
    assert ids == text[0].tolist()


def test_details_end_where_decoding_stops_on_a_drafted_token(llama: PreTrainedModel) -> None:
    text = llama.generate(prompt(), **GREEDY)
    arguments = {**GREEDY, "eos_token_id": int(text[0, 15])}
    spec = {"drafter": around(text, "chain"), "fallback": False}
    *_, last = stream(llama, inputs=prompt(), tree_spec=spec, detail=True, **arguments)
    assert last.bonus is None
    assert last.target_probability is not None and len(last.target_probability) == len(last.tokens)


def test_details_change_no_text_and_are_absent_unless_asked_for(llama: PreTrainedModel) -> None:
    sampled = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 24}
    texts = []
    for detail in (True, False):
        torch.manual_seed(3)
        rounds = stream(llama, inputs=prompt(), tree_spec="union", detail=detail, **sampled)
        records = list(rounds)
        texts.append(rounds.result.tolist())
        assert all((r.target_probability is not None) == (r.target_rank is not None) == detail for r in records)
        assert detail or all(r.sizing is None for r in records)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("row_cost", [0.0001, 0.002, 0.01])
@pytest.mark.parametrize("balance", [0.5, 30.0])
def test_sizing_explains_the_size_that_was_chosen(row_cost: float, balance: float) -> None:
    costs = CostModel()
    for rows in (1, 2, 4, 8, 16, 32):
        for _ in range(5):
            costs.observe(rows, 10, 0.02 + row_cost * rows)
    sizer = Sizer(costs, balance=balance)
    tree = TokenTree.from_paths(1, [[2, 3, 4, 5], [2, 6], [7, 8], [9]])
    nodes = len(sizer.cut(tree, 10)) - 1
    sizing = sizer.explain(tree, 10, nodes=nodes)
    assert len(sizing.gain) == len(sizing.seconds) == len(tree) and sizing.gain[0] == 0
    net = [g - sizing.rate * (s - sizing.seconds[0]) for g, s in zip(sizing.gain, sizing.seconds, strict=True)]
    assert nodes == int(np.argmax(net[: sizing.affordable + 1]))
    assert 0 <= nodes <= sizing.affordable <= len(tree) - 1


def test_sizing_is_that_of_the_round(llama: PreTrainedModel) -> None:
    """In a real run too, whatever the machine's times are."""
    text = llama.generate(prompt(), do_sample=False, max_new_tokens=60)
    spec = {"drafter": around(text, "truth_last"), "max_children": 8, "max_nodes": 64}
    records = list(stream(llama, inputs=prompt(), tree_spec=spec, detail=True, do_sample=False, max_new_tokens=60))
    sizings = [(r.drafted, r.sizing) for r in records if r.sizing is not None]
    assert sizings
    for drafted, sizing in sizings:
        net = [g - sizing.rate * (s - sizing.seconds[0]) for g, s in zip(sizing.gain, sizing.seconds, strict=True)]
        assert drafted == sizing.nodes <= sizing.affordable
        assert net[drafted] == pytest.approx(max(net[: sizing.affordable + 1]), abs=1e-4)  # it compares in float32


def test_the_whole_draft_is_there_and_what_was_verified_is_part_of_it(llama: PreTrainedModel) -> None:
    text = llama.generate(prompt(), do_sample=False, max_new_tokens=60)
    spec = {"drafter": around(text, "wide"), "max_children": 8, "max_nodes": 64}
    records = list(stream(llama, inputs=prompt(), tree_spec=spec, detail=True, do_sample=False, max_new_tokens=60))
    assert records[0].draft is None and any(r.draft is not None for r in records)
    for record in records:
        if record.draft is None:
            assert record.drafted == 0
            continue
        paths = {tuple(record.draft.tokens[0, record.draft.path(n)]) for n in range(len(record.draft))}
        assert {tuple(record.tree.tokens[0, record.tree.path(n)]) for n in range(len(record.tokens))} <= paths
        assert set(record.to_dict()["draft"]) == {"tokens", "parents", "scores"}


def test_sizing_is_ready_for_json(llama: PreTrainedModel) -> None:
    rounds = stream(llama, inputs=prompt(), tree_spec="ngram", detail=True, **GREEDY)
    for record in rounds:
        document = record.to_dict()
        assert document["sizing"] is None or set(document["sizing"]) == {
            "gain",
            "seconds",
            "rate",
            "affordable",
            "nodes",
        }
        assert all(math.isfinite(p) for p in document["target_probability"])


def test_details_are_not_in_the_timed_parts(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from hf_treespec import decoding

    true_view = decoding.target_view

    def slow_view(*arguments: object) -> object:
        time.sleep(0.05)
        return true_view(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(decoding, "target_view", slow_view)
    records = list(stream(llama, inputs=prompt(), tree_spec="ngram", detail=True, do_sample=False, max_new_tokens=5))
    assert sum(min(sum(r.seconds.values()), 1.0) < 0.05 for r in records) >= len(records) - 1  # one may be interrupted


# -------------------------------------------------------------------- who can draft alone


def test_drafters_that_need_nothing_more_are_told_apart() -> None:
    alone = drafter_names(alone=True)
    assert {"early_exit", "ngram", "recycling", "union"} <= set(alone) <= set(drafter_names())
    assert not {"model", "eagle", "medusa", "hydra", "datastore"} & set(alone)


def test_a_constructor_that_asks_for_something_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy(Drafter):
        def __init__(self, path: str) -> None:
            self.path = path

        def draft(self, context: object, budget: object) -> TokenTree:
            raise NotImplementedError

    class Honest(Needy):
        needs = "a file"

        def __init__(self, path: str | None = None) -> None:
            super().__init__(path or "")

    monkeypatch.setitem(base._registry, "needy", Needy)
    monkeypatch.setitem(base._registry, "honest", Honest)
    assert not {"needy", "honest"} & set(drafter_names(alone=True))
    assert {"needy", "honest"} <= set(drafter_names())


def test_every_drafter_that_says_it_needs_nothing_works_by_its_name(llama: PreTrainedModel) -> None:
    expected = llama.generate(prompt(), **GREEDY)
    for name in drafter_names(alone=True):
        ours = llama.generate(prompt(), tree_spec=name, **GREEDY)
        assert torch.equal(getattr(ours, "sequences", ours), expected), name


# -------------------------------------------------------------------- nothing learnt in between


def test_fresh_tables_neither_take_nor_leave_what_was_learnt(llama: PreTrainedModel) -> None:
    def nodes() -> list[int]:
        spec = {"drafter": "recycling", "fallback": False}
        return [r.drafted for r in stream(llama, inputs=prompt(), tree_spec=spec, **GREEDY)]

    with fresh_tables(llama):
        first = nodes()
        warm = nodes()
        with fresh_tables(llama):
            assert nodes() == first
        assert sum(warm) > sum(first) or len(warm) < len(first)  # the block above did not teach this one anew
        with pytest.raises(RuntimeError), fresh_tables(llama):
            raise RuntimeError
        assert nodes() != first
    assert knowledge_of(llama, "recycling", False) is not None
    assert hf_treespec.fresh_tables is fresh_tables
