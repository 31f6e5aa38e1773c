"""The demo in a real browser: what a visitor sees, presses and hears, and what a model cannot do to the page.

Needs Playwright and a Chromium (`pip install playwright`, and the system's chromium, or $CHROMIUM). Pictures are left in
screenshots/, which git ignores.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import json
import os
import re
import shutil
import threading
import time
import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apps
import pytest
from settings import Limits

pytest.importorskip("gradio", reason="the app's tests need gradio: pip install hf-treespec[app]")
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the browser's tests need playwright: pip install playwright"
)

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "screenshots"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser's tests need chromium, or its path in $CHROMIUM"),
    pytest.mark.filterwarnings(*apps.GRADIO_WARNINGS),
]
WAIT = 30_000  # milliseconds, on a busy machine
# Trees of one size, whatever this machine takes for a row.
FIXED = "?sized=0&nodes=12&new_tokens=40"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    PICTURES.mkdir(exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def engine() -> Any:
    return apps.tiny_engine(limits=Limits(seconds=20))


@pytest.fixture(scope="module")
def address(engine: Any) -> Iterator[str]:
    with apps.served(engine) as address:
        yield address


@pytest.fixture(scope="module")
def static_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The static page as it is uploaded."""
    spec = importlib.util.spec_from_file_location("stage_space", ROOT / "scripts" / "stage_space.py")
    assert spec is not None and spec.loader is not None
    staging = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(staging)
    folder = tmp_path_factory.mktemp("static") / "space"
    staging.stage("static", folder)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


class Visit:
    """A page, and all that it complained of or asked others for."""

    def __init__(self, page: Any) -> None:
        self.page, self.complaints, self.hosts = page, [], set()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2].split(":")[0]))

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector(".ts", timeout=WAIT)
        self.page.wait_for_load_state("networkidle")  # a link's settings come with a call of their own

    def run(self, prompt: str | None = apps.PROMPT) -> None:
        if prompt is not None:
            self.page.fill("#prompt textarea", prompt)
        self.page.click("#go")
        self.phase("running", "done")
        self.phase("done")

    def phase(self, *names: str) -> None:
        selector = ",".join(f'.ts[data-phase="{name}"]' for name in names)
        self.page.wait_for_selector(selector, state="attached", timeout=WAIT)

    def press(self, action: str) -> None:
        self.page.click(f'.ts [data-act="{action}"]')

    def picture(self, name: str) -> None:
        self.page.screenshot(path=str(PICTURES / f"{name}.png"), full_page=True)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(f".ts {selector}"))

    def calm(self) -> None:
        """Nothing went wrong, nothing was run, and nobody else was asked."""
        assert self.complaints == []
        assert self.hosts <= {"127.0.0.1"}
        assert self.page.evaluate("window.__pwned") is None
        assert self.page.locator(".ts img, .ts script, .ts iframe, .ts a").count() == 0


@contextlib.contextmanager
def visiting(browser: Any, width: int = 1280, **options: Any) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    try:
        yield Visit(context.new_page())
    finally:
        context.close()


# -------------------------------------------------------------------- the live page


def test_a_run_is_drawn_and_hostile_text_stays_text(browser: Any, address: str) -> None:
    with visiting(browser) as visit:
        visit.open(address + FIXED)
        visit.run()
        for selector in (".ts-plain", ".ts-chain"):
            assert re.fullmatch(r"(▼ )?\d+\.\d\d×", visit.text(selector))
        assert float(visit.text(".ts-tokens")) >= 1
        assert "same text" in visit.text(".ts-status")
        assert visit.page.locator(".ts-lane").count() == 3
        visit.page.wait_for_selector('.ts-svg[data-stage="keep"]', timeout=WAIT)
        assert visit.page.locator(".ts-svg .node.root").count() == 1
        visit.press("last")
        shown = visit.text(".ts-text")
        assert any(token in shown for token in ("<img", "${window", "{{value}}", "</script>", "<!--"))
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x1b]", shown)
        assert visit.page.locator(".ts-text span.kept").count() and visit.page.locator(".ts-text span.own").count()
        assert visit.page.locator(".ts-times .bar").count() > 2 and visit.page.locator(".ts-depthrow").count()
        assert "–" not in visit.text(".ts-heads")
        visit.picture("live-light")
        visit.calm()


def test_rounds_can_be_walked_by_mouse_and_keys(browser: Any, address: str) -> None:
    with visiting(browser) as visit:
        page = visit.page
        visit.open(address + FIXED)
        visit.run()
        visit.press("first")
        assert visit.text(".ts-where").startswith("round 0 of") and visit.text(".ts-play") == "Play"
        visit.press("next")
        visit.press("next")
        assert visit.text(".ts-where").startswith("round 2 of")
        before = visit.text(".ts-text")
        visit.press("prev")
        assert visit.text(".ts-where").startswith("round 1 of")
        assert before.startswith(visit.text(".ts-text")) and before != visit.text(".ts-text")
        page.focus(".ts-seek")
        page.keyboard.press("End")
        last = re.findall(r"\d+", visit.text(".ts-where"))
        assert last[0] == last[1]
        page.keyboard.press("Home")
        assert visit.text(".ts-where").startswith("round 0 of")
        # a round with guesses, and its tree by arrow keys
        for _ in range(int(last[0])):
            visit.press("next")
            if page.locator(".ts-svg .node.kept, .ts-svg .node.dropped").count() > 1:
                break
        page.focus('.ts-svg [data-node="0"]')
        page.keyboard.press("ArrowRight")
        focused = page.evaluate("document.activeElement.dataset.node")
        assert focused not in (None, "0")
        for word in ("drafter", "target", "choice"):
            assert word in visit.text(".ts-detail")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("document.activeElement.dataset.node") == "0"
        assert page.locator('.ts-svg [tabindex="0"]').count() == 1
        page.hover(".ts-svg .node.own")
        assert "own token" in visit.text(".ts-detail")
        visit.calm()


def test_playback_pauses_replays_and_keeps_its_speed(browser: Any, address: str) -> None:
    with visiting(browser) as visit:
        visit.open(address)
        visit.page.select_option(".ts-rate", "4")
        visit.run()
        visit.press("play")
        assert visit.text(".ts-play") == "Play"
        where = visit.text(".ts-where")
        visit.page.wait_for_timeout(900)
        assert visit.text(".ts-where") == where
        visit.press("play")
        visit.page.wait_for_function(
            "w => document.querySelector('.ts-where').textContent !== w", arg=where, timeout=WAIT
        )
        visit.press("last")
        assert visit.text(".ts-play") == "Replay"
        visit.press("play")
        visit.page.wait_for_function(
            "document.querySelector('.ts-where').textContent.startsWith('round 1 ')", timeout=WAIT
        )
        visit.press("race")
        visit.page.wait_for_function(
            "document.querySelector('.ts-clock').textContent.includes('own clock')", timeout=WAIT
        )
        visit.calm()


def test_stop_frees_the_models_and_the_next_run_works(browser: Any) -> None:
    engine = apps.tiny_engine(limits=Limits(seconds=60))
    slow = [0.05]
    engine._target.model.register_forward_pre_hook(lambda *_: time.sleep(slow[0]))
    with apps.served(engine) as address, visiting(browser) as visit:
        visit.open(address + "?new_tokens=150")
        visit.page.click("#go")
        visit.phase("running")
        visit.page.wait_for_timeout(600)
        visit.page.click("#stop")
        assert engine._lock.acquire(timeout=1.0)
        engine._lock.release()
        visit.phase("stopped")
        assert visit.text(".ts-status") == "Stopped."
        slow[0] = 0.0
        visit.run(None)
        assert "same text" in visit.text(".ts-status")
        # a closed tab
        slow[0] = 0.05
        visit.page.click("#go")
        visit.phase("running")
        visit.page.close()
        assert engine._lock.acquire(timeout=1.0)
        engine._lock.release()
        assert visit.complaints == []


def test_errors_are_told_on_the_page(browser: Any, address: str) -> None:
    with visiting(browser) as visit:
        visit.open(address)
        visit.page.fill("#prompt textarea", "x" * 600)
        visit.page.click("#go")
        visit.phase("error")
        assert "600 tokens" in visit.text(".ts-status")
        visit.run()
        visit.calm()


def test_a_link_opens_its_settings_and_the_page_gives_one(browser: Any, address: str) -> None:
    with visiting(browser) as visit:
        visit.open(address + "?prompt=hello%20you&new_tokens=9&nodes=999&__theme=light")
        visit.page.wait_for_function("document.querySelector('#prompt textarea').value === 'hello you'", timeout=WAIT)
        visit.run(None)
        visit.press("link")
        assert "prompt=hello+you" in visit.page.url and "new_tokens=9" in visit.page.url
        assert "nodes=24" in visit.page.url  # 999 was refused
        visit.calm()


def test_exports_are_whole(browser: Any, address: str, tmp_path: Path) -> None:
    with visiting(browser) as visit:
        visit.open(address)
        visit.run()
        for action in ("json", "svg"):
            with visit.page.expect_download() as download:
                visit.press(action)
            download.value.save_as(tmp_path / action)
        trace = json.loads((tmp_path / "json").read_text(encoding="utf-8"))
        assert trace["v"] == 1 and trace["phase"] == "done" and trace["rounds"][0]["index"] == 0
        drawn = (tmp_path / "svg").read_text(encoding="utf-8")
        xml.dom.minidom.parseString(drawn.encode())
        assert (
            "<script" not in drawn
            and "<img" not in drawn
            and "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
        )
        visit.page.goto((tmp_path / "svg").rename(tmp_path / "race.svg").as_uri())
        assert visit.page.evaluate("document.documentElement.tagName") == "svg"
        assert visit.page.evaluate("window.__pwned") is None


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_a_phone_shows_an_outline_and_does_not_overflow(browser: Any, address: str, theme: str) -> None:
    with visiting(browser, width=390) as visit:
        visit.open(f"{address}{FIXED}&__theme={theme}")
        visit.run()
        visit.press("last")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
        xs = visit.page.evaluate(
            "[...document.querySelectorAll('.ts-svg .node')].map(n => parseFloat(n.style.getPropertyValue('--y')))"
        )
        assert len(set(xs)) == len(xs)  # one row a node
        spilt = "[...document.querySelectorAll('.ts-card')].filter(c => c.scrollWidth > c.clientWidth + 1).length"
        assert visit.page.evaluate(spilt) == 0
        assert visit.page.evaluate("document.querySelector('.ts').classList.contains('dark')") == (theme == "dark")
        visit.picture(f"live-phone-{theme}")
        visit.calm()


def test_dark(browser: Any, address: str) -> None:
    with visiting(browser) as visit:
        visit.open(f"{address}{FIXED}&__theme=dark")
        visit.run()
        visit.press("last")
        visit.picture("live-dark")
        style = "getComputedStyle(document.querySelector('.ts'))"
        card = visit.page.evaluate(f"{style}.getPropertyValue('--card')")
        ink = visit.page.evaluate(f"{style}.color")
        assert card.strip() == "#181f2a" and ink == "rgb(232, 236, 242)"
        visit.calm()


def test_reduced_motion_moves_nothing(browser: Any, address: str) -> None:
    with visiting(browser, reduced_motion="reduce") as visit:
        visit.open(address)
        visit.run()
        assert visit.page.get_attribute(".ts-svg", "data-stage") == "keep"
        assert (
            visit.page.evaluate("getComputedStyle(document.querySelector('.ts-svg .node')).transitionDuration") == "0s"
        )
        assert visit.page.evaluate("document.getAnimations().filter(a => a.effect.target.closest('.ts')).length") == 0
        visit.calm()


def test_what_is_said_aloud_is_polite_and_rare(browser: Any, address: str) -> None:
    with visiting(browser) as visit:
        visit.open(address)
        visit.page.evaluate(
            "window.said = []; const live = document.querySelector('.ts-live');"
            "new MutationObserver(() => said.push(live.textContent)).observe(live, { childList: true, subtree: true })"
        )
        visit.page.select_option(".ts-rate", "4")
        visit.run()
        visit.page.wait_for_timeout(4000)
        said = visit.page.evaluate("window.said")
        assert said and any("as fast as plain" in sentence for sentence in said)
        assert len(said) <= 5  # a dozen rounds passed by
        assert visit.page.get_attribute(".ts-live", "aria-live") == "polite"


# -------------------------------------------------------------------- the static page


def test_the_static_page_plays_recorded_runs_with_the_same_files(browser: Any, static_address: str) -> None:
    with visiting(browser, color_scheme="light") as visit:
        visit.open(static_address)
        visit.phase("done")
        visit.page.wait_for_selector('.ts-svg[data-stage="keep"]', timeout=WAIT)
        assert "recorded" in visit.text(".ts-status") and re.search(r"\d×", visit.text(".ts-plain"))
        visit.press("next")
        visit.picture("static-light")
        run = visit.page.get_attribute(".ts", "data-run")
        visit.page.select_option("#traces", index=1)
        visit.page.wait_for_function("r => document.querySelector('.ts').dataset.run !== r", arg=run, timeout=WAIT)
        visit.page.click("#theme")
        assert visit.page.evaluate("document.querySelector('.ts').classList.contains('dark')")
        visit.calm()


HOSTILE_PIECES = [
    "<img src=x onerror=window.__pwned=1>",
    "${window.__pwned=2}",
    "{{constructor.constructor('window.__pwned=3')()}}",
    "\ud800",
    "\udc00 half",
    "\u202eabc\u2066",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "\u0301" * 400,
    "\x00\x1b[31m\x07",
    "مرحبا",
    "",
    "\ufffe\uffff",
    " ",
    "\n\n\t",
    "a" * 3000,
]


def test_any_text_is_shown_inert(browser: Any, static_address: str) -> None:
    """Documents whose every text is hostile, half characters included, which no tokenizer here can write."""
    count = len(HOSTILE_PIECES)
    round_ = {
        "index": 1,
        "ids": list(range(count + 1)),
        "texts": ["root", *HOSTILE_PIECES],
        "parents": [-1, *([0] * (count - 2)), 1, 1],
        "scores": [1.0, *([0.5] * count)],
        "target": [1.0, *([0.1] * count)],
        "ranks": [0] * (count + 1),
        "kept": [1],
        "bonus": True,
        "pieces": HOSTILE_PIECES[:2],
        "seconds": {"draft": 0.001, "verify": 0.01, "host": 0.001},
        "sizing": None,
        "cut": {"texts": HOSTILE_PIECES, "parents": [0] * count, "scores": [0.1] * count},
    }
    lane = {"tokens": 20, "seconds": 0.5, "forwards": 3, "finished": True, "marks": [[100, 1], [500, 20]]}
    trace = {
        "v": 1, "run": "hostile", "seq": 1, "phase": "done", "note": HOSTILE_PIECES[0], "order": ["tree", "chain", "plain"],
        "settings": {"prompt": HOSTILE_PIECES[0], "drafter": HOSTILE_PIECES[1], "sized": True}, "same_text": True, "text": "",
        "facts": {"model": HOSTILE_PIECES[0], "weights": HOSTILE_PIECES[1], "kind": "cpu", "threads": 1},
        "lanes": {"tree": lane, "chain": lane, "plain": lane},
        "rounds": [{**round_, "index": n, "pieces": HOSTILE_PIECES[2 * n : 2 * n + 2]} for n in range(count // 2)],
    }  # fmt: skip
    with visiting(browser) as visit:
        visit.open(static_address)
        visit.phase("done")
        visit.page.evaluate("value => view.update(value)", json.dumps(trace))
        visit.page.wait_for_selector('.ts[data-run="hostile"]', state="attached")
        visit.press("last")
        assert visit.page.locator(".ts-svg .node").count() == 2 * count + 1
        for node in range(2 * count + 1):
            visit.page.evaluate("n => document.querySelector(`[data-node='${n}']`).focus()", node)
        shown = visit.page.evaluate("document.querySelector('.ts').textContent")
        assert "<img src=x onerror" in shown and "⟨D800⟩" in shown and "⟨202E⟩" in shown
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x1b\ud800-\udfff]", shown)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1280
        svg = visit.page.evaluate("animatedSvg(view.state().race)")
        xml.dom.minidom.parseString(svg.encode())
        visit.picture("hostile")
        visit.calm()


@pytest.mark.parametrize(
    "value", ["", "null", "[]", "{}", '{"v":2}', '{"v":1,"rounds":5}', "<b>", '{"v":1,"stopped":true}']
)
def test_what_is_no_document_is_passed_over(browser: Any, static_address: str, value: str) -> None:
    with visiting(browser) as visit:
        visit.open(static_address)
        visit.phase("done")
        visit.page.evaluate("value => view.update(value)", value)
        assert "recorded" in visit.text(".ts-status")
        visit.calm()
