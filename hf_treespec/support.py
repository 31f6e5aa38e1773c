"""What `generate(tree_spec=...)` honours, and what it refuses by name before the first token.

Refusals come in two places: `check_config` and `check_call` look at arguments while `generate` is still sorting them;
`check_model` looks at the target, ending with a numeric self-check: a small tree must give the logits of sequential
forwards. Names of model families are not consulted.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from . import _compat, attention
from .cache import TreeCache, check_cache
from .errors import DrafterError, UnsupportedArgumentError, UnsupportedModelError
from .tree import TokenTree
from .verify import ForwardArguments, Verifier

_PLAIN = "or decode without tree_spec."


def _refusals(config: Any) -> list[tuple[bool, str, str]]:
    """(refuse?, what, the way out) for every option of a `GenerationConfig` that a tree cannot honour."""

    def more_than(name: str, least: float) -> bool:
        value = getattr(config, name, None)
        return value is not None and value > least

    def given(name: str) -> bool:
        return getattr(config, name, None) not in (None, False)

    def show(name: str) -> str:
        return f"{name}={getattr(config, name, None)!r}"

    beams = "beam search ranks whole texts, a tree verifies one. Use num_beams=1,"
    other = "it is another way to decode. Use one of the two."
    return [
        (more_than("num_beams", 1), show("num_beams"), beams),
        (more_than("num_beam_groups", 1), show("num_beam_groups"), beams),
        (given("constraints"), "constraints", beams),
        (given("force_words_ids"), "force_words_ids", beams),
        (
            more_than("num_return_sequences", 1),
            show("num_return_sequences"),
            "one text is decoded at a time. Call generate once for each sequence,",
        ),
        (
            more_than("penalty_alpha", 0),
            show("penalty_alpha"),
            "contrastive search is another way to decode. Unset it,",
        ),
        (given("dola_layers"), show("dola_layers"), other),
        (
            given("prompt_lookup_num_tokens"),
            show("prompt_lookup_num_tokens"),
            "tree_spec='ngram' does this as a tree. Unset it,",
        ),
        (given("use_mtp"), show("use_mtp"), "tree_spec='mtp' drafts with the same layers, as a tree. Unset it,"),
        (given("assistant_early_exit"), show("assistant_early_exit"), other),
        (
            given("speculation_type"),
            show("speculation_type"),
            "tree_spec='dflash' drafts with the same assistant_model, as a tree. Unset it,",
        ),
        (
            more_than("guidance_scale", 1) or (given("guidance_scale") and config.guidance_scale < 1),
            show("guidance_scale"),
            "guidance runs the model once more for every token. Unset it,",
        ),
        (config.use_cache is False, "use_cache=False", "a tree is verified on top of a cache. Leave use_cache on,"),
        (
            getattr(config, "cache_implementation", None) not in (None, "dynamic"),
            show("cache_implementation"),
            "only the default dynamic cache can hold a tree. Unset it,",
        ),
        *(
            (_is_set(config, name), show(name), f"it steers transformers' own assistants. {instead}")
            for name, instead in (
                ("num_assistant_tokens", "Use tree_spec={'max_depth': ..., 'max_nodes': ...},"),
                ("num_assistant_tokens_schedule", "Trees size themselves; unset it,"),
                ("assistant_confidence_threshold", "Use tree_spec={'drafter_options': {'min_gain': ...}},"),
                ("max_matching_ngram_size", "Unset it,"),
                ("assistant_lookbehind", "Unset it,"),
                ("target_lookbehind", "Unset it,"),
            )
        ),
    ]


def _is_set(config: Any, name: str) -> bool:
    """Whether an option differs from what transformers fills in by itself."""
    value = getattr(config, name, None)
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    fresh = getattr(type(config)(), name, None)
    return value is not None and value not in (defaults.get(name), fresh)


def check_config(config: Any) -> None:
    """Raises `UnsupportedArgumentError` for the first option that a tree cannot honour."""
    for refused, what, way_out in _refusals(config):
        if refused:
            tail = f" {_PLAIN}" if way_out.endswith(",") else ""
            raise UnsupportedArgumentError(f"{what} cannot be combined with tree_spec: {way_out}{tail}")


def check_call(rows: int, synced_gpus: bool) -> None:
    """Raises `UnsupportedArgumentError` for what only shows when `generate` has prepared its inputs."""
    if rows != 1:
        raise UnsupportedArgumentError(
            f"a batch of {rows} prompts cannot be combined with tree_spec yet: call generate once for each prompt, "
            f"{_PLAIN}"
        )
    if synced_gpus:
        raise UnsupportedArgumentError(
            "synced_gpus=True cannot be combined with tree_spec: the number of forwards differs between GPUs. Use "
            f"synced_gpus=False with a model that one process holds, {_PLAIN}"
        )


ASSISTANT_ARGUMENTS = ("assistant_model", "tokenizer", "assistant_tokenizer")
# Vocabulary sizes of one tokenizer differ by padding to a multiple of a power of two; Qwen2.5's 0.5B and 7B by 128.
MAX_PADDING = 1024


def check_assistant(target: Any, assistant_model: Any, tokenizer: Any = None, assistant_tokenizer: Any = None) -> None:
    """Raises `DrafterError` unless target and assistant share a tokenizer, as far as that can be seen.

    Tokenizers are compared where both are given; otherwise vocabulary sizes, which may differ by padding. A wrong guess
    costs speed, never the text.
    """
    if assistant_model is None:
        return
    check_assistant_model(assistant_model)
    if tokenizer is not None and assistant_tokenizer is not None:
        if not same_tokenizer(tokenizer, assistant_tokenizer):
            raise DrafterError(
                "tokenizer and assistant_tokenizer differ, and drafter 'model' does not translate between them. Use "
                "tree_spec='universal', or leave the drafter to 'auto'."
            )
        return
    configs = [_compat.text_config(model) for model in (target, assistant_model)]
    if not all(hasattr(config, "vocab_size") for config in configs):  # a head without a vocabulary of its own
        return
    sizes = [config.vocab_size for config in configs]
    if abs(sizes[0] - sizes[1]) > MAX_PADDING:
        raise DrafterError(
            f"assistant_model has a vocabulary of {sizes[1]} tokens and the target of {sizes[0]}: their tokenizers "
            "differ. Pass tokenizer= (the target's) and assistant_tokenizer= as well, use an assistant_model with the "
            "target's tokenizer, or tree_spec='ngram' without assistant_model."
        )


def check_assistant_model(assistant_model: Any) -> None:
    """Raises `DrafterError` for what is no model of transformers."""
    if not isinstance(assistant_model, PreTrainedModel):
        raise DrafterError(
            f"assistant_model={type(assistant_model).__name__} is not a transformers model; pass a drafter of your own "
            "as tree_spec=drafter."
        )


# Share of the smaller vocabulary that two releases of one tokenizer have in common: they differ by a few special tokens.
SAME_VOCABULARY = 0.99
_compared: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, tuple[int, int, bool]]] = (
    weakref.WeakKeyDictionary()
)


def same_tokenizer(tokenizer: Any, other: Any) -> bool:
    """Whether ids mean the same to both, but for a few. Remembered, since vocabularies are large."""
    if tokenizer is other:
        return True
    known = _compared.setdefault(tokenizer, weakref.WeakKeyDictionary())
    sizes = (len(tokenizer), len(other))
    if known.get(other, ())[:2] != sizes:  # tokens may have been added since
        ids, others = tokenizer.get_vocab(), other.get_vocab()
        common = sum(others.get(token) == index for token, index in ids.items())
        known[other] = (*sizes, common >= SAME_VOCABULARY * min(len(ids), len(others)))
    return known[other][2]


# Arguments of `generate` that reach a decoding method and are handled by name.
_HANDLED = (
    "attention_mask",
    "position_ids",
    "cache_position",
    "logits_to_keep",
    "use_cache",
    "inputs_embeds",
    "input_ids",
)
# Consumed by the prompt's forward, besides what transformers itself lists.
_PROMPT_ONLY = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes")


def round_arguments(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> ForwardArguments:
    """Sorts the arguments that transformers would pass on in every step of plain decoding.

    Plain values are passed on. Token types are continued as transformers continues them. Inputs of the prompt alone
    (images and the like) are consumed by the prefill. Any other tensor would have to be laid out along the tree.

    Raises:
        UnsupportedArgumentError: a tensor argument that is not known to belong to the prompt only.
    """
    prompt_only = {*_PROMPT_ONLY, *_compat.prompt_only_arguments()}
    result = ForwardArguments()
    for name, value in model_kwargs.items():
        if value is None or name in _HANDLED or name in prompt_only or isinstance(value, Cache):
            continue
        if isinstance(value, (bool, int, float, str)):
            result.constant[name] = value
        elif name == "token_type_ids":
            result.columns[name] = value[:, -1:]
        elif name == "mm_token_type_ids":
            result.columns[name] = torch.zeros_like(value[:, -1:])
        else:
            raise UnsupportedArgumentError(
                f"{name}= ({type(value).__name__}) cannot be combined with tree_spec: it is not known how it extends "
                f"along a tree. Drop it, {_PLAIN}"
            )
    return result


def check_model(model: PreTrainedModel, *, self_check: bool = True) -> None:
    """Raises `UnsupportedModelError` unless a tree can be verified by `model`.

    Args:
        self_check: also compare a small tree with sequential forwards, once for a loaded model and attention.
    """
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder; tree_spec decodes decoder-only models. {_PLAIN_CALL}"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{kind} carries a recurrent state, which cannot branch. {_PLAIN_CALL}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{kind} takes no position_ids, so nodes cannot be placed. {_PLAIN_CALL}")
    if model.training and _drops(model):
        raise UnsupportedModelError(f"{kind} is in training mode with dropout: call model.eval() first.")
    owner = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", model)
    if owner is not model and getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(f"{kind} runs under a prompt-learning adapter, which hides virtual tokens in the "
                                    f"cache. Merge or disable the adapter, {_PLAIN}")  # fmt: skip
    check_cache(DynamicCache(config=_compat.text_config(model)))
    if self_check:
        _checked.require(model)


_PLAIN_CALL = "Decode without tree_spec."


def _drops(model: PreTrainedModel) -> bool:
    layers = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())
    options = [v for k, v in _compat.text_config(model).to_dict().items() if "dropout" in k or k.endswith("_pdrop")]
    return layers or any(isinstance(v, (int, float)) and v > 0 for v in options)


class _SelfChecks:
    """Which loaded models have passed, under which attention. A pass holds for every model of the same config."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.models: weakref.WeakKeyDictionary[PreTrainedModel, set[str]] = weakref.WeakKeyDictionary()
        self.passed: set[str] = set()

    def require(self, model: PreTrainedModel) -> None:
        how = f"{attention.implementation(model)} {model.dtype}"
        with self.lock:
            if how in self.models.get(model, ()):
                return
            key = f"{type(model).__qualname__} {how} {model.config.to_json_string()}"
            if key not in self.passed:
                error, allowed = tree_error(model), _tolerance(model)
                if not error <= allowed:
                    raise UnsupportedModelError(
                        f"{type(model).__name__} with {attention.implementation(model)!r} attention does not compute a "
                        f"tree as it computes a text: the logits differ by {error:.2g} of their spread (allowed: "
                        f"{allowed:g}). Try attn_implementation='eager', {_PLAIN}"
                    )
                self.passed.add(key)
            self.models.setdefault(model, set()).add(how)


_checked = _SelfChecks()


def _tolerance(model: PreTrainedModel) -> float:
    """Share of the logits' spread. Wrong masks or positions give 0.1 to 4; rounding 1e-6 in float32, 3e-2 in int8."""
    quantised = getattr(model, "is_quantized", False) or model.dtype != torch.float32
    return 5e-2 if quantised else 1e-3


def _unknown_window(config: Any) -> int:
    """The reach of local attention that `verify` does not know by name (GPT-Neo's `window_size`, say), 0 if none."""
    known = ("sliding_window", "max_window_layers", "use_sliding_window", "full_attn_mod")
    found = [
        value
        for name, value in config.to_dict().items()
        if ("window" in name or "local_attention" in name) and name not in known and type(value) is int
    ]
    return min(found, default=0)


@torch.no_grad()
def tree_error(model: PreTrainedModel) -> float:
    """How far a small tree's logits are from those of a sequential forward, as a share of the logits' spread (RMS).

    The tree hangs below a short text: the root, some children, and a child of the last one. The path through the last
    child is what a wrong mask, slot-based positions or a recurrent layer get wrong. The text is as long as any local
    attention that is not known by name, so that its edge falls into the tree.
    """
    config = _compat.text_config(model)
    size, length = config.vocab_size, 2 + _unknown_window(config)
    text = [(7 * i + 11) % size for i in range(length)] + [t % size for t in (5, 23, 3)]  # root, last child, its child
    decoys = [
        (t + 19) % size for t in range(4)
    ]  # siblings before the second child, so that slots run ahead of positions
    tree = TokenTree([text[length], *decoys, text[length + 1], text[length + 2]], [-1, 0, 0, 0, 0, 0, 5])
    device = model.device
    ids = torch.tensor([text], device=device)
    with attention.tree_attention_on(model), contextlib.suppress(RuntimeError, TypeError, AttributeError, ValueError):
        cache, key = DynamicCache(config=config), _compat.cache_key(model)
        whole = model(input_ids=ids, use_cache=True, return_dict=True, **{key: cache}).logits[0, length:].float()
        positions = torch.arange(length, device=device)[None]
        prefix = TreeCache(cache)
        if any(layer.offset for layer in prefix.tree_layers):  # a short window has dropped what the tree is to see
            cache = DynamicCache(config=config)
            model(input_ids=ids[:, :length], position_ids=positions, use_cache=True, **{key: cache})
            prefix = TreeCache(cache)
        prefix.shorten(length)
        logits = Verifier(model, prefix, positions[:, -1:]).forward(tree).logits[0, [0, 5, 6]].float()
        return float((logits - whole).norm() / (whole - whole.mean(-1, keepdim=True)).norm())
    return float("nan")  # the model's forward cannot even be called so
