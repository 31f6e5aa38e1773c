"""`datastore`: continuations of earlier texts, looked up in a file that was built beforehand. No weights.

The longest suffix of the text (up to 16 tokens) that occurs in the datastore is found, and what followed it there is
proposed (REST, He et al. 2023); what chance that leaves goes to a shorter match that occurs more often. A node keeps the
interval of the datastore's sorted positions for each length of match that was asked for. Each comes from the parent's by
one binary search, and the text's own nodes outlive a round.

A guess's chance is counted by the match's length and by how often the token followed: n of t occurrences count as
n / (t + 1), since one occurrence says less than many.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..datastore import CONTEXT, NOWHERE, Datastore, Interval
from ..errors import DrafterError
from .base import Prompt, register_drafter
from .source import Answers, Odds, Source, SourceDrafter

# Kinds of guesses: by match length 1, 2, 3, 4-5, 6-8, 9-15, 16, and by share. Priors: means over 120 of SmolLM2-135M's
# greedy answers to instruction prompts, in a datastore of 680 others, rounded.
_LENGTHS, _SHARES = (1, 2, 3, 4, 6, 9, 16), (0.05, 0.15, 0.35, 0.6, 0.8)
_PRIORS = (
    (0.02, 0.06, 0.14, 0.21, 0.3, 0.45),
    (0.02, 0.06, 0.14, 0.31, 0.41, 0.63),
    (0.03, 0.06, 0.13, 0.32, 0.51, 0.82),
    (0.02, 0.05, 0.18, 0.37, 0.6, 0.82),
    (0.01, 0.05, 0.15, 0.6, 0.65, 0.94),
    (0.01, 0.05, 0.16, 0.6, 0.8, 0.98),
    (0.01, 0.1, 0.24, 0.86, 0.86, 0.98),
)
# The length of the shorter match, and how many times as often it must occur to know something new. Measured on the same
# answers: 1 to 3 tokens serve as well as searching for the best length, without it drafts bring 4 % fewer tokens.
_SHORT, _MORE = 2, 2


class Place:
    """A place in a text, and where the datastore has seen the tokens before it.

    Attributes:
        token: the last token before this place.
        before: the place before that token; None where the text begins, or where it is too far back to matter.
        guesses: what `DatastoreSource.guesses` found here, or None if it was not asked: for each of the matches that
            speak, the longest first, token to kind.
    """

    __slots__ = ("_intervals", "_longest", "before", "children", "guesses", "store", "token")

    def __init__(self, store: Datastore, token: int, before: Place | None) -> None:
        self.store, self.token, self.before = store, token, before
        self._intervals: dict[int, Interval] = {1: store.token(token)}
        self._longest = -1
        self.children: dict[int, Place] = {}
        self.guesses: list[dict[int, int]] | None = None

    def step(self, token: int) -> Place:
        """The place after `token`: always the same object, so that what was found there is kept."""
        child = self.children.get(token)
        if child is None:
            child = self.children[token] = Place(self.store, token, self)
        return child

    def interval(self, length: int) -> Interval:
        """Where the last `length` tokens occur; `length` is 1 to `CONTEXT`."""
        found = self._intervals.get(length)
        if found is None:
            found = NOWHERE if self.before is None else self.before.interval(length - 1)
            if found[0] < found[1]:
                found = self.store.narrow(found, length - 1, self.token)
            self._intervals[length] = found
        return found

    @property
    def longest(self) -> int:
        """Tokens of the longest suffix that occurs, at most `CONTEXT`; 0 where even the last one does not."""
        if self._longest < 0:
            length = 1 if self.before is None else min(self.before.longest + 1, CONTEXT)
            while length and self.interval(length)[0] >= self.interval(length)[1]:
                length -= 1
            self._longest = length
        return self._longest


class DatastoreSource(Source):
    """States are places. It learns only from what a draft has asked for: reading a long prompt costs no lookups."""

    def __init__(self, store: Datastore, min_match: int = 1, width: int = 4) -> None:
        self.store, self.min_match, self.width = store, min_match, width
        self.odds = Odds([chance for row in _PRIORS for chance in row])
        self._known: dict[tuple[int, int, int], dict[int, int]] = {}
        self._place = Place(store, -1, None)
        self._recent: deque[Place] = deque([self._place], maxlen=CONTEXT)

    def read(self, token: int) -> None:
        place = self._place
        self._place = place.step(token)
        place.children = {}  # the branches that did not come true
        self._recent.append(self._place)
        self._recent[0].before = None  # no match reaches further back

    def learn(self, states: Sequence[Place], answers: Answers) -> None:
        said = [
            (node, token, kind)
            for node, state in enumerate(states)
            for kinds in state.guesses or ()
            for token, kind in kinds.items()
        ]
        if said:
            nodes, tokens, kinds = np.array(said).T
            self.odds.count_all(kinds, answers.at(nodes, tokens))

    def root(self) -> Place:
        return self._place

    def step(self, state: Place, token: int) -> Place:
        return state.step(token)

    def guesses(self, state: Place) -> dict[int, float]:
        if state.guesses is None:
            try:
                state.guesses = self._ask(state)
            except IndexError as error:
                raise self.store.damaged("its positions lie outside of it") from error
        odds, chances = self.odds.chance, dict[int, float]()
        left = 1.0
        for kinds in state.guesses:
            taken = 0.0
            for token, kind in kinds.items():
                chance = left * odds[kind]
                taken += chance
                chances[token] = chances.get(token, 0.0) + chance
            left = max(0.0, left - taken)
        return chances

    def _ask(self, place: Place) -> list[dict[int, int]]:
        """What the longest match says, and one of `_SHORT` tokens where that occurs more often."""
        length = place.longest
        if length < self.min_match:
            return []
        first, end = place.interval(length)
        found = [self._kinds((first, end), length)]
        shorter = min(length - 1, _SHORT)
        if shorter >= self.min_match:
            wider = place.interval(shorter)
            if wider[1] - wider[0] >= _MORE * (end - first):
                found.append(self._kinds(wider, shorter))
        return found

    def _kinds(self, interval: Interval, length: int) -> dict[int, int]:
        """The `width` most frequent continuations of a match, each with its kind."""
        key = (*interval, length)
        known = self._known.get(key)
        if known is None:
            counts, total = self.store.following(interval, length)
            best = sorted(counts, key=counts.__getitem__, reverse=True)[: self.width]
            row = (len(_SHARES) + 1) * (bisect_right(_LENGTHS, length) - 1)
            known = {token: row + bisect_right(_SHARES, counts[token] / (total + 1)) for token in best}
            self._known[key] = known
        return known


def open_store(path: Any, drafter: str, option: str = "path") -> Datastore:
    """The datastore behind a drafter's option: a path, or one that is open already.

    Raises:
        DrafterError: neither. DatastoreError: it cannot be opened.
    """
    if isinstance(path, Datastore):
        return path
    if not isinstance(path, (str, os.PathLike)):
        raise DrafterError(f"drafter {drafter!r}: {option}={path!r} must be a path or an open Datastore.")
    return Datastore.open(path)


def check_fits(store: Datastore, prompt: Prompt) -> None:
    """Raises `DatastoreError` if the target cannot say the datastore's ids, or the call's tokenizer is another one."""
    store.check_vocabulary(prompt.verified.logits.shape[-1])
    if prompt.tokenizer is not None:
        store.check_tokenizer(prompt.tokenizer)


@register_drafter("datastore")
class DatastoreDrafter(SourceDrafter):
    """Drafts what followed the longest match in a datastore of earlier texts.

    A target does not know its tokenizer. The vocabulary's size is checked in every call; the tokenizer's fingerprint where
    `generate` is given `tokenizer=`, by the command line, and by `Datastore.open(path, tokenizer=tokenizer)`, whose
    result can be given as `path`. With another tokenizer's ids the text is the same, but drafts are worthless.

    Args:
        path: a file made by `hf-treespec datastore build`, or an open `Datastore`.
        min_match: tokens that must match before anything is proposed.
        width: continuations of one match at most.
    """

    needs = "a datastore of earlier texts"

    def __init__(
        self, path: str | os.PathLike[str] | Datastore | None = None, min_match: int = 1, width: int = 4
    ) -> None:
        if path is None:
            raise DrafterError("drafter 'datastore' needs path=...; build one with hf-treespec datastore build.")
        if isinstance(min_match, bool) or not isinstance(min_match, int) or not 1 <= min_match <= CONTEXT:
            raise DrafterError(f"min_match={min_match!r} must be a whole number of tokens, 1 to {CONTEXT}.")
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= 64:
            raise DrafterError(f"width={width!r} must be a whole number of continuations, 1 to 64.")
        self.store = open_store(path, "datastore")
        self.min_match, self.width = min_match, width

    def sources(self, prompt: Prompt) -> list[Source]:
        check_fits(self.store, prompt)
        return [DatastoreSource(self.store, self.min_match, self.width)]
