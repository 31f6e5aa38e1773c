"""`ngram`: continuations of what stood before, from a suffix automaton over prompt and output. No weights.

The automaton (Blumer et al. 1985) holds every substring of the text; appending a token is O(1) amortised. The state of
the longest suffix that occurred before is the last state's suffix link, and its transitions are all continuations of
all its occurrences, already merged into one trie. Shorter suffixes follow along suffix links. A child's score blends
them, the longest first, as prediction by partial matching does:

    p(c) = Σ_l  a(m_l) · Π_{j<l} (1 - a(m_j)) · count_l(c) / total_l

where l runs over suffixes, m_l is the match length and a(m) the chance that a match of length m predicts the next
token at all, counted while the text grows. The tree is grown best first by path score.

Prompt lookup (Saxena 2023) is the chain of this; SAM decoding (Hu et al. 2024) uses the same automaton for chains.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right

from ..errors import DrafterError
from ..tree import TokenTree
from .base import Budget, Commit, DraftContext, Drafter, Prompt, register_drafter

# Match lengths with their own a(m): 1, 2, 3, 4-5, 6-8, 9-15, 16 and more.
_LENGTHS = (1, 2, 3, 4, 6, 9, 16)
# a(m) before anything is counted, and how many observations that is worth. Means of SmolLM2-135M's greedy answers to
# instruction prompts, rounded.
_PRIOR = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_PRIOR_WEIGHT = 8.0
# Suffixes whose counts an appended token updates, and suffixes blended for one node: longer chains of suffix links
# only occur in periodic text, where the long matches decide anyway.
_COUNTED, _BLENDED = 16, 3
# A path less likely than this is not worth a row in any cost model (a row costs over 1 % of a pass).
_MIN_SCORE = 0.01


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


@register_drafter("ngram")
class NgramDrafter(Drafter):
    """Drafts what followed the longest repeated suffixes of prompt and output.

    Args:
        min_match: tokens that must match before anything is proposed; 1 always proposes where a token recurs.
    """

    def __init__(self, min_match: int = 1) -> None:
        if not isinstance(min_match, int) or min_match < 1:
            raise DrafterError(f"min_match={min_match!r} must be a whole number of tokens, 1 or more.")
        self.min_match = min_match

    def start(self, prompt: Prompt) -> None:
        self._text = SuffixAutomaton()
        self._hits = [a * _PRIOR_WEIGHT for a in _PRIOR]
        self._tries = [_PRIOR_WEIGHT] * len(_PRIOR)
        for token in prompt.ids[0].tolist():
            self._read(token)

    def observe(self, commit: Commit) -> None:
        for token in commit.tokens:
            self._read(token)

    def _read(self, token: int) -> None:
        text = self._text
        state = text.link[text.last] if text.last else 0
        for _ in range(_BLENDED):  # did each suffix that we would have asked predict this token?
            if state <= 0:
                break
            bucket = bisect_right(_LENGTHS, text.length[state]) - 1
            self._tries[bucket] += 1
            self._hits[bucket] += token in text.next[state]
            state = text.link[state]
        text.append(token)

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        tokens, parents, scores = [context.last_token], [-1], [1.0]
        text = self._text
        frontier: list[tuple[float, int, int, int, int]] = []  # (-score, order, parent, token, state)
        depth = [0]
        self._expand(frontier, 0, 1.0, text.link[text.last], budget.max_children)
        while frontier and len(tokens) <= budget.max_nodes:
            negative, _, parent, token, state = heapq.heappop(frontier)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            depth.append(depth[parent] + 1)
            if depth[node] < budget.max_depth:
                if state == text.last:  # the end of the text: go on with its longest suffix that occurred before
                    state = text.link[state]
                self._expand(frontier, node, -negative, state, budget.max_children)
        return TokenTree(tokens, parents, scores)

    def _expand(
        self, frontier: list[tuple[float, int, int, int, int]], node: int, score: float, state: int, children: int
    ) -> None:
        """Puts the likeliest continuations of `state` on the frontier, as children of `node`."""
        text = self._text
        chance: dict[int, float] = {}
        target: dict[int, int] = {}
        left = score
        for _ in range(_BLENDED):
            if state <= 0 or text.length[state] < self.min_match:
                break
            counts = text.count[state]
            if counts:
                bucket = bisect_right(_LENGTHS, text.length[state]) - 1
                trust = self._hits[bucket] / self._tries[bucket]
                share = left * trust / sum(counts.values())
                for token, count in counts.items():
                    chance[token] = chance.get(token, 0.0) + share * count
                    target.setdefault(token, text.next[state][token])  # the longest context goes on
                left *= 1.0 - trust
                if left < _MIN_SCORE:
                    break
            state = text.link[state]
        best = heapq.nlargest(children, chance, key=chance.__getitem__) if len(chance) > children else chance
        for token in best:
            if chance[token] >= _MIN_SCORE:
                heapq.heappush(frontier, (-chance[token], len(frontier) + node * 65536, node, token, target[token]))
