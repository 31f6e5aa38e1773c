"""What the README lists is what the code has: options with their defaults, drafters, files of the loop."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from hf_treespec import TreeSpecConfig, drafter_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_option_and_its_default_are_listed() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", README, flags=re.M))
    for field in dataclasses.fields(TreeSpecConfig):
        default = field.default_factory() if callable(field.default_factory) else field.default
        assert rows[field.name].replace('"', "'") == repr(default), field.name


def test_every_drafter_is_listed() -> None:
    table = README.split("| drafter | what it needs")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.M)) == drafter_names()


def test_files_that_are_named_exist() -> None:
    for name in re.findall(r"hf_treespec/[\w/]+\.py", README):
        assert (ROOT / name).is_file(), name
