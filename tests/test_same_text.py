"""The promise: token for token the text of plain `generate`, whatever drafts and however the tree looks."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from conftest import SHAPES, VOCAB, WIDE_OPEN, adversary, around, prompt, run, target
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig

# Every processor meets every model, drafter, attention and 50 seeds in the full matrix (HF_TREESPEC_FULL=1);
# by default the 50 seeds of each (model, drafter, attention) are dealt out among the processors.
FULL = os.environ.get("HF_TREESPEC_FULL") == "1"
SEEDS = 50
SAMPLING = (
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05, "temperature": 1.5},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9},
)


class Stateful(LogitsProcessor):
    """Counts its own calls and pushes another token each time: wrong if it is called once too often or too seldom."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (7 * self.calls + input_ids.shape[1] + int(input_ids[0, -1])) % VOCAB] += 3.0
        return scores


PROCESSORS: dict[str, Any] = {
    "none": dict,
    "repetition_penalty": lambda: {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 2},
    "min_new_tokens": lambda: {"min_new_tokens": 6, "eos_token_id": list(range(2, 30))},
    "bad_words_ids": lambda: {"bad_words_ids": [[t] for t in range(20, 32)] + [[33, 34], [5, 6, 7]]},
    "stateful": lambda: {"logits_processor": LogitsProcessorList([Stateful()])},
}
DRAFTERS = ("ngram", "model", *SHAPES, "adversary")
ATTENTIONS = ("sdpa", "eager")
FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "gpt2")


@functools.cache
def plain(family: str, attention: str, processor: str, seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain `generate`'s text, and the generator's state after it."""
    ids = repeating_prompt()
    if seed is not None:
        torch.manual_seed(seed)
    text = target(family, attention).generate(ids, **arguments(processor, seed))
    return text, torch.get_rng_state()


def arguments(processor: str, seed: int | None) -> dict[str, Any]:
    mode = {"do_sample": False} if seed is None else {"do_sample": True, **SAMPLING[seed % len(SAMPLING)]}
    return {"max_new_tokens": 14, **mode, **PROCESSORS[processor]()}


def repeating_prompt() -> torch.Tensor:
    """Longer than the sliding windows, and with repeats for the n-gram drafter."""
    return torch.cat([prompt(7), prompt(7), prompt(2, seed=5)], 1)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_text(family: str, drafter: str, attention: str) -> None:
    model = target(family, attention)
    for number, processor in enumerate(PROCESSORS):
        seeds = [None, *(s for s in range(SEEDS) if FULL or s % len(PROCESSORS) == number)]
        for seed in seeds:
            expected, state = plain(family, attention, processor, seed)
            extra: dict[str, Any] = {}
            by: Any = drafter
            if drafter == "model":
                extra["assistant_model"] = target(family, "sdpa")  # the target itself: drafts that are often right
            elif drafter == "adversary":
                by = adversary(expected)
            elif drafter in SHAPES:
                by = around(expected, drafter)
            if seed is not None:
                torch.manual_seed(seed)
            text = run(model, repeating_prompt(), by, **arguments(processor, seed), **extra)
            what = f"{family} {drafter} {attention} {processor} seed {seed}"
            assert torch.equal(text, expected), f"{what}: {text.tolist()} is not {expected.tolist()}"
            if seed is not None:
                assert torch.equal(torch.get_rng_state(), state), f"{what}: the generator stands elsewhere"
            stats = text.tree_spec
            if drafter == "adversary":
                assert stats.accepted == 0
            if drafter in ("chain", "truth_last", "binary"):
                assert stats.tokens_per_round > 2.0  # the trees really are accepted along their true path


def test_a_processor_that_draws_from_the_generator_is_still_exact() -> None:
    """Plain decoding interleaves its draws with the processor's; peeked noise must give way."""

    class Noisy(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return scores + torch.rand(scores.shape)

    model = target("llama")
    common = {"max_new_tokens": 12, "do_sample": True, "logits_processor": LogitsProcessorList([Noisy()])}
    torch.manual_seed(3)
    expected = model.generate(prompt(), **common)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    text = run(model, prompt(), "model", assistant_model=model, **common)
    assert torch.equal(text, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_scores_in_double_precision_sample_the_same() -> None:
    class Double(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return scores.double()

    model = target("llama")
    common = {"max_new_tokens": 12, "do_sample": True, "logits_processor": LogitsProcessorList([Double()])}
    torch.manual_seed(3)
    expected = model.generate(prompt(), **common)
    torch.manual_seed(3)
    assert torch.equal(run(model, prompt(), "model", assistant_model=model, **common), expected)


@pytest.mark.parametrize("do_sample", [False, True])
def test_choices_of_all_nodes_at_once_are_those_made_one_by_one(do_sample: bool, monkeypatch: Any) -> None:
    """The one-read-a-round path that devices use, forced on this CPU."""
    from hf_treespec.accept import Picker

    model = target("llama")
    common = {"max_new_tokens": 16, "do_sample": do_sample, "temperature": 0.8 if do_sample else None, "top_k": 20}
    torch.manual_seed(5)
    expected = model.generate(prompt(), **common)
    state = torch.get_rng_state()
    taken = []
    original = Picker.pick_all
    monkeypatch.setattr(Picker, "at_once", property(lambda self: True, lambda self, value: None), raising=False)
    monkeypatch.setattr(Picker, "pick_all", lambda self, verified: taken.append(1) or original(self, verified))
    torch.manual_seed(5)
    text = run(model, prompt(), around(expected, "truth_last"), **common)
    assert taken
    assert torch.equal(text, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_coupled_drafts_are_accepted_far_more_often_than_blind_ones() -> None:
    """At temperature 1 a drafter that is the target itself, and sees its noise, is right every time."""
    model = target("llama")
    common = {"max_new_tokens": 40, "do_sample": True, "top_k": 0}
    torch.manual_seed(0)
    stats = run(model, prompt(), "model", assistant_model=model, **common).tree_spec
    assert stats.acceptance_by_depth[:3] == [1.0, 1.0, 1.0]


class _Reached:
    """A grammar of one's own: allows the tokens that its table says, by prefix."""

    def __call__(self, batch_id: int, ids: torch.Tensor) -> list[int]:
        assert batch_id == 0 and ids.dim() == 1
        return [t for t in range(2, VOCAB) if (t + int(ids[-1]) + len(ids)) % 3]


OPTIONS: dict[str, Any] = {
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": _Reached()},
    "forced_eos": lambda: {"forced_eos_token_id": 7},
    "min_length": lambda: {"min_length": 20, "eos_token_id": list(range(2, 30))},
    "decaying_length": lambda: {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": [5, 9, 11]},
    "sequence_bias": lambda: {"sequence_bias": [[[5], 2.0], [[7, 8], -5.0], [[9, 10, 11], 4.0]]},
    "suppress": lambda: {"suppress_tokens": list(range(10, 40)), "begin_suppress_tokens": list(range(40, 50))},
    "encoder_penalties": lambda: {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "renormalised": lambda: {"renormalize_logits": True, "remove_invalid_values": True},
    "typical": lambda: {"do_sample": True, "typical_p": 0.7},
    "cutoffs": lambda: {"do_sample": True, "epsilon_cutoff": 0.02, "eta_cutoff": 0.02},
    "top_h": lambda: {"do_sample": True, "top_h": 0.5},
    "watermark": lambda: {"do_sample": True, "watermarking_config": WatermarkingConfig(bias=3.0)},
    "synthid": lambda: {
        "do_sample": True,
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, context_history_size=8),
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("drafter", ["truth_last", "model"])
def test_options_of_generate(option: str, drafter: str) -> None:
    """The rest of transformers' processors and warpers; the stateful SynthID among them."""
    model = target("llama")

    def text(**spec: Any) -> torch.Tensor:
        torch.manual_seed(6)
        return model.generate(prompt(), **{"max_new_tokens": 16, "do_sample": False, **OPTIONS[option](), **spec})

    expected = text()
    spec = {"drafter": drafter if drafter == "model" else around(expected, drafter), **WIDE_OPEN}
    assert torch.equal(text(tree_spec=spec, **({"assistant_model": model} if drafter == "model" else {})), expected)
