"""What a tree costs here, what its nodes are worth, and when to decode plainly.

    expected tokens of a round with n nodes        1 + S(n),   S(n) = sum of the n best calibrated path scores, each
                                                               drawn towards its mean over the last trees
    its price                                      T(1 + n)    rows of one target forward, host included
    what a second is worth                         ρ           tokens per second of the rounds so far
    chosen n                                       argmax  S(n) - ρ · (T(1 + n) - T(1));   0 decodes plainly

which is "add a node while its path score is above its marginal price" for any shape of T, flat (a GPU), linear (a CPU) or
a staircase (kernels that switch). T is measured from the rounds themselves (`costs.py`), path scores are corrected by
what happened to earlier ones (`Calibration`), and an account bounds what bad drafts may cost (`Sizer.balance`).

Nothing here can change the text: a tree is only cut. It knows nothing of models, caches or how trees are drafted. What
every round pays for is lists and loops: trees have a dozen nodes, and after a pass over all weights of a model nothing
is left in the processor's cache, so that each array function costs more than such a loop.
"""

from __future__ import annotations

import dataclasses
import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, repeat, zip_longest

import numpy as np

from .costs import CostModel, monotone
from .drafters.base import Budget
from .stats import Sizing
from .tree import TokenTree

# The account, in plain rounds. A round drafts what the account can pay should all of it be in vain, and each token earns a
# little, so that drafts which never help cost at most FIRST_BALANCE + INTEREST · tokens: 2.4 % of 256 tokens, 3.6 % of 64.
# Gains are saved, up to a limit.
FIRST_BALANCE, INTEREST, MOST_BALANCE = 1.0, 0.02, 30.0
# A call in which drafts lost all that they began with halves what the next one starts with and earns, down to this; one in
# which they won doubles it. Free drafts are worth a try on every text; one forward of a model may cost as much as a round,
# and models that never help are seldom asked in the end.
LEAST_TRUST, LEAST_TRUST_IN_MODELS = 0.25, 1 / 16
# Levels of a drafter's very first tree.
FIRST_DEPTH = 2
# After so many drafts in a row of which nothing was worth a row, one round in so many drafts.
PATIENCE, IDLE_PERIOD = 4, 3
# Drafters overrate unlikely paths more often than they underrate them: what they give half the price of a row, at most
# this, is left out before it is drafted.
MOST_MIN_SCORE = 0.05
# Scores are estimates, and those of a tree that looks better (worse) than others are exaggerated: a k-th node counts for
# so much of its own score, and for the rest what k-th nodes had in the trees before. This mean looks back so many trees.
OWN_SHARE, TREE_HORIZON = 0.6, 32
# The rate ρ looks back over so many tokens, of an earlier call over half as many. It begins with a quarter of plain ones.
RATE_HORIZON = 64.0


def _logit(q: np.ndarray) -> np.ndarray:
    q = np.clip(q, 1e-3, 1 - 1e-3)
    return np.asarray(np.log(q / (1 - q)))


class Calibration:
    """From a drafter's edge scores to chances, for first, second and later siblings.

    Around each of a few scores it counts how often edges came true and how often they should have; the differences (in
    logits) correct what lies between by interpolation. Rising, so that it does not reorder siblings of a rank. Labels are
    the edges below nodes that the target reached: the child was its own token, or not. It begins with believing the
    drafter, and old labels fade. A curve, not a line: a line that fits sure guesses promises too much of the many
    unlikely ones.
    """

    RANKS = 3
    _KNOTS = np.array([0.01, 0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99])
    _AT = _logit(_KNOTS)
    # labels that believing the drafter is worth, and the count at which old ones begin to fade
    _PRIOR, _MEMORY = 3.0, 300.0
    # Curves are tables over equal steps of the score: they are looked up far more often than made.
    _STEPS = 512
    _SCORES = _logit(np.linspace(0, 1, _STEPS + 1))
    _NEAREST = np.searchsorted((_AT[1:] + _AT[:-1]) / 2, _SCORES).tolist()

    def __init__(self) -> None:
        # for each rank and knot: labels, those that came true, and the sum of their scores
        self._counts = np.zeros((3, self.RANKS, len(self._KNOTS)))
        self._lock = threading.Lock()
        self._new = self._seen = 0
        self._correct()

    def chances(self, scores: Sequence[float], ranks: Sequence[int]) -> list[float]:
        """The chances of edges, given their scores in [0, 1] and sibling ranks (0 is the best)."""
        steps, tables, last = self._STEPS, self._table, self.RANKS - 1
        return [tables[min(rank, last)][int(score * steps + 0.5)] for score, rank in zip(scores, ranks, strict=True)]

    def observe(self, labels: Sequence[tuple[float, int, bool]]) -> None:
        """Edges below reached nodes: their scores, their ranks, and whether each was the target's own token."""
        with self._lock:
            labelled, true, promised = self._counts
            for score, rank, hit in labels:
                place = min(rank, self.RANKS - 1), self._NEAREST[int(score * self._STEPS + 0.5)]
                labelled[place] += 1.0
                promised[place] += score
                if hit:
                    true[place] += 1.0
            self._new += len(labels)
            self._seen += len(labels)
            if self._new >= min(max(2, self._seen // 8), 48):
                self._new = 0
                self._correct()

    def _correct(self) -> None:
        self._counts *= np.where(self._counts[0] > self._MEMORY, 0.5, 1.0)
        labelled, true, promised = self._counts
        expected = (promised + self._PRIOR * self._KNOTS) / (labelled + self._PRIOR)
        came_true = (true + self._PRIOR * self._KNOTS) / (labelled + self._PRIOR)
        wanted = self._AT + _logit(came_true) - _logit(expected)
        weights = labelled + 0.1  # knots without labels give way
        rising = [monotone(w.tolist(), n.tolist()) for w, n in zip(wanted, weights, strict=True)]
        curves = np.array([np.interp(self._SCORES, self._AT, curve) for curve in rising])
        self._table: list[list[float]] = (1 / (1 + np.exp(-curves))).tolist()


@dataclasses.dataclass
class Sizer:
    """Decides the size of each round of a call. What it knows outlives the call; see `knowledge.py`.

    Attributes:
        costs: of the target.
        calibration: of the drafter on this target.
        balance: what drafting may still lose, in plain rounds. A round that drafts pays its price and earns its tokens.
        trust: the share of `FIRST_BALANCE` and `INTEREST` that drafts get, after what they did in the calls before.
        rate: ρ, tokens per second.
        level_seconds: one forward of the drafter's own model; 0 for drafters without.
        usual: nodes that the last rounds verified, about; there is no use in drafting many more.
        typical: calibrated scores of the best, second, ... node, means over the last trees; 0 where a tree had none.
        idle: drafts in a row of which nothing was worth a row. After a few, only some rounds draft.
    """

    costs: CostModel
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    balance: float = FIRST_BALANCE
    trust: float = 1.0
    rate: float = 0.0
    level_seconds: float = 0.0
    usual: float = 4.0
    typical: list[float] = dataclasses.field(default_factory=list)
    idle: int = 0
    _trees: int = 0  # that `typical` is a mean over
    _skipped: int = 0
    _tried: bool = False
    _earned: float = 0.0  # by drafts in this call, in plain rounds
    # the rate's two sums, fading
    _tokens: float = 0.0
    _seconds: float = 0.0

    def begin(self) -> None:
        """A new call: whatever was lost before, it may be tried again, and a new text has another rate."""
        if self._earned > 0:
            self.trust = min(1.0, 2 * self.trust)
        elif self._earned < -FIRST_BALANCE * self.trust:
            self.trust = max(LEAST_TRUST_IN_MODELS if self.level_seconds else LEAST_TRUST, self.trust / 2)
        self._earned = 0.0
        self.balance = max(self.balance, FIRST_BALANCE * self.trust)
        self._tokens, self._seconds = self._tokens / 2, self._seconds / 2

    def budget(self, limits: Budget, context: int) -> Budget:
        """What the drafter may do this round; no nodes where the round is to be plain."""
        if self.costs.times(1) < 2:  # everything is compared with plain decoding: measure it first
            return dataclasses.replace(limits, max_nodes=0)
        curve = self.costs.curve(2, context).tolist()
        self._skipped += 1
        if self.idle >= PATIENCE and self._skipped < IDLE_PERIOD:
            return dataclasses.replace(limits, max_nodes=0)
        self._skipped = 0
        # in plain rounds: one row more, one forward of the drafter, and what the account leaves for forwards
        row, level = curve[2] / curve[1] - 1, self.level_seconds / curve[1]
        left = self.balance - row
        if left < level:
            return dataclasses.replace(limits, max_nodes=0)
        depth = limits.max_depth if self._tried else FIRST_DEPTH  # what a forward costs is not known before the first
        if level:
            depth = int(left / level)
        depth, self._tried = min(depth, limits.max_depth), True
        rate = self._rate(curve[1])
        return dataclasses.replace(
            limits,
            max_nodes=min(limits.max_nodes, int(self.usual) + 4),
            max_depth=depth,
            min_gain=min(0.9, rate * self.level_seconds),
            min_score=min(MOST_MIN_SCORE, 0.5 * rate * (curve[2] - curve[1])),
        )

    def cut(self, tree: TokenTree, context: int) -> TokenTree:
        """The part of a tree (one row) that is worth its rows here, depth first, with calibrated path scores."""
        if len(tree) == 1:
            return tree
        scores, order = self._weigh(tree)
        self._remember([scores[node] for node in order[1:]])
        curve = self.costs.curve(len(tree), context).tolist()
        rate, nodes, best = self._rate(curve[1]), 0, 0.0
        for count, worth in enumerate(self._worth(scores, order)[: self._affordable(curve)], 1):
            gain = worth - rate * (curve[1 + count] - curve[1])
            if gain > best:
                nodes, best = count, gain
        self.usual = max(nodes, 0.8 * self.usual)
        return tree.depth_first(order[: nodes + 1], scores)

    def explain(self, tree: TokenTree, context: int, nodes: int) -> Sizing:
        """What `cut` has decided by, told before the round is learnt from. `nodes` were verified."""
        scores, order = self._weigh(tree)
        curve = self.costs.curve(len(tree), context).tolist()
        return Sizing(
            gain=[0.0, *self._worth(scores, order)],
            seconds=curve[1:],
            rate=self._rate(curve[1]),
            affordable=self._affordable(curve),
            nodes=nodes,
        )

    def _weigh(self, tree: TokenTree) -> tuple[list[float], list[int]]:
        """Calibrated path scores, and nodes by these: the root first, parents before children."""
        scores = self.calibrated(tree)
        return scores, sorted(range(len(scores)), key=lambda node: -scores[node])

    def _remember(self, falling: list[float]) -> None:
        """One tree more in `typical`: the scores of its nodes, the best first."""
        self._trees = min(self._trees + 1, TREE_HORIZON)
        share = 1 / self._trees
        # made anew, not changed in place: calls of other threads read it
        self.typical = [old + share * (new - old) for old, new in zip_longest(self.typical, falling, fillvalue=0.0)]

    def _worth(self, scores: list[float], order: list[int]) -> list[float]:
        """S of 1, 2, ... nodes."""
        means = chain(self.typical, repeat(0.0))
        pairs = zip(order[1:], means, strict=False)
        return list(accumulate(OWN_SHARE * scores[node] + (1 - OWN_SHARE) * mean for node, mean in pairs))

    def _affordable(self, curve: list[float]) -> int:
        """The most nodes that the account can pay; a size far beyond those measured is a guess, and not among them."""
        most = curve[1] * (1 + self.balance)
        return min(bisect_right(curve, most, lo=2) - 2, max(0, 2 * self.costs.largest - 1))

    def calibrated(self, tree: TokenTree) -> list[float]:
        """Path scores as the calibration sees them; never above the parent's."""
        parents, edges, ranks = _edges(tree)
        scores = [1.0]
        for parent, chance in zip(parents, self.calibration.chances(edges, ranks), strict=True):
            scores.append(scores[parent] * chance)
        return scores

    def learn(self, drafted: TokenTree, tokens: list[int]) -> None:
        """What the target said to a drafted tree, with the drafter's own scores.

        Args:
            tokens: the round's tokens; they lead from the root through nodes of `drafted` as far as it holds them.
        """
        asked, node = {}, 0
        for token in tokens:
            child = asked[node] = drafted.child(node, token)
            if child is None:
                break
            node = child
        edges = enumerate(zip(*_edges(drafted), strict=True), 1)
        labels = [(edge, rank, asked[parent] == child) for child, (parent, edge, rank) in edges if parent in asked]
        if labels:
            self.calibration.observe(labels)

    def account(
        self,
        rows: int,
        context: int,
        committed: int,
        drafting: float,
        seconds: float,
        *,
        drafted: bool,
        forwards: int = 0,
        reading: float = 0.0,
    ) -> None:
        """A round is over.

        Args:
            rows: of its forward. context: tokens cached before it. committed: tokens it gave.
            drafting: seconds spent in the drafter, which also listens in plain rounds. seconds: of the whole round.
            drafted: whether it was asked for a tree. forwards: of the drafter's own model.
            reading: seconds besides these in which the drafter read the prompt. Once a call, so it is charged to the trust
                in later calls and not to the account.
        """
        self.costs.observe(rows, context, seconds - drafting)
        curve = self.costs.curve(rows, context)
        plain = float(curve[1])
        earned = 0.0
        if rows == 1:
            earned = -drafting / plain if drafted else 0.0
        else:
            # an interruption of the machine is not the draft's fault: no more than the size's usual price and half
            price = min(seconds - drafting, 1.5 * float(curve[rows])) + drafting
            earned = committed - price / plain
        self._earned += earned - reading / plain
        self.balance += earned
        # only gains are saved beyond the first balance
        interest = self.trust * INTEREST * committed if self.balance < FIRST_BALANCE else 0.0
        self.balance = min(self.balance + interest, MOST_BALANCE)
        if drafted:
            self.idle = 0 if rows > 1 else self.idle + 1
        if forwards:
            new = drafting / forwards
            self.level_seconds = new if not self.level_seconds else 0.8 * self.level_seconds + 0.2 * new
        if not self._seconds:
            self._tokens, self._seconds = RATE_HORIZON / 4, RATE_HORIZON / 4 * plain
        fading = 1 - min(1.0, committed / RATE_HORIZON)
        self._tokens = fading * self._tokens + committed
        self._seconds = fading * self._seconds + seconds
        self.rate = self._tokens / self._seconds

    def _rate(self, plain: float) -> float:
        """Tokens per second: what the last rounds gave (sums, not a mean of rates), at least what plain decoding gives."""
        return max(self.rate, 1.0 / plain)


def _edges(tree: TokenTree) -> tuple[list[int], list[float], list[int]]:
    """For each node but the root its parent, the score of the edge between them, and its rank among its siblings."""
    parents, scores = tree.parents[0].tolist()[1:], tree.scores[0].tolist()
    # not above 1 where rounding puts a child above its parent, and 0 below one of no chance
    edges = [
        min(1.0, score / scores[parent]) if score > 0 else 0.0
        for parent, score in zip(parents, scores[1:], strict=True)
    ]
    return parents, edges, tree.sibling_ranks[0].tolist()[1:]
