"""Loads models for the command line: names, device, dtype and 4-bit weights as a user gives them.

It refuses to know what the models are for. Every mistake becomes a `UserError` of one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
from huggingface_hub.utils.tqdm import enable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from . import __version__
from .demo_model import HUB_ID, demo_model, demo_model_path
from .packing import can_pack, is_packed, pack
from .support import same_tokenizer


class UserError(Exception):
    """A mistake of the caller's, told in one line."""


@dataclasses.dataclass
class Loaded:
    """A model, its tokenizer, and what is drafted with."""

    model: Any
    tokenizer: Any
    assistant: Any
    assistant_tokenizer: Any
    name: str

    def helper(self) -> dict[str, Any]:
        """The arguments of `generate` that bring in the assistant; with both tokenizers where they differ."""
        if self.assistant is None:
            return {}
        both = {"tokenizer": self.tokenizer, "assistant_tokenizer": self.assistant_tokenizer}
        return {"assistant_model": self.assistant, **({} if same_tokenizer(*both.values()) else both)}

    def inputs(self, prompt: str, raw: bool) -> dict[str, Any]:
        """The prompt's ids, through the chat template where the tokenizer has one."""
        if raw or not self.tokenizer.chat_template:
            ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            chat = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        ids = ids.to(self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    @contextlib.contextmanager
    def packed(self, wanted: bool | None) -> Iterator[None]:
        """The models packed for a while: where asked to (True), or where it helps and can be done (None)."""
        with contextlib.ExitStack() as stack:
            for model in filter(None, (self.model, self.assistant)):
                fit = can_pack() and model.device.type == "cpu" and model.dtype == torch.float32
                if wanted or (wanted is None and fit and not getattr(model, "is_quantized", False)):
                    stack.enter_context(pack(model))
            yield

    def _quantization(self) -> str | None:
        if getattr(self.model, "is_loaded_in_4bit", False):
            return "nf4"
        return "packed half precision" if is_packed(self.model) else None

    def machine(self) -> dict[str, Any]:
        """What the numbers were measured on."""
        device = self.model.device
        cuda = device.type == "cuda"
        return {
            "device": str(device),
            "device_name": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "quantization": self._quantization(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_treespec": __version__,
        }


def describe(machine: dict[str, Any]) -> str:
    """What `Loaded.machine` says, as short as a heading wants it."""
    threads = f", {machine['threads']} thread{'s' * (machine['threads'] != 1)}" if machine["device"] == "cpu" else ""
    return f"{machine['device']}, {machine['quantization'] or machine['dtype']}{threads}"


def load(
    name: str | None,
    *,
    assistant: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    nf4: bool = False,
) -> Loaded:
    """The models by their names or folders; `name` None is the embedded one.

    Args:
        device: None is a CUDA GPU where there is one, else the CPU.
        dtype: "float32", "bfloat16", "float16", "auto" for the checkpoint's own; None is a half precision on CUDA, else
            float32.
        nf4: quantises to 4 bits while loading; arithmetic is in `dtype`.

    Raises:
        UserError: a name, device or package cannot be had.
        DemoModelError: the embedded model cannot be had.
    """
    place = pick_device(device)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for results, whatever a library says while it loads
        model, tokenizer = load_model(name, place, dtype, nf4)
        helper, helpers = load_model(assistant, place, dtype, nf4) if assistant else (None, None)
    return Loaded(model, tokenizer, helper, helpers, name or HUB_ID.split("/")[-1])


def pick_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda", "mps", "xpu"):
        raise UserError(f"--device {name} is not known; give cpu, cuda, cuda:1, mps or xpu")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} cannot be used: {_brief(error)}") from error


def load_model(name: str | None, device: torch.device, dtype_name: str | None, nf4: bool) -> tuple[Any, Any]:
    """A model and its tokenizer; `name` None is the embedded one."""
    half = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16
    dtype: Any = half if device.type == "cuda" else torch.float32
    if dtype_name == "auto":
        dtype = "auto" if name else torch.float32  # what the embedded checkpoint is kept in
    elif dtype_name:
        dtype = getattr(torch, dtype_name)
    quantization = four_bit(dtype) if nf4 else None
    if name is None:
        return demo_model(dtype=dtype, device=device, quantization_config=quantization)
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():  # the hub's complaint about such a name is obscure
        raise UserError(f"cannot load model {name!r}: there is no such folder")
    try:
        placed = {"quantization_config": quantization, "device_map": {"": device}} if quantization else {}
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **placed)
        return (model if placed else model.to(device)), AutoTokenizer.from_pretrained(name)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises a dozen classes here, for names, files, packages and networks
        raise UserError(f"cannot load model {name!r}: {_brief(error)}") from error


def load_tokenizer(name: str | None) -> Any:
    """A model's tokenizer alone; `name` None is the embedded model's."""
    if name is not None and name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise UserError(f"cannot load the tokenizer of {name!r}: there is no such folder")
    source = demo_model_path() if name is None else name
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # as for models
        raise UserError(f"cannot load the tokenizer of {name!r}: {_brief(error)}") from error


def four_bit(dtype: Any) -> BitsAndBytesConfig:
    for package in ("bitsandbytes", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--nf4 needs {package}: pip install hf-treespec[quant]")
    compute = {} if dtype == "auto" else {"bnb_4bit_compute_dtype": dtype}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **compute)


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No progress bars and no hints of transformers in the output; our own log to stderr."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    log, handler = logging.getLogger("hf_treespec"), logging.StreamHandler(sys.stderr)
    level = log.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if sys.stderr.isatty() and not HF_HUB_DISABLE_PROGRESS_BARS:  # that took the bars of downloads with it
        enable_progress_bars()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
