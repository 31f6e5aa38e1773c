"""What earlier calls have measured: one `Sizer` for a loaded target, a drafter and a place, in memory and on request on disk.

It knows nothing of how costs are used, only whose they are and where they are kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
import weakref
from pathlib import Path

import torch
from transformers import PreTrainedModel

from . import attention
from .budget import Sizer
from .costs import CostModel
from .demo_model import cache_root

logger = logging.getLogger("hf_treespec")

_knowledge: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], CostModel | Sizer]] = (
    weakref.WeakKeyDictionary()
)


def knowledge_of(model: PreTrainedModel, drafter: str, sampled: bool, *, remember: bool = False) -> Sizer:
    """The sizer of a loaded target and a drafter by name: what earlier calls in this process have measured.

    Costs are kept for each dtype, quantisation, attention, device and thread count; calibration also for each drafter,
    and apart for greedy and sampled decoding.

    Args:
        remember: costs that are not known in this process are looked up in the user's cache folder.
    """
    place = _place(model)
    known = _knowledge.setdefault(model, {})
    if remember and place not in known:
        known[place] = _read_costs(_costs_file(model, place))
    costs = known.setdefault(place, CostModel())
    assert isinstance(costs, CostModel)
    sizer = known.setdefault((*place, drafter, sampled), Sizer(costs))
    assert isinstance(sizer, Sizer)
    sizer.begin()
    return sizer


def save_costs(model: PreTrainedModel) -> None:
    """Writes what a target's rounds cost to the user's cache folder, for `remember=True` in later processes."""
    place = _place(model)
    costs = _knowledge.get(model, {}).get(place)
    if isinstance(costs, CostModel) and costs.measured():
        file = _costs_file(model, place)
        draft = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"place": [str(part) for part in place], "samples": costs.to_dict()}))
            os.replace(draft, file)  # nobody reads half a file
        except OSError as error:  # a finished text is worth more than what it has taught
            logger.warning("What rounds cost could not be written to %s (%r); later processes measure it.", file, error)


def _place(model: PreTrainedModel) -> tuple[object, ...]:
    """Everything that decides what a row costs, besides the weights' shapes."""
    head = model.get_output_embeddings()
    attention_kind = "eager" if attention.implementation(model) == "eager" else "sdpa"
    return (model.dtype, type(head).__name__, attention_kind, str(model.device), torch.get_num_threads())


def _costs_file(model: PreTrainedModel, place: tuple[object, ...]) -> Path:
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""
    parts = (type(model).__name__, model.config.to_json_string(), *place, platform.processor(), platform.machine(), gpu)
    return cache_root() / "costs" / (hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32] + ".json")


def _read_costs(file: Path) -> CostModel:
    costs = CostModel()
    try:
        costs.load(json.loads(file.read_text())["samples"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # only speed is lost
        logger.warning("What rounds cost could not be read from %s (%r); it is measured again.", file, error)
        return CostModel()
    return costs
