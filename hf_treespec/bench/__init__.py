"""Measurements: Spec-Bench side by side, interleaved, with the texts compared. `python -m hf_treespec.bench --help`."""

from .spec_bench import TASKS, Arm, Question, Result, load, measure, table

__all__ = ["TASKS", "Arm", "Question", "Result", "load", "measure", "table"]
