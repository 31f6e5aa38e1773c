"""Trees from assistants that read the target's keys and values, against transformers' step over one path at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prompt, run
from natives import SHARES, assert_same, assert_scores, begun, draft, rounds, scored, with_shared_kv
from transformers import DynamicCache, PreTrainedModel

import hf_treespec
from hf_treespec import Budget, DrafterError, SharedKvDrafter, TokenTree, _compat, load_drafter
from hf_treespec.cache import TreeCache

BUDGET = Budget(max_nodes=20, max_depth=4, max_children=3)


def target_cache(target: PreTrainedModel, ids: list[int]) -> tuple[DynamicCache, Any]:
    cache = DynamicCache(config=_compat.text_config(target))
    with torch.no_grad():
        out = target(
            input_ids=torch.tensor([ids]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=True,
            **{_compat.cache_key(target): cache},
        )
    return cache, out


def seen(target: PreTrainedModel, ids: list[int]) -> dict[str, Any]:
    """The field of `Prompt` that this drafter needs besides: the target's cache over the text without its root."""
    return {"cache": TreeCache(target_cache(target, ids[:-1])[0])}


def chances(target: PreTrainedModel, model: Any, ids: list[int], path: list[int]) -> torch.Tensor:
    """(V,) what the assistant says after `path`: transformers' loop, one token at a time, on fresh keys."""
    _, out = target_cache(target, ids[:-1])
    window = _compat.text_config(target).sliding_window
    shared = {
        kind: tuple(part[:, :, 1 - window :] if kind == "sliding_attention" else part for part in parts)
        for kind, parts in out.shared_kv_states.items()
    }
    hidden = out.hidden_states[-1][:, -1:]
    for token in [ids[-1], *path]:
        embeds = torch.cat([target.get_input_embeddings()(torch.tensor([[token]])), hidden], -1)
        with torch.no_grad():
            step = model(
                inputs_embeds=embeds,
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=shared,
                use_cache=False,
            )
        hidden = step.last_hidden_state
    return step.logits[0, -1].softmax(-1)


@pytest.mark.parametrize("length", [5, 14, 30])
@pytest.mark.parametrize("family", SHARES)
def test_scores_are_those_of_transformers_steps(family: str, length: int) -> None:
    target, model = with_shared_kv(family)
    ids = prompt(length)[0].tolist()
    drafter = begun(SharedKvDrafter(model, wave=3, min_gain=0.0), target, ids, extra=seen(target, ids))
    tree = draft(drafter, ids, BUDGET)
    assert_scores(tree, lambda path: chances(target, model, ids, path))
    assert tree.depths.max() > 1


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("accept", [0, 1, 2, "all"])
@pytest.mark.parametrize("family", SHARES)
def test_draft_after_acceptance_equals_a_fresh_drafters(family: str, accept: Any, do_sample: bool) -> None:
    target, model = with_shared_kv(family)
    drafter = SharedKvDrafter(model, min_gain=0.0)
    accepted = rounds(drafter, target, accept, do_sample, BUDGET, extra=lambda ids: seen(target, ids))
    assert accept != "all" or max(accepted) > 1


def test_in_the_loop_it_reads_what_the_text_alone_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that lie in the loop's cache, after rounds that rejected and accepted, are those of a fresh forward."""
    target, model = with_shared_kv("gemma4")
    expected = target.generate(prompt(20), do_sample=False, max_new_tokens=60)
    checked = []

    class Checking(SharedKvDrafter):
        def draft(self, context: Any, budget: Budget) -> TokenTree:
            tree = super().draft(context, budget)
            ids = context.ids[0].tolist()
            fresh = begun(SharedKvDrafter(model, min_gain=0.0), target, ids, extra=seen(target, ids))
            assert_same(tree, draft(fresh, ids, budget))
            checked.append(len(tree))
            ahead = expected[0, len(ids) : len(ids) + len(ids) % 3].tolist()  # some of the truth, so that some is taken
            return tree.merge(TokenTree.chain(ids[-1], ahead, [1.0] * len(ahead)))

    monkeypatch.setattr("hf_treespec.cache.MIN_GROWTH", 4)  # so that layers with a window drop their old keys
    text = run(target, prompt(20), Checking(model, min_gain=0.0), do_sample=False, max_new_tokens=60)
    assert torch.equal(text, expected)
    assert text.tree_spec.accepted > 10 and len(checked) > 20


def test_contract_with_embeddings_in_clusters() -> None:
    """Of which only the likeliest are scored."""
    target, model = with_shared_kv("gemma4_shared")
    drafter = SharedKvDrafter(with_clusters(model), min_gain=0.0)
    hf_treespec.check_drafter(drafter, target, max_new_tokens=8)


def with_clusters(model: Any) -> Any:
    config = type(model.config).from_dict(
        {**model.config.to_dict(), "use_ordered_embeddings": True, "num_centroids": 1, "centroid_intermediate_top_k": 1}
    )
    other = type(model)(config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict(), strict=False)
    other.masked_embedding.token_ordering.copy_(torch.arange(len(other.masked_embedding.token_ordering)))
    return other


def test_auto_takes_it_from_assistant_model() -> None:
    target, model = with_shared_kv("gemma4")
    for spec in (True, "shared_kv"):
        text = target.generate(prompt(), tree_spec=spec, assistant_model=model, do_sample=False, max_new_tokens=12)
        assert torch.equal(text, target.generate(prompt(), do_sample=False, max_new_tokens=12))
        assert text.tree_spec.drafter == "shared_kv"


def test_padding_does_not_change_the_drafts() -> None:
    target, model = with_shared_kv("gemma4")
    drafter = SharedKvDrafter(model, min_gain=0.0)
    for length in (5, 14):  # padding within the window, and beyond it
        plain = run(target, prompt(length), drafter, do_sample=False, max_new_tokens=8)
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt(length)], 1)
        mask = (padded != 0).long()
        text = run(target, padded, drafter, do_sample=False, max_new_tokens=8, attention_mask=mask)
        assert torch.equal(text[:, 3:], plain)
        for ours, theirs in zip(text.tree_spec.records[1:], plain.tree_spec.records[1:], strict=True):
            assert scored(ours.tree) == pytest.approx(scored(theirs.tree), abs=1e-4)


# -------------------------------------------------------------------- files, and what is refused


def test_a_saved_assistant_is_loaded(tmp_path: Path) -> None:
    target, model = with_shared_kv("gemma4")
    model.save_pretrained(tmp_path)
    found = hf_treespec.inspect_checkpoint(tmp_path)
    assert found.format == "shared-kv" and found.facts["target's hidden size"] == 32
    ids = prompt(14)[0].tolist()
    expected = draft(begun(SharedKvDrafter(model), target, ids, extra=seen(target, ids)), ids, BUDGET)
    for loaded in (load_drafter(tmp_path), load_drafter(tmp_path, target=target, wave=4)):
        assert isinstance(loaded, SharedKvDrafter)
        assert_same(draft(begun(loaded, target, ids, extra=seen(target, ids)), ids, BUDGET), expected)


def test_misfits_are_named(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = with_shared_kv("gemma4")
    with pytest.raises(DrafterError, match="'shared_kv' needs an assistant"):
        run(target, prompt(), "shared_kv", max_new_tokens=4)
    with pytest.raises(DrafterError, match="LlamaForCausalLM does not read a target's keys"):
        SharedKvDrafter(llama)
    with pytest.raises(DrafterError, match="LlamaForCausalLM does not share"):
        run(llama, prompt(), SharedKvDrafter(model), max_new_tokens=4)
    with pytest.raises(DrafterError, match="use tree_spec='shared_kv'"):
        run(target, prompt(), "model", assistant_model=model, max_new_tokens=4)
    with monkeypatch.context() as patch, pytest.raises(DrafterError, match="a hidden size of 48"):
        patch.setattr(model.config, "backbone_hidden_size", 48)
        run(target, prompt(), SharedKvDrafter(model), max_new_tokens=4)
    with (
        monkeypatch.context() as patch,
        pytest.raises(DrafterError, match="reads 2 heads of size 99 in sliding_attention"),
    ):
        patch.setattr(model.model.layers[0].self_attn, "head_dim", 99)
        run(target, prompt(), SharedKvDrafter(model), max_new_tokens=4)
