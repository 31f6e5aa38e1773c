"""Plain `generate` as an iterator: one token when it is asked for, timed only while it works.

`generate` cannot be suspended, so it runs on a thread of its own that waits between tokens until the next one is asked
for. What the page does meanwhile is then in nobody's time, and stopping takes one token.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch


class _Stopped(Exception):
    """Ends `generate` from within."""


class PlainRun:
    """Iterates over the new tokens of `model.generate(**arguments)`.

    Attributes:
        seconds: wall clock so far from the call of `generate`, waiting left out.
    """

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.seconds = 0.0
        self._asked = threading.Semaphore(0)
        self._given: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self._stopped = self._over = False
        self._prompt = True  # a streamer is handed the prompt first
        self._thread = threading.Thread(target=self._work, args=(model, arguments), daemon=True, name="plain-generate")
        self._thread.start()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._over:
            raise StopIteration
        self._asked.release()
        given = self._given.get()
        if isinstance(given, int):
            return given
        self._over = True
        self._thread.join()
        if given is None:
            raise StopIteration
        raise given

    def close(self) -> None:
        """Ends decoding after the token that is being computed, if any."""
        self._stopped = True
        self._over = True
        self._asked.release()
        self._thread.join()

    # ---------------------------------------------------------------- on the thread

    def _work(self, model: Any, arguments: dict[str, Any]) -> None:
        end: BaseException | None = None
        try:
            self._wait()
            model.generate(**arguments, tree_spec=False, streamer=self)
            self.seconds += time.perf_counter() - self._began
        except _Stopped:
            pass
        except BaseException as error:  # told to whoever iterates
            end = error
        self._given.put(end)

    def _wait(self) -> None:
        self._asked.acquire()
        if self._stopped:
            raise _Stopped
        self._began = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with each token."""
        if self._prompt:
            self._prompt = False
            return
        token = int(value.reshape(-1)[0])
        self.seconds += time.perf_counter() - self._began
        self._given.put(token)
        self._wait()

    def end(self) -> None:
        """Called by `generate` after the last token."""
