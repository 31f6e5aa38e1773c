"""SmolLM2-135M, the real target: few prompts, since every token costs tens of milliseconds."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from conftest import SHAPES

import hf_treespec
from hf_treespec import Budget, DraftContext, ScriptedDrafter, TokenTree

pytestmark = pytest.mark.real_model

PROMPTS = {
    "copy": (
        "Correct the spelling mistakes in this text and repeat the whole text:\n\nThe committee met on Tuesday to discus "
        "the new budget for the library. Several members said that the budget was to small."
    ),
    "open": "Give three short reasons why trees are good for a city.",
}


@pytest.fixture(scope="module")
def smol() -> Any:
    torch.set_num_threads(2)
    return hf_treespec.demo_model()


def inputs(tokenizer: Any, text: str) -> dict[str, torch.Tensor]:
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", PROMPTS)
def test_same_text_on_a_real_model(smol: Any, name: str, sampled: bool) -> None:
    model, tokenizer = smol
    mode = {"do_sample": True, "temperature": 0.8, "top_p": 0.95} if sampled else {"do_sample": False}
    prompt = inputs(tokenizer, PROMPTS[name])
    torch.manual_seed(7)
    expected = model.generate(**prompt, max_new_tokens=40, **mode)
    torch.manual_seed(7)
    text = model.generate(
        **prompt, max_new_tokens=40, tree_spec={"drafter": "ngram", "fallback": False, "debug": True}, **mode
    )
    assert torch.equal(text, expected)
    if name == "copy" and not sampled:
        assert text.tree_spec.tokens_per_round > 2


def test_nf4_target(smol: Any) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model, tokenizer = hf_treespec.demo_model(quantization_config=config)
    prompt = inputs(tokenizer, PROMPTS["copy"])
    expected = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    text = model.generate(
        **prompt, max_new_tokens=16, do_sample=False, tree_spec={"drafter": "ngram", "fallback": False, "debug": True}
    )
    assert torch.equal(text, expected)


def test_host_time_at_32_nodes_and_a_thousand_tokens(smol: Any) -> None:
    """At most 2 ms a round on an idle machine of 2026; twice that is what fails here, since machines are shared."""
    model, _ = smol
    ids = torch.randint(100, 40_000, (1, 1000), generator=torch.Generator().manual_seed(0))
    text = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)[0].tolist()

    def script(context: DraftContext, budget: Budget) -> TokenTree:
        ahead = text[context.ids.shape[1] :][: min(3, budget.max_depth)]
        paths = SHAPES["truth_last"](ahead)
        tree = TokenTree.from_paths(context.last_token, paths)
        wide = [[50 + i] for i in range(33 - len(tree))]
        return TokenTree.from_paths(context.last_token, [*wide, *paths])

    spec = {"drafter": ScriptedDrafter(script), "max_nodes": 32, "max_children": 64, "fallback": False}
    stats = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, tree_spec=spec).tree_spec
    assert stats.tokens_per_round > 2.5  # paths of non-first children, so that the cache has to move
    host = statistics.median(r.seconds["host"] for r in stats.decoding if r.drafted == 32)
    assert host < 4e-3, f"{1000 * host:.2f} ms"
