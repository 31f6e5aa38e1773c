"""Records races as the documents that the page plays: for the static page, for the README's picture, for a first look.

    python app/record.py app/static_space/traces          every example, on the embedded model

Each example is raced several times and the race whose speed-up is the median one is kept: neither the best nor a cold
one. Record on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from document import Document, encode
from engine import Engine, load
from settings import EXAMPLES, Settings

RACES = 9  # a multiple of the arms, so that each goes first as often


def record(engine: Engine, settings: Settings, races: int = RACES) -> dict[str, Any]:
    """The median race, as a document."""
    documents = []
    for turn in range(races):
        document = Document(settings)
        for event in engine.race(settings, turn=turn):
            document.apply(event)
        documents.append(document)
    documents.sort(key=lambda d: float(d.lanes["plain"]["seconds"] / d.lanes["tree"]["seconds"]))
    return {**documents[len(documents) // 2].to_dict(), "recorded": True}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Records the examples.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--races", type=int, default=RACES)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    engine = load()
    manifest = []
    for title, prompt in EXAMPLES.items():
        document = record(engine, Settings(prompt=prompt), options.races)
        name = title.lower().replace(" ", "-") + ".json"
        (options.folder / name).write_text(encode(document) + "\n", encoding="ascii")
        manifest.append({"file": name, "title": title})
        lanes = document["lanes"]
        print(title, {arm: round(lane["tokens"] / lane["seconds"], 1) for arm, lane in lanes.items()})
    (options.folder / "index.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
