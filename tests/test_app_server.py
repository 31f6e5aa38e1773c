"""The demo's server as strangers meet it: gradio_client, raw HTTP, wrong types, huge values, leaving early."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import apps
import pytest

pytest.importorskip("gradio", reason="the app's tests need gradio: pip install hf-treespec[app]")

import gradio as gr
import httpx
from gradio_client import Client
from gradio_client.exceptions import AppError
from settings import Limits
from ui import layout

pytestmark = pytest.mark.filterwarnings(*apps.GRADIO_WARNINGS)

GOOD = {"prompt": apps.PROMPT, "new_tokens": 12}


@pytest.fixture(scope="module")
def engine() -> Any:
    return apps.tiny_engine(limits=Limits(seconds=8, queue=3))


@pytest.fixture(scope="module")
def address(engine: Any) -> Iterator[str]:
    with apps.served(engine) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Client:
    return Client(address, verbose=False)


def endpoint_of_the_page(address: str) -> tuple[int, int]:
    """The index of the page's own event, and how many inputs it has."""
    config = httpx.get(f"{address}config").json()
    found = [d for d in config["dependencies"] if d["api_name"] == "handle"]
    return found[0]["id"], len(found[0]["inputs"])


def call(address: str, name: str, data: Any) -> list[tuple[str, Any]]:
    """A raw call: the events of its stream."""
    posted = httpx.post(f"{address}gradio_api/call/{name}", json={"data": data}, timeout=20)
    if posted.status_code != 200:
        return [("refused", posted.status_code)]
    events, kind = [], ""
    with httpx.stream("GET", f"{address}gradio_api/call/{name}/{posted.json()['event_id']}", timeout=30) as stream:
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: ") and kind != "heartbeat":
                events.append((kind, json.loads(line[6:])))
    return events


# -------------------------------------------------------------------- the public endpoint


def test_only_decode_is_public_and_it_is_typed(client: Client) -> None:
    api = client.view_api(return_format="dict", print_info=False)
    assert list(api["named_endpoints"]) == ["/decode"] and not api["unnamed_endpoints"]
    endpoint = api["named_endpoints"]["/decode"]
    kinds = {p["parameter_name"]: p["type"]["type"] for p in endpoint["parameters"]}
    assert kinds == {
        "prompt": "string",
        "drafter": "string",
        "new_tokens": "integer",
        "nodes": "integer",
        "depth": "integer",
        "children": "integer",
        "sized": "boolean",
        "temperature": "number",
        "seed": "integer",
        "quantised": "boolean",
    }
    [result] = endpoint["returns"]
    assert {"text", "same_text", "tree", "chain", "plain", "speedup_over_plain"} <= set(result["type"]["properties"])


def test_decode_gives_numbers(client: Client, engine: Any) -> None:
    result = client.predict(**GOOD, temperature=0.5, seed=3, api_name="/decode")
    assert result["finished"] and result["same_text"] is True
    assert {result[arm]["tokens"] for arm in ("tree", "chain", "plain")} == {12}
    tree, plain = result["tree"], result["plain"]
    assert plain["passes"] == 12 and tree["passes"] <= 12
    assert tree["tokens_per_second"] == pytest.approx(tree["tokens"] / tree["seconds"])
    ratio = tree["tokens_per_second"] / plain["tokens_per_second"]
    assert result["speedup_over_plain"] == pytest.approx(ratio)
    assert all(0 <= share <= 1 for share in result["acceptance_by_depth"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"new_tokens": 10**12},
        {"nodes": -5},
        {"nodes": 1e300},
        {"depth": "deep"},
        {"children": None},
        {"temperature": [1]},
        {"seed": {"a": 1}},
        {"sized": "no"},
        {"drafter": "../../etc/passwd"},
        {"drafter": 7},
        {"prompt": 5},
        {"prompt": ""},
        {"prompt": "x" * 100_000},
        {"prompt": "\ud800"},
        {"quantised": True},
    ],
)
def test_wrong_values_are_refused_in_words(address: str, wrong: dict[str, Any]) -> None:
    values = {"prompt": apps.PROMPT, "drafter": "union", "new_tokens": 8, "nodes": 8, "depth": 4, "children": 2}
    values |= {"sized": True, "temperature": 0.0, "seed": 0, "quantised": False, **wrong}
    body = json.dumps({"data": list(values.values())})  # ASCII, so that half a character may be sent
    posted = httpx.post(f"{address}gradio_api/call/decode", content=body, headers={"content-type": "application/json"})
    assert posted.status_code == 200
    kind, message = "", ""
    with httpx.stream("GET", f"{address}gradio_api/call/decode/{posted.json()['event_id']}", timeout=20) as stream:
        for line in stream.iter_lines():
            kind = line[7:] if line.startswith("event: ") else kind
            message = line if line.startswith("data: ") and kind == "error" else message
    assert kind == "error" and "Traceback" not in message and "/site-packages/" not in message


@pytest.mark.parametrize(
    "data", [[], ["x"], [None] * 10, ["x"] * 10, [{}] * 10, [10**30] * 10, [[["x"]]] * 10, {}, None, "x"]
)
def test_the_pages_own_event_survives_anything(address: str, client: Client, data: Any) -> None:
    """It is private, which hides it and stops nobody."""
    for kind, document in call(address, "handle", data):
        assert kind in ("error", "refused", "complete", "generating")
        if kind in ("complete", "generating"):
            assert json.loads(document[0])["phase"] == "error"
    assert client.predict(**GOOD, api_name="/decode")["finished"]


def test_the_pages_own_event_has_the_same_limits(address: str) -> None:
    _, inputs = endpoint_of_the_page(address)
    assert inputs == len(layout.FIELDS)
    good = dict(zip(layout.FIELDS, [apps.PROMPT, "union", 12, 8, 4, 2, True, 0, 0, False], strict=True))
    done = call(address, "handle", list(good.values()))
    assert json.loads(done[-1][1][0])["phase"] == "done"
    for wrong in ({"prompt": "y" * 2000}, {"new_tokens": 10**7}, {"nodes": 10**7}, {"drafter": "model"}):
        kind, data = call(address, "handle", list({**good, **wrong}.values()))[-1]
        assert kind == "error" or json.loads(data[0])["phase"] == "error"


def test_the_queue_cannot_be_passed_by(address: str) -> None:
    index, _ = endpoint_of_the_page(address)
    for path, body in (
        ("run/decode", {"data": [apps.PROMPT]}),
        ("run/predict", {"data": [apps.PROMPT], "fn_index": index}),
        ("api/decode", {"data": [apps.PROMPT]}),
    ):
        assert httpx.post(f"{address}gradio_api/{path}", json=body).status_code in (401, 403, 404, 405, 422, 500), path
    assert httpx.post(f"{address}gradio_api/run/decode", json={"data": [apps.PROMPT]}).status_code != 200


@pytest.mark.parametrize("path", ["app/app.py", "/etc/passwd", "../pyproject.toml", "app/ui/static/tree.js"])
def test_no_file_is_read(address: str, path: str) -> None:
    for url in (f"{address}gradio_api/file={path}", f"{address}file={path}"):
        assert httpx.get(url, follow_redirects=True).status_code in (403, 404)


def test_uploads_are_tiny(address: str) -> None:
    files = {"files": ("x.txt", b"x" * 20_000)}
    assert httpx.post(f"{address}gradio_api/upload", files=files).status_code != 200


# -------------------------------------------------------------------- leaving, failing, waiting


@pytest.fixture
def slow_engine() -> Any:
    engine = apps.tiny_engine(limits=Limits(seconds=20, queue=2))
    apps.slow_down(engine, 0.1)
    return engine


def free_within(engine: Any, seconds: float) -> bool:
    taken = engine._lock.acquire(timeout=seconds)
    if taken:
        engine._lock.release()
    return bool(taken)


def wait_for_a_run(engine: Any) -> None:
    until = time.monotonic() + 10
    while not engine._lock.locked():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_cancelled_call_frees_the_models_within_a_second(slow_engine: Any) -> None:
    with apps.served(slow_engine) as address:
        client = Client(address, verbose=False)
        job = client.submit(prompt=apps.PROMPT, new_tokens=150, api_name="/decode")
        wait_for_a_run(slow_engine)
        time.sleep(0.9)  # it has reported
        began = time.monotonic()
        job.cancel()
        assert free_within(slow_engine, 3)
        assert time.monotonic() - began < 1  # at most a report's interval, and a round
        assert client.predict(prompt=apps.PROMPT, new_tokens=1, api_name="/decode")["finished"]


def test_a_dropped_stream_frees_the_models(slow_engine: Any) -> None:
    with apps.served(slow_engine) as address:
        values = [apps.PROMPT, "union", 150, 8, 4, 2, True, 0, 0, False]
        session = {"session_hash": "leaver", "fn_index": endpoint_of_the_page(address)[0], "data": values}
        assert httpx.post(f"{address}gradio_api/queue/join", json=session).status_code == 200
        with httpx.stream("GET", f"{address}gradio_api/queue/data?session_hash=leaver", timeout=10) as stream:
            lines = stream.iter_lines()
            while "process_generating" not in next(lines):
                pass
        began = time.monotonic()  # the tab is closed
        assert free_within(slow_engine, 3)
        assert time.monotonic() - began < 1


def test_more_than_the_queue_holds_is_told_to_come_back(slow_engine: Any) -> None:
    with apps.served(slow_engine) as address:
        body = {"data": [apps.PROMPT, "union", 100, 8, 4, 2, True, 0.0, 0, False]}
        codes = [httpx.post(f"{address}gradio_api/call/decode", json=body).status_code for _ in range(7)]
        assert 503 in codes and codes[0] == 200


def test_an_exception_ends_the_stream_with_words_and_not_with_its_text() -> None:
    engine = apps.tiny_engine()
    secret = "the secret of this server"
    broken = threading.Event()
    broken.set()

    def fail(*_: Any) -> None:
        if broken.is_set():
            raise RuntimeError(secret)

    engine._target.model.register_forward_pre_hook(fail)
    with apps.served(engine) as address:
        values = [apps.PROMPT, "union", 12, 8, 4, 2, True, 0, 0, False]
        kind, data = call(address, "handle", values)[-1]
        document = json.loads(data[0])
        assert kind == "complete" and document["phase"] == "error" and "failed" in document["note"]
        assert secret not in json.dumps(document)
        client = Client(address, verbose=False)
        with pytest.raises(AppError) as caught:
            client.predict(**GOOD, api_name="/decode")
        assert secret not in str(caught.value)
        broken.clear()
        assert json.loads(call(address, "handle", values)[-1][1][0])["phase"] == "done"
        assert client.predict(**GOOD, api_name="/decode")["same_text"] is True


def test_the_page_keeps_nothing_and_tells_nobody(engine: Any, address: str) -> None:
    import app

    options = app.launch_options()
    assert not options["run_history"] and not options["share"] and not options["show_error"]
    page = layout.build(engine, "{}")
    assert page.analytics_enabled is False
    config = httpx.get(f"{address}config").json()
    assert not config.get("analytics_enabled")
    assert gr.__version__ >= "6"
