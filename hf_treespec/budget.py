"""What a tree costs here, what its nodes are worth, and when to decode plainly.

    expected tokens of a round with n nodes        1 + S(n),   S(n) = sum of the n best calibrated path scores
    its price                                      T(1 + n)    rows of one target forward, host included
    what a second is worth                         ρ           tokens per second of the rounds so far
    chosen n                                       argmax  S(n) - ρ · (T(1 + n) - T(1));   0 decodes plainly

which is "add a node while its path score is above its marginal price" for any shape of T, flat (a GPU), linear (a CPU) or
a staircase (kernels that switch). T is measured from the rounds themselves (`CostModel`), path scores are corrected by
what happened to earlier ones (`Calibration`), and an account bounds what bad drafts may cost (`Sizer.balance`).

Nothing here can change the text: a tree is only cut. It knows nothing of models, caches or how trees are drafted.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
from collections import deque

import numpy as np

from .drafters.base import Budget
from .stats import Sizing
from .tree import FloatArray, TokenTree

# Samples kept of each number of rows: the median ignores outliers, and old samples make room for new ones.
SAMPLES = 41
# T(n) / T(1) where nothing is measured yet: a little dearer for each row, so that trees are tried and then measured.
PRIOR_SLOPE = 0.05
# The account, in plain rounds. A round drafts what the account can pay should all of it be in vain, and each token earns a
# little, so that drafts which never help cost at most FIRST_BALANCE + INTEREST · tokens: 2.4 % of 256 tokens, 3.6 % of 64.
# Gains are saved, up to a limit.
FIRST_BALANCE, INTEREST, MOST_BALANCE = 1.0, 0.02, 30.0
# A call in which drafts lost all that they began with halves what the next one starts with and earns, down to this; one in
# which they won doubles it.
LEAST_TRUST = 0.25
# Levels of a drafter's very first tree.
FIRST_DEPTH = 2
# After so many drafts in a row of which nothing was worth a row, one round in so many drafts.
PATIENCE, IDLE_PERIOD = 4, 3
# Drafters overrate unlikely paths more often than they underrate them: what they give half the price of a row, at most
# this, is left out before it is drafted.
MOST_MIN_SCORE = 0.05
# The rate ρ looks back over so many tokens, of an earlier call over half as many. It begins with a quarter of plain ones.
RATE_HORIZON = 64.0


class CostModel:
    """Seconds of a round, drafting left out, by rows of its forward and cached tokens. Shared by all calls on a target.

    Robust (medians), monotone in rows (pool adjacent violators), interpolated between measured sizes, and corrected for
    the context's length by one slope that is fitted to all samples.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._fitted: tuple[list[int], list[float], float] = ([], [], 0.0)  # rows, seconds, slope beyond
        self._slope = 0.0  # a cached token adds this share
        self._count = 0
        self._lock = threading.Lock()

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """One round: a forward of `rows` on top of `context` cached tokens took `seconds`."""
        with self._lock:
            new = rows not in self._samples
            samples = self._samples.setdefault(rows, deque(maxlen=SAMPLES))
            samples.append((context, seconds))
            self._count += 1
            if self._count % 64 == 0:
                self._fit_slope()
            if new or self._count < 32 or self._count % 8 == 0:  # the curve moves slowly; a round should not pay for it
                self._fit()

    def times(self, rows: int) -> int:
        """How often so many rows were measured, of late."""
        return len(self._samples.get(rows, ()))

    @property
    def largest(self) -> int:
        """The most rows that were measured."""
        return self._fitted[0][-1] if self._fitted[0] else 1

    def measured(self) -> dict[int, int]:
        """Rows that were measured, and how often (at most `SAMPLES`)."""
        with self._lock:
            return {rows: len(samples) for rows, samples in sorted(self._samples.items())}

    def curve(self, most: int, context: int) -> FloatArray:
        """(most + 1,) seconds by rows; index 0 repeats one row."""
        rows, known, slope = self._fitted
        if not len(rows):
            return np.zeros(most + 1, np.float32)
        at = np.arange(most + 1)
        curve = np.interp(at, rows, known) + np.maximum(0, at - rows[-1]) * slope
        return np.asarray(curve * (1 + self._slope * context), dtype=np.float32)

    def _fit(self) -> None:
        """The monotone curve through the medians, at zero context."""
        rows = sorted(self._samples)
        medians = [_typical([s / (1 + self._slope * c) for c, s in self._samples[n]]) for n in rows]
        medians = self._doubt(rows, medians)
        known = monotone(medians, [float(len(self._samples[n])) for n in rows])
        if len(rows) == 1:
            slope = PRIOR_SLOPE * known[0]
        else:  # beyond what was measured it goes on as steeply as it has risen, at the end or on the whole
            slope = max((known[-1] - known[-2]) / (rows[-1] - rows[-2]), (known[-1] - known[0]) / (rows[-1] - rows[0]))
        self._fitted = (rows, known, slope)

    def _doubt(self, rows: list[int], medians: list[float]) -> list[float]:
        """A size seen once or twice, maybe interrupted, must look cheap enough to be seen again.

        It counts as half as dear again as one row at most, or as what the sizes that are known well lead to expect.
        """
        known = [(n, m) for n, m in zip(rows, medians, strict=True) if len(self._samples[n]) >= 3]
        first, last = (known[0], known[-1]) if known else ((1, 0.0), (1, 0.0))
        slope = (last[1] - first[1]) / max(1, last[0] - first[0])
        doubted = []
        for n, median in zip(rows, medians, strict=True):
            believable = max(1.5 * medians[0] * (1 + PRIOR_SLOPE * (n - rows[0])), last[1] + slope * (n - last[0]))
            doubted.append(min(median, believable) if len(self._samples[n]) < 3 else median)
        return doubted

    def to_dict(self) -> dict[str, list[list[float]]]:
        """The samples, ready for JSON."""
        with self._lock:
            return {str(rows): [[c, s] for c, s in samples] for rows, samples in self._samples.items()}

    def load(self, data: dict[str, list[list[float]]]) -> None:
        """Takes samples from `to_dict` as if they had been observed."""
        for rows, samples in data.items():
            for context, seconds in samples:
                self.observe(int(rows), int(context), float(seconds))

    def _fit_slope(self) -> None:
        """The slope under which samples of one size agree best, whatever their context."""
        groups = [np.array(s) for s in self._samples.values() if len({c for c, _ in s}) > 2]
        if not groups:
            return

        slopes = np.array([0.0, *np.geomspace(1e-6, 1e-2, 33)])
        disagreement = np.zeros(len(slopes))
        for contexts, seconds in (group.T for group in groups):
            logs = np.log(seconds)[:, None] - np.log1p(contexts[:, None] * slopes)
            disagreement += np.abs(logs - np.median(logs, axis=0)).sum(axis=0)
        self._slope = float(slopes[disagreement.argmin()])


def _typical(seconds: list[float]) -> float:
    """The median; of few samples the least, since an interruption only adds, and a size thought dear is not tried again."""
    return statistics.median(seconds) if len(seconds) >= 5 else min(seconds)


def monotone(values: list[float], weights: list[float]) -> list[float]:
    """Isotonic regression (pool adjacent violators): the rising sequence nearest to `values`."""
    blocks: list[list[float]] = []  # value, weight, count
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (v2, w2, n2), (v1, w1, n1) = blocks.pop(), blocks.pop()
            blocks.append([(v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2])
    return [value for value, _, count in blocks for _ in range(int(count))]


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
    # labels that believing the drafter is worth, and the count at which old ones begin to fade
    _PRIOR, _MEMORY = 3.0, 300.0

    def __init__(self) -> None:
        self._at = _logit(self._KNOTS)
        self._between = (self._at[1:] + self._at[:-1]) / 2
        # for each rank and knot: labels, those that came true, and the sum of their scores
        self._labels, self._true, self._promised = (np.zeros((self.RANKS, len(self._at))) for _ in range(3))
        self._corrected = np.tile(self._at, (self.RANKS, 1))
        self._lock = threading.Lock()
        self._new = self._seen = 0

    def chances(self, scores: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """(n,) chances of edges, given their scores (n,) and sibling ranks (n,) (0 is the best)."""
        x, ranks = _logit(scores), np.minimum(ranks, self.RANKS - 1)
        place = np.clip(np.searchsorted(self._at, x) - 1, 0, len(self._at) - 2)
        low, high = self._at[place], self._at[place + 1]
        y_low, y_high = self._corrected[ranks, place], self._corrected[ranks, place + 1]
        y = y_low + (y_high - y_low) * np.clip((x - low) / (high - low), 0.0, 1.0)
        return np.asarray(1 / (1 + np.exp(-y)))

    def observe(self, scores: np.ndarray, ranks: np.ndarray, hits: np.ndarray) -> None:
        """Edges below reached nodes, and whether each was the target's own token."""
        place = (np.minimum(ranks, self.RANKS - 1), np.searchsorted(self._between, _logit(scores)))
        with self._lock:
            np.add.at(self._labels, place, 1.0)
            np.add.at(self._true, place, hits)
            np.add.at(self._promised, place, scores)
            self._new += len(scores)
            self._seen += len(scores)
            if self._new >= (2 if self._seen < 100 else 24):
                self._new = 0
                self._correct()

    def _correct(self) -> None:
        fading = np.where(self._labels > self._MEMORY, 0.5, 1.0)
        for counts in (self._labels, self._true, self._promised):
            counts *= fading
        expected = (self._promised + self._PRIOR * self._KNOTS) / (self._labels + self._PRIOR)
        came_true = (self._true + self._PRIOR * self._KNOTS) / (self._labels + self._PRIOR)
        wanted = self._at + _logit(came_true) - _logit(expected)
        weights = self._labels + 0.1  # knots without labels give way
        self._corrected = np.array([monotone(w.tolist(), n.tolist()) for w, n in zip(wanted, weights, strict=True)])


def _logit(q: np.ndarray) -> np.ndarray:
    q = np.clip(q, 1e-3, 1 - 1e-3)
    return np.asarray(np.log(q / (1 - q)))


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
        idle: drafts in a row of which nothing was worth a row. After a few, only some rounds draft.
    """

    costs: CostModel
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    balance: float = FIRST_BALANCE
    trust: float = 1.0
    rate: float = 0.0
    level_seconds: float = 0.0
    usual: float = 4.0
    idle: int = 0
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
            self.trust = max(LEAST_TRUST, self.trust / 2)
        self._earned = 0.0
        self.balance = max(self.balance, FIRST_BALANCE * self.trust)
        self._tokens, self._seconds = self._tokens / 2, self._seconds / 2

    def budget(self, limits: Budget, context: int) -> Budget:
        """What the drafter may do this round; no nodes where the round is to be plain."""
        if self.costs.times(1) < 2:  # everything is compared with plain decoding: measure it first
            return dataclasses.replace(limits, max_nodes=0)
        curve = self.costs.curve(2, context)
        self._skipped += 1
        if self.idle >= PATIENCE and self._skipped < IDLE_PERIOD:
            return dataclasses.replace(limits, max_nodes=0)
        self._skipped = 0
        # in plain rounds: one row more, one forward of the drafter, and what the account leaves for forwards
        row, level = float(curve[2] / curve[1]) - 1, self.level_seconds / float(curve[1])
        left = self.balance - row
        if left < level:
            return dataclasses.replace(limits, max_nodes=0)
        depth = limits.max_depth if self._tried else FIRST_DEPTH  # what a forward costs is not known before the first
        if level:
            depth = int(left / level)
        depth, self._tried = min(depth, limits.max_depth), True
        rate = self._rate(curve)
        return dataclasses.replace(
            limits,
            max_nodes=min(limits.max_nodes, int(1.5 * self.usual) + 4),
            max_depth=depth,
            min_gain=min(0.9, rate * self.level_seconds),
            min_score=min(MOST_MIN_SCORE, 0.5 * rate * float(curve[2] - curve[1])),
        )

    def cut(self, tree: TokenTree, context: int) -> TokenTree:
        """The part of a tree (one row) that is worth its rows here; its scores become calibrated path scores."""
        if len(tree) == 1:
            return tree
        scores, order, worth, price, curve = self._weigh(tree, context)
        gain = worth - self._rate(curve) * price
        gain[self._affordable(curve) :] = -np.inf
        nodes = int(np.argmax(gain)) + 1 if gain.max() > 0 else 0
        self.usual = max(nodes, 0.8 * self.usual)
        return tree.select(np.sort(order[: nodes + 1]), scores)

    def explain(self, tree: TokenTree, context: int, nodes: int) -> Sizing:
        """What `cut` has decided by, told before the round is learnt from. `nodes` were verified."""
        _, _, worth, _, curve = self._weigh(tree, context)
        return Sizing(
            gain=[0.0, *worth.tolist()],
            seconds=curve[1:].tolist(),
            rate=self._rate(curve),
            affordable=min(len(worth), self._affordable(curve)),
            nodes=nodes,
        )

    def _weigh(
        self, tree: TokenTree, context: int
    ) -> tuple[FloatArray, np.ndarray, np.ndarray, np.ndarray, FloatArray]:
        """Calibrated scores (N,), nodes by score, and for 1, 2, ... nodes S and its price; and the curve T."""
        scores = self.calibrated(tree)
        order = np.argsort(-scores, kind="stable")  # the root first, parents before children
        curve = self.costs.curve(len(tree), context)
        return scores, order, np.cumsum(scores[order[1:]]), curve[2:] - curve[1], curve

    def _affordable(self, curve: np.ndarray) -> int:
        """The most nodes that the account can pay; a size far beyond those measured is a guess, and not among them."""
        price = curve[2:] - curve[1]  # rises
        return min(int((price <= self.balance * curve[1]).sum()), max(0, 2 * self.costs.largest - 1))

    def calibrated(self, tree: TokenTree) -> FloatArray:
        """(N,) path scores as the calibration sees them; never above the parent's."""
        edges, ranks = _edges(tree)
        logs = np.zeros(len(tree))
        logs[1:] = np.log(self.calibration.chances(edges, ranks))
        scores: FloatArray = np.exp(tree.ancestors[0] @ logs).astype(np.float32)
        return scores

    def learn(self, drafted: TokenTree, tokens: list[int]) -> None:
        """What the target said to a drafted tree, with the drafter's own scores.

        Args:
            tokens: the round's tokens; they lead from the root through nodes of `drafted` as far as it holds them.
        """
        edges, ranks = _edges(drafted)
        asked, true = (np.zeros(len(drafted), dtype=np.bool_) for _ in range(2))
        node = 0
        for token in tokens:
            asked[node] = True
            child = drafted.child(node, token)
            if child is None:
                break
            true[child], node = True, child
        below = asked[drafted.parents[0, 1:]]
        if below.any():
            self.calibration.observe(edges[below], ranks[below], true[1:][below])

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
    ) -> None:
        """A round is over.

        Args:
            rows: of its forward. context: tokens cached before it. committed: tokens it gave.
            drafting: seconds spent in the drafter, which also listens in plain rounds. seconds: of the whole round.
            drafted: whether it was asked for a tree. forwards: of the drafter's own model.
        """
        self.costs.observe(rows, context, seconds - drafting)
        plain = float(self.costs.curve(1, context)[1])
        earned = 0.0
        if rows == 1:
            earned = -drafting / plain if drafted else 0.0
        else:
            # an interruption of the machine is not the draft's fault: no more than the size's usual price and half
            price = min(seconds - drafting, 1.5 * float(self.costs.curve(rows, context)[rows])) + drafting
            earned = committed - price / plain
        self._earned += earned
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

    def _rate(self, curve: np.ndarray) -> float:
        """Tokens per second: what the last rounds gave (sums, not a mean of rates), at least what plain decoding gives."""
        return max(self.rate, 1.0 / float(curve[1]))


def _edges(tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    """Scores (N - 1,) of the edges above each node but the root, and the nodes' ranks among their siblings."""
    scores, parents = tree.scores[0], tree.parents[0, 1:]
    edges = scores[1:] / np.maximum(scores[parents], 1e-9)
    return np.clip(edges, 0.0, 1.0), tree.sibling_ranks[0, 1:]
