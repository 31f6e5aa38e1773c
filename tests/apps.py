"""The demo on a tiny random model that writes hostile text: markup, template syntax, steering marks, halves of characters."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

APP = Path(__file__).parent.parent / "app"
if str(APP) not in sys.path:
    sys.path.insert(0, str(APP))

HOSTILE = [
    "<img src=x onerror=window.__pwned=1>",
    "${window.__pwned=2}",
    "{{value}}",
    "</script><script>window.__pwned=3</script>",
    "\u202eabc",
    "\u2066\u2028",
    "\u0301",
    "👩‍👩‍👧‍👦",
    " Sun",
    "\x1b[31m\x07",
    "`${1}`",
    "<!--",
]
PROMPT = "abc abd abc abe abc"
# What Gradio's server warns of that is not ours: sockets and event loops are left to the garbage collector, and two options
# of pandas that it uses while it sums up its queue are going to vanish.
GRADIO_WARNINGS = (
    "ignore:unclosed:ResourceWarning",
    "ignore:'future.no_silent_downcasting' is deprecated",
    "ignore:The copy keyword is deprecated",
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, so that most characters come in halves, and hostile tokens; no chat template."""
    tokens = ["<end>", *bytes_to_unicode().values()]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    backend.add_tokens([AddedToken(token, normalized=False) for token in HOSTILE])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


def tiny_model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[257:] *= 3  # hostile tokens are likely
    return model


def tiny_engine(**options: Any) -> Any:
    """An engine on a fresh tiny model."""
    from engine import Engine, Target

    tokenizer = tiny_tokenizer()
    return Engine(Target("tiny", tiny_model(len(tokenizer)), tokenizer, None), **options)


def slow_down(engine: Any, seconds: float) -> None:
    """Every forward of the target takes longer."""
    import time

    model = engine._target.model
    model.register_forward_pre_hook(lambda *_: time.sleep(seconds))


@contextlib.contextmanager
def served(engine: Any, first: str | None = None) -> Iterator[str]:
    """The whole page on a free port of this machine; gives its address."""
    from document import Document
    from ui import layout

    import app

    page = layout.build(engine, Document(note="Press Run.").dumps() if first is None else first)
    options = {**app.launch_options(), "quiet": True, "prevent_thread_lock": True, "ssr_mode": False}
    _, address, _ = page.launch(server_name="127.0.0.1", **options)
    try:
        yield address
    finally:
        page.close()
        gc.collect()  # now, while the test's filter for what Gradio leaves open holds
