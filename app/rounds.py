"""One round of a tree as a page draws it: plain data made from the library's records.

It refuses to know how rounds come about, and how they are drawn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hf_treespec
from hf_treespec import RoundRecord, Stream


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of the tree as a page draws it. Lists are by node; the bonus, where there is one, comes last.

    Attributes:
        texts: of each token by itself; `ids` are the tokens.
        parents: -1 for the root (node 0). The bonus hangs off the last kept node.
        scores: the drafter's path scores; 0 for the bonus.
        target: the target's probability of the token after its parent; ranks: 0 is its first choice.
        kept: drafted nodes that were committed, in order.
        bonus: whether the target added a token of its own.
        pieces: of the text, one for each committed token: the drafted ones, then the target's own.
        seconds: "draft", "verify" and "host".
        sizing: gain and price by nodes, see `hf_treespec.Sizing`; None where nothing was sized.
        cut: drafted nodes that were not worth checking: "texts", "parents" and "scores". They are numbered on from the
            other nodes.
    """

    index: int
    ids: list[int]
    texts: list[str]
    parents: list[int]
    scores: list[float]
    target: list[float]
    ranks: list[int]
    kept: list[int]
    bonus: bool
    pieces: list[str]
    seconds: dict[str, float]
    sizing: dict[str, Any] | None
    cut: dict[str, list[Any]]


class RoundViews:
    """`Round`s from records made with `detail=True`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._text = hf_treespec.Detokenizer(tokenizer)

    def round(self, record: RoundRecord, rounds: Stream) -> Round:
        assert record.target_probability is not None and record.target_rank is not None
        ids, parents = record.tokens.tolist(), record.parents.tolist()
        scores, cut = self._drafted(record)
        kept = record.path[1:]
        if record.bonus is not None:
            ids, parents, scores = [*ids, record.bonus], [*parents, record.path[-1]], [*scores, 0.0]
        else:  # decoding stopped on a drafted token: it is in the text, though not in the path
            last = record.tree.child(record.path[-1], record.committed[-1])
            kept = kept if last is None else [*kept, last]
        pieces = [self._text.add([token]) for token in record.committed]
        if rounds.result is not None:
            pieces[-1] += self._text.end()
        return Round(
            index=record.index,
            ids=ids,
            texts=[self._word(token) for token in ids],
            parents=parents,
            scores=scores,
            target=[float(f"{p:.3g}") for p in record.target_probability],
            ranks=record.target_rank,
            kept=kept,
            bonus=record.bonus is not None,
            pieces=pieces,
            seconds={part: round(value, 6) for part, value in record.seconds.items()},
            sizing=None if record.sizing is None else dataclasses.asdict(record.sizing),
            cut=cut,
        )

    def _drafted(self, record: RoundRecord) -> tuple[list[float], dict[str, list[Any]]]:
        """The drafter's own scores of the verified nodes, and the nodes that were cut."""
        scores = [round(score, 4) for score in record.scores.tolist()]
        cut: dict[str, list[Any]] = {"texts": [], "parents": [], "scores": []}
        if record.draft is None:
            return scores, cut
        first = len(record.tokens) + (record.bonus is not None)  # the number of the first one that was cut
        verified, place = record.tree, {0: 0}
        tokens, parents = record.draft.tokens[0].tolist(), record.draft.parents[0].tolist()
        for node, score in enumerate(record.draft.scores[0].tolist()):
            if not node:
                continue
            above = place[parents[node]]
            found = verified.child(above, tokens[node]) if above < first else None
            if found is None:
                place[node] = first + len(cut["texts"])
                cut["texts"].append(self._word(tokens[node]))
                cut["parents"].append(above)
                cut["scores"].append(round(score, 4))
            else:
                place[node] = found
                scores[found] = round(score, 4)
        return scores, cut

    def _word(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = str(self._tokenizer.decode([token]))
        return self._known[token]
