"""The demo's server, and the entry point of its Space.

    python app/app.py            http://127.0.0.1:7860, the embedded model, no network
    hf-treespec serve-demo       the same

Environment: HF_TREESPEC_DEMO_MODEL and HF_TREESPEC_DEMO_ASSISTANT name another target and a small model that drafts.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import zero  # noqa: I001 - before anything looks at CUDA
import engine
import gradio as gr
from document import Document
from ui import layout

RECORDED = FOLDER / "static_space" / "traces" / "fix-typos.json"


def first_document() -> str:
    """What a visitor sees before the first run: a recorded race, else an empty page."""
    if RECORDED.is_file():
        return RECORDED.read_text(encoding="ascii")
    return Document(note="Press Run.").dumps()


def make(model: str | None, assistant: str | None) -> gr.Blocks:
    """The page on loaded models; None is the embedded target, and no assistant."""
    models = engine.load(model, assistant, borrowed=zero.ON_ZERO_GPU)
    return layout.build(models, first_document(), zero.borrowed(models.race))


def launch_options() -> dict[str, Any]:
    """Of `Blocks.launch`, for a page that strangers use."""
    return {
        "theme": gr.themes.Soft(primary_hue="teal", neutral_hue="slate", font=["system-ui", "sans-serif"]),
        "css": layout.CSS,
        "head": layout.HEAD,
        "footer_links": ["api", "gradio", "settings"],
        "run_history": False,  # prompts are nobody else's business
        "max_file_size": "1kb",  # nothing is uploaded here
        "state_session_capacity": 200,
        "show_error": False,
        "enable_monitoring": False,
        "share": False,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hf-treespec serve-demo", description="The demo page, on this machine.")
    parser.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
    parser.add_argument("--port", type=int, default=int(os.environ.get("GRADIO_SERVER_PORT", "7860")))
    parser.add_argument("--model", default=os.environ.get("HF_TREESPEC_DEMO_MODEL"))
    parser.add_argument("--assistant-model", default=os.environ.get("HF_TREESPEC_DEMO_ASSISTANT"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    page = make(options.model, options.assistant_model)
    page.launch(server_name=options.host, server_port=options.port, **launch_options())


if __name__ == "__main__":
    main()
