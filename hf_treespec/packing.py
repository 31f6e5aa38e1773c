"""`pack`: cheap rows on a CPU. Linear layers of a float32 model run on FBGEMM's packed half-precision weights.

torch's float32 linear has a fast path for one row and packs the weights anew for every call with more, so that verifying
two tokens costs as much as verifying twenty and twice as much as one. FBGEMM packs once, reads half the bytes, and
computes each row by itself: a row's result does not depend on how many rows stand beside it, which is what a tree needs.

What changes: weights are rounded to half precision (relative error 2^-11), activations and sums stay float32. Texts are
those of the packed model: plain decoding of the packed model and tree decoding of it agree, and may differ from the
unpacked model's. Memory: the original weights are kept, for `unpack`, plus half their size for the packed ones.
"""

from __future__ import annotations

from types import TracebackType

import torch
from transformers import PreTrainedModel

from .errors import UnsupportedModelError

# FBGEMM saturates what half precision cannot hold; such a layer stays as it is.
_HALF_MAX = 65504.0


class PackedLinear(torch.nn.Module):
    """A `torch.nn.Linear` whose forward uses packed half-precision weights. The original stands in `linear`."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)

    @property
    def weight(self) -> torch.Tensor:
        """The original float32 weight (out, in): tied embeddings and drafting heads read it."""
        return self.linear.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) float32 to (..., out) float32."""
        # torch asks the packed weights for `__torch_function__`, which they answer by a C++ exception, and `.op` passes over
        # a search in Python for traced arguments: together 7 of 9 us, in each of some hundred layers of a forward
        with torch._C.DisableTorchFunctionSubclass():
            out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16.op(input, self._packed)
        return out


class Packed:
    """A packed model. `unpack` (or leaving the `with` block) puts the very same layers back."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers: list[tuple[torch.nn.Module, str, torch.nn.Linear]] = []
        try:
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if type(child) is torch.nn.Linear and bool(child.weight.abs().max() <= _HALF_MAX):
                        setattr(parent, name, PackedLinear(child))
                        self.layers.append((parent, name, child))
        except BaseException:
            self.unpack()
            raise
        if not self.layers:
            raise UnsupportedModelError(f"{type(model).__name__} has no float32 linear layer to pack.")

    def unpack(self) -> None:
        """Restores the original layers; harmless when called again."""
        for parent, name, child in self.layers:
            setattr(parent, name, child)
        self.layers = []

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpack()


def is_packed(model: PreTrainedModel) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


def can_pack() -> bool:
    """Whether this build of torch has FBGEMM's packed half-precision linear on this processor."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack(model: PreTrainedModel) -> Packed:
    """Packs the linear layers of a float32 model on the CPU, in place, until `unpack`.

        with hf_treespec.pack(model):
            model.generate(**inputs, tree_spec=True)

        packed = hf_treespec.pack(model)  # or for good
        packed.unpack()

    Raises:
        UnsupportedModelError: the model is not float32 on a CPU, is quantised, is packed already, needs gradients, or
            this torch lacks FBGEMM.
    """
    kind = type(model).__name__
    if not can_pack():
        engines = ", ".join(torch.backends.quantized.supported_engines)
        raise UnsupportedModelError(
            f"this torch has no FBGEMM (its quantised engines: {engines}), so {kind} cannot be packed; it needs an x86 "
            "processor with AVX2 and a torch build for it."
        )
    if is_packed(model):
        raise UnsupportedModelError(f"{kind} is packed already; unpack it first.")
    if model.device.type != "cpu" or model.dtype != torch.float32 or getattr(model, "is_quantized", False):
        raise UnsupportedModelError(
            f"{kind} is {model.dtype} on {model.device.type}{', quantised' if getattr(model, 'is_quantized', False) else ''};"
            " pack is for unquantised float32 models on a CPU."
        )
    if model.training:
        raise UnsupportedModelError(
            f"{kind} is in training mode, and packed layers have no gradients: call model.eval()."
        )
    return Packed(model)
