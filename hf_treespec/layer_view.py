"""A model that runs some of another one's decoder layers and shares every weight with it: self-speculation's drafter.

The view has the same embeddings, final norm and head; between them stand the chosen layers, in order (Draft & Verify,
Zhang et al. 2023; LayerSkip, Elhoushi et al. 2024; SWIFT, Xia et al. 2024). Nothing is copied but thin objects: modules
that know their place (`layer_idx`) or a config, and whatever contains them. Everything with weights of its own (linear
layers, quantised, packed or adapted ones too, norms, embeddings) is the very object of the model:

    model                view of layers 0, 3
    ├─ embed_tokens      = the same
    ├─ layers 0 1 2 3    ≈ thin copies of layers 0 3, which count themselves 0 1
    │   └─ q_proj, ...   = the same
    ├─ norm, lm_head     = the same
    └─ config            ≈ a copy that says num_hidden_layers = 2

So the model, its config and its layers never change, not even for the time of a call. A view is a picture of the moment:
make a new one after layers were replaced (packed, unpacked, adapters added).
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module, ModuleList
from transformers import PretrainedConfig, PreTrainedModel

from . import _compat
from .errors import UnsupportedModelError

# What makes a layer depend on others than the one before it, or on its number, by the names that configs give it.
_ENTANGLED = ("num_kv_shared_layers", "hidden_size_per_layer_input")


def layer_view(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """`model` with only the decoder layers `layers`, which is a causal LM of its own with a cache of `len(layers)`.

    Args:
        layers: ascending indices, at least one.

    Raises:
        UnsupportedModelError: the decoder's layers are not found, or do not stand for themselves.
    """
    stack = decoder_layers(model)
    memo: dict[int, Any] = {}
    view: PreTrainedModel = _Copier(stack, layers, memo).copy(model)
    text = _compat.text_config(model)
    # one config usually serves all modules, but nothing says that it must
    for config in {id(c): c for m in view.modules() if type(c := m.__dict__.get("config")) is type(text)}.values():
        _cut(config, len(stack), layers)
    _cut(_compat.text_config(view), len(stack), layers)
    return view


def decoder_layers(model: PreTrainedModel) -> ModuleList:
    """The list of decoder layers: the only one whose i-th module counts itself as layer i.

    Raises:
        UnsupportedModelError: there is no such list, there are several, or layers depend on more than the one before.
    """
    kind, config = type(model).__name__, _compat.text_config(model)
    count = getattr(config, "num_hidden_layers", None)
    entangled = [name for name in _ENTANGLED if getattr(config, name, None)]
    if entangled:
        raise UnsupportedModelError(
            f"{kind} cannot run with some of its layers: they depend on their numbers (config.{entangled[0]}="
            f"{getattr(config, entangled[0])}). {_WAY_OUT}"
        )
    lists = {name: m for name, m in model.named_modules() if isinstance(m, ModuleList) and len(m) == count}
    found = [name for name, m in lists.items() if all(_places(layer) == {i} for i, layer in enumerate(m))]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{kind} cannot run with some of its layers: {len(found)} lists of {count} numbered decoder layers were "
            f"found{' (' + ', '.join(found) + ')' if found else ''}. {_WAY_OUT}"
        )
    owner = found[0].rpartition(".")[0]
    beside = [name for name in lists if name != found[0] and name.rpartition(".")[0] == owner]
    if beside:
        raise UnsupportedModelError(
            f"{kind} cannot run with some of its layers: {beside[0]} has a part for each of them. {_WAY_OUT}"
        )
    return lists[found[0]]


_WAY_OUT = "Use another drafter, e.g. tree_spec='union'."


def _places(layer: Module) -> set[int]:
    """What the modules of a layer think its index is."""
    return {m.__dict__["layer_idx"] for m in layer.modules() if isinstance(m.__dict__.get("layer_idx"), int)}


def _cut(config: Any, count: int, layers: Sequence[int]) -> None:
    """Makes a config of `count` layers, lists of one entry a layer included, one of `layers`. Harmless if it is that."""
    if config.num_hidden_layers != count or len(layers) == count:
        return
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == count:
            config.__dict__[name] = type(value)(value[i] for i in layers)  # checked as a whole, so set as a whole
    config.num_hidden_layers = len(layers)


class _Copier:
    """Copies what must differ between a model and its view, and shares the rest.

    Args:
        stack: the model's list of layers, of which `layers` stay.
        memo: of `copy.deepcopy`, so that configs which contain each other still do in the copy.
    """

    def __init__(self, stack: ModuleList, layers: Sequence[int], memo: dict[int, Any]) -> None:
        self.stack, self.layers, self.memo = stack, layers, memo
        self.done: dict[int, Module] = {}

    def copy(self, module: Any) -> Any:
        if id(module) not in self.done:
            self.done[id(module)] = self._stack() if module is self.stack else self._copy(module)
        return self.done[id(module)]

    def _stack(self) -> Module:
        kept = _thin(self.stack)
        kept.__dict__["_modules"] = {str(place): self.copy(self.stack[i]) for place, i in enumerate(self.layers)}
        for place, layer in enumerate(kept.children()):
            for module in layer.modules():
                if "layer_idx" in module.__dict__:
                    module.__dict__["layer_idx"] = place
        return kept

    def _copy(self, module: Module) -> Module:
        children = {name: None if child is None else self.copy(child) for name, child in module._modules.items()}
        config = module.__dict__.get("config")
        own = isinstance(config, PretrainedConfig) or "layer_idx" in module.__dict__
        if not own and all(child is children[name] for name, child in module._modules.items()):
            return module
        copied = _thin(module)
        copied.__dict__["_modules"] = children
        if isinstance(config, PretrainedConfig):
            copied.__dict__["config"] = copy.deepcopy(config, self.memo)
        return copied


def _thin(module: Module) -> Module:
    """A module of the same kind with the same tensors, whose attributes can be set without changing the original.

    Raises:
        UnsupportedModelError: its forward was replaced by a function that is bound to the original in an unknown way.
    """
    copied: Module = type(module).__new__(type(module))
    copied.__dict__ = {name: _rebound(value, module, copied) for name, value in module.__dict__.items()}
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers", "_modules") or name.endswith("_hooks"):
            copied.__dict__[name] = copy.copy(value)
    if "_compiled_call_impl" in copied.__dict__:  # of `module.compile()`: it runs the original
        copied.__dict__["_compiled_call_impl"] = None
    if "forward" in copied.__dict__ and copied.__dict__["forward"] is module.__dict__["forward"]:
        raise UnsupportedModelError(
            f"the forward of {type(module).__name__} was replaced by an object ({type(module.forward).__name__}), so that "
            f"it cannot run with some of its layers. {_WAY_OUT}"
        )
    return copied


def _rebound(value: Any, module: Module, copied: Module) -> Any:
    """What is bound to `module` (a method, or a hook's `partial(new_forward, module)`), bound to its copy instead."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, copied)
    if isinstance(value, functools.partial) and value.args and value.args[0] is module:
        bound = functools.partial(value.func, copied, *value.args[1:], **value.keywords)
        bound.__dict__.update(
            {name: _rebound(v, module, copied) for name, v in value.__dict__.items()}
        )  # its signature
        return bound
    return value


def layer_bytes(model: PreTrainedModel) -> tuple[float, float]:
    """Bytes of one decoder layer's weights (the mean over layers) and of the head's, which is what passes cost."""
    stack = decoder_layers(model)
    layers = sum(p.numel() * p.element_size() for p in stack.parameters())
    head = getattr(model.get_output_embeddings(), "weight", None)
    return layers / len(stack), float(head.numel() * head.element_size()) if isinstance(head, torch.Tensor) else 0.0
