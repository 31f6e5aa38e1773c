"""The hook: `import hf_treespec` makes `tree_spec` an argument of `generate` and tree decoding a generation mode.

Four things in transformers are touched, and `disable()` puts all of them back:

* `GenerationConfig.tree_spec`: an attribute (default None), so that `generate` takes the argument and configs carry it;
* `GenerationConfig.get_generation_mode` and `.validate`: they answer for configs whose `tree_spec` is set;
* `GenerationMixin._validate_generation_mode`: likewise, with the arguments of the call;
* the table of generation modes gets one entry, and `GenerationMixin` the method that it names.

With `tree_spec` unset every one of them hands over to the original at once. This form receives streamers, tokenizers,
assistant models and stop strings, and works through PEFT, pipelines and pickles.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GENERATION_MODES_MAPPING

from . import support
from .config import TreeSpecConfig
from .decoding import Call, Decoding
from .drafters.base import Drafter, drafter_class, drafter_for, make_drafter
from .errors import OptionError, UnsupportedArgumentError

MODE = "tree_spec"
_METHOD = "_tree_spec_decoding"
_originals: dict[str, Any] = {}


class _TreeSpecAttribute:
    """`GenerationConfig.tree_spec`: None unless set, kept in the instance in a form that JSON can hold."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return None if instance is None else instance.__dict__.get(MODE)

    def __set__(self, instance: Any, value: Any) -> None:
        if isinstance(value, TreeSpecConfig):
            value = value.to_dict() or True
        if value is None:
            instance.__dict__.pop(MODE, None)
            return
        instance.__dict__[MODE] = value
        # a config derived from a model config drops unknown keys when it is loaded again; it is the user's own now
        instance.__dict__["_from_model_config"] = False

    def __delete__(self, instance: Any) -> None:
        instance.__dict__.pop(MODE, None)


def enable() -> None:
    """Adds the `tree_spec` mode to transformers. Importing the package has called it; calling it again is harmless."""
    if _originals:
        return
    for owner, name in (
        (GenerationConfig, "get_generation_mode"),
        (GenerationConfig, "validate"),
        (GenerationMixin, "_validate_generation_mode"),
    ):
        _originals[name] = getattr(owner, name)
    GenerationConfig.tree_spec = _TreeSpecAttribute()
    GenerationConfig.get_generation_mode = _get_generation_mode
    GenerationConfig.validate = _validate
    GenerationMixin._validate_generation_mode = _validate_generation_mode
    GENERATION_MODES_MAPPING[MODE] = _METHOD
    setattr(GenerationMixin, _METHOD, _tree_spec_decoding)


def disable() -> None:
    """Takes the mode out again; transformers is then as if the package had not been imported."""
    if not _originals:
        return
    GenerationConfig.get_generation_mode = _originals.pop("get_generation_mode")
    GenerationConfig.validate = _originals.pop("validate")
    GenerationMixin._validate_generation_mode = _originals.pop("_validate_generation_mode")
    del GenerationConfig.tree_spec
    del GENERATION_MODES_MAPPING[MODE]
    delattr(GenerationMixin, _METHOD)


@functools.wraps(GenerationConfig.get_generation_mode)
def _get_generation_mode(self: GenerationConfig, assistant_model: PreTrainedModel | None = None) -> Any:
    if self.tree_spec is None or self.tree_spec is False:
        return _originals["get_generation_mode"](self, assistant_model)
    return MODE


@functools.wraps(GenerationConfig.validate)
def _validate(self: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
    # `generate` leaves for its paged decoding before it asks for a mode; this is the only place on that way
    if self.tree_spec and self.cache_implementation == "paged":
        support.check_config(self)
    return _originals["validate"](self, *args, **kwargs)


@functools.wraps(GenerationMixin._validate_generation_mode)
def _validate_generation_mode(self: Any, generation_mode: Any, generation_config: Any, mode_kwargs: Any) -> Any:
    if generation_mode != MODE:
        return _originals["_validate_generation_mode"](self, generation_mode, generation_config, mode_kwargs)
    support.check_config(generation_config)
    given = {k: mode_kwargs.get(k) for k in support.ASSISTANT_ARGUMENTS}
    if given["assistant_model"] is not None:
        support.check_assistant_model(given["assistant_model"])
    config, drafter, _ = resolve(generation_config.tree_spec, **given)
    if not drafter.uses_assistant_tokenizer:
        support.check_assistant(self, **given)
    support.check_model(self, self_check=config.self_check)


def resolve(
    value: Any, assistant_model: PreTrainedModel | None = None, tokenizer: Any = None, assistant_tokenizer: Any = None
) -> tuple[TreeSpecConfig, Drafter, bool]:
    """What `tree_spec=value` asks for: the options, the drafter, and whether rounds are to be streamed.

    Raises:
        OptionError, DrafterError: the value, an option or the drafter's name is not understood.
        UnsupportedArgumentError: the drafter has no use for the assistant, or for its tokenizer.
    """
    stream = isinstance(value, StreamRequest)
    config = TreeSpecConfig.from_value(value.value if stream else value)
    drafter = config.drafter
    if isinstance(drafter, str):
        name = _automatic(assistant_model, tokenizer, assistant_tokenizer) if drafter == "auto" else drafter
        options = dict(config.drafter_options)
        if assistant_model is not None and "model" in inspect.signature(drafter_class(name)).parameters:
            options.setdefault("model", assistant_model)  # heads tell by it which states of the target they read
        drafter = make_drafter(name, **options)
    elif config.drafter_options:
        raise OptionError("drafter_options are for a drafter given by name; configure the Drafter itself.")
    if assistant_model is not None and not drafter.uses_assistant_model:
        raise UnsupportedArgumentError(
            f"assistant_model= cannot be combined with tree_spec={drafter.name!r}, which does not use it. Drop it, or "
            f"use tree_spec={drafter_for(assistant_model)!r}."
        )
    if assistant_tokenizer is not None and not drafter.uses_assistant_tokenizer and assistant_model is None:
        raise UnsupportedArgumentError(
            f"assistant_tokenizer= cannot be combined with tree_spec={drafter.name!r} without assistant_model=, which "
            "it belongs to. Drop it, or pass both."
        )
    return config, drafter, stream


def _automatic(assistant_model: PreTrainedModel | None, tokenizer: Any, assistant_tokenizer: Any) -> str:
    """The name behind 'auto'."""
    name = drafter_for(assistant_model)
    if name != "model" or assistant_tokenizer is None:
        return name
    same = tokenizer is not None and support.same_tokenizer(tokenizer, assistant_tokenizer)
    return "model" if same else "universal"


class StreamRequest:
    """Wraps the value of `tree_spec` where `hf_treespec.stream` wants the rounds instead of the result."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> StreamRequest:
        return self


def _tree_spec_decoding(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    assistant_model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Tree decoding, called by `generate` like its own decoding methods. See `hf_treespec.decoding`."""
    try:
        support.check_call(input_ids.shape[0], synced_gpus)
        config, drafter, stream = resolve(generation_config.tree_spec, assistant_model, tokenizer, assistant_tokenizer)
        decoding = Decoding(
            Call(
                model=self,
                config=config,
                drafter=drafter,
                ids=input_ids,
                processors=logits_processor,
                stopping=stopping_criteria,
                generation_config=generation_config,
                model_kwargs=model_kwargs,
                streamer=streamer,
                assistant_model=assistant_model,
                tokenizer=tokenizer,
                assistant_tokenizer=assistant_tokenizer,
            )
        )
    except BaseException:
        if streamer is not None:  # it holds the prompt already, and somebody may be waiting at its other end
            streamer.end()
        raise
    return decoding if stream else decoding.run()
