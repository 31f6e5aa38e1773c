"""Makes the folder that is uploaded as a Space: the page, the library beside it, and what its hardware needs.

    python scripts/stage_space.py cpu build/space        or zerogpu, or static

A Space installs its requirements before any file of it is there, so the library cannot be installed from the folder: it lies
beside `app.py`, where Python finds it, and the Space is exactly this checkout. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APP, STATIC_PAGE = ROOT / "app", ROOT / "app" / "static_space"
FLAVOURS = ("cpu", "zerogpu", "static")
# In the front matter of a Space's README; the page assigns no hardware, it suggests.
HARDWARE = {"cpu": "cpu-basic", "zerogpu": "zero-a10g"}
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "*.pyc", "*.pyi", "overlays", "static_space", "requirements.txt", ".gradio"
)


def stage(flavour: str, folder: Path) -> None:
    """Fills `folder`, which must be new or staged before.

    Raises:
        FileExistsError: the folder holds something that was not staged.
    """
    if folder.exists():
        if any(folder.iterdir()) and not (folder / ".staged").is_file():
            raise FileExistsError(f"{folder} holds other files; give a new folder.")
        shutil.rmtree(folder)
    if flavour == "static":
        _stage_static(folder)
    else:
        _stage_gradio(flavour, folder)
    (folder / ".staged").write_text(flavour + "\n", encoding="utf-8")


def _stage_gradio(flavour: str, folder: Path) -> None:
    shutil.copytree(APP, folder, ignore=LEFT_OUT)
    traces = folder / "static_space" / "traces"
    traces.mkdir(parents=True)
    shutil.copy(STATIC_PAGE / "traces" / "fix-typos.json", traces)
    shutil.copytree(ROOT / "hf_treespec", folder / "hf_treespec", ignore=LEFT_OUT)
    shutil.copy(APP / "overlays" / flavour / "requirements.txt", folder)
    shutil.copy(ROOT / "LICENSE", folder)
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(
        text.replace("pinned: false", f"pinned: false\nsuggested_hardware: {HARDWARE[flavour]}", 1), encoding="utf-8"
    )


def _stage_static(folder: Path) -> None:
    shutil.copytree(STATIC_PAGE, folder)
    static = APP / "ui" / "static"
    shutil.copytree(static, folder / "static", ignore=shutil.ignore_patterns("*.html"))
    page, markup = folder / "index.html", (static / "tree.html").read_text(encoding="utf-8")
    page.write_text(page.read_text(encoding="utf-8").replace("<!-- tree.html -->", markup), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Makes the folder that is uploaded as a Space.")
    parser.add_argument("flavour", choices=FLAVOURS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    stage(options.flavour, options.folder)
    files = [file for file in options.folder.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 1024
    print(f"{options.folder}: {len(files)} files, {size:.0f} KiB, for the Space flavour {options.flavour}")


if __name__ == "__main__":
    main()
