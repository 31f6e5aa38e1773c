"""The command `hf-treespec`: demo · generate · profile · datastore · serve-demo · drafters.

`demo` decodes one prompt plainly, as a chain and as a tree: see `hf_treespec.demo`.
`generate` streams a text to stdout, and nothing else there.
`profile` measures what rows cost and drafts are worth: see `hf_treespec.profile`.
`datastore` makes files of earlier texts to draft from: see `hf_treespec.datastore_cli`.
`serve-demo` serves the demo as a page, which lies outside the package: see its folder `app`.

Exit status: 0; 1 texts differ that must not; 2 a mistake of the caller's, in one line on stderr; 130 interrupted.

It refuses to know how trees are made and verified: it calls what any user of the library would, and hands records to
`terminal`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from . import __version__, datastore_cli, demo, drafters, profile, profile_view, terminal
from .datastore import Datastore
from .demo_model import HUB_ID
from .detokenizer import Detokenizer
from .drafters.base import drafter_class
from .errors import TreeSpecError
from .integration import resolve
from .loading import Loaded, UserError, load, quiet_libraries
from .streaming import stream


def main(argv: list[str] | None = None) -> int:
    """Runs one command line; returns its exit status."""
    for out in (sys.stdout, sys.stderr):  # a model's text may hold what the terminal's encoding does not
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="backslashreplace")
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
        with quiet_libraries(), contextlib.ExitStack() as args.until_the_end:
            return int(args.command(args))
    except (UserError, TreeSpecError) as error:
        return _complain(str(error), 2)
    except torch.OutOfMemoryError as error:
        return _complain(f"out of memory: {error}", 2)
    except KeyboardInterrupt:
        _progress("")  # the terminal has just shown ^C
        return _complain("interrupted", 130)
    except BrokenPipeError:  # the reader has gone, as `head` does; nothing may be flushed into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _complain(message: str, status: int) -> int:
    print("hf-treespec:", terminal.inert(" ".join(message.split())), file=sys.stderr)
    return status


def _progress(message: str) -> None:
    """For somebody who waits at a terminal."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hf-treespec", description="Tree speculative decoding: the same text in fewer forward passes.")
    parser.add_argument("--version", action="version", version=f"hf-treespec {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", parser_class=Parser, metavar="COMMAND")

    shown = commands.add_parser("demo", help="one prompt decoded plainly, as a chain and as a tree, side by side")
    shown.set_defaults(command=run_demo)
    shown.add_argument("prompt", nargs="?", type=_prompt, default=demo.PROMPT, help="default: a text with typos to fix")
    shown.add_argument("--repeats", type=_number(int, 1), default=1, metavar="N", help="time each arm N times: medians")
    shown.add_argument("--speed", type=_number(float, 0.01), default=1.0, metavar="X", help="X times as fast a replay")
    shown.add_argument("--no-animation", action="store_true", help="do not replay the rounds")
    shown.add_argument("--plain", action="store_true", help="no colours, no redrawing (implied where not a terminal)")

    generate = commands.add_parser("generate", help="stream a text to stdout")
    generate.set_defaults(command=run_generate)
    generate.add_argument("prompt", type=_prompt)
    generate.add_argument(
        "--temperature", type=_number(float, 0), default=0.0, metavar="T", help="0 (default): greedy, no sampling"
    )
    generate.add_argument("--top-p", type=_number(float, 0, 1), metavar="P", help="sampling: the likeliest, up to P")
    generate.add_argument("--top-k", type=_number(int, 1), metavar="K", help="sampling: the K likeliest tokens")
    generate.add_argument(
        "--seed", type=_number(int, 0, 2**63 - 1), metavar="N", help="the same seed gives the same text"
    )

    measured = commands.add_parser(
        "profile", help="what rows cost here, what drafts are worth, and the sizes that follow"
    )
    measured.set_defaults(command=run_profile)
    measured.add_argument("prompt", nargs="?", type=_prompt, help="default: short ones of several kinds")
    measured.add_argument("--png", type=Path, metavar="FILE", help="draw it there too (needs matplotlib)")
    measured.add_argument("--plain", action="store_true", help="no colours (implied where not a terminal)")

    served = commands.add_parser("serve-demo", help="the demo as a page in the browser, drawn as it runs")
    served.set_defaults(command=run_serve_demo)
    served.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    served.add_argument("--port", type=_number(int, 1, 65535), default=7860, metavar="N", help="default: 7860")
    served.add_argument("--model", metavar="ID_OR_PATH", help=f"the target; default: {HUB_ID}, embedded")
    served.add_argument("--assistant-model", metavar="ID_OR_PATH", help="a small model that may draft")
    served.add_argument("--threads", type=_number(int, 1), metavar="N", help="torch's CPU threads")

    for command in (shown, generate, measured):
        _add_common(command)
    inspected = commands.add_parser("inspect", help="say what a trained drafter's files are")
    inspected.set_defaults(command=run_inspect)
    inspected.add_argument("path", metavar="ID_OR_PATH")
    inspected.add_argument("--revision", metavar="NAME", help="of a Hub repository")
    inspected.add_argument("--json", action="store_true", help="one JSON document on stdout, and nothing else")
    datastore_cli.add_commands(commands, _progress)
    names = commands.add_parser("drafters", help="list who can draft")
    names.set_defaults(command=run_drafters)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="ID_OR_PATH", help=f"a causal language model; default: {HUB_ID}, embedded")
    model.add_argument("--raw", action="store_true", help="the prompt as it stands, without the chat template")
    model.add_argument("--device", help="cpu, cuda, cuda:1, mps; default: cuda where there is one, else cpu")
    model.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="default: bfloat16 on cuda, else float32; auto: the checkpoint's",
    )
    model.add_argument("--nf4", action="store_true", help="4-bit weights by bitsandbytes")
    model.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        help="packed half-precision weights on a CPU: faster, see README. The demo does so unless told not to",
    )
    model.add_argument("--threads", type=_number(int, 1), metavar="N", help="torch's CPU threads")
    tree = parser.add_argument_group("tree")
    who = tree.add_mutually_exclusive_group()
    who.add_argument("--drafter", metavar="NAME", help="see hf-treespec drafters; default: auto")
    who.add_argument("--head", metavar="ID_OR_PATH", help="a trained drafter's files, see hf-treespec inspect")
    tree.add_argument(
        "--assistant-model",
        metavar="ID_OR_PATH",
        help="a small model that drafts, with a tokenizer of its own if need be",
    )
    tree.add_argument("--datastore", metavar="PATH", help="earlier texts to draft from: see hf-treespec datastore")
    tree.add_argument("--max-nodes", type=int, metavar="N", help="guesses a round at most")
    tree.add_argument("--max-depth", type=int, metavar="N", help="guesses on one path at most")
    tree.add_argument("--max-children", type=int, metavar="N", help="guesses for one place at most")
    tree.add_argument(
        "--no-fallback",
        dest="fallback",
        action="store_const",
        const=False,
        help="always verify what was drafted, instead of what pays here",
    )
    parser.add_argument("--max-new-tokens", type=_number(int, 1), default=128, metavar="N", help="default: 128")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, and nothing else")
    parser.add_argument("--rounds", action="store_true", help="as --json, with every round's record")


def _number(kind: type, low: float, high: float | None = None) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not (low <= value < float("inf") if high is None else low <= value <= high):
            span = f"{low} or more" if high is None else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"{text} is out of range; give {span}")
        return value

    parse.__name__ = "whole number" if kind is int else "number"  # argparse names it in its complaint
    return parse


def _prompt(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give some text")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):  # bytes that the shell handed over
        raise argparse.ArgumentTypeError(f"{text!r} is not text in {sys.getfilesystemencoding()}")
    return text


def tree_options(args: argparse.Namespace) -> dict[str, Any]:
    """What is to stand after `tree_spec=`, checked before a model is loaded."""
    names = ("drafter", "max_nodes", "max_depth", "max_children", "fallback")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.datastore is not None:
        options["drafter_options"] = datastore_cli.drafter_options(args)
    resolve(options)
    return options


def load_named(args: argparse.Namespace, options: dict[str, Any]) -> Loaded:
    """The models that the options name; a head goes into `options`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    _progress(f"loading {args.model or HUB_ID} ...")
    loaded = load(args.model, assistant=args.assistant_model, device=args.device, dtype=args.dtype, nf4=args.nf4)
    if args.head:
        options["drafter"] = drafters.load_drafter(args.head, target=loaded.model)
    if args.datastore is not None:
        Datastore.open(args.datastore, tokenizer=loaded.tokenizer)
    args.until_the_end.enter_context(
        loaded.packed(None if args.pack is None and args.command is run_demo else bool(args.pack))
    )
    return loaded


# ---------------------------------------------------------------- commands


def run_demo(args: argparse.Namespace) -> int:
    screen = pick_screen(args)
    options = tree_options(args)
    loaded = load_named(args, options)
    inputs, machine = loaded.inputs(args.prompt, args.raw), loaded.machine()
    arms = demo.make_arms(options, loaded.helper())
    demo.measure(arms, loaded.model, inputs, args.max_new_tokens, args.repeats, say=_progress)
    facts = {"prompt": args.prompt, "model": loaded.name, "machine": machine, "repeats": args.repeats}
    if screen is None:
        print(json.dumps(demo.document(arms, loaded.tokenizer, facts, rounds=args.rounds), indent=2))
    else:
        demo.show(arms, loaded.tokenizer, facts, screen, speed=None if args.no_animation else args.speed)
    if demo.same_text(arms) or machine["dtype"] != "float32":
        return 0
    different = ", ".join(f"{arm.name} at token {arm.first_difference}" for arm in arms if not arm.same_text)
    return _complain(f"THE TEXTS DIFFER: {different}. In float32 that is a bug of hf_treespec; please report it.", 1)


def pick_screen(args: argparse.Namespace, *, drawn: bool = True) -> terminal.Screen | None:
    """Where results are shown; None for JSON. Without rich, what must be `drawn` is refused."""
    if args.json or args.rounds:
        return None
    if args.plain or not sys.stdout.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return terminal.PlainScreen()
    if importlib.util.find_spec("rich") is None:
        if not drawn:
            return terminal.PlainScreen()
        raise UserError("the drawn demo needs rich: pip install hf-treespec[demo]  (or run it with --plain)")
    return terminal.RichScreen()


def run_generate(args: argparse.Namespace) -> int:
    sampling = {name: value for name in ("top_p", "top_k") if (value := getattr(args, name)) is not None}
    if args.temperature:
        sampling |= {"do_sample": True, "temperature": args.temperature}
    elif sampling:
        raise UserError(f"--{next(iter(sampling)).replace('_', '-')} is for sampling; give a --temperature above 0")
    else:
        sampling = {"do_sample": False}
    options = tree_options(args)
    loaded = load_named(args, options)
    inputs = loaded.inputs(args.prompt, args.raw)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    sampling |= loaded.helper()
    began = time.perf_counter()
    rounds = stream(loaded.model, tree_spec=options, **inputs, **sampling, max_new_tokens=args.max_new_tokens)
    text = Detokenizer(loaded.tokenizer)
    as_json = args.json or args.rounds
    safe = terminal.inert if sys.stdout.isatty() else str
    for record in rounds:
        new = text.add(record.committed)
        if new and not as_json:
            print(safe(new), end="", flush=True)
    rest, seconds, stats = text.end(), time.perf_counter() - began, rounds.stats
    if as_json:
        numbers = {"seconds": seconds, "tokens_per_second": stats.committed / seconds}
        facts = {"prompt": args.prompt, "model": loaded.name, "machine": loaded.machine(), "text": text.text}
        print(json.dumps({**facts, **numbers, "stats": stats.to_dict(rounds=args.rounds)}, indent=2))
    else:
        print(safe(rest), flush=True)
    print(
        f"{stats.committed} tokens in {stats.rounds} rounds after the prompt's, {stats.tokens_per_round:.2f} tokens "
        f"per round, {stats.committed / seconds:.1f} tokens/s with the prompt ({stats.drafter} drafts)",
        file=sys.stderr,
    )
    return 0


def run_profile(args: argparse.Namespace) -> int:
    screen = pick_screen(args, drawn=False)
    options = tree_options(args)
    if args.png is not None:
        profile_view.check_png(args.png)
    loaded = load_named(args, options)
    prompts = {"prompt": args.prompt} if args.prompt else profile.PROMPTS
    inputs = {name: loaded.inputs(text, args.raw) for name, text in prompts.items()}
    found = profile.measure(loaded.model, inputs, options, loaded.helper(), args.max_new_tokens, say=_progress)
    facts = {"model": loaded.name, "machine": loaded.machine(), "prompts": prompts}
    if args.png is not None:
        profile_view.write_png(found, facts, args.png)
    if screen is None:
        print(json.dumps({**facts, **found.to_dict(rounds=args.rounds)}, indent=2))
    else:
        profile_view.show(found, facts, screen)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    found = drafters.inspect_checkpoint(args.path, revision=args.revision)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    rows = {
        "format": found.format,
        "files": ", ".join(found.files),
        "parameters": f"{found.parameters:,}",
        **{name: _told(value) for name, value in found.facts.items()},
    }
    for name, value in rows.items():
        print(f"{name:<{max(map(len, rows))}}  {terminal.inert(value)}")
    return 0


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "nothing"
    return "unknown" if value is None else str(value)


def run_serve_demo(args: argparse.Namespace) -> int:
    app = load_app()
    if args.threads:
        torch.set_num_threads(args.threads)
    options = ["--host", args.host, "--port", str(args.port)]
    for name in ("model", "assistant_model"):
        if getattr(args, name):
            options += [f"--{name.replace('_', '-')}", getattr(args, name)]
    app.main(options)
    return 0


def load_app(package: Path = Path(__file__).parent) -> Any:
    """The module of the demo page: in a wheel it lies inside the package, in a checkout beside it."""
    if importlib.util.find_spec("gradio") is None:
        raise UserError("serve-demo needs gradio: pip install hf-treespec[app]")
    places = [package / "app" / "app.py", package.parent / "app" / "app.py"]
    found = next((place for place in places if place.is_file()), None)
    spec = importlib.util.spec_from_file_location("hf_treespec_app", found) if found else None
    if spec is None or spec.loader is None:
        raise UserError(
            f"the demo page is not in this installation (looked for {' and '.join(str(p) for p in places)}); reinstall "
            "hf-treespec[app], or use a checkout"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_drafters(args: argparse.Namespace) -> int:
    names = drafters.drafter_names()
    for name in names:
        document = inspect.getdoc(drafter_class(name)) or ""
        print(f"{name:<{max(map(len, names))}}  {document.split(chr(10), 1)[0]}".rstrip())
    return 0
