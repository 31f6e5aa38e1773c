"""The page and its events: controls on the left, the race on the right, and one public endpoint."""

from __future__ import annotations

import dataclasses
import html
import json
import logging
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import gradio as gr
from api import endpoint
from document import Document
from engine import Busy, Engine, Started
from settings import EXAMPLES, Settings, SettingsError, check, default_settings, from_link

from hf_treespec import TreeSpecError

from .component import race_view

logger = logging.getLogger("hf_treespec.app")

# A yield costs some 10 ms on both sides; rounds that end within this time share one.
YIELD_SECONDS = 0.08
STOPPED = '{"v":1,"stopped":true}'
FIELDS = tuple(field.name for field in dataclasses.fields(Settings))
TITLE = """# Watch the tree, race the chain
Language models write one token per pass. **Tree speculative decoding** lets a cheap drafter guess a tree of what may come \
next, checks all of it in one pass, and keeps what the model itself would have written: *the same text in fewer passes*."""
HEAD = '<meta name="description" content="Tree speculative decoding for Hugging Face transformers, live">'
CSS = """
#controls { position: sticky; top: 8px; }
#prompt textarea { font-size: 15px; }
.gradio-container { max-width: 1360px !important; margin: 0 auto !important; }
#examples button { font-size: 13px; min-width: 0; }
footer { margin-top: 8px; }
"""


def run(engine: Engine, race: Any, turn: int, values: dict[str, Any]) -> Iterator[str]:
    """Documents of one race, the last one whole. Every failure is a document too, and leaves the next run working.

    Args:
        race: `engine.race`, or what stands for it on borrowed hardware.
    """
    try:
        settings = check(values, engine.limits, engine.drafters, nf4=engine.has_nf4)
    except SettingsError as error:
        yield Document(phase="error", note=str(error)).dumps()
        return
    document = Document(settings, "waiting", "Loading the quantised target …" if settings.quantised else "")
    yield document.dumps()
    last = time.monotonic()
    try:
        for event in race(settings, turn=turn):
            document.apply(event)
            if document.phase == "limit":
                document.note = f"Ended at this demo's limit of {engine.limits.seconds:g} seconds."
            if isinstance(event, Started) or time.monotonic() - last >= YIELD_SECONDS:
                yield document.dumps()
                last = time.monotonic()
    except (SettingsError, Busy, TreeSpecError) as error:
        document.phase, document.note = "error", str(error)
    except Exception:  # whatever a model or a device may raise: told in the log, and not to strangers
        logger.exception("a run failed")
        document.phase, document.note = "error", "This run failed; the server's log says why. The next one may work."
    yield document.dumps()


def build(engine: Engine, first: str, race: Any = None) -> gr.Blocks:
    """The page.

    Args:
        first: the document that a visitor sees before the first run.
        race: stands for `engine.race` where a platform wraps it.
    """
    race = race or engine.race
    turns = count()
    limits, defaults = engine.limits, default_settings(engine.drafters)
    with gr.Blocks(
        title="Tree speculative decoding", fill_width=True, analytics_enabled=False, delete_cache=(3600, 3600)
    ) as page:
        gr.Markdown(TITLE, elem_id="title")
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=290, elem_id="controls"):
                prompt = gr.Textbox(
                    defaults.prompt,
                    label="Prompt",
                    lines=5,
                    max_lines=9,
                    max_length=limits.prompt_characters,
                    elem_id="prompt",
                )
                with gr.Row(elem_id="examples"):
                    shortcuts = [gr.Button(name, size="sm", min_width=110) for name in EXAMPLES]
                with gr.Row():
                    go = gr.Button("Run", variant="primary", elem_id="go", min_width=110)
                    stop = gr.Button("Stop", elem_id="stop", min_width=80)
                inputs = {"prompt": prompt, **_settings(engine, defaults)}
            with gr.Column(scale=3, min_width=320):
                view = race_view(first, elem_id="race")
        fields = [inputs[name] for name in FIELDS]

        def handle(*values: Any) -> Iterator[str]:
            yield from run(engine, race, next(turns), dict(zip(FIELDS, values, strict=True)))

        started = gr.on(
            [go.click, prompt.submit],
            handle,
            fields,
            view,
            show_progress="hidden",  # a pending component fades
            concurrency_limit=1,
            concurrency_id="model",
            trigger_mode="once",
            api_visibility="private",
        )
        # the race ends with the generator that is closed; the page, which gets nothing more from it, is told so
        stop.click(
            lambda: STOPPED,
            None,
            view,
            cancels=[started],
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        for button, text in zip(shortcuts, EXAMPLES.values(), strict=True):
            button.click(
                None, None, prompt, js=f"() => {json.dumps(text)}", api_visibility="private", show_progress="hidden"
            )

        def open_link(request: gr.Request) -> list[Any]:
            settings, wrong = from_link(dict(request.query_params), limits, engine.drafters, nf4=engine.has_nf4)
            if wrong:
                gr.Warning(html.escape(wrong), duration=12)
            return [getattr(settings, name) for name in FIELDS]

        page.load(open_link, None, fields, api_visibility="private", show_progress="hidden")
        gr.api(endpoint(engine, race, turns), api_name="decode", concurrency_limit=1, concurrency_id="model")
    return page.queue(max_size=limits.queue, default_concurrency_limit=1, api_open=False)


def _settings(engine: Engine, defaults: Settings) -> dict[str, Any]:
    limits = engine.limits
    menu = [(f"{name}: {_brief(text)}", name) for name, text in engine.describe_drafters().items()]
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        drafter = gr.Dropdown(menu, value=defaults.drafter, label="Drafter", info="Who guesses.", elem_id="drafter")
        new_tokens = gr.Slider(
            1, limits.new_tokens, defaults.new_tokens, step=1, label="New tokens", elem_id="new_tokens"
        )
        nodes = gr.Slider(1, limits.nodes, defaults.nodes, step=1, label="Nodes", info="Guesses a round at most.")
        depth = gr.Slider(1, limits.depth, defaults.depth, step=1, label="Depth", info="Guesses on one path at most.")
        children = gr.Slider(
            1, limits.children, defaults.children, step=1, label="Children", info="Guesses for one place at most."
        )
        sized = gr.Checkbox(
            defaults.sized, label="Size by cost", info="Check only guesses that pay here; off: all of them."
        )
        temperature = gr.Slider(
            0,
            limits.temperature,
            defaults.temperature,
            step=0.05,
            label="Temperature",
            info="0 is greedy. Sampled text is the same for the same seed.",
        )
        seed = gr.Number(defaults.seed, label="Seed", precision=0, minimum=0, maximum=2**31 - 1)
        quantised = gr.Checkbox(
            defaults.quantised,
            label="Quantised target (NF4)",
            visible=engine.has_nf4,
            info="4-bit weights by bitsandbytes.",
        )
    return {
        "drafter": drafter,
        "new_tokens": new_tokens,
        "nodes": nodes,
        "depth": depth,
        "children": children,
        "sized": sized,
        "temperature": temperature,
        "seed": seed,
        "quantised": quantised,
    }


def _brief(text: str) -> str:
    return text if len(text) <= 90 else text[:89] + "…"
