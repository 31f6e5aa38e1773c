"""The one document that a page plays: a race as JSON, the same live, recorded and exported.

    {"v": 1, "run", "seq", "phase", "note", "settings", "order", "facts", "same_text", "text",
     "lanes": {arm: {"tokens", "seconds", "forwards", "finished", "marks": [[milliseconds, tokens], ...]}},
     "rounds": [{"index", "ids", "texts", "parents", "scores", "target", "ranks", "kept", "bonus", "pieces", "seconds",
                 "sizing", "cut": {"texts", "parents", "scores"}}, ...]}

It travels as a string: a page that is handed a nested value copies and compares it several times at each update. While a
race runs, a document carries its last rounds only, and everything again at the end; each can be shown by itself, and
a round that arrives twice is told by its index. It refuses to know models and pages.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from typing import Any

from engine import ARMS, Event, Finished, Started
from settings import Settings

VERSION = 1
# Rounds that a running document repeats, so that one which got lost or came before the page heals.
WINDOW = 12


class Document:
    """Grows with the events of a race. `dumps` may be called at any time.

    Attributes:
        phase: "idle", "waiting", "running", "done", "limit" (the wall clock ended it), "stopped" or "error".
    """

    def __init__(self, settings: Settings | None = None, phase: str = "idle", note: str = "") -> None:
        self.run = secrets.token_hex(4)
        self.sequence = 0
        self.phase, self.note = phase, note
        self.settings = None if settings is None else dataclasses.asdict(settings)
        self.order: tuple[str, ...] = ARMS
        self.facts: dict[str, Any] = {}
        self.same_text: bool | None = None
        self.text = ""
        self.lanes: dict[str, dict[str, Any]] = {
            arm: {"tokens": 0, "seconds": 0.0, "forwards": 0, "finished": False, "marks": []} for arm in ARMS
        }
        self.rounds: list[dict[str, Any]] = []

    def apply(self, event: Event) -> None:
        if isinstance(event, Started):
            self.phase, self.order, self.facts = "running", event.order, event.facts
        elif isinstance(event, Finished):
            self.phase, self.same_text, self.text = event.reason, event.same_text, event.text
        else:
            lane = self.lanes[event.arm]
            lane["marks"].append([round(1000 * event.seconds, 2), event.tokens])
            lane["tokens"], lane["forwards"], lane["finished"] = event.tokens, event.forwards, event.finished
            lane["seconds"] = round(event.seconds, 5)
            if event.round is not None:
                self.rounds.append(_compact(dataclasses.asdict(event.round)))

    def to_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Ready for JSON; not `whole`, it has the last rounds only."""
        return {
            "v": VERSION,
            "run": self.run,
            "seq": self.sequence,
            "phase": self.phase,
            "note": self.note,
            "settings": self.settings,
            "order": list(self.order),
            "facts": self.facts,
            "same_text": self.same_text,
            "text": self.text,
            "lanes": self.lanes,
            "rounds": self.rounds if whole else self.rounds[-WINDOW:],
        }

    def dumps(self) -> str:
        """One line of ASCII without "<": whatever a model wrote is neither markup nor half a character on its way."""
        self.sequence += 1
        return encode(self.to_dict(whole=self.phase != "running"))


def encode(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _compact(drawn: dict[str, Any]) -> dict[str, Any]:
    """No more digits than a picture shows."""
    sizing = drawn["sizing"]
    if sizing is not None:
        sizing["gain"] = [round(value, 4) for value in sizing["gain"]]
        sizing["seconds"] = [round(value, 6) for value in sizing["seconds"]]
        sizing["rate"] = round(sizing["rate"], 2)
    return drawn
