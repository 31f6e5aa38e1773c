"""The component that draws a race: one `gr.HTML` whose template never changes, fed with documents as JSON strings.

A factory, not a subclass: subclassing a Gradio component writes a stub file beside the module when it is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

STATIC = Path(__file__).parent / "static"
# In this order: later files use what earlier ones define. The static page loads the same files.
SCRIPTS = ("rounds.js", "tree.js", "panels.js", "export.js", "view.js")
_START = """
const view = createView(element);
view.update(props.value);  // whatever stands there when the page mounts it
watch('value', () => view.update(props.value));
"""


def race_view(value: str, **options: Any) -> gr.HTML:
    """Draws `value`, a document of `document.Document.dumps`, and every later one.

    Templates are evaluated as code in the browser, so no text of a run is ever in them: it arrives as the value and is
    drawn through `textContent`.
    """
    script = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return gr.HTML(
        value=value,
        html_template=(STATIC / "tree.html").read_text(encoding="utf-8"),
        css_template=(STATIC / "tree.css").read_text(encoding="utf-8"),
        js_on_load=script + _START,
        apply_default_css=False,
        **options,
    )
