"""Borrowed GPUs: on a ZeroGPU Space, a race runs in a worker that holds a GPU for its time and no longer.

Elsewhere nothing here does anything. The package `spaces` is there on Spaces alone; it must be imported before CUDA is
looked at, so `app.py` imports this module first. A race crosses the border between the processes: settings go in and
events come out, all plain data.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

ON_ZERO_GPU = bool(os.environ.get("SPACES_ZERO_GPU")) and importlib.util.find_spec("spaces") is not None
if ON_ZERO_GPU:
    import spaces

# A visitor's quota is charged with what is asked for: a base for the prompt and for three arms, and a share of each token.
BASE_SECONDS, SECONDS_A_TOKEN, MOST_SECONDS = 6, 0.1, 45


def seconds_wanted(settings: Any, turn: int = 0) -> int:
    """GPU seconds to ask for; called with the arguments of the race itself."""
    return int(min(MOST_SECONDS, BASE_SECONDS + SECONDS_A_TOKEN * settings.new_tokens))


def borrowed(race: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """`race`, run on a borrowed GPU where this is a ZeroGPU Space."""
    if not ON_ZERO_GPU:
        return race

    def on_gpu(settings: Any, turn: int = 0) -> Iterator[Any]:
        yield from race(settings, turn=turn)

    wrapped: Callable[..., Iterator[Any]] = spaces.GPU(duration=seconds_wanted)(on_gpu)
    return wrapped
