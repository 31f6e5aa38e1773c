"""`stream`: the rounds of a call, one by one, on the caller's thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from .decoding import Decoding
from .integration import StreamRequest, enable
from .stats import DecodeStats, RoundRecord


class Stream:
    """An iterator of `RoundRecord`. A round is computed when it is asked for; no threads.

    Attributes:
        stats: the `DecodeStats` so far.
        result: what `generate` would have returned; None until the last round was taken.
    """

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._rounds = decoding.rounds()

    def __iter__(self) -> Iterator[RoundRecord]:
        return self

    def __next__(self) -> RoundRecord:
        return next(self._rounds)

    def close(self) -> None:
        """Ends decoding early. The model, a user's cache and the streamer are left in order."""
        self._rounds.close()

    @property
    def stats(self) -> DecodeStats:
        return self._decoding.stats

    @property
    def result(self) -> Any:
        return self._decoding.result


def stream(model: PreTrainedModel, *, tree_spec: Any = True, detail: bool = False, **generate_arguments: Any) -> Stream:
    """Decodes with `model`, yielding a `RoundRecord` for each round (index 0: the prompt's forward).

        for record in hf_treespec.stream(model, **inputs, max_new_tokens=64):
            print(tokenizer.decode(record.committed), end="", flush=True)

    Args:
        tree_spec: as in `generate`.
        detail: fills `target_probability`, `target_rank`, `sizing` and `draft` of each record, for somebody who looks at
            rounds. It costs time, but none that `seconds` counts, and changes nothing else.
        generate_arguments: as in `generate`.

    Raises:
        TreeSpecError: as `generate` does, before the first round.
    """
    enable()
    decoding = model.generate(tree_spec=StreamRequest(tree_spec), **generate_arguments)
    decoding.detail = detail
    return Stream(decoding)
