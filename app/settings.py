"""What one run may be: every setting, its limits, and the check that all ways in share (page, link, HTTP, MCP).

It knows nothing of models or pages. Values from outside are hostile until `check` has seen them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

PROMPT = (
    "Fix the typos in this text:\n\n"
    "The Sun is a star. The Sun is the closest star to teh Earth. The Earth goes around the Sun once a year, and the "
    "Moon goes arround the Earth once a month. Without the Sun there woud be no light on teh Earth, no light on the "
    "Moon and no life on the Earth."
)
EXAMPLES = {
    "Fix typos": PROMPT,
    "Past tense": "Rewrite this note in the past tense:\n\nThe ship leaves the harbour at noon. The ship passes the island "
    "at three, and the crew waves to the people on the island.",
    "Write code": "Write a Python class Stack with the methods push, pop, peek and is_empty.",
    "Free text": "What should I think about before I plant a small vegetable garden?",
}


class SettingsError(ValueError):
    """A setting that this demo does not take; the message names it, its value and what would do."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one run may cost. They hold for everybody, however the run was asked for.

    Attributes:
        prompt_characters: looked at before anything is tokenised.
        prompt_tokens: with the chat template.
        seconds: wall clock of a whole run; it ends after the round in which they pass.
        queue: runs that may wait.
    """

    prompt_characters: int = 1500
    prompt_tokens: int = 400
    new_tokens: int = 192
    nodes: int = 64
    depth: int = 16
    children: int = 8
    temperature: float = 2.0
    seconds: float = 40.0
    queue: int = 12


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run as it was asked for, checked.

    Attributes:
        sized: trees are cut to what pays here, by the library's cost model; else they are as large as `nodes` allows.
        temperature: 0 is greedy.
        quantised: the target has 4-bit weights (NF4).
    """

    prompt: str = PROMPT
    drafter: str = "union"
    new_tokens: int = 64
    nodes: int = 24
    depth: int = 5
    children: int = 3
    sized: bool = True
    temperature: float = 0.0
    seed: int = 0
    quantised: bool = False


def check(values: Mapping[str, Any], limits: Limits, drafters: Sequence[str], *, nf4: bool) -> Settings:
    """Settings from outside.

    Args:
        values: by the names of `Settings`; what is missing takes its default.
        drafters: the names on offer.
        nf4: whether a quantised target is on offer.

    Raises:
        SettingsError: a value of the wrong type, out of range or not on offer.
    """
    whole = {
        "new_tokens": (1, limits.new_tokens),
        "nodes": (1, limits.nodes),
        "depth": (1, limits.depth),
        "children": (1, limits.children),
        "seed": (0, 2**31 - 1),
    }
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(Settings)})
    if unknown:
        raise SettingsError(f"There is no setting {_shown(unknown[0])}.")
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name in whole:
            checked[name] = int(_number(name, value, *whole[name], whole=True))
        elif name == "temperature":
            checked[name] = _number(name, value, 0.0, limits.temperature)
        elif name == "drafter":
            if not isinstance(value, str) or value not in drafters:
                raise SettingsError(f"drafter {_shown(value)} is not offered here; choose {', '.join(drafters)}.")
            checked[name] = value
        elif name == "prompt":
            checked[name] = _prompt(value, limits)
        elif not isinstance(value, bool):
            raise SettingsError(f"{name} is {_shown(value)}; it must be true or false.")
        else:
            checked[name] = value
    if checked.get("quantised") and not nf4:
        raise SettingsError("quantised targets are not offered here: they need bitsandbytes and accelerate.")
    return Settings(**checked)


def from_link(query: Mapping[str, str], limits: Limits, drafters: Sequence[str], *, nf4: bool) -> tuple[Settings, str]:
    """Settings from a link's query parameters, and what was wrong with them ("" where nothing was).

    A value that cannot be taken leaves the default in place and is named.
    """
    defaults = default_settings(drafters)
    values, wrong = dataclasses.asdict(defaults), []
    for field in dataclasses.fields(Settings):
        if field.name not in query:
            continue
        text: Any = str(query[field.name])
        default = getattr(defaults, field.name)
        try:
            if isinstance(default, bool):
                text = {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
            elif isinstance(default, (int, float)):
                text = type(default)(text)
            check({field.name: text}, limits, drafters, nf4=nf4)
        except SettingsError as error:
            wrong.append(str(error))
        except (ValueError, OverflowError):
            wrong.append(f"{field.name} is {_shown(text)}; it must be a number.")
        else:
            values[field.name] = text
    return Settings(**values), " ".join(wrong)


def default_settings(drafters: Sequence[str]) -> Settings:
    drafter = Settings.drafter if Settings.drafter in drafters else drafters[0]
    return Settings(drafter=drafter)


def _number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, float) and math.isnan(value))
    ):
        raise SettingsError(f"{name} is {_shown(value)}; it must be a number.")
    if whole and isinstance(value, float) and not value.is_integer():
        raise SettingsError(f"{name} is {_shown(value)}; it must be a whole number.")
    if not low <= value <= high:
        raise SettingsError(f"{name} is {_shown(value)}; this demo takes {low:g} to {high:g}.")
    return value


def _prompt(value: Any, limits: Limits) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SettingsError("The prompt is empty; type some text.")
    if len(value) > limits.prompt_characters:
        raise SettingsError(
            f"The prompt has {len(value)} characters; this demo takes {limits.prompt_characters} at most."
        )
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise SettingsError("The prompt holds half a character (a lone surrogate), which is not text.")
    return value


def _shown(value: Any) -> str:
    """Short, whatever it is."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**12 else "a huge number"
    return text if len(text) <= 40 else text[:39] + "…"
