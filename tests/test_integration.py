"""The hook: what `import hf_treespec` changes in transformers, and what it must not."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, build, prompt, ready_drafter, target
from natives import FITTING
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.generation.utils import GENERATION_MODES_MAPPING

import hf_treespec
from hf_treespec import (
    Drafter,
    DrafterError,
    NgramDrafter,
    OptionError,
    TokenTree,
    TreeSpecConfig,
    TreeSpecError,
    UnsupportedArgumentError,
    UnsupportedModelError,
    _compat,
)

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10}


def patched() -> list[Any]:
    return [
        GenerationConfig.__dict__.get("tree_spec"),
        GenerationConfig.get_generation_mode,
        GenerationConfig.validate,
        GenerationMixin._validate_generation_mode,
        dict(GENERATION_MODES_MAPPING),
        getattr(GenerationMixin, "_tree_spec_decoding", None),
    ]


def test_enable_is_idempotent_and_disable_restores(llama: PreTrainedModel) -> None:
    enabled = patched()
    hf_treespec.enable()
    assert patched() == enabled
    hf_treespec.disable()
    bare = patched()
    assert bare[0] is None and bare[5] is None and "tree_spec" not in bare[4]
    with pytest.raises(ValueError, match="tree_spec"):  # transformers' own complaint about an unknown argument
        llama.generate(prompt(), tree_spec=True, **GREEDY)
    hf_treespec.disable()
    hf_treespec.enable()
    hf_treespec.disable()
    assert patched() == bare
    hf_treespec.enable()
    assert llama.generate(prompt(), tree_spec=True, **GREEDY).tree_spec.committed == 10


@pytest.mark.parametrize("value", [None, False])
def test_unset_leaves_generate_untouched(llama: PreTrainedModel, value: Any, monkeypatch: Any) -> None:
    """Plain text, plain type, no attribute, and none of our code on the way."""
    expected = llama.generate(prompt(), **GREEDY)
    monkeypatch.setattr(GenerationMixin, "_tree_spec_decoding", None)
    monkeypatch.setattr("hf_treespec.support.check_config", None)
    text = llama.generate(prompt(), tree_spec=value, **GREEDY)
    assert torch.equal(text, expected)
    assert not hasattr(text, "tree_spec")


@pytest.mark.parametrize(
    "value",
    [
        True,
        "ngram",
        NgramDrafter(),
        {"max_nodes": 7, "drafter": "ngram", "drafter_options": {"min_match": 2}},
        TreeSpecConfig(max_depth=3),
        TreeSpecConfig(drafter=NgramDrafter(), max_children=2),
    ],
    ids=str,
)
def test_everything_that_tree_spec_takes(llama: PreTrainedModel, value: Any) -> None:
    text = llama.generate(prompt(), tree_spec=value, **GREEDY)
    assert torch.equal(text, llama.generate(prompt(), **GREEDY))
    assert text.tree_spec.drafter in ("ngram", "union")


def test_an_option_reaches_the_loop(llama: PreTrainedModel) -> None:
    ids = prompt(4).repeat(1, 4)
    always = {"fallback": False}
    for knob, measure in (("max_nodes", lambda r: r.drafted), ("max_depth", lambda r: int(r.tree.depths.max()))):
        stats = llama.generate(ids, tree_spec={knob: 2, **always}, **GREEDY).tree_spec
        assert max(measure(r) for r in stats.decoding) == 2
    stats = llama.generate(ids, tree_spec={"max_children": 1, **always}, **GREEDY).tree_spec
    assert all((r.parents == range(-1, len(r.parents) - 1)).all() for r in stats.records)
    assert llama.generate(ids, tree_spec={"max_nodes": 0}, **GREEDY).tree_spec.drafted == 0


def test_auto_is_the_model_where_one_is_given(llama: PreTrainedModel) -> None:
    assert llama.generate(prompt(), tree_spec=True, **GREEDY).tree_spec.drafter == "union"
    text = llama.generate(prompt(), tree_spec={"fallback": False}, assistant_model=llama, **GREEDY)
    assert text.tree_spec.drafter == "model"
    assert text.tree_spec.tokens_per_round > 2


def test_as_a_default_of_the_model_saved_and_loaded(tmp_path: Path) -> None:
    model = build("llama")
    model.generation_config = GenerationConfig.from_model_config(model.config)  # loading drops unknown keys of these
    model.generation_config.pad_token_id = 0
    expected = model.generate(prompt(), **GREEDY)
    model.generation_config.tree_spec = TreeSpecConfig(max_nodes=5)
    for again in (model, _saved_and_loaded(model, tmp_path), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert again.generation_config.tree_spec == {"max_nodes": 5}
        text = again.generate(prompt(), **GREEDY)
        assert torch.equal(text, expected)
        assert max(r.drafted for r in text.tree_spec.records) <= 5
        assert not hasattr(again.generate(prompt(), tree_spec=False, **GREEDY), "tree_spec")
        assert again.generate(prompt(), tree_spec={"max_nodes": 0}, **GREEDY).tree_spec.drafted == 0


def _saved_and_loaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_in_a_config_object(llama: PreTrainedModel) -> None:
    config = GenerationConfig(tree_spec=True, pad_token_id=0, **GREEDY)
    assert llama.generate(prompt(), generation_config=config).tree_spec.committed == 10
    again = GenerationConfig.from_dict(config.to_dict())
    assert again.tree_spec is True and again == config
    assert GenerationConfig().tree_spec is None
    assert "tree_spec" not in GenerationConfig().to_dict()


def test_through_a_pipeline(tmp_path: Path) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    vocab = {chr(65 + i): i for i in range(VOCAB)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="A")
    generator = pipeline("text-generation", model=build("llama"), tokenizer=tokenizer, device="cpu")
    config = GenerationConfig(pad_token_id=0, **GREEDY)
    plain = generator("HELLOHELLO", generation_config=config)
    trees = generator("HELLOHELLO", generation_config=GenerationConfig(pad_token_id=0, tree_spec=True, **GREEDY))
    assert trees == plain and len(plain[0]["generated_text"]) == 20


# peft 0.21 itself uses names that transformers 5.24 deprecates
_PEFT = pytest.mark.filterwarnings("ignore:.*(is_gradient_checkpointing|past_key_values).*:FutureWarning")


@_PEFT
def test_through_peft() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, lora).eval()
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(30)
    text = wrapped.generate(input_ids=prompt(), tree_spec=True, **GREEDY)
    expected = wrapped.generate(input_ids=prompt(), **GREEDY)
    assert torch.equal(text, expected)
    with wrapped.disable_adapter():
        assert not torch.equal(wrapped.generate(input_ids=prompt(), **GREEDY), expected)
    assert text.tree_spec.committed == 10


@_PEFT
def test_prompt_learning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(build("llama"), tuning).eval()
    with pytest.raises(UnsupportedModelError, match="prompt-learning"):
        wrapped.generate(input_ids=prompt(), tree_spec=True, **GREEDY)


# -------------------------------------------------------------------- refused by name, before the first token


class _NoForward(Exception):
    pass


@pytest.fixture
def untouchable(llama: PreTrainedModel) -> Any:
    """The model, after its self-check, with a forward that must not run."""
    llama.generate(prompt(), tree_spec=True, **GREEDY)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise _NoForward

    handle = llama.register_forward_pre_hook(refuse)
    yield llama
    handle.remove()


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=3": {"num_beams": 3},
    "num_return_sequences=2": {"num_return_sequences": 2, "do_sample": True},
    "penalty_alpha=0.6": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers='high'": {"dola_layers": "high"},
    "prompt_lookup_num_tokens=3": {"prompt_lookup_num_tokens": 3},
    "guidance_scale=1.5": {"guidance_scale": 1.5},
    "use_cache=False": {"use_cache": False},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "cache_implementation='offloaded'": {"cache_implementation": "offloaded"},
    "cache_implementation='quantized'": {"cache_implementation": "quantized"},
    "cache_implementation='paged'": {"cache_implementation": "paged"},
    "assistant_early_exit=1": {"assistant_early_exit": 1},
    "num_assistant_tokens=7": {"num_assistant_tokens": 7},
    "synced_gpus=True": {"synced_gpus": True},
    "a batch of 2 prompts": {"inputs": torch.ones(2, 5, dtype=torch.long) * 3},
}


@pytest.mark.parametrize("named", REFUSED)
def test_refused_by_name(untouchable: PreTrainedModel, named: str) -> None:
    arguments = {"inputs": prompt(), **GREEDY, **REFUSED[named]}
    with pytest.raises(UnsupportedArgumentError) as caught:
        untouchable.generate(tree_spec=True, **arguments)
    message = str(caught.value)
    assert named in message
    assert any(way_out in message for way_out in ("Use ", "Unset it", "Leave ", "Call ", "call "))


def test_caches_that_cannot_hold_trees_are_refused(untouchable: PreTrainedModel) -> None:
    key = _compat.cache_key(untouchable)
    static = StaticCache(config=untouchable.config, max_cache_len=64)
    with pytest.raises(UnsupportedModelError, match="StaticCache"):
        untouchable.generate(prompt(), tree_spec=True, **{key: static}, **GREEDY)
    offloaded = DynamicCache(config=untouchable.config)
    offloaded.offloading = True
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        untouchable.generate(prompt(), tree_spec=True, **{key: offloaded}, **GREEDY)
    assert QuantizedCache is not None


def test_unknown_tensor_arguments_are_refused() -> None:
    model = target("gpt2")
    with pytest.raises(UnsupportedArgumentError, match="encoder_hidden_states"):
        model.generate(prompt(), tree_spec=True, encoder_hidden_states=torch.zeros(1, 3, 32), **GREEDY)


BAD_VALUES: list[tuple[Any, type[TreeSpecError], str]] = [
    (3.5, OptionError, "3.5"),
    ("ngrm", DrafterError, "'ngram'"),
    ({"max_node": 4}, OptionError, "max_node'.*max_nodes"),
    ({"max_nodes": -1}, OptionError, "max_nodes=-1.*0 to 1024"),
    ({"max_nodes": True}, OptionError, "max_nodes=True"),
    ({"max_depth": 0}, OptionError, "max_depth=0"),
    ({"max_children": 2.0}, OptionError, "max_children=2.0"),
    ({"debug": 1}, OptionError, "debug=1"),
    ({"drafter": 5}, OptionError, "drafter=5"),
    ({"drafter_options": [1]}, OptionError, "drafter_options"),
    ({"drafter": "ngram", "drafter_options": {"size": 3}}, DrafterError, "size"),
    ({"drafter": "ngram", "drafter_options": {"min_match": 0}}, DrafterError, "min_match=0"),
    ({"drafter": NgramDrafter(), "drafter_options": {"min_match": 2}}, OptionError, "drafter_options"),
    ("model", DrafterError, "assistant_model"),
]


@pytest.mark.parametrize("value, kind, message", BAD_VALUES, ids=lambda v: str(v)[:40])
def test_bad_values_name_themselves(
    llama: PreTrainedModel, value: Any, kind: type[TreeSpecError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        llama.generate(prompt(), tree_spec=value, **GREEDY)


def test_assistants_that_do_not_fit(llama: PreTrainedModel) -> None:
    other = build("llama")
    other.config.vocab_size = VOCAB + 5000
    with pytest.raises(DrafterError, match="5061 tokens and the target of 61"):
        llama.generate(prompt(), tree_spec=True, assistant_model=other, **GREEDY)
    with pytest.raises(DrafterError, match="not a transformers model"):
        llama.generate(prompt(), tree_spec=True, assistant_model=torch.nn.Linear(2, 2), **GREEDY)
    with pytest.raises(UnsupportedArgumentError, match="does not use it"):
        llama.generate(prompt(), tree_spec="ngram", assistant_model=llama, **GREEDY)


@pytest.mark.parametrize("size", [VOCAB + 3, VOCAB - 3])
def test_vocabularies_that_differ_by_padding(llama: PreTrainedModel, size: int) -> None:
    """Tokens that only one of the two models has do not hurt; the text is the target's."""
    from conftest import LLAMA
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": size})).eval()
    for do_sample in (False, True):
        torch.manual_seed(2)
        expected = llama.generate(prompt(), max_new_tokens=30, do_sample=do_sample)
        torch.manual_seed(2)
        text = llama.generate(prompt(), max_new_tokens=30, do_sample=do_sample, tree_spec=True, assistant_model=small)
        assert torch.equal(text, expected)


def test_models_that_cannot_hold_trees_are_refused() -> None:
    import transformers

    common = {"vocab_size": VOCAB, "hidden_size": 32, "pad_token_id": 0, "eos_token_id": None}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**common, n_layer=1, n_head=2)).eval()
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM takes no position_ids"):
        bloom.generate(prompt(), tree_spec=True, **GREEDY)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**common, num_hidden_layers=1)).eval()
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        mamba.generate(prompt(), tree_spec=True, **GREEDY)
    neo = transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            **common,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            initializer_range=0.2,
            bos_token_id=1,
        )
    ).eval()
    with pytest.raises(UnsupportedModelError, match="does not compute a tree"):
        neo.generate(prompt(), tree_spec=True, **GREEDY)


def test_training_mode_with_dropout_is_refused() -> None:
    model = build("gpt2").train()  # attention and residual dropout of 0.1
    with pytest.raises(UnsupportedModelError, match=r"model\.eval"):
        model.generate(prompt(), tree_spec=True, **GREEDY)
    quiet = build("llama").train()  # no dropout anywhere
    assert torch.equal(quiet.generate(prompt(), tree_spec=True, **GREEDY), target("llama").generate(prompt(), **GREEDY))


# -------------------------------------------------------------------- drafters of one's own


@pytest.mark.parametrize(
    "tree, message",
    [
        (lambda root: TokenTree.root_only(root + 1), "whose root is"),
        (lambda root: TokenTree.chain(root, [VOCAB + 3]), f"token {VOCAB + 3} is not in the target's vocabulary of"),
        (lambda root: TokenTree([root, 3], [-1, 0], [1.0, float("nan")]), "scores must be finite"),
        (lambda root: TokenTree([root, 3, 4], [-1, 0, 1], [1.0, 0.2, 0.5]), "above its parent's"),
        (lambda root: [root, 3], "must return a TokenTree"),
    ],
    ids=["root", "vocabulary", "nan", "rising", "type"],
)
def test_broken_trees_are_named(llama: PreTrainedModel, tree: Any, message: str) -> None:
    drafter = type("Broken", (Drafter,), {"name": "broken", "draft": lambda self, c, b: tree(c.last_token)})()
    with pytest.raises(DrafterError, match=message) as caught:
        llama.generate(prompt(), tree_spec={"drafter": drafter, "fallback": False}, **GREEDY)
    assert "'broken'" in str(caught.value)


def test_names_are_registered_once() -> None:
    with pytest.raises(DrafterError, match="'ngram' is taken"):
        hf_treespec.register_drafter("ngram")(type("Other", (Drafter,), {"draft": lambda *a: None}))
    with pytest.raises(DrafterError, match="'auto' is taken"):
        hf_treespec.register_drafter("auto")(type("Other", (Drafter,), {"draft": lambda *a: None}))


@pytest.mark.parametrize("name", hf_treespec.drafter_names())
def test_every_registered_drafter_keeps_its_contract(
    name: str, llama: PreTrainedModel, assistant: PreTrainedModel, tmp_path: Path
) -> None:
    if name in FITTING:  # heads that only some targets have
        hf_treespec.check_drafter(*FITTING[name](), max_new_tokens=12)
        return
    drafter = ready_drafter(name, llama, tmp_path)
    extra = {"assistant_model": assistant} if drafter.uses_assistant_model else {}
    hf_treespec.check_drafter(drafter, llama, **extra)


BAD_DRAFTERS: dict[str, Any] = {
    "default generator": lambda self, c, b: (torch.rand(1), TokenTree.root_only(c.last_token))[1],
    "changed context.ids": lambda self, c, b: (c.ids.fill_(1), TokenTree.root_only(1))[1],
    "levels where the budget allows": lambda self, c, b: TokenTree.chain(c.last_token, [3] * (b.max_depth + 1)),
    "siblings hold the same token": lambda self, c, b: TokenTree([c.last_token, 3, 3], [-1, 0, 0]),
    "not a TokenTree": lambda self, c, b: None,
}


@pytest.mark.parametrize("fault", BAD_DRAFTERS)
def test_check_drafter_finds_what_is_wrong(fault: str, llama: PreTrainedModel) -> None:
    drafter = type("Bad", (Drafter,), {"name": "bad", "draft": BAD_DRAFTERS[fault]})()
    with pytest.raises(DrafterError, match=fault):
        hf_treespec.check_drafter(drafter, llama)


def test_public_names_are_the_sorted_list() -> None:
    assert hf_treespec.__all__ == sorted(hf_treespec.__all__)
    assert all(hasattr(hf_treespec, name) for name in hf_treespec.__all__)
    from importlib.metadata import version

    assert version("hf-treespec") == hf_treespec.__version__
