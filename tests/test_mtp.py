"""Trees from MTP layers: transformers' own chain, computed anew for each path, is what every node must agree with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prompt, run
from natives import MTP, assert_same, assert_scores, begun, draft, rounds, states_of, with_mtp
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import hf_treespec
from hf_treespec import Budget, DrafterError, MtpDrafter, UnsupportedArgumentError, _compat

if _compat.mtp_class() is None:
    pytest.skip("this transformers has no MtpModel (since 5.14)", allow_module_level=True)

BUDGET = Budget(max_nodes=20, max_depth=5, max_children=3)


def chances(target: PreTrainedModel, mtp: Any, ids: list[int], path: list[int]) -> torch.Tensor:
    """(V,) what the MTP layers say after `path`: transformers' loop on an empty cache, with the path's tokens."""
    cache_class = pytest.importorskip("transformers.cache_utils").MtpCache
    if not hasattr(mtp, "forward_layer"):
        pytest.skip("this transformers has no MtpModel.forward_layer")
    hidden = states_of(target, ids)[-1][:, :-1]
    tokens, positions = torch.tensor([ids[1:]]), torch.arange(1, len(ids))[None]
    last = len(mtp.layers) - 1
    inputs = hidden
    with torch.no_grad():
        for depth in range(len(path) + 1):
            cache = cache_class(config=mtp.config)
            hidden = mtp.forward_layer(min(depth, last), inputs, positions, cache, input_ids=tokens)
            if depth < len(path):
                more = torch.tensor([[path[depth]]])
                if depth < last:  # roll by one, as the next layer is trained
                    inputs, tokens, positions = hidden, torch.cat([tokens[:, 1:], more], 1), positions + 1
                else:  # the last layer goes on with its own output
                    inputs = torch.cat([inputs, hidden[:, -1:]], 1)
                    tokens = torch.cat([tokens, more], 1)
                    positions = torch.cat([positions, positions[:, -1:] + 1], 1)
        return mtp._project_to_logits(hidden[0, -1]).softmax(-1)


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("family", MTP)
def test_scores_are_those_of_transformers_own_chain(family: str, recursive: bool) -> None:
    target, mtp = with_mtp(family)
    ids = prompt(14)[0].tolist()
    drafter = MtpDrafter(mtp, wave=3, min_gain=0.0, recursive=recursive)
    tree = draft(begun(drafter, target, ids), ids, BUDGET)
    assert_scores(tree, lambda path: chances(target, mtp, ids, path))
    assert tree.depths.max() > len(mtp.layers) if recursive else tree.depths.max() == len(mtp.layers)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("accept", [0, 1, 2, "all"])
@pytest.mark.parametrize("family", MTP)
def test_draft_after_acceptance_equals_a_fresh_drafters(family: str, accept: Any, do_sample: bool) -> None:
    target, mtp = with_mtp(family)
    for recursive in (False, True):
        drafter = MtpDrafter(mtp, wave=4, min_gain=0.0, recursive=recursive)
        accepted = rounds(drafter, target, accept, do_sample, BUDGET)
        assert accept != "all" or recursive or max(accepted) == min(len(mtp.layers), 3)


def test_a_long_text_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target, mtp = with_mtp("glm4_moe")
    ids = prompt(30)[0].tolist()
    drafter = MtpDrafter(mtp, min_gain=0.0)
    whole = draft(begun(drafter, target, ids), ids, BUDGET)
    monkeypatch.setattr("hf_treespec.drafters.mtp.CHUNK", 4)
    assert_same(draft(begun(drafter, target, ids), ids, BUDGET), whole)


def test_a_text_shorter_than_the_layers_are_many() -> None:
    """Layer k never sees the first k tokens: with two tokens only the first layer has something to read."""
    target, mtp = with_mtp("glm4_moe")
    for recursive in (False, True):
        drafter = MtpDrafter(mtp, min_gain=0.0, recursive=recursive)
        for length in (2, 3):
            tree = draft(begun(drafter, target, [5, 6, 7][:length]), [5, 6, 7][:length], BUDGET)
            assert tree.depths.max() == length - 1
            assert_scores(tree, lambda path, n=length: chances(target, mtp, [5, 6, 7][:n], path))


def test_contract() -> None:
    """The registry's test runs over three layers; this one over one layer with a window, used again and again."""
    target, mtp = with_mtp("mellum")
    hf_treespec.check_drafter(MtpDrafter(mtp, min_gain=0.0, recursive=True), target, max_new_tokens=9)


def test_same_text_with_accepted_drafts() -> None:
    target, mtp = with_mtp("glm4_moe")
    for sampled in ({"do_sample": False}, {"do_sample": True, "temperature": 0.5}):
        torch.manual_seed(7)
        expected = target.generate(prompt(), max_new_tokens=40, **sampled)
        torch.manual_seed(7)
        text = run(target, prompt(), MtpDrafter(mtp, wave=8, min_gain=0.0), max_new_tokens=40, **sampled)
        assert torch.equal(text, expected)
        assert text.tree_spec.accepted > 0


def trees(text: Any) -> list[list[int]]:
    return [record.tokens.tolist() for record in text.tree_spec.records[1:]]


def test_padding_does_not_change_the_drafts() -> None:
    target, mtp = with_mtp("mellum")
    drafter = MtpDrafter(mtp, min_gain=0.0)
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    plain = run(target, prompt(), drafter, **arguments)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt()], 1)
    mask = (padded != 0).long()
    text = run(target, padded, drafter, attention_mask=mask, **arguments)
    assert torch.equal(text[:, 3:], plain)
    assert trees(text) == trees(plain)


# -------------------------------------------------------------------- loading, and what is refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and MTP layer in one folder, named as Mellum's checkpoints name them."""
    target, mtp = with_mtp("mellum")
    folder = tmp_path_factory.mktemp("mellum")
    target.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    for name, tensor in mtp.layers[0].state_dict().items():
        first, _, rest = name.partition(".")
        if first != "mtp_block":
            tensors[f"mtp.{names[first]}.{rest}"] = tensor
        elif name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, weight in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors[f"mtp.layers.0.mlp.experts.{expert}.{part}.weight"] = weight.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, weight in enumerate(tensor):
                tensors[f"mtp.layers.0.mlp.experts.{expert}.down_proj.weight"] = weight.contiguous()
        else:
            tensors[f"mtp.layers.0.{rest}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_targets_own_layers_are_loaded_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, mtp = with_mtp("mellum")
    loaded = type(target).from_pretrained(saved)
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    expected = run(target, prompt(), MtpDrafter(mtp), **arguments)
    text = run(loaded, prompt(), "mtp", **arguments)
    assert torch.equal(text, expected)
    assert trees(text) == trees(expected)
    monkeypatch.setattr(_compat.mtp_class(), "from_pretrained", None)
    assert torch.equal(run(loaded, prompt(), "mtp", **arguments), expected)


def test_targets_without_layers_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(DrafterError, match="LlamaForCausalLM has no num_mtp_layers"):
        run(llama, prompt(), "mtp", max_new_tokens=4)


def test_layers_that_cannot_be_loaded_are_named() -> None:
    target, _ = with_mtp("glm4_moe")  # never saved
    with pytest.raises(DrafterError, match=r"Glm4MoeForCausalLM was not loaded from anywhere.*MtpDrafter\(mtp_model\)"):
        run(target, prompt(), "mtp", max_new_tokens=4)


def test_folders_without_the_layers_are_named(tmp_path: Path) -> None:
    target, _ = with_mtp("mellum")
    target.save_pretrained(tmp_path)
    loaded = type(target).from_pretrained(tmp_path)
    with pytest.raises(DrafterError, match="MTP layers of MellumForCausalLM cannot be loaded from"):
        run(loaded, prompt(), "mtp", max_new_tokens=4)


def test_another_targets_layers_are_refused(llama: PreTrainedModel) -> None:
    target, mtp = with_mtp("mellum")
    with pytest.raises(DrafterError, match="LlamaForCausalLM is no MtpModel"):
        run(target, prompt(), MtpDrafter(llama), max_new_tokens=4)
    with pytest.raises(DrafterError, match="wave=0"):
        MtpDrafter(mtp, wave=0)
    small = _compat.text_config(llama).hidden_size
    monkey = MtpDrafter(mtp)
    mtp.config.hidden_size = small + 8
    try:
        with pytest.raises(DrafterError, match=f"a hidden size of {small + 8}"):
            run(target, prompt(), monkey, max_new_tokens=4)
    finally:
        mtp.config.hidden_size = small


def test_without_mtp_model_the_release_that_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = with_mtp("mellum")
    monkeypatch.setattr(_compat, "mtp_class", lambda: None)
    with pytest.raises(DrafterError, match=r"MtpModel \(5\.14 or later\)"):
        run(target, prompt(), "mtp", max_new_tokens=4)


def test_use_mtp_points_here() -> None:
    target, _ = with_mtp("mellum")
    with pytest.raises(UnsupportedArgumentError, match="tree_spec='mtp'"):
        target.generate(prompt(), use_mtp=True, tree_spec=True, max_new_tokens=4)
