"""Trees from DFlash drafters: one uncached forward over the whole text is what every tree must agree with."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, prompt, run
from natives import assert_same, assert_scores, begun, committed, draft, rounds, scored, states_of, with_dflash
from transformers import PreTrainedModel

import hf_treespec
from hf_treespec import Budget, CheckpointError, DFlashDrafter, DrafterError, _compat, load_drafter
from hf_treespec.accept import NoiseWindow

if _compat.dflash_cache() is None:
    pytest.skip("this transformers has no DFlash drafters (since 5.15)", allow_module_level=True)

FAMILIES = ("llama", "muse_glimmer")
BUDGET = Budget(max_nodes=20, max_depth=8, max_children=3)


def block(target: PreTrainedModel, model: Any, ids: list[int]) -> torch.Tensor:
    """(B - 1, V) probabilities by depth: the drafting model without a cache, with masks written out here."""
    config = model.config
    states = states_of(target, ids[:-1])
    context = torch.cat([states[layer + 1] for layer in config.target_layer_ids], -1)
    tokens = torch.tensor([[ids[-1]] + [config.mask_token_id] * (config.block_size - 1)])
    embeds = torch.nn.functional.embedding(tokens, target.get_input_embeddings().weight)
    keys = torch.arange(len(ids) - 1 + config.block_size)
    far = (keys[None] - keys[-config.block_size :, None]).abs() > config.sliding_window
    window = torch.zeros(far.shape).masked_fill(far, -torch.inf)[None, None]
    with torch.no_grad():
        out = model(
            noise_embeds=embeds,
            context_hidden_states=context,
            attention_mask={"full_attention": None, "sliding_attention": window},
            position_ids=keys[None],
        )
        return target.get_output_embeddings()(out.last_hidden_state[0, 1:]).softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_products_over_positions(family: str) -> None:
    target, model = with_dflash(family)
    ids = prompt(14)[0].tolist()
    tree = draft(begun(DFlashDrafter(model), target, ids), ids, BUDGET)
    chances = block(target, model, ids)
    assert_scores(tree, lambda path: chances[len(path)] if len(path) < 4 else torch.zeros(VOCAB))
    drafter = begun(DFlashDrafter(model), target, ids)
    draft(drafter, ids, BUDGET)
    assert drafter.forwards == 1


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_tree_holds_the_best_of_all_paths(do_sample: bool) -> None:
    target, model = with_dflash("llama")
    ids = prompt(14)[0].tolist()
    noise = NoiseWindow((1, VOCAB), torch.device("cpu")) if do_sample else None
    tree = draft(begun(DFlashDrafter(model), target, ids, do_sample), ids, BUDGET, noise)
    chances = block(target, model, ids)
    if noise is not None:  # the target's own draws, a depth each
        chances = (chances / torch.cat([noise.peek(depth) for depth in range(4)])).log().softmax(-1)
    tops = chances.topk(3)
    every = {}
    for depth in range(1, 5):
        for ranks in itertools.product(range(3), repeat=depth):
            path = tuple(int(tops.indices[d, r]) for d, r in enumerate(ranks))
            every[path] = float(torch.stack([tops.values[d, r] for d, r in enumerate(ranks)]).prod())
    best = sorted(every.values(), reverse=True)[: BUDGET.max_nodes]
    assert sorted(scored(tree).values(), reverse=True) == pytest.approx(best, abs=1e-4)
    assert all(every[path] == pytest.approx(score, abs=1e-4) for path, score in scored(tree).items())


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("accept", [0, 1, 2, "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_after_acceptance_equals_a_fresh_drafters(family: str, accept: Any, do_sample: bool) -> None:
    target, model = with_dflash(family)
    accepted = rounds(DFlashDrafter(model), target, accept, do_sample, BUDGET)
    assert accept != "all" or max(accepted) > 2


@pytest.mark.parametrize("limit", [Budget(1, 1, 1), Budget(12, 12, 1), Budget(30, 2, 2)])
def test_budgets_are_kept(limit: Budget) -> None:
    target, model = with_dflash("llama")
    ids = prompt(14)[0].tolist()
    tree = draft(begun(DFlashDrafter(model), target, ids), ids, limit)
    assert len(tree) - 1 <= limit.max_nodes and tree.depths.max() <= min(4, limit.max_depth)
    assert tree.sibling_ranks.max() < limit.max_children


def test_the_targets_embedding_norm_is_left_alone() -> None:
    target, model = with_dflash("muse_glimmer")
    embedding: Any = target.get_input_embeddings()
    norm = embedding.embed_norm
    ids = prompt(9)[0].tolist()
    draft(begun(DFlashDrafter(model), target, ids), ids, BUDGET)
    assert embedding.embed_norm is norm


def test_contract_on_the_family_that_ships_one() -> None:
    target, model = with_dflash("muse_glimmer")
    hf_treespec.check_drafter(DFlashDrafter(model), target, max_new_tokens=8)


def test_auto_takes_it_from_assistant_model() -> None:
    target, model = with_dflash("llama")
    for spec in (True, "dflash", {"drafter": "dflash"}):
        text = target.generate(prompt(), tree_spec=spec, assistant_model=model, do_sample=False, max_new_tokens=12)
        assert torch.equal(text, target.generate(prompt(), do_sample=False, max_new_tokens=12))
        assert text.tree_spec.drafter == "dflash"


def test_a_drafter_that_can_read_no_further_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = with_dflash("llama")
    monkeypatch.setattr(model.config, "max_position_embeddings", 24)
    text = run(target, prompt(12), DFlashDrafter(model), do_sample=False, max_new_tokens=20)
    assert torch.equal(text, target.generate(prompt(12), do_sample=False, max_new_tokens=20))
    assert text.tree_spec.records[1].drafted and not text.tree_spec.records[-1].drafted


def test_padding_does_not_change_the_drafts() -> None:
    target, model = with_dflash("llama")
    plain = run(target, prompt(), DFlashDrafter(model), do_sample=False, max_new_tokens=12)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt()], 1)
    mask = (padded != 0).long()
    text = run(target, padded, DFlashDrafter(model), do_sample=False, max_new_tokens=12, attention_mask=mask)
    assert [r.tokens.tolist() for r in text.tree_spec.records[1:]] == [
        r.tokens.tolist() for r in plain.tree_spec.records[1:]
    ]


# -------------------------------------------------------------------- files, and what is refused


def test_a_saved_drafter_is_loaded(tmp_path: Path) -> None:
    target, model = with_dflash("llama")
    model.save_pretrained(tmp_path)
    found = hf_treespec.inspect_checkpoint(tmp_path)
    assert found.format == "dflash" and found.facts["block size"] == 5
    assert found.facts["target's states it reads"] == [2, 1]
    assert found.parameters == sum(p.numel() for p in model.parameters())
    ids = prompt(14)[0].tolist()
    for loaded in (load_drafter(tmp_path), load_drafter(tmp_path, target=target)):
        assert isinstance(loaded, DFlashDrafter)
        expected = draft(begun(DFlashDrafter(model), target, ids), ids, BUDGET)
        assert_same(draft(begun(loaded, target, ids), ids, BUDGET), expected)
    with pytest.raises(CheckpointError, match=r"does not take options \{'wave': 3\}"):
        load_drafter(tmp_path, wave=3)


def test_classes_with_code_of_their_own_are_refused(tmp_path: Path) -> None:
    with_dflash("llama")[1].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["DFlashDraftModel"]}))
    with pytest.raises(CheckpointError, match="class DFlashDraftModel, which is not one of this transformers' own"):
        load_drafter(tmp_path)


def test_without_dflash_the_release_that_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "dflash_cache", lambda: None)
    with pytest.raises(DrafterError, match=r"DFlashCache \(5\.15 or later\)"):
        hf_treespec.make_drafter("dflash")


def test_misfits_are_named(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = with_dflash("llama")
    with pytest.raises(DrafterError, match="'dflash' needs a model"):
        run(target, prompt(), "dflash", max_new_tokens=4)
    with pytest.raises(DrafterError, match="LlamaForCausalLM is not a DFlash drafter"):
        DFlashDrafter(llama)
    with pytest.raises(DrafterError, match="use tree_spec='dflash'"):
        run(target, prompt(), "model", assistant_model=model, max_new_tokens=4)
    for name, value, message in (
        ("mask_token_id", 61, "masks with token 61"),
        ("hidden_size", 48, "a hidden size of 48"),
        ("target_layer_ids", [0, 2], "reads the state after layer 3"),
    ):
        with monkeypatch.context() as patch, pytest.raises(DrafterError, match=message):
            patch.setattr(model.config, name, value)
            run(target, prompt(), DFlashDrafter(model), max_new_tokens=4)


def test_what_was_rejected_is_not_in_the_context() -> None:
    """Two rounds whose trees differ but whose texts do not leave the drafter in the same state."""
    target, model = with_dflash("llama")
    ids = prompt(12)[0].tolist()
    trees = []
    for limit in (BUDGET, Budget(3, 1, 3)):
        drafter = begun(DFlashDrafter(model), target, ids)
        tree = draft(drafter, ids, limit)
        drafter.observe(committed(target, ids, tree, [0], 9))
        trees.append(draft(drafter, [*ids, 9], BUDGET))
    assert_same(*trees)
