"""`ngram`: continuations of what stood before, from a suffix automaton over prompt and output. No weights.

The automaton (Blumer et al. 1985) holds every substring of the text; appending a token is O(1) amortised. The state of
the longest suffix that occurred before is the last state's suffix link, and its transitions are all continuations of
all its occurrences, already merged into one trie. Shorter suffixes follow along suffix links. A token's chance blends
them, the longest first, as prediction by partial matching does:

    p(c) = Σ_l  a(m_l) · Π_{j<l} (1 - a(m_j)) · count_l(c) / total_l

where l runs over suffixes, m_l is the match length and a(m) the chance that a match of length m predicts the next
token at all, counted while the text grows.

Prompt lookup (Saxena 2023) is the chain of this; SAM decoding (Hu et al. 2024) uses the same automaton for chains.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ..errors import DrafterError
from .base import Prompt, register_drafter
from .source import MIN_SCORE, Answers, Odds, Source, SourceDrafter

# Match lengths with their own a(m): 1, 2, 3, 4-5, 6-8, 9-15, 16 and more. Priors: means over SmolLM2-135M's greedy
# answers to instruction prompts, rounded.
_LENGTHS = (1, 2, 3, 4, 6, 9, 16)
_PRIOR = (0.5, 0.65, 0.65, 0.75, 0.8, 0.9, 0.98)
# Suffixes whose counts an appended token updates, and suffixes blended for one node: longer chains of suffix links
# only occur in periodic text, where the long matches decide anyway.
_COUNTED, _BLENDED = 16, 3


class SuffixAutomaton:
    """Every substring of a growing text. State 0 is the empty string; `last` is the whole text.

    Attributes:
        length: longest string of each state.
        link: suffix link of each state, -1 for state 0.
        next: transitions of each state, token to state, in the order of first occurrence.
        count: how often each transition was taken, token to count (for the `_COUNTED` longest suffixes).
    """

    def __init__(self) -> None:
        self.length, self.link = [0], [-1]
        self.next: list[dict[int, int]] = [{}]
        self.count: list[dict[int, int]] = [{}]
        self.last = 0

    def append(self, token: int) -> None:
        """Extends the text by one token."""
        new = self._state(self.length[self.last] + 1)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            self.count[state][token] = 1
            state = self.link[state]
        if state < 0:
            self.link[new] = 0
        else:
            self._recount(state, token)
            target = self.next[state][token]
            if self.length[target] != self.length[state] + 1:
                target = self._split(state, token, target)
            self.link[new] = target
        self.last = new

    def step(self, state: int, token: int) -> int:
        """The longest suffix of `state` + `token` that occurred, as a state; 0 if the token never did."""
        while state >= 0 and token not in self.next[state]:
            state = self.link[state]
        return 0 if state < 0 else self.next[state][token]

    def _state(self, length: int) -> int:
        self.length.append(length)
        self.link.append(0)
        self.next.append({})
        self.count.append({})
        return len(self.length) - 1

    def _recount(self, state: int, token: int) -> None:
        for _ in range(_COUNTED):
            if state < 0:
                return
            self.count[state][token] += 1
            state = self.link[state]

    def _split(self, state: int, token: int, target: int) -> int:
        """The strings of `target` no longer than `state` + token become a state of their own."""
        clone = self._state(self.length[state] + 1)
        self.next[clone] = dict(self.next[target])
        self.count[clone] = dict(self.count[target])
        self.link[clone], self.link[target] = self.link[target], clone
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        return clone


class NgramSource(Source):
    """States are states of the automaton over the text."""

    def __init__(self, min_match: int = 1) -> None:
        self.min_match = min_match
        self.text = SuffixAutomaton()
        self.odds = Odds(_PRIOR)

    def read(self, token: int) -> None:
        self.text.append(token)

    def learn(self, states: Sequence[int], answers: Answers) -> None:
        asked = [(node, *suffix) for node, state in enumerate(states) for suffix in self._suffixes(state)]
        held = answers.among([node for node, _, _ in asked], [tokens for _, _, tokens in asked])
        for (_, kind, _), hit in zip(asked, held, strict=True):
            self.odds.count(kind, hit)

    def _suffixes(self, state: int) -> list[tuple[int, dict[int, int]]]:
        """The suffixes that `guesses` asks at a state: the kind of each, and the tokens that have followed it."""
        text, found = self.text, []
        for _ in range(_BLENDED):
            if state <= 0:
                break
            if text.next[state]:
                found.append((self._kind(state), text.next[state]))
            state = text.link[state]
        return found

    def root(self) -> int:
        return self.text.link[self.text.last]

    def step(self, state: int, token: int) -> int:
        state = self.text.step(state, token)
        # at the end of the text nothing has followed yet: go on with its longest suffix that occurred before
        return self.text.link[state] if state == self.text.last else state

    def guesses(self, state: int) -> dict[int, float]:
        text = self.text
        chances: dict[int, float] = {}
        left = 1.0
        for _ in range(_BLENDED):
            if state <= 0 or text.length[state] < self.min_match:
                break
            counts = text.count[state]
            if counts:
                trust = self.odds.chance[self._kind(state)]
                share = left * trust / sum(counts.values())
                for token, count in counts.items():
                    chances[token] = chances.get(token, 0.0) + share * count
                left *= 1.0 - trust
                if left < MIN_SCORE:
                    break
            state = text.link[state]
        return chances

    def _kind(self, state: int) -> int:
        return bisect_right(_LENGTHS, self.text.length[state]) - 1


@register_drafter("ngram")
class NgramDrafter(SourceDrafter):
    """Drafts what followed the longest repeated suffixes of prompt and output.

    Args:
        min_match: tokens that must match before anything is proposed; 1 always proposes where a token recurs.
    """

    def __init__(self, min_match: int = 1) -> None:
        if not isinstance(min_match, int) or min_match < 1:
            raise DrafterError(f"min_match={min_match!r} must be a whole number of tokens, 1 or more.")
        self.min_match = min_match

    def sources(self, prompt: Prompt) -> list[Source]:
        return [NgramSource(self.min_match)]
