"""Packed weights: what is computed, that rows do not depend on each other, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import SHAPES, around, build, prompt, run

import hf_treespec
from hf_treespec import UnsupportedModelError, pack
from hf_treespec.packing import PackedLinear, can_pack, is_packed
from hf_treespec.reference import path_logits

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM")
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}


def test_a_packed_layer_is_the_layer_with_half_precision_weights() -> None:
    linear = torch.nn.Linear(40, 24)
    x = torch.randn(3, 7, 40)
    expected = torch.nn.functional.linear(x, linear.weight.half().float(), linear.bias)
    torch.testing.assert_close(PackedLinear(linear)(x), expected, atol=1e-5, rtol=1e-5)


def test_rows_do_not_depend_on_each_other() -> None:
    packed = PackedLinear(torch.nn.Linear(576, 200, bias=False))
    x = torch.randn(40, 576)
    everything = packed(x)
    for rows in (1, 2, 3, 7, 8, 24, 39):
        assert torch.equal(packed(x[:rows]), everything[:rows])


@pytest.mark.parametrize("do_sample", [False, True])
def test_trees_on_a_packed_model_give_its_own_plain_text(do_sample: bool) -> None:
    model = build("llama")
    arguments = {**GREEDY, "do_sample": do_sample}
    with pack(model):
        torch.manual_seed(1)
        expected = model.generate(prompt(), **arguments)
        for drafter in (*SHAPES, "ngram", "union"):
            torch.manual_seed(1)
            by = around(expected, drafter) if drafter in SHAPES else drafter
            assert torch.equal(run(model, prompt(), by, **arguments), expected)


def test_packing_is_small_and_reversible() -> None:
    model = build("llama")
    layers, head = dict(model.named_modules()), model.get_output_embeddings()
    before = model(prompt()).logits
    with pack(model) as packed:
        assert packed is model and is_packed(model)
        inside = model(prompt()).logits
        assert not torch.equal(inside, before)
        torch.testing.assert_close(inside, before, atol=0.05, rtol=0.02)  # weights rounded by 2**-11
        tree = hf_treespec.TokenTree([5, 6, 7], [-1, 0, 0])
        assert path_logits(model, prompt(), tree).shape == (3, 61)
    assert not is_packed(model)
    assert model.get_output_embeddings() is head
    assert dict(model.named_modules()) == layers
    assert torch.equal(model(prompt()).logits, before)


def test_an_exception_inside_unpacks() -> None:
    model = build("llama")
    with pytest.raises(KeyError), pack(model):
        raise KeyError
    assert not is_packed(model)


def test_layers_that_half_precision_cannot_hold_stay() -> None:
    model = build("llama")
    model.lm_head.weight.data[0, 0] = 1e6
    with pack(model):
        assert type(model.lm_head) is torch.nn.Linear
        assert is_packed(model)


def test_refusals_name_the_model_and_the_reason(monkeypatch: Any) -> None:
    model = build("llama")
    with pack(model), pytest.raises(UnsupportedModelError, match="packed already"):
        pack(model)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM is torch\.bfloat16 on cpu"):
        pack(build("llama").to(torch.bfloat16))
    with pytest.raises(UnsupportedModelError, match=r"model\.eval"):
        pack(build("llama").train())
    monkeypatch.setattr("hf_treespec.packing.can_pack", lambda: False)
    with pytest.raises(UnsupportedModelError, match="no FBGEMM"):
        pack(model)
