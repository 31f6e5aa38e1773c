"""What holds for all heads that transformers ships: prompts of every kind, and a second turn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import prompt, run
from natives import FITTING
from transformers import DynamicCache

from hf_treespec import MtpDrafter, _compat

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}


@pytest.mark.parametrize("name", FITTING)
def test_prompts_of_every_kind(name: str) -> None:
    """Chunks, embeddings, and a cache of an earlier turn leave states of only some of the prompt."""
    drafter, target = FITTING[name]()
    key = _compat.cache_key(target)
    expected = target.generate(prompt(14), **GREEDY).sequences
    for arguments in (
        {"prefill_chunk_size": 4},
        {"output_hidden_states": True},
        {"inputs_embeds": target.get_input_embeddings()(prompt(14))},
    ):
        out = run(target, prompt(14), drafter, **arguments, **GREEDY)
        assert torch.equal(out.sequences, expected), arguments
        assert out.tree_spec.records[1].drafted
    first = run(target, prompt(14), drafter, **{key: DynamicCache(config=_compat.text_config(target))}, **GREEDY)
    longer = torch.cat([first.sequences, prompt(3, seed=5)], 1)
    second = run(target, longer, drafter, **{key: first[key]}, **GREEDY)
    assert torch.equal(second.sequences, target.generate(longer, **GREEDY).sequences)
    assert second.tree_spec.records[1].drafted


@pytest.mark.parametrize("name", ["dflash", "mtp"])
def test_prompts_that_are_only_embeddings(name: str) -> None:
    drafter, target = FITTING[name]()
    embeds = target.get_input_embeddings()(prompt(14))
    expected = target.generate(inputs_embeds=embeds, **GREEDY).sequences
    out = target.generate(inputs_embeds=embeds, tree_spec={"drafter": drafter, "fallback": False}, **GREEDY)
    assert torch.equal(out.sequences, expected)
    assert out.tree_spec.records[1].drafted


@pytest.mark.parametrize("name", FITTING)
def test_half_precision(name: str) -> None:
    drafter, target = FITTING[name]()
    head = drafter.mtp_model if isinstance(drafter, MtpDrafter) else drafter.model
    target, head = copy.deepcopy((target, head))  # at once, since they share weights
    target.to(torch.bfloat16)
    head.to(torch.bfloat16)
    assert run(target, prompt(14), type(drafter)(head), **GREEDY).tree_spec.records[1].drafted
    if name != "mtp":  # it is part of the target; others may be of another dtype
        assert run(target, prompt(14), drafter, **GREEDY).tree_spec.records[1].drafted
