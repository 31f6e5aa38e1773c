"""Tiny random targets with the heads that transformers ships for them: MTP layers, DFlash drafters, Gemma-4 assistants."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import LLAMA, VOCAB, WINDOWS, prompt
from conftest import target as targets
from transformers import LogitsProcessorList, PreTrainedModel

from hf_treespec import (
    Budget,
    Commit,
    DFlashDrafter,
    DraftContext,
    Drafter,
    MtpDrafter,
    Prompt,
    SharedKvDrafter,
    TokenTree,
    _compat,
)
from hf_treespec.accept import NoiseWindow
from hf_treespec.verify import Verified

MOE = {**LLAMA, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
DENSE_FIRST = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
MTP = {
    # three layers in a row; latent attention; one layer with a window of 8
    "glm4_moe": ("Glm4Moe", {**MOE, **DENSE_FIRST, "num_mtp_layers": 3}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{k: v for k, v in MOE.items() if k != "head_dim"},
            **DENSE_FIRST,
            **LATENT,
            "num_key_value_heads": 4,
            "num_mtp_layers": 2,
        },
    ),
    "mellum": ("Mellum", {**MOE, **WINDOWS, "num_experts": 4, "num_mtp_layers": 1}),
}


def _made(kind: str, options: dict[str, Any], head: str = "ForCausalLM", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, kind.removesuffix("Text") + head)(config).eval()
    model.requires_grad_(False)
    return model


def _generates(model: Any) -> Any:
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def with_mtp(family: str) -> tuple[PreTrainedModel, Any]:
    """A target and its MTP layers, which are random too but for what they share with it."""
    kind, options = MTP[family]
    if "num_mtp_layers" not in inspect.signature(getattr(transformers, f"{kind}Config")).parameters:
        pytest.skip(f"this transformers has no MTP layers for {kind}")
    target = _generates(_made(kind, options))
    torch.manual_seed(1)
    mtp = _compat.mtp_class()(target, options["num_mtp_layers"]).eval()
    mtp.requires_grad_(False)
    for name, tensor in [*mtp.layers.named_parameters(), *mtp.layers.named_buffers()]:
        if "norm" not in name:  # the class initialises no experts, since it is only ever loaded
            tensor.normal_(0.0, 0.5)
    return target, mtp


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "layer_types": ["full_attention"],
}
MUSE = {**LLAMA, **WINDOWS, "qk_scale_factor": 1.5}
DFLASH = {
    **{k: v for k, v in LLAMA.items() if k not in ("vocab_size", "initializer_range")},
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "block_size": 5,
    "mask_token_id": 60,
    "target_layer_ids": [1, 0],
}


@functools.cache
def with_dflash(family: str) -> tuple[PreTrainedModel, Any]:
    """A target and a random DFlash drafter: the family that ships one, or any that has the same sizes."""
    if _compat.dflash_cache() is None:
        pytest.skip("this transformers has no DFlash drafters (since 5.15)")
    model = _made("MuseGlimmerAssistant", DFLASH, "Model", seed=1)
    for name, tensor in model.named_parameters():
        if "norm" not in name:
            tensor.normal_(0.0, 0.5)
    if family != "muse_glimmer":
        return targets(family), model
    torch.manual_seed(0)
    config = transformers.MuseGlimmerConfig(text_config=MUSE, vision_config=VISION)
    return _generates(transformers.MuseGlimmerForConditionalGeneration(config).eval().requires_grad_(False)), model


GEMMA4 = {
    **LLAMA,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
SHARES = {"gemma4": {}, "gemma4_shared": {"num_kv_shared_layers": 2}}


@functools.cache
def with_shared_kv(family: str) -> tuple[PreTrainedModel, Any]:
    """A Gemma 4 target, whose last two layers may reuse keys themselves, and a random assistant of one layer a kind."""
    if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this transformers has no Gemma 4 assistants")
    target = _generates(_made("Gemma4Text", {**GEMMA4, **SHARES[family]}))
    own = {"num_hidden_layers": 2, "layer_types": GEMMA4["layer_types"][:2], "hidden_size": 16, "intermediate_size": 24}
    text = {**GEMMA4, **own, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    options = {"text_config": transformers.Gemma4TextConfig(**text), "backbone_hidden_size": 32}
    try:
        model = _made("Gemma4Assistant", options, seed=1)
    except ValueError as error:  # 5.23 refuses every assistant: all of its layers reuse keys
        pytest.skip(f"this transformers cannot make a Gemma 4 assistant: {error}")
    for name, tensor in model.named_parameters():
        if "norm" not in name:
            tensor.normal_(0.0, 0.5)
    return target, model


def _shared_kv() -> tuple[Drafter, PreTrainedModel]:
    target, model = with_shared_kv("gemma4")
    return SharedKvDrafter(model, min_gain=0.0), target


def _dflash() -> tuple[Drafter, PreTrainedModel]:
    target, model = with_dflash("llama")
    return DFlashDrafter(model), target


def _mtp() -> tuple[Drafter, PreTrainedModel]:
    if _compat.mtp_class() is None:
        pytest.skip("this transformers has no MtpModel (since 5.14)")
    target, mtp = with_mtp("glm4_moe")
    return MtpDrafter(mtp, min_gain=0.0), target


# by registered name, a drafter and a target that it fits; for those that fit no plain one
FITTING: dict[str, Callable[[], tuple[Drafter, PreTrainedModel]]] = {
    "dflash": _dflash,
    "mtp": _mtp,
    "shared_kv": _shared_kv,
}


# -------------------------------------------------------------------- a call, step by step


def states_of(target: PreTrainedModel, ids: list[int]) -> tuple[torch.Tensor, ...]:
    """All hidden states of an uncached forward, (1, t, h) each."""
    with torch.no_grad():
        out = target(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return out.hidden_states


def begun(
    drafter: Drafter,
    target: PreTrainedModel,
    ids: list[int],
    do_sample: bool = False,
    extra: Any = None,
    *,
    read: bool = True,
) -> Drafter:
    """`drafter` at the start of a call: the prompt is `ids` without the last token, which is the first new one.

    Args:
        extra: fields of `Prompt` besides.
        read: whether the drafter has read the prompt, as before its first draft.
    """
    fresh = drafter.for_call()
    tree = TokenTree.root_only(ids[-2])
    verified = Verified(tree, torch.zeros(1, 1, VOCAB), states_of(target, ids[:-1]))
    prompt = Prompt(
        target, torch.tensor([ids[:-1]]), None, do_sample, LogitsProcessorList(), None, 64, verified, **(extra or {})
    )
    fresh.start(prompt)
    fresh.observe(Commit([[ids[-1]]], [[0]], [ids[-1]], verified))
    if read:
        fresh.read_prompt()
    return fresh


def draft(drafter: Drafter, ids: list[int], budget: Budget, noise: Any = None) -> TokenTree:
    tree = drafter.draft(DraftContext(torch.tensor([ids]), [ids[-1]], noise, 100), budget)
    tree.check(VOCAB)
    return tree


def committed(target: PreTrainedModel, ids: list[int], tree: TokenTree, path: list[int], bonus: int) -> Commit:
    """The round that accepts `path` (nodes, the root first). States of other nodes are noise: nobody may read them."""
    tokens = tree.tokens[0, path[1:]].tolist()
    states = states_of(target, ids + tokens)
    seen = []
    for layer in states:
        nodes = torch.randn(1, len(tree), layer.shape[-1])
        nodes[0, path] = layer[0, len(ids) - 1 :]
        seen.append(nodes)
    return Commit([[*tokens, bonus]], [path], [bonus], Verified(tree, torch.zeros(1, len(tree), VOCAB), tuple(seen)))


def scored(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The tree as paths of tokens with their scores."""
    return {tuple(tree.tokens[0, tree.path(n)[1:]].tolist()): float(tree.scores[0, n]) for n in range(1, len(tree))}


def assert_same(tree: TokenTree, expected: TokenTree) -> None:
    ours, theirs = scored(tree), scored(expected)
    assert ours.keys() == theirs.keys()
    for path, score in theirs.items():
        assert ours[path] == pytest.approx(score, abs=1e-4), path


def assert_scores(tree: TokenTree, chances: Callable[[list[int]], torch.Tensor]) -> None:
    """Every node's score is the product of `chances(path before it)`, (V,) each, and a node's children are its best."""
    for node in range(len(tree)):
        path = tree.tokens[0, tree.path(node)[1:]].tolist()
        score = 1.0
        for i, token in enumerate(path):
            score *= float(chances(path[:i])[token])
        assert tree.scores[0, node] == pytest.approx(score, abs=1e-4), path
        children = tree.tokens[0, tree.parents[0] == node].tolist()
        if children:
            assert set(children) == set(chances(path).topk(len(children)).indices.tolist())
    assert len(tree) > 3 and tree.sibling_ranks.max() > 0  # or nothing was compared


def update(fields: dict[str, Any], now: dict[str, Any]) -> None:
    """What the loop keeps up to date in the prompt's `fields`."""
    for name, value in now.items():
        vars(fields[name]).update(vars(value))


def rounds(
    template: Drafter,
    target: PreTrainedModel,
    accept: Any,
    do_sample: bool,
    budget: Budget,
    extra: Callable[[list[int]], dict[str, Any]] = lambda ids: {},
) -> list[int]:
    """Four rounds that accept `accept` tokens of some path; after each the draft must be that of a fresh drafter.

    Before them three rounds are plain, so that the prompt is read late. In the third nothing is drafted, as where a
    budget is spent.

    Returns:
        How many tokens were accepted in each.
    """
    noise = NoiseWindow((1, VOCAB), torch.device("cpu")) if do_sample else None
    ids = torch.cat([prompt(9), prompt(6)], 1)[0].tolist()
    fields = extra(ids[:-3])
    kept = begun(template, target, ids[:-3], do_sample, fields, read=False)
    for end in range(len(ids) - 3, len(ids)):
        kept.observe(committed(target, ids[:end], TokenTree.root_only(ids[end - 1]), [0], ids[end]))
    update(fields, extra(ids))
    kept.read_prompt()
    accepted = []
    for number in range(5):
        if number == 2:
            tree = TokenTree.root_only(ids[-1])
        else:
            tree = draft(kept, ids, budget, noise)
            assert_same(tree, draft(begun(template, target, ids, do_sample, extra(ids)), ids, budget, noise))
        deep = [n for n in range(len(tree)) if tree.depths[0, n] == tree.depths.max()]
        leaf = deep[(3 * number) % len(deep)]
        path = tree.path(leaf)[: None if accept == "all" else accept + 1]
        bonus = 2 + (7 * number + len(ids)) % 50
        kept.observe(committed(target, ids, tree, path, bonus))
        ids = [*ids, *tree.tokens[0, path[1:]].tolist(), bonus]
        update(fields, extra(ids))
        accepted.append(len(path) - 1)
    return accepted
