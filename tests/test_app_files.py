"""What is shipped with the demo: traces, the picture, the static page, staged Spaces, and the command that serves it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import xml.dom.minidom
from pathlib import Path
from typing import Any

import apps
import pytest
from document import VERSION

from hf_treespec import cli
from hf_treespec.loading import UserError

ROOT = Path(__file__).parent.parent
TRACES = ROOT / "app" / "static_space" / "traces"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="this test needs node")


@pytest.fixture(scope="module")
def staging() -> Any:
    spec = importlib.util.spec_from_file_location("stage_space", ROOT / "scripts" / "stage_space.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -------------------------------------------------------------------- traces, picture, JavaScript


def test_recorded_traces_are_documents() -> None:
    listed = json.loads((TRACES / "index.json").read_text(encoding="ascii"))
    assert {entry["file"] for entry in listed} == {f.name for f in TRACES.glob("*.json")} - {"index.json"}
    for entry in listed:
        text = (TRACES / entry["file"]).read_text(encoding="ascii")
        trace = json.loads(text)
        assert "<" not in text and trace["v"] == VERSION and trace["recorded"] is True
        assert trace["phase"] == "done" and trace["same_text"] is True
        assert [r["index"] for r in trace["rounds"]] == list(range(len(trace["rounds"])))
        assert "".join(piece for r in trace["rounds"] for piece in r["pieces"]) == trace["text"]
        for lane in trace["lanes"].values():
            assert lane["finished"] and lane["marks"][-1][1] == lane["tokens"]


@needs_node
def test_the_scripts_own_tests_pass() -> None:
    assert NODE is not None
    done = subprocess.run([NODE, "--test", str(ROOT / "tests" / "js")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-3000:]


@needs_node
def test_the_picture_is_drawn_from_the_recorded_trace() -> None:
    assert NODE is not None
    command = [NODE, str(ROOT / "scripts" / "picture.js"), str(TRACES / "fix-typos.json")]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, encoding="utf-8").stdout
    assert drawn == (ROOT / "docs" / "race.svg").read_text(encoding="utf-8"), "make docs/race.svg anew: see README"
    assert len(drawn) < 1_000_000
    xml.dom.minidom.parseString(drawn.encode())
    assert not re.search(r"<script|<image|<foreignObject|href|\bon\w+=", drawn)


@needs_node
def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    assert NODE is not None
    (tmp_path / "x.json").write_text("{}")
    command = [NODE, str(ROOT / "scripts" / "picture.js"), str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no trace" in done.stderr


# -------------------------------------------------------------------- Spaces


def front_matter(page: Path) -> dict[str, str]:
    head = page.read_text(encoding="utf-8").split("---")[1]
    return dict(line.split(": ", 1) for line in head.strip().splitlines() if re.match(r"\w+: ", line))


@pytest.mark.parametrize("flavour", ["cpu", "zerogpu"])
def test_a_staged_space_is_whole(staging: Any, flavour: str, tmp_path: Path) -> None:
    folder = tmp_path / "space"
    for _ in range(2):  # staging again is fine
        staging.main([flavour, str(folder)])
    matter = front_matter(folder / "README.md")
    assert matter["sdk"] == "gradio" and int(matter["sdk_version"].split(".")[0]) >= 6
    assert (folder / matter["app_file"]).is_file() and matter["suggested_hardware"] == staging.HARDWARE[flavour]
    assert len(matter["short_description"]) <= 60
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert {"hf_treespec/decoding.py", "ui/static/tree.js", "static_space/traces/fix-typos.json", "LICENSE"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".pyi"))]
    requirements = (folder / "requirements.txt").read_text()
    assert ("+cpu" in requirements) == (flavour == "cpu")
    # what the platform installs itself, in its own versions
    assert not re.search(r"^(gradio|spaces|hf.treespec)\b", requirements, flags=re.M)


def test_a_staged_static_space_is_whole(staging: Any, tmp_path: Path) -> None:
    folder = tmp_path / "space"
    staging.main(["static", str(folder)])
    assert front_matter(folder / "README.md")["sdk"] == "static"
    page = (folder / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert name.startswith("data:") or (folder / name).is_file(), name
    assert 'class="ts"' in page and "http" not in page.replace("http-equiv", "")
    static = ROOT / "app" / "ui" / "static"
    assert (folder / "static" / "tree.js").read_bytes() == (static / "tree.js").read_bytes()


def test_staging_leaves_other_folders_alone(staging: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other files"):
        staging.main(["cpu", str(tmp_path)])
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_requirements_are_those_of_the_cpu_space() -> None:
    assert (ROOT / "app" / "requirements.txt").read_text() == (ROOT / "app/overlays/cpu/requirements.txt").read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = apps.tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    apps.tiny_model(len(tokenizer)).save_pretrained(folder)
    return folder


def test_a_staged_space_starts_with_the_library_inside_it(staging: Any, tmp_path: Path, tiny_folder: Path) -> None:
    pytest.importorskip("gradio", reason="the app's tests need gradio: pip install hf-treespec[app]")
    from gradio_client import Client

    folder, port = tmp_path / "space", free_port()
    staging.stage("cpu", folder)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_TREESPEC_DEMO_MODEL": str(tiny_folder), "GRADIO_SERVER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    script = "import runpy, hf_treespec; print(hf_treespec.__file__); runpy.run_path('app.py', run_name='__main__')"
    log = tmp_path / "log.txt"
    with log.open("wb") as out:
        server = subprocess.Popen([sys.executable, "-c", script], cwd=folder, env=environment, stdout=out, stderr=out)
        try:
            until = time.monotonic() + 60
            while "Running on local URL" not in log.read_text(errors="replace"):
                assert server.poll() is None and time.monotonic() < until, log.read_text(errors="replace")[-2000:]
                time.sleep(0.1)
            client = Client(f"http://127.0.0.1:{port}", verbose=False)
            result = client.predict("abc abd", new_tokens=6, api_name="/decode")
            assert result["finished"] and result["plain"]["tokens"] == 6
            assert str(folder / "hf_treespec") in log.read_text()
        finally:
            server.terminate()
            server.wait(20)


# -------------------------------------------------------------------- the command


def test_serve_demo_finds_the_page_in_a_checkout_and_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    wheel, checkout = tmp_path / "wheel" / "hf_treespec", tmp_path / "checkout" / "hf_treespec"
    for folder, inside in ((wheel / "app", "wheel"), (checkout.parent / "app", "checkout")):
        folder.mkdir(parents=True)
        (folder / "app.py").write_text(f"PLACE = {inside!r}\n")
    assert cli.load_app(wheel).PLACE == "wheel"
    assert cli.load_app(checkout).PLACE == "checkout"


def test_serve_demo_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["serve-demo"]) == 2
    assert "pip install hf-treespec[app]" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="checkout"):
        cli.load_app(tmp_path / "hf_treespec")


def test_serve_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class App:
        main = staticmethod(asked.append)

    monkeypatch.setattr(cli, "load_app", App)
    assert cli.main(["serve-demo", "--port", "8123", "--assistant-model", "small"]) == 0
    assert asked == [["--host", "127.0.0.1", "--port", "8123", "--assistant-model", "small"]]
    assert cli.main(["serve-demo", "--port", "0"]) == 2
