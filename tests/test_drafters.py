"""The drafters: what they propose, and that what they keep between rounds is what a fresh one would compute."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_eagle
import torch
from conftest import prompt, run, target
from safetensors.torch import load_file, save_file
from transformers import LogitsProcessorList, PreTrainedModel

from hf_treespec import (
    Budget,
    CheckpointError,
    Commit,
    DraftContext,
    Drafter,
    DrafterError,
    ModelDrafter,
    NgramDrafter,
    Prompt,
    TokenTree,
    inspect_checkpoint,
    load_drafter,
)
from hf_treespec.accept import NoiseWindow
from hf_treespec.drafters.checkpoint import Checkpoint, _formats
from hf_treespec.drafters.near_miss import NearMissSource
from hf_treespec.drafters.ngram import SuffixAutomaton
from hf_treespec.drafters.recycling import RecyclingSource, Successors
from hf_treespec.drafters.source import Answers, coupled, top
from hf_treespec.verify import Verified

BUDGET = Budget(max_nodes=24, max_depth=6, max_children=3)


def plain_round(root: int, token: int) -> Commit:
    return Commit([[token]], [[0]], [token], Verified(TokenTree.root_only(root), torch.zeros(1, 1, 61)))


def started(
    drafter: Drafter, ids: list[int], model: Any = None, do_sample: bool = False, *, read: bool = True
) -> Drafter:
    """`drafter` at the start of a call on the text `ids`, whose last token is the root."""
    fresh = drafter.for_call()
    logits = torch.zeros(1, 1, 61)
    verified = Verified(TokenTree.root_only(ids[-2]), logits)
    text = torch.tensor([ids[:-1]])
    fresh.start(Prompt(model, text, None, do_sample, LogitsProcessorList(), None, 64, verified))
    fresh.observe(Commit([[ids[-1]]], [[0]], [ids[-1]], verified))
    if read:
        fresh.read_prompt()
    return fresh


def drafted(drafter: Drafter, ids: list[int], budget: Budget = BUDGET, noise: Any = None) -> TokenTree:
    tree = drafter.draft(DraftContext(torch.tensor([ids]), [ids[-1]], noise, 100), budget)
    tree.check(61)
    return tree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[0, tree.path(n)[1:]].tolist()) for n in range(1, len(tree))}


# -------------------------------------------------------------------- the suffix automaton


@pytest.mark.parametrize("seed", range(6))
def test_automaton_finds_the_longest_suffix_that_occurred_before(seed: int) -> None:
    """After every token: the suffix link of the last state is that suffix, its transitions all its continuations, and
    (for texts this short) the counts how often each followed."""
    rng = np.random.default_rng(seed)
    automaton, text = SuffixAutomaton(), []
    for token in rng.integers(0, 2 + seed // 2, 60).tolist():
        automaton.append(token)
        text.append(token)
        longest = 0
        for length in range(1, len(text)):
            suffix = text[-length:]
            starts = [i for i in range(len(text) - length) if text[i : i + length] == suffix]
            if not starts:
                break
            longest = length
        state = automaton.link[automaton.last]
        assert automaton.length[state] == longest
        suffix = text[len(text) - longest :]
        followed: dict[int, int] = {}
        for i in range(len(text) - longest):
            if text[i : i + longest] == suffix:
                followed[text[i + longest]] = followed.get(text[i + longest], 0) + 1
        assert set(automaton.next[state]) == set(followed)
        if longest > 2:
            assert automaton.count[state] == followed


def test_automaton_is_linear() -> None:
    """At most two states a token, whatever the text (Blumer et al. 1985)."""
    for text in ([1] * 500, [1, 2] * 250, np.random.default_rng(0).integers(0, 3, 500).tolist()):
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        assert len(automaton.length) <= 2 * len(text)


# -------------------------------------------------------------------- ngram


def test_ngram_continues_a_copy_deeply() -> None:
    ids = [*range(2, 30), 2, 3, 4, 5]
    tree = drafted(started(NgramDrafter(), ids), ids)
    assert (6, 7, 8, 9, 10, 11) in paths(tree)
    assert tree.scores[0, 1] > 0.5


def test_ngram_holds_all_continuations_the_frequent_first() -> None:
    ids = [5, 6, 7, 1, 5, 6, 8, 2, 5, 6, 7, 3, 5, 6]
    tree = drafted(started(NgramDrafter(), ids), ids)
    level = {
        int(t): float(s) for t, p, s in zip(tree.tokens[0], tree.parents[0], tree.scores[0], strict=True) if p == 0
    }
    assert set(level) >= {7, 8}
    assert level[7] > level[8]
    assert {(7, 1), (7, 3), (8, 2)} <= paths(tree)


def test_ngram_drafts_nothing_where_nothing_recurs() -> None:
    ids = list(range(2, 20))
    assert len(drafted(started(NgramDrafter(), ids), ids)) == 1


def test_ngram_goes_on_past_the_end_of_a_periodic_text() -> None:
    ids = [1, 2, 3] * 4
    assert (1, 2, 3, 1, 2, 3) in paths(drafted(started(NgramDrafter(), ids), ids))


@pytest.mark.parametrize("do_sample", [False, True])
def test_guesses_are_held_against_the_target_at_every_node(do_sample: bool) -> None:
    """Also at rejected ones: a hit where the target's choice is among the tokens; its probability where it samples."""
    ids = [5, 6, 7, 5, 6, 8, 5, 6]
    drafter = started(NgramDrafter(), ids, do_sample=do_sample)
    source = drafter._sources[0]  # type: ignore[attr-defined]
    tree = TokenTree([6, 7, 8, 5], [-1, 0, 0, 1])  # 7 is accepted, 8 is not; after 6-7 and 6-8 stood 5
    logits = torch.full((1, 4, 61), -5.0)
    for node, token in enumerate([7, 5, 5, 9]):
        logits[0, node, token] = 1.0
    asked = [source._suffixes(_walk(source, tree, node)) for node in range(4)]
    tries, hits = sum(source.odds._tries), sum(source.odds._hits)
    p, answers, expected = logits[0].softmax(-1), [7, 5, 5, 9], 0.0
    for node, suffixes in enumerate(asked):
        for _, tokens in suffixes:
            expected += sum(float(p[node, t]) for t in tokens) if do_sample else float(answers[node] in tokens)
    drafter.observe(Commit([[7, 5]], [[0, 1]], [5], Verified(tree, logits)))
    assert sum(source.odds._tries) - tries == sum(map(len, asked)) > 4
    assert expected > 1
    assert sum(source.odds._hits) - hits == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("do_sample", [False, True])
def test_recycled_guesses_are_held_against_the_target_at_every_node(do_sample: bool) -> None:
    source = RecyclingSource(Successors(2))
    for token in (5, 6):
        source.read(token)
    source.table.store([[6], [7, (6, 7)]], np.array([[7, 8], [9, 5]]), np.array([[0.95, 0.05], [0.5, 0.5]], np.float32))
    tree = TokenTree([6, 7, 8], [-1, 0, 0])
    logits = torch.full((1, 3, 61), -5.0)
    logits[0, 0, 8], logits[0, 1, 9], logits[0, 2, 9] = 3.0, 3.0, 3.0
    before = [sum(odds._hits) for odds in source.odds]
    answers = Answers(Commit([[8, 9]], [[0, 2]], [9], Verified(tree, logits)), 1.0 if do_sample else None, 2)
    source.learn([(5, 6), (6, 7), (6, 8)], answers)
    p = logits[0].softmax(-1)
    one = float(p[0, 7] + p[0, 8] + p[1, 9] + p[1, 5]) if do_sample else 2.0  # the last token alone: at nodes 0 and 1
    two = float(p[1, 9] + p[1, 5]) if do_sample else 1.0  # the last two: only 6-7 is known
    assert [sum(odds._hits) - b for odds, b in zip(source.odds, before, strict=True)] == pytest.approx(
        [one, two], abs=1e-5
    )


def test_guesses_are_coupled_to_the_draw() -> None:
    """Over many draws: what the guesses get together is how often the target's choice is among them, and the one that
    gets most is chosen more often than by the chances alone."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(12, 0.7))
    chances = {token: float(p[token]) for token in range(6)}
    promised, held, first, plainly = 0.0, 0, 0, 0
    for _ in range(4000):
        noise = rng.exponential(size=12).astype(np.float32)
        choice = int(np.argmax(p / noise))
        shifted = coupled(chances, noise)
        promised += sum(shifted.values())
        held += choice in chances
        first += choice == max(shifted, key=shifted.__getitem__)
        plainly += choice == max(chances, key=chances.__getitem__)
    assert promised == pytest.approx(held, rel=0.05)
    assert first > 1.3 * plainly


def _walk(source: Any, tree: TokenTree, node: int) -> Any:
    state = source.root()
    for n in tree.path(node)[1:]:
        state = source.step(state, int(tree.tokens[0, n]))
    return state


def test_min_match_asks_for_more() -> None:
    ids = [5, 6, 7, 8, 9, 6]
    assert len(drafted(started(NgramDrafter(), ids), ids)) > 1
    assert len(drafted(started(NgramDrafter(min_match=2), ids), ids)) == 1


def test_ngram_obeys_its_budget() -> None:
    ids = np.random.default_rng(0).integers(0, 4, 80).tolist()
    drafter = started(NgramDrafter(), ids)
    for budget in (Budget(1, 1, 1), Budget(30, 2, 2), Budget(12, 12, 1)):
        tree = drafted(drafter, ids, budget)
        assert len(tree) - 1 <= budget.max_nodes and tree.depths.max() <= budget.max_depth
        assert max((tree.parents[0] == i).sum() for i in range(len(tree))) <= budget.max_children


@pytest.mark.parametrize("kind", ["ngram", "model"])
@pytest.mark.parametrize("accept", [0, 1, 2, "all"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_after_acceptance_equals_a_fresh_drafters(
    kind: str, accept: Any, do_sample: bool, assistant: PreTrainedModel
) -> None:
    """After accepting none, some or all of a path, also of non-first children, for several rounds."""
    template: Drafter = NgramDrafter() if kind == "ngram" else ModelDrafter(assistant, wave=3, min_gain=0.0)
    noise = NoiseWindow((1, 61), torch.device("cpu")) if do_sample else None
    ids = torch.cat([prompt(9), prompt(6)], 1)[0].tolist()
    kept = started(template, ids[:-3], assistant, do_sample, read=False)
    for end in range(len(ids) - 3, len(ids)):  # rounds in which it is not asked
        kept.observe(plain_round(ids[end - 1], ids[end]))
    kept.read_prompt()
    for round_number in range(4):
        tree = drafted(kept, ids, noise=noise)
        fresh = started(template, ids, assistant, do_sample)
        if kind == "ngram":  # a(m) is learnt along the way and differs by design
            kept._sources[0].odds = copy.deepcopy(fresh._sources[0].odds)  # type: ignore[attr-defined]
            tree = drafted(kept, ids, noise=noise)
        expected = drafted(fresh, ids, noise=noise)
        assert paths(tree) == paths(expected)
        torch.testing.assert_close(
            torch.from_numpy(np.sort(tree.scores[0])), torch.from_numpy(np.sort(expected.scores[0])), atol=1e-4, rtol=0
        )
        leaf = len(tree) - 1 - round_number % max(1, len(tree) // 2)
        path = tree.path(leaf)[: None if accept == "all" else accept + 1]
        bonus = 2 + (7 * round_number + len(ids)) % 50
        tokens = [*tree.tokens[0, path[1:]].tolist(), bonus]
        kept.observe(Commit([tokens], [path], [bonus], Verified(tree, torch.zeros(1, len(tree), 61))))
        ids += tokens


def test_a_padded_prompt_is_read_late_as_one_without_padding(assistant: PreTrainedModel) -> None:
    ids = prompt(12)[0].tolist()
    expected = drafted(started(ModelDrafter(assistant, min_gain=0.0), ids, assistant), ids)
    drafter, text = ModelDrafter(assistant, min_gain=0.0).for_call(), torch.tensor([[0] * 4 + ids[:8]])
    mask = torch.tensor([[0] * 4 + [1] * 8])
    verified = Verified(TokenTree.root_only(ids[7]), torch.zeros(1, 1, 61))
    drafter.start(Prompt(assistant, text, mask, False, LogitsProcessorList(), None, 64, verified))
    for root, token in itertools.pairwise(ids[7:]):
        drafter.observe(plain_round(root, token))
    drafter.read_prompt()
    tree = drafted(drafter, [0] * 4 + ids)
    assert paths(tree) == paths(expected)
    torch.testing.assert_close(
        torch.from_numpy(np.sort(tree.scores[0])), torch.from_numpy(np.sort(expected.scores[0])), atol=1e-4, rtol=0
    )


def test_model_drafts_are_the_assistants_own_likeliest_paths(assistant: PreTrainedModel) -> None:
    """Scores are products of the assistant's probabilities, and the tree holds the best nodes of those it could reach."""
    ids = prompt(10)[0].tolist()
    tree = drafted(started(ModelDrafter(assistant, wave=24, min_gain=0.0), ids, assistant), ids, Budget(15, 3, 4))
    for node in range(1, len(tree)):
        path = tree.tokens[0, tree.path(node)[1:]].tolist()
        score = 1.0
        for i, token in enumerate(path):
            with torch.no_grad():
                logits = assistant(input_ids=torch.tensor([ids + path[:i]]), use_cache=False).logits[0, -1]
            score *= float(logits.softmax(-1)[token])
        assert tree.scores[0, node] == pytest.approx(score, abs=1e-4)
    first = [int(t) for t, p in zip(tree.tokens[0], tree.parents[0], strict=True) if p == 0]
    with torch.no_grad():
        best = assistant(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(len(first)).indices.tolist()
    assert set(first) == set(best)


def test_model_stops_where_another_wave_does_not_pay(assistant: PreTrainedModel) -> None:
    ids = prompt(10)[0].tolist()
    eager = drafted(started(ModelDrafter(assistant, min_gain=0.0), ids, assistant), ids)
    thrifty = drafted(started(ModelDrafter(assistant, min_gain=1.0), ids, assistant), ids)
    assert thrifty.depths.max() < eager.depths.max()


def test_a_drafting_model_that_can_read_no_further_drafts_nothing(llama: PreTrainedModel) -> None:
    short = copy.deepcopy(llama)
    short.config.max_position_embeddings = 24
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    for length in (12, 30):  # it ends within the text; it cannot even read the prompt
        text = run(llama, prompt(length), "model", assistant_model=short, **arguments)
        assert torch.equal(text, llama.generate(prompt(length), **arguments))
        last = text.tree_spec.records[-1]
        assert last.drafted == 0


def test_contract_types_are_frozen() -> None:
    for kind in (Budget, Commit, DraftContext, Prompt):
        assert dataclasses.fields(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


# -------------------------------------------------------------------- recycling and the union


def test_top_of_a_large_vocabulary_is_exact() -> None:
    for size in (4096, 4100, 512):  # in chunks; not a multiple of a chunk; too few chunks
        scores = torch.randn(7, size)
        tokens, chances = top(scores, 8)
        expected = scores.topk(8, dim=-1)
        assert (tokens == expected.indices.numpy()).all()
        assert (chances == expected.values.softmax(-1).numpy()).all()


def test_recycling_keeps_what_the_target_thought_also_at_rejected_nodes(llama: PreTrainedModel) -> None:
    source = RecyclingSource(Successors(4))
    for token in (5, 6):
        source.read(token)
    tree = TokenTree([6, 7, 8, 9], [-1, 0, 0, 2])  # the text ... 5 6; drafted 7, and 8 9
    logits = torch.randn(1, 4, 61)
    source._before_root = 5
    source.look(Answers(Commit([[7]], [[0]], [7], Verified(tree, logits)), None, 4))
    best = logits[0].topk(4).indices.tolist()
    for context, row in ((6, 0), ((5, 6), 0), (7, 1), ((6, 7), 1), (8, 2), (9, 3), ((8, 9), 3)):
        assert [token for token, _ in source.table.after(context)] == best[row]
    assert source.table.after((5, 9)) == []
    guesses = source.guesses((5, 6))
    assert next(iter(guesses)) == best[0][0] and 0 < sum(guesses.values()) <= 1


# The text ends 5 6; drafted below 6: 7 8 9, and 10. The target wants 11 instead.
NEAR_MISS = TokenTree([6, 7, 8, 9, 10], [-1, 0, 1, 2, 0])


def _near_misses(choice: int | None = 11) -> tuple[NearMissSource, Answers]:
    logits = (-5.0 - 0.01 * torch.arange(61.0)).repeat(1, 5, 1)  # the rest: low ids first
    for node, likely in enumerate([(11, 7, 30), (8, 31), (32, 9), (33,), (34,)]):
        for rank, token in enumerate(likely):
            logits[0, node, token] = 4.0 - rank
    source = NearMissSource()
    stop = [[11]] if choice is not None else [[7]]
    answers = Answers(Commit(stop, [[0]], [choice], Verified(NEAR_MISS, logits)), None, source.width)
    source.look(answers)
    return source, answers


def test_what_follows_a_replaced_token_is_tried_after_the_one_in_its_place() -> None:
    source, _ = _near_misses()
    guesses = source.guesses(source.root())
    assert {8, 31} <= set(guesses), "what the target said after 7, the likelier of the two drafts that it replaced"
    assert {7, 30} <= set(guesses), "what else it thought likely where it chose 11"
    assert 11 not in guesses and 34 not in guesses
    after_8 = source.guesses(source.step(source.root(), 8))
    after_7 = source.guesses(source.step(source.root(), 7))
    assert {32, 9} <= set(after_8), "the draft 7 8 was verified as far as what follows 8"
    assert {8, 31} <= set(after_7), "the draft resumed behind the delayed 7"
    deeper = source.step(source.step(source.root(), 7), 8)
    assert set(source.guesses(deeper)) == set(after_8)
    assert source.guesses(source.step(source.root(), 50)) == {}


def test_near_misses_of_a_text_that_went_on_as_drafted_are_none() -> None:
    source, _ = _near_misses(choice=None)
    assert source.root() == () and source.guesses(source.root()) == {}


def test_near_misses_are_held_against_the_target() -> None:
    source, _ = _near_misses()
    before, tries = np.array(source.odds._hits), np.array(source.odds._tries)
    guesses = source.guesses(source.root())
    tree = TokenTree([11, 8], [-1, 0])
    logits = torch.full((1, 2, 61), -5.0)
    logits[0, 0, 8], logits[0, 1, 40] = 4.0, 4.0
    answers = Answers(Commit([[8, 40]], [[0, 1]], [40], Verified(tree, logits)), None, source.width)
    source.learn([source.root(), source.step(source.root(), 8)], answers)
    after_8 = source.guesses(source.step(source.root(), 8))
    assert sum(np.array(source.odds._tries) - tries) == len(guesses) + len(after_8)
    changed = np.array(source.odds._hits) - before
    assert sum(changed) == 1.0, "8 came true, nothing that was guessed behind it did"
    assert source.guesses(source.root())[8] > guesses[8] and source.guesses(source.root())[30] < guesses[30]


def test_recycling_tables_are_bounded(monkeypatch: Any) -> None:
    from hf_treespec.drafters import recycling

    monkeypatch.setattr(recycling, "MAX_CONTEXTS", 100)
    table = recycling.Successors(2)
    for start in range(0, 1000, 10):
        table.store([[t] for t in range(start, start + 10)], np.ones((10, 2)), np.ones((10, 2)))
    assert len(table.place) <= 110
    assert table.after(999)


def test_a_target_learns_from_call_to_call(llama: PreTrainedModel) -> None:
    """The second time over, the target's own opinions draft its text."""
    from hf_treespec.drafters.recycling import exchange_tables

    exchange_tables(llama)
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30}
    first = run(llama, prompt(), "recycling", **arguments).tree_spec
    second = run(llama, prompt(), "recycling", **arguments).tree_spec
    assert second.tokens_per_round > 1.3 * first.tokens_per_round
    exchange_tables(llama)
    again = run(llama, prompt(), "recycling", **arguments).tree_spec
    assert again.tokens_per_round == first.tokens_per_round


def test_the_union_holds_what_its_members_propose(llama: PreTrainedModel) -> None:
    from hf_treespec import UnionDrafter

    ids = [*range(2, 30), 2, 3, 4, 5]
    union = started(UnionDrafter(width=3), ids, llama)
    assert (6, 7, 8, 9, 10, 11) in paths(drafted(union, ids))
    union._sources[1].table.store([[5]], np.array([[50, 0, 1]]), np.array([[0.9, 0.05, 0.05]]))  # type: ignore[attr-defined]
    assert {(6,), (50,)} <= paths(drafted(union, ids))


@pytest.mark.parametrize("name", ["recycling", "union"])
def test_widths_out_of_range_are_named(name: str) -> None:
    from hf_treespec import DrafterError, make_drafter

    with pytest.raises(DrafterError, match="width=0"):
        make_drafter(name, width=0)


# -------------------------------------------------------------------- whole models from files


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_folder_with_a_causal_lm_drafts(family: str, shards: bool, tmp_path: Path, llama: PreTrainedModel) -> None:
    small = target(family)
    small.save_pretrained(tmp_path, max_shard_size="10KB" if shards else "1GB")
    found = inspect_checkpoint(tmp_path)
    assert found.format == "causal-lm" and len(found.files) > shards
    assert found.facts["class"] == type(small).__name__ and found.facts["vocabulary"] == 61
    ids = prompt(10)[0].tolist()
    expected = drafted(started(ModelDrafter(small, wave=3), ids, llama), ids)
    for drafter in (load_drafter(tmp_path, wave=3), load_drafter(tmp_path, target=llama, wave=3)):
        assert isinstance(drafter, ModelDrafter)
        assert paths(drafted(started(drafter, ids, llama), ids)) == paths(expected)


def test_a_loaded_model_takes_the_targets_dtype(tmp_path: Path, llama: PreTrainedModel) -> None:
    llama.save_pretrained(tmp_path)
    half = copy.deepcopy(llama).to(torch.bfloat16)
    assert load_drafter(tmp_path, target=half).model.dtype == torch.bfloat16  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"format causal-lm does not take options \{'hops': 1\}"):
        load_drafter(tmp_path, hops=1)


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path, llama: PreTrainedModel) -> None:
    llama.save_pretrained(tmp_path)
    other = copy.deepcopy(llama)
    other.config.vocab_size = 5000
    with pytest.raises(DrafterError, match="vocabulary of 61 tokens and the target of 5000"):
        load_drafter(tmp_path, target=other)


def test_a_model_with_weights_missing_is_refused(tmp_path: Path, llama: PreTrainedModel) -> None:
    llama.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lacks weights of LlamaForCausalLM: model\.layers\.1\.mlp\.up_proj\.weight, "
    ):
        load_drafter(tmp_path)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layout", test_eagle.LAYOUTS)
def test_a_head_is_no_causal_lm_whatever_it_calls_itself(layout: str, prefix: str, tmp_path: Path) -> None:
    _, config, tensors = test_eagle.write(tmp_path, layout)
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    config = {**config, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not _formats["causal-lm"].recognises(Checkpoint.open(tmp_path))


def test_a_model_with_medusa_heads_is_no_plain_one(tmp_path: Path, llama: PreTrainedModel) -> None:
    llama.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    heads = {"medusa_head.0.0.linear.weight": torch.zeros(32, 32), "medusa_head.0.0.linear.bias": torch.zeros(32)}
    heads["medusa_head.0.1.weight"] = torch.zeros(61, 32)
    save_file({**tensors, **heads}, tmp_path / "model.safetensors")
    assert inspect_checkpoint(tmp_path).format == "medusa"


def test_part_of_a_model_is_no_causal_lm(tmp_path: Path, llama: PreTrainedModel) -> None:
    llama.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".1." not in n}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="of no known format"):
        load_drafter(tmp_path)
