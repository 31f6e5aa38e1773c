"""`python -m hf_treespec.bench`: a table for people, then one JSON document on the last line for scripts."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import torch
import transformers

from ..errors import TreeSpecError
from ..loading import UserError
from ..loading import load as load_model
from ..packing import pack
from .spec_bench import TASKS, Arm, load, measure, table


def _arm(text: str) -> Arm:
    name, _, value = text.partition("=")
    return Arm(name, {"tree_spec": json.loads(value) if value else name})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_treespec.bench", description=__doc__)
    parser.add_argument("data", help="Spec-Bench's question.jsonl")
    parser.add_argument(
        "--arm", action="append", type=_arm, help='NAME or NAME=JSON of tree_spec, e.g. t8={"max_nodes":8}'
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated")
    parser.add_argument("--prompts", type=int, default=4, help="of each task")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--pack", action="store_true", help="packed half-precision weights")
    weights.add_argument("--nf4", action="store_true", help="4-bit weights by bitsandbytes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0}
    try:
        questions = load(options.data, options.prompts, options.tasks.split(","))
        loaded = load_model(None, nf4=options.nf4)
        model, tokenizer = loaded.model, loaded.tokenizer
        if options.pack:
            pack(model)
        arms = [Arm("plain"), *(options.arm or [Arm("ngram", {"tree_spec": "ngram"})])]
        results = []
        for result in measure(
            model, tokenizer, questions, arms, new_tokens=options.new_tokens, repeats=options.repeats, **sampling
        ):
            results.append(result)
            print(
                f"{result.question.task:15} #{result.question.number:<4} {result.arm:12} {result.seconds:7.2f} s "
                f"{result.tokens:4} tokens  {'same' if result.same else 'DIFFERS'}  {result.stats or ''}",
                file=sys.stderr,
            )
    except (TreeSpecError, UserError) as error:
        print(f"hf_treespec.bench: {error}", file=sys.stderr)
        return 2
    rows = table(results)
    print(
        f"{'task':15} {'arm':12} {'tok/round':>9} {'tok/s':>7} {'speed-up':>8} {'host ms':>8} {'draft ms':>8}  same text"
    )
    for row in rows:
        print(
            f"{row['task']:15} {row['arm']:12} {row['tokens_per_round']:9.2f} {row['tokens_per_second']:7.1f} "
            f"{row['speed_up']:7.2f}x {row['host_ms_per_round']:8.2f} {row['draft_ms_per_round']:8.2f}  "
            f"{row['same_text']}/{row['prompts']}"
        )
    machine = {
        "threads": options.threads,
        "processor": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(model.dtype),
        "quantization": loaded.machine()["quantization"],
        "new_tokens": options.new_tokens,
        "temperature": options.temperature,
    }
    print(json.dumps({"machine": machine, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
