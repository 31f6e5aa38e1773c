"""Heads on disk: finding their files, knowing their format, naming what does not fit.

A `Format` recognises its checkpoints by config and tensor names, says what it found, and makes a drafter of them. Each
format is registered by the file of the drafter that it makes.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ..errors import CheckpointError
from .base import Drafter

# What a folder's weights may be called, the first that is there counts. Sharded ones have an index that names them.
_WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
# What is fetched from a Hub repository; a head has neither code nor tokenizer of its own that we would run.
_PATTERNS = ("*.json", "*.safetensors", "*.bin", "*.pt")


class Checkpoint:
    """Config and weights of one folder. Opening reads names and shapes only.

    Attributes:
        source: what the user asked for; stands in messages.
        folder: where the files lie.
        config: `config.json`, or {} where there is none.
        shapes: tensor name to shape.
        dtypes: tensor name to dtype.
    """

    def __init__(self, source: str, folder: Path) -> None:
        self.source, self.folder = source, folder
        self.config = self._read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}  # tensor name to file
        self._pickled: dict[Path, dict[str, torch.Tensor]] = {}  # mapped into memory where the file allows it
        self.files = self._weight_files()
        for file in self.files:
            self._scan(file)

    @classmethod
    def open(cls, path_or_id: str | Path, revision: str | None = None) -> Checkpoint:
        """A local folder, or a repository of the Hub (fetched into its cache).

        Raises:
            CheckpointError: there is no such folder or repository, or no weights that can be read in it.
        """
        source, path = str(path_or_id), Path(path_or_id).expanduser()
        if path.is_dir():
            if revision is not None:
                raise CheckpointError(f"{source} is a folder, which has no revision={revision!r}; leave it out.")
            return cls(source, path)
        if path.is_file():
            raise CheckpointError(f"{source} is a file; give the folder that holds it and its config.json.")
        if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
            raise CheckpointError(f"there is no folder {source}.")
        return cls(source, _fetch(source, revision))

    def _weight_files(self) -> list[Path]:
        for name in _WEIGHTS:
            file = self.folder / name
            if not file.is_file():
                continue
            if not name.endswith(".index.json"):
                return [file]
            shards = sorted(set(self._read_json(file).get("weight_map", {}).values()))
            gone = [shard for shard in shards if not (self.folder / shard).is_file()]
            if gone or not shards:
                raise CheckpointError(f"{file} names shards that are not there: {', '.join(gone) or 'none at all'}.")
            return [self.folder / shard for shard in shards]
        found = sorted(p for suffix in ("safetensors", "bin", "pt") for p in self.folder.glob(f"*.{suffix}"))
        if len(found) == 1:
            return found
        what = f"several weight files ({', '.join(p.name for p in found)})" if found else "no weights"
        raise CheckpointError(f"{self.source} holds {what}; expected is one of {', '.join(_WEIGHTS)}.")

    def _scan(self, file: Path) -> None:
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a mapping
                        part = opened.get_slice(name)
                        self._note(name, tuple(part.get_shape()), str(part.get_dtype()).lower(), file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
            return
        self._pickled[file] = _unpickle(file)
        for name, tensor in self._pickled[file].items():
            self._note(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), file)

    def _note(self, name: str, shape: tuple[int, ...], dtype: str, file: Path) -> None:
        self.shapes[name], self.dtypes[name], self._files[name] = shape, dtype, file

    def _read_json(self, file: Path) -> dict[str, Any]:
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{file} is not readable JSON: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{file} holds {type(value).__name__}, not an object.")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of the config.

        Raises:
            CheckpointError: it is missing without a default, or no whole number above 0.
        """
        value = self.config.get(name, default)
        if value is None:
            raise CheckpointError(f"config.json of {self.source} lacks {name!r}.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"config.json of {self.source} has {name}={value!r}, which is no whole number above 0."
            )
        return value

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors of these names, on the CPU in the dtype that they were saved in."""
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self._files[name], []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, inside in wanted.items():
            if file in self._pickled:
                tensors |= {name: self._pickled[file][name] for name in inside}
                continue
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in inside}
        return tensors

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def _fetch(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision!r}" if revision is not None else ""
        raise CheckpointError(
            f"{repository!r} is neither a folder nor a repository of the Hub that can be fetched{at}: {error}"
        ) from error


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    """A state dict from a torch file; only tensors are read, never code (`weights_only`)."""
    try:
        try:
            value = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of before torch 1.6 are no archives and cannot be mapped
            value = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
        raise CheckpointError(f"{file} is not a state dict that can be read safely: {error}") from error
    if not isinstance(value, Mapping) or not all(isinstance(t, torch.Tensor) for t in value.values()):
        raise CheckpointError(f"{file} does not hold a state dict: expected are tensors by name.")
    return dict(value)


def compare(module: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises `CheckpointError` with all names that are missing or unexpected, and all shapes that differ."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    wrong = [
        *(f"missing {name} {shape}" for name, shape in expected.items() if name not in shapes),
        *(f"unexpected {name} {shape}" for name, shape in shapes.items() if name not in expected),
        *(
            f"{name} is {shapes[name]} instead of {shape}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ),
    ]
    if wrong:
        raise CheckpointError(f"the weights of {source} do not fit: {'; '.join(wrong)}.")


def fill(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Puts every tensor into the parameter or buffer of its name.

    Raises:
        CheckpointError: as `compare`.
    """
    compare(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    module.load_state_dict(dict(tensors), strict=True, assign=True)


def pretrained(checkpoint: Checkpoint, kind: Any, target: PreTrainedModel | None) -> Any:
    """A whole model of one of transformers' own classes, in the target's dtype and on its device if there is one.

    Raises:
        CheckpointError: its files cannot be read, or lack weights.
    """
    arguments: dict[str, Any] = {"dtype": "auto" if target is None else target.dtype}
    quantised = "quantization_config" in checkpoint.config
    if quantised and target is not None:  # cannot be moved afterwards
        arguments["device_map"] = {"": target.device}
    try:
        model, info = kind.from_pretrained(checkpoint.folder, output_loading_info=True, **arguments)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"{checkpoint.source} cannot be loaded as {kind.__name__}: {error}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        raise CheckpointError(f"{checkpoint.source} lacks weights of {kind.__name__}: {', '.join(missing[:6])}{more}.")
    return model.eval() if target is None or quantised else model.eval().to(target.device)


# ---------------------------------------------------------------- formats


class Format(abc.ABC):
    """One way in which heads are published. Registered by `register_format`; stateless."""

    name: ClassVar[str]

    @abc.abstractmethod
    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether config and tensor names are this format's. No two formats may claim one checkpoint."""

    @abc.abstractmethod
    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What a user wants to know about it: sizes, taps, what is taken from the target. Values fit into JSON.

        Raises:
            CheckpointError: tensors are missing or unexpected.
        """

    @abc.abstractmethod
    def load(self, checkpoint: Checkpoint, target: PreTrainedModel | None, **options: Any) -> Drafter:
        """The drafter. With a target it is checked against it, and put on its device in its dtype.

        Raises:
            CheckpointError: it is incomplete.
            DrafterError: it does not fit the target.
        """


_formats: dict[str, Format] = {}
F = TypeVar("F", bound=type[Format])


def register_format(cls: F) -> F:
    """Class decorator: `load_drafter` then knows this format."""
    _formats[cls.name] = cls()
    return cls


def recognise(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint.

    Raises:
        CheckpointError: none, or several.
    """
    found = [known for known in _formats.values() if known.recognises(checkpoint)]
    if len(found) == 1:
        return found[0]
    names = sorted(checkpoint.shapes)
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    if found:
        raise CheckpointError(
            f"{checkpoint.source} could be any of {', '.join(f.name for f in found)} (tensors: {shown})."
        )
    raise CheckpointError(
        f"{checkpoint.source} is of no known format: its tensors are {shown}. Known are {', '.join(sorted(_formats))}."
    )


@dataclasses.dataclass(frozen=True)
class Found:
    """What `inspect_checkpoint` says.

    Attributes:
        source: as it was asked for.
        format: its name.
        facts: see `Format.facts`.
        parameters: numbers in all of its tensors.
        files: names of the weight files.
    """

    source: str
    format: str
    facts: dict[str, Any]
    parameters: int
    files: list[str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def inspect_checkpoint(path_or_id: str | Path, *, revision: str | None = None) -> Found:
    """What is at a path or in a repository, without loading weights.

    Raises:
        CheckpointError: nothing that can be read, or of no known format.
    """
    checkpoint = Checkpoint.open(path_or_id, revision)
    known = recognise(checkpoint)
    return Found(
        checkpoint.source,
        known.name,
        known.facts(checkpoint),
        checkpoint.parameters,
        [file.name for file in checkpoint.files],
    )


def load_drafter(
    path_or_id: str | Path, *, target: PreTrainedModel | None = None, revision: str | None = None, **options: Any
) -> Drafter:
    """A trained drafter from a local folder or the Hub.

        drafter = hf_treespec.load_drafter("folder", target=model)
        model.generate(**inputs, tree_spec=drafter)

    Args:
        target: the model that it is to draft for: sizes are checked at once, and the head is put on its device in its
            dtype. Without it both happen at the first call.
        revision: of a Hub repository.
        options: of the format's drafter, e.g. `wave`.

    Raises:
        CheckpointError: nothing that can be read, of no known format, or incomplete.
        DrafterError: it does not fit the target, or an option is unknown.
    """
    checkpoint = Checkpoint.open(path_or_id, revision)
    known = recognise(checkpoint)
    try:
        return known.load(checkpoint, target, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise CheckpointError(f"a drafter of format {known.name} does not take options {options!r}: {error}") from error
