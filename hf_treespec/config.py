"""`TreeSpecConfig`: every knob once, with its default, unit, range and source.

It knows nothing of models or of the loop; it only says what the values may be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import OptionError

if TYPE_CHECKING:
    from .drafters.base import Drafter


def _knob(default: Any, help: str, *, low: int | None = None, high: int | None = None) -> Any:
    metadata = {"help": help, "low": low, "high": high}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class TreeSpecConfig:
    """How one call of `generate` speculates. None of these knobs changes the text, only the speed.

    Raises:
        OptionError: a value of the wrong type or out of its range.
    """

    drafter: str | Drafter = _knob(
        "auto",
        "Who drafts: a registered name, or a `Drafter`. 'auto' is what fits an `assistant_model`, else 'union'.",
    )
    drafter_options: Mapping[str, Any] = _knob({}, "Keyword arguments for the constructor of a drafter given by name.")
    # 32: up to here a GPU's forward costs hardly more than one row; on a CPU fewer pay, which `fallback` finds out.
    max_nodes: int = _knob(
        32, "Drafted nodes a round at most, the root not counted. 0 decodes plainly.", low=0, high=1024
    )
    max_depth: int = _knob(16, "Drafted tokens on one path at most.", low=1, high=256)
    max_children: int = _knob(4, "Continuations of one node at most; 1 drafts a chain.", low=1, high=256)
    fallback: bool = _knob(
        True,
        "Size each round by what rows cost and drafts are worth here, down to plain decoding. False verifies whatever is "
        "drafted within the limits, which makes a half-precision run reproducible.",
    )
    remember: bool = _knob(
        False,
        "Keep what rounds cost here in the user's cache folder, so that later processes need not measure it again.",
    )
    self_check: bool = _knob(
        True, "Compare a small tree with a sequential forward once per loaded architecture, before the first token."
    )
    debug: bool = _knob(False, "Assert the loop's invariants in every round.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))

    @classmethod
    def from_value(cls, value: Any) -> TreeSpecConfig:
        """The config behind what a user may write after `tree_spec=`.

        Args:
            value: `True`, a drafter's name, a `Drafter`, a mapping of knobs, or a `TreeSpecConfig`.

        Raises:
            OptionError: for any other value, an unknown knob, or a knob out of range.
        """
        from .drafters.base import Drafter

        if isinstance(value, cls):
            return value
        if value is True:
            return cls()
        if isinstance(value, (str, Drafter)):
            return cls(drafter=value)
        if isinstance(value, Mapping):
            known = [field.name for field in dataclasses.fields(cls)]
            unknown = [key for key in value if key not in known]
            if unknown:
                raise OptionError(f"tree_spec has no option {unknown[0]!r}; the options are {', '.join(known)}.")
            return cls(**value)
        raise OptionError(
            f"tree_spec={value!r} ({type(value).__name__}) is not understood; give True, a drafter's name, "
            "a Drafter, a dict of options or a TreeSpecConfig."
        )

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults, ready for JSON (and for `from_value`)."""
        changed = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            if value != default:
                changed[field.name] = dict(value) if isinstance(value, Mapping) else value
        return changed


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    from .drafters.base import Drafter

    low, high = field.metadata["low"], field.metadata["high"]
    if field.name == "drafter":
        if not isinstance(value, (str, Drafter)):
            raise OptionError(f"drafter={value!r} must be a registered name or a Drafter, not {type(value).__name__}.")
    elif field.name == "drafter_options":
        if not isinstance(value, Mapping):
            raise OptionError(f"drafter_options={value!r} must be a dict, not {type(value).__name__}.")
    elif low is not None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionError(f"{field.name}={value!r} must be a whole number, not {type(value).__name__}.")
        if not low <= value <= high:
            raise OptionError(f"{field.name}={value} is out of range; give {low} to {high}. {field.metadata['help']}")
    elif not isinstance(value, bool):
        raise OptionError(f"{field.name}={value!r} must be True or False.")
