"""What a round costs: T(rows, context) in seconds, measured from the rounds themselves.

It knows nothing of trees or of what their nodes are worth; `budget.py` asks it what rows cost.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque

import numpy as np

from .tree import FloatArray

# Samples kept of each number of rows: the median ignores outliers, and old samples make room for new ones.
SAMPLES = 41
# T(n) / T(1) where nothing is measured yet: a little dearer for each row, so that trees are tried and then measured.
PRIOR_SLOPE = 0.05


class CostModel:
    """Seconds of a round, drafting left out, by rows of its forward and cached tokens. Shared by all calls on a target.

    Robust (medians), monotone in rows (pool adjacent violators), interpolated between measured sizes, and corrected for
    the context's length by one slope that is fitted to all samples.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._fitted: tuple[list[int], list[float], float] = ([], [], 0.0)  # rows, seconds, slope beyond
        self._base: FloatArray = np.zeros(64, np.float32)  # by rows, at zero context
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
        if most >= len(self._base):
            self._base = self._tabulate(2 * most)
        curve: FloatArray = self._base[: most + 1] * (1 + self._slope * context)
        return curve

    def _tabulate(self, count: int) -> FloatArray:
        """(count,) the fitted curve at 0, 1, ... rows; zeros where nothing is measured."""
        rows, known, slope = self._fitted
        if not rows:
            return np.zeros(count, np.float32)
        at = np.arange(count)
        return np.asarray(np.interp(at, rows, known) + np.maximum(0, at - rows[-1]) * slope, dtype=np.float32)

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
        self._base = self._tabulate(len(self._base))

    def _doubt(self, rows: list[int], medians: list[float]) -> list[float]:
        """A size seen once or twice, maybe interrupted, must look cheap enough to be seen again.

        It counts as a third dearer than one row at most, or as what the sizes that are known well lead to expect. (With
        half as dear again, a text with few sure guesses never saw it again.)
        """
        known = [(n, m) for n, m in zip(rows, medians, strict=True) if len(self._samples[n]) >= 3]
        first, last = (known[0], known[-1]) if known else ((1, 0.0), (1, 0.0))
        slope = (last[1] - first[1]) / max(1, last[0] - first[0])
        doubted = []
        for n, median in zip(rows, medians, strict=True):
            believable = max(1.35 * medians[0] * (1 + PRIOR_SLOPE * (n - rows[0])), last[1] + slope * (n - last[0]))
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
