"""Self-speculation: what a view of some layers computes, that the target stays as it was, and what is drafted with it."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import COMMON, LLAMA, build, prompt, run
from test_drafters import drafted, paths
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

import hf_treespec
from hf_treespec import (
    Budget,
    Commit,
    Drafter,
    DrafterError,
    EarlyExitDrafter,
    Prompt,
    TokenTree,
    UnsupportedModelError,
    _compat,
)
from hf_treespec.accept import NoiseWindow
from hf_treespec.attention import tree_attention_on
from hf_treespec.cache import TreeCache
from hf_treespec.drafters import early_exit
from hf_treespec.layer_view import decoder_layers, layer_view
from hf_treespec.packing import PackedLinear, can_pack
from hf_treespec.reference import path_logits
from hf_treespec.verify import Verified, Verifier

LAYERS = 5
KEPT = (0, 2, 4)
DEEP = {**LLAMA, "num_hidden_layers": LAYERS}
WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}
GPT = {**COMMON, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 256}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DEEP),
    "qwen2": ("Qwen2ForCausalLM", {**DEEP, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", DEEP),
    "mistral": ("MistralForCausalLM", {**DEEP, "sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", {**DEEP, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2ForCausalLM", {**DEEP, **WINDOWS}),
    "gemma3": ("Gemma3ForCausalLM", {**DEEP, **WINDOWS}),
    "phi": ("PhiForCausalLM", {**DEEP, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", DEEP),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "neox": ("GPTNeoXForCausalLM", {**DEEP, "rotary_pct": 0.5}),
    "opt": ("OPTForCausalLM", {**DEEP, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
_built: dict[str, PreTrainedModel] = {}


def deep(family: str, attention: str | None = None, fresh: bool = False) -> PreTrainedModel:
    """A target of five layers; those that are not asked for fresh are the session's and stay as they are."""
    if fresh or family not in _built:
        name, options = FAMILIES[family]
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        config = kind.config_class(**options)
        config._attn_implementation = attention or ("eager" if family == "gemma2" else "sdpa")  # it caps scores
        model = kind(config).eval()
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
        with torch.no_grad():  # a random network's layers differ too much from each other for any of them to be missed
            for parameter in decoder_layers(model).parameters():
                parameter.mul_(0.5)
        if fresh:
            return model
        _built[family] = model
    return _built[family]


def rebuilt(model: PreTrainedModel, kept: tuple[int, ...]) -> PreTrainedModel:
    """A model that was made with fewer layers, from a config of its own, with copies of the kept layers' weights."""
    config = copy.deepcopy(model.config)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    config.num_hidden_layers = len(kept)
    fresh = type(model)(config).eval()
    stack = next(n for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(f"{stack}."):
            number, rest = name[len(stack) + 1 :].split(".", 1)
            if int(number) not in kept:
                continue
            name = f"{stack}.{kept.index(int(number))}.{rest}"
        weights[name] = tensor.clone()
    fresh.load_state_dict(weights)
    return fresh


def fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything that a view could have changed: every module's attributes, tensors by identity and content, configs."""

    def plain(value: Any) -> Any:
        return value if isinstance(value, (int, float, str, bool, tuple, type(None))) else id(value)

    modules = [(n, id(m), {k: plain(v) for k, v in m.__dict__.items()}) for n, m in model.named_modules()]
    children = [(n, [(c, id(v)) for c, v in m._modules.items()]) for n, m in model.named_modules()]
    tensors = [(n, id(t), t.detach().clone().numpy().tobytes()) for n, t in model.named_parameters()]
    buffers = [(n, id(t), t.clone().numpy().tobytes()) for n, t in model.named_buffers()]
    configs = sorted({m.config.to_json_string() for m in model.modules() if hasattr(m, "config")})
    return modules, children, tensors, buffers, configs, repr(vars(model.config))


# -------------------------------------------------------------------- the view


@pytest.mark.parametrize("kept", [KEPT, (0, 1), (4,), tuple(range(LAYERS))], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_computes_what_a_model_of_these_layers_computes(family: str, kept: tuple[int, ...]) -> None:
    model = deep(family)
    expected = rebuilt(model, kept)
    view = layer_view(model, kept)
    with torch.no_grad():
        torch.testing.assert_close(view(prompt(20)).logits, expected(prompt(20)).logits, atol=1e-4, rtol=0)
        # and on its own cache, token by token, past the window
        text = view.generate(prompt(5), **GREEDY)
        assert torch.equal(text, expected.generate(prompt(5), **GREEDY))
    assert {id(p) for p in view.parameters()} <= {id(p) for p in model.parameters()}
    assert view.config.num_hidden_layers == len(kept) and model.config.num_hidden_layers == LAYERS


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_is_left_as_it_was(family: str) -> None:
    model = deep(family, fresh=True)
    model.generate(prompt(), tree_spec="union", **GREEDY)  # what transformers itself adds at a first call
    before = fingerprint(model)
    text = run(model, prompt(20), "early_exit", **GREEDY)
    assert fingerprint(model) == before
    assert torch.equal(text, model.generate(prompt(20), **GREEDY))


def test_rotary_frequencies_that_move_are_the_views_own() -> None:
    options = {**DEEP, "max_position_embeddings": 24, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    options["rope_parameters"]["rope_theta"] = 10000.0
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).eval()
    before = fingerprint(model)
    layer_view(model, KEPT)(prompt(60))
    assert fingerprint(model) == before


@pytest.mark.parametrize("where", ["draft", "view"])
def test_the_target_is_left_as_it_was_when_drafting_fails(where: str, monkeypatch: Any) -> None:
    model = deep("llama", fresh=True)
    model.generate(prompt(), tree_spec="union", **GREEDY)
    before = fingerprint(model)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("on purpose")

    if where == "draft":
        monkeypatch.setattr(EarlyExitDrafter, "_expand", fail)
    else:
        monkeypatch.setattr(early_exit, "tokens_per_pass", fail)
    with pytest.raises(KeyError, match="on purpose"):
        run(model, prompt(20), "early_exit", **GREEDY)
    monkeypatch.undo()
    assert fingerprint(model) == before


def test_the_target_may_run_while_a_view_does() -> None:
    """Their attention is switched apart: the one that leaves first does not take the other's away."""
    from hf_treespec.attention import NAME, implementation, tree_attention_on

    model = deep("llama", fresh=True)
    view = layer_view(model, KEPT)
    with tree_attention_on(view):
        assert implementation(view) == NAME and implementation(model) == "sdpa"
        assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}
    with tree_attention_on(model):
        inside = layer_view(model, KEPT)
        with tree_attention_on(inside):
            pass
        assert implementation(model) == NAME
    assert implementation(model) == implementation(view) == "sdpa"


def test_threads_share_a_target() -> None:
    """One drafts with its layers, one decodes plainly, one in trees of another drafter."""
    model = deep("llama", fresh=True)
    expected = model.generate(prompt(20), **GREEDY)
    calls: list[Any] = [{"tree_spec": s} for s in ("early_exit", False, "union", "early_exit")]
    with ThreadPoolExecutor(len(calls)) as pool:
        texts = list(pool.map(lambda call: [model.generate(prompt(20), **call, **GREEDY) for _ in range(6)], calls))
    assert all(torch.equal(text, expected) for several in texts for text in several)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}


def test_nothing_keeps_the_target_alive() -> None:
    model = deep("llama", fresh=True)
    run(model, prompt(20), "early_exit", **GREEDY)
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None


def test_hooks_of_a_sharded_or_quantised_model_move_over() -> None:
    """accelerate replaces forwards by partials that are bound to the module: the copy's must run the copy."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = deep("llama", fresh=True)
    expected = rebuilt(model, KEPT)
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    with torch.no_grad():
        torch.testing.assert_close(layer_view(model, KEPT)(prompt()).logits, expected(prompt()).logits)
        assert torch.equal(run(model, prompt(20), "early_exit", **GREEDY), model.generate(prompt(20), **GREEDY))


def test_a_forward_that_was_replaced_is_refused() -> None:
    model = deep("llama", fresh=True)
    original = model.model.forward
    model.model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    with pytest.raises(UnsupportedModelError, match=r"forward of LlamaModel was replaced.*union"):
        run(model, prompt(20), "early_exit", **GREEDY)


def test_models_whose_layers_are_not_found_are_refused() -> None:
    model = deep("llama", fresh=True)
    model.model.layers[2].self_attn.layer_idx = 7
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.* 0 lists of 5 numbered decoder layers"):
        layer_view(model, KEPT)
    model = deep("llama", fresh=True)
    model.model.norms = torch.nn.ModuleList(torch.nn.Identity() for _ in range(LAYERS))
    with pytest.raises(UnsupportedModelError, match=r"model\.norms has a part for each"):
        run(model, prompt(20), EarlyExitDrafter(2), **GREEDY)
    model = deep("llama", fresh=True)
    model.config.num_kv_shared_layers = 2
    with pytest.raises(UnsupportedModelError, match="num_kv_shared_layers=2"):
        layer_view(model, KEPT)


# -------------------------------------------------------------------- drafting


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "neox"])
def test_all_layers_draft_the_targets_own_tokens(family: str) -> None:
    """Greedily, and sampled by the coupling of the noise: whatever is drafted best is accepted."""
    for sampled in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        drafter = EarlyExitDrafter(LAYERS, min_gain=0.0)
        spec = {"drafter": drafter, "max_nodes": 8, "max_children": 1, "fallback": False, "debug": True}
        torch.manual_seed(3)
        stats = deep(family).generate(prompt(20), tree_spec=spec, max_new_tokens=27, **sampled).tree_spec
        assert stats.accepted == stats.drafted > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "neox"])
def test_contract(family: str) -> None:
    hf_treespec.check_drafter(EarlyExitDrafter(), deep(family), max_new_tokens=12)
    hf_treespec.check_drafter(EarlyExitDrafter([0, 1, 2, 4]), deep(family), max_new_tokens=12)


def test_eager_targets() -> None:
    model = deep("llama", "eager", fresh=True)
    assert torch.equal(run(model, prompt(20), "early_exit", **GREEDY), model.generate(prompt(20), **GREEDY))


def test_with_hidden_states_and_left_padding() -> None:
    """What transformers hangs onto a model to collect hidden states sees no view; padding is not read."""
    model = deep("llama", fresh=True)
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt(20)], 1)
    more = {"attention_mask": (ids != 0).long(), "output_hidden_states": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **more, **GREEDY)
    text = run(model, ids, EarlyExitDrafter(LAYERS), **more, **GREEDY)
    assert torch.equal(text.sequences, expected.sequences)
    assert len(text.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip(text.hidden_states, expected.hidden_states, strict=True):
        assert len(ours) == LAYERS + 1
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert text.tree_spec.acceptance_by_depth[0] == 1.0


def begun(ids: list[int], model: PreTrainedModel, do_sample: bool = False) -> tuple[Drafter, Verifier]:
    """A drafter at the start of a call on the text `ids`, whose last token is the root, and the target's verifier."""
    drafter = EarlyExitDrafter(KEPT, wave=3, min_gain=0.0).for_call()
    text = torch.tensor([ids[:-1]])
    source = DynamicCache(config=model.config)
    last_position = torch.tensor([[len(ids) - 2]])
    with torch.no_grad(), tree_attention_on(model):
        model(input_ids=text, use_cache=True, **{_compat.cache_key(model): source})
        cache = TreeCache(source)
        verifier = Verifier(model, cache, last_position)
        verified = Verified(TokenTree.root_only(ids[-2]), torch.zeros(1, 1, 61))
        warpers = LogitsProcessorList()
        more = {"cache": cache, "last_position": last_position}
        drafter.start(Prompt(model, text, None, do_sample, warpers, None, 64, verified, **more))
    return drafter, verifier


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("accept", [0, 1, "all"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_after_acceptance_equals_a_fresh_drafters(family: str, accept: Any, do_sample: bool) -> None:
    model = deep(family)
    noise = NoiseWindow((1, 61), torch.device("cpu")) if do_sample else None
    ids = torch.cat([prompt(9), prompt(6)], 1)[0].tolist()
    kept, verifier = begun(ids, model, do_sample)
    for round_number in range(4):
        tree = drafted(kept, ids, noise=noise)
        assert verifier.cache.get_seq_length() == verifier.cache.filled == len(ids) - 1, "drafts are cut off again"
        expected = drafted(begun(ids, model, do_sample)[0], ids, noise=noise)
        assert paths(tree) == paths(expected)
        torch.testing.assert_close(
            torch.from_numpy(np.sort(tree.scores[0])), torch.from_numpy(np.sort(expected.scores[0])), atol=1e-4, rtol=0
        )
        path = tree.path(len(tree) - 1 - round_number)[: None if accept == "all" else accept + 1]
        bonus = 2 + (7 * round_number + len(ids)) % 50
        tokens = [*tree.tokens[0, path[1:]].tolist(), bonus]
        with tree_attention_on(model):
            verified = verifier.forward(tree)
        expected_logits = path_logits(model, torch.tensor([ids]), tree)
        torch.testing.assert_close(verified.logits[0], expected_logits, atol=1e-4, rtol=0)  # on clean keys
        verifier.cache.keep([path])
        kept.observe(Commit([tokens], [path], [bonus], verified))
        ids += tokens


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_scores_are_the_kept_layers_probabilities_on_the_targets_keys(family: str) -> None:
    model = deep(family)
    oracle = rebuilt(model, KEPT)
    ids = prompt(14)[0].tolist()
    tree = drafted(begun(ids, model)[0], ids, Budget(15, 3, 4))
    whole = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([ids[:-1]]), use_cache=True, **{_compat.cache_key(model): whole})
    for node in range(1, len(tree)):
        path = tree.tokens[0, tree.path(node)[1:]].tolist()
        score = 1.0
        for i, token in enumerate(path):
            keys = DynamicCache()
            for place, layer in enumerate(KEPT):
                keys.update(whole.layers[layer].keys, whole.layers[layer].values, place)
            with torch.no_grad():
                tail = torch.tensor([[ids[-1], *path[:i]]])
                logits = oracle(input_ids=tail, use_cache=True, **{_compat.cache_key(oracle): keys}).logits[0, -1]
            score *= float(logits.softmax(-1)[token])
        assert tree.scores[0, node] == pytest.approx(score, abs=1e-4)


# -------------------------------------------------------------------- targets whose layers are not plain


@pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM")
def test_a_target_that_is_packed_before_or_after_the_drafter_is_made() -> None:
    model = deep("llama", fresh=True)
    drafter = EarlyExitDrafter(KEPT)
    run(model, prompt(20), drafter, **GREEDY)
    with hf_treespec.pack(model):
        view = layer_view(model, KEPT)
        linear = {type(m) for n, m in view.named_modules() if n.endswith("q_proj")}
        assert linear == {PackedLinear}
        expected = model.generate(prompt(20), **GREEDY)
        full = run(model, prompt(20), EarlyExitDrafter(LAYERS), **GREEDY)
        assert torch.equal(full, expected) and full.tree_spec.acceptance_by_depth[0] == 1.0
        for by in (drafter, EarlyExitDrafter(KEPT)):
            assert torch.equal(run(model, prompt(20), by, **GREEDY), expected)
    assert torch.equal(run(model, prompt(20), drafter, **GREEDY), model.generate(prompt(20), **GREEDY))
    assert not any(isinstance(m, PackedLinear) for m in layer_view(model, KEPT).modules())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_targets(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = deep("llama", fresh=True)
    for layer in decoder_layers(model):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is torch.nn.Linear:
                    shape: tuple[Any, ...] = (child.in_features, child.out_features)
                    if kind == "nf4":
                        small = bnb.nn.Linear4bit(
                            *shape, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=torch.uint8
                        )
                        small.weight = bnb.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                    else:
                        small = bnb.nn.Linear8bitLt(*shape, bias=False, has_fp16_weights=False, threshold=6.0)
                        small.weight = bnb.nn.Int8Params(child.weight.data, requires_grad=False, has_fp16_weights=False)
                    setattr(parent, name, small.to("cpu"))
    model.generate(prompt(), **GREEDY)
    view = layer_view(model, KEPT)
    shared = {id(m) for m in model.modules() if type(m).__module__.startswith("bitsandbytes")}
    assert {id(m) for m in view.modules() if type(m).__module__.startswith("bitsandbytes")} < shared
    for drafter in (EarlyExitDrafter(LAYERS), "early_exit"):
        text = run(model, prompt(20), drafter, **GREEDY)
        assert torch.equal(text, model.generate(prompt(20), **GREEDY))
        assert drafter == "early_exit" or text.tree_spec.acceptance_by_depth[0] == 1.0


@pytest.mark.filterwarnings("ignore:.*(is_gradient_checkpointing|past_key_values).*:FutureWarning")  # as in peft 0.21
def test_a_target_with_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(deep("llama", fresh=True), lora).eval()
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(30)
    texts = []
    for _ in range(2):
        expected = wrapped.generate(input_ids=prompt(20), **GREEDY)
        spec = {"drafter": EarlyExitDrafter(LAYERS), "fallback": False}
        text = wrapped.generate(input_ids=prompt(20), tree_spec=spec, **GREEDY)
        assert torch.equal(text, expected)
        assert text.tree_spec.acceptance_by_depth[0] == 1.0  # it drafts with the adapter that is on now
        texts.append(text)
        wrapped.base_model.disable_adapter_layers()
    assert not torch.equal(*texts)


# -------------------------------------------------------------------- which layers


def test_layers_are_chosen_by_what_they_predict() -> None:
    """Two layers of five do nothing: the candidate that leaves out one of them is as good as the target, and cheaper."""
    model = deep("llama", fresh=True)
    with torch.no_grad():
        for layer in (decoder_layers(model)[2], decoder_layers(model)[3]):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    chosen = early_exit.choose_layers(model, prompt(40))
    assert {0, 1, 4} <= set(chosen) and len(chosen) < LAYERS
    stats = run(model, prompt(40), "early_exit", **GREEDY).tree_spec
    assert stats.acceptance_by_depth[0] == 1.0


def test_a_choice_waits_for_a_long_prompt_and_is_then_remembered(monkeypatch: Any) -> None:
    model = deep("llama", fresh=True)
    asked: list[int] = []
    original = early_exit.choose_layers
    monkeypatch.setattr(early_exit, "choose_layers", lambda m, ids: asked.append(ids.shape[1]) or original(m, ids))
    run(model, prompt(early_exit.LEAST_TOKENS - 1), "early_exit", **GREEDY)
    assert asked == []
    padded = torch.cat([torch.zeros(1, 8, dtype=torch.long), prompt(12)], 1)
    run(model, padded, "early_exit", attention_mask=(padded != 0).long(), **GREEDY)
    assert asked == []
    run(model, prompt(150), "early_exit", **GREEDY)
    run(model, prompt(20), "early_exit", **GREEDY)
    assert asked == [early_exit.MOST_TOKENS]
    assert early_exit.layers_of(model, prompt(2)) == early_exit.layers_of(model, prompt(90))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12, 30, 80])
def test_candidates_are_subsets_whose_cost_is_bounded(count: int) -> None:
    found = early_exit.candidates(count)
    assert len(set(found)) == len(found) >= 1
    for layers in found:
        assert len(layers) >= 1 and list(layers) == sorted(set(layers)) and layers[-1] < count
        assert len(layers) < count or count == 1
    assert all({0, count - 1} <= set(layers) for layers in found[len(early_exit.EXITS) :] if count > 2)
    if count >= 8:
        assert 1 + sum(len(layers) for layers in found) / count < 5


def test_tokens_per_pass() -> None:
    assert early_exit.tokens_per_pass(0.0, 0.0, 0.5) == pytest.approx(1 / 1.5)
    assert early_exit.tokens_per_pass(1.0, 1.0, 0.0) == pytest.approx(1 + early_exit.MOST_FORWARDS)
    assert early_exit.tokens_per_pass(0.5, 0.5, 0.1) == pytest.approx(max(1.5 / 1.1, 1.75 / 1.2, 1.875 / 1.3))


@pytest.mark.parametrize(
    "layers", [0, -1, True, 2.0, "all", [], [1, 1], [2, 1], [-1, 0], [0, 1.5], [True, 2], {0, 1}], ids=str
)
def test_bad_layers_are_named(layers: Any) -> None:
    with pytest.raises(DrafterError, match="layers="):
        EarlyExitDrafter(layers)


@pytest.mark.parametrize("layers", [LAYERS + 1, [0, LAYERS]], ids=str)
def test_more_layers_than_there_are(layers: Any) -> None:
    with pytest.raises(DrafterError, match=r"early_exit.*LlamaForCausalLM has: 5 layers, 0 to 4"):
        run(deep("llama"), prompt(20), EarlyExitDrafter(layers), **GREEDY)


def test_a_prompt_without_ids() -> None:
    """The target has read it, whatever it was."""
    model = deep("llama")
    embeds = model.get_input_embeddings()(prompt(20)).detach()
    mask = torch.ones(1, 20, dtype=torch.long)
    expected = model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY)
    drafter = EarlyExitDrafter(LAYERS, min_gain=0.0)
    text = model.generate(inputs_embeds=embeds, attention_mask=mask, tree_spec={"drafter": drafter}, **GREEDY)
    assert torch.equal(text, expected) and text.tree_spec.acceptance_by_depth[0] == 1.0
    again = model.generate(inputs_embeds=embeds, attention_mask=mask, tree_spec="early_exit", **GREEDY)
    assert torch.equal(again, expected)


def test_other_options() -> None:
    with pytest.raises(DrafterError, match="wave=0"):
        EarlyExitDrafter(wave=0)
    with pytest.raises(DrafterError, match="min_gain=2"):
        EarlyExitDrafter(min_gain=2)
    spec = {"drafter": "early_exit", "drafter_options": {"layers": 2}, "fallback": False}
    assert deep("llama").generate(prompt(), tree_spec=spec, **GREEDY).tree_spec.drafter == "early_exit"
    with pytest.raises(hf_treespec.UnsupportedArgumentError, match="does not use it"):
        deep("llama").generate(prompt(), tree_spec="early_exit", assistant_model=build("llama"), **GREEDY)
