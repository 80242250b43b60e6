"""Compare rows over several streams by their ranks: Friedman's test, and a test of each row against the best one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import friedmanchisquare, rankdata, wilcoxon

from research.comparison.comparison_file import Entry
from research.comparison.plan import Row


@dataclass(frozen=True)
class Ranks:
    """Ranks of the rows that all streams have, the best first; `p` is the p-value of Friedman's test."""

    rows: list[tuple[Row, float, float | None]]  # row, mean rank (1 is best), p-value against the best row
    streams: int
    p: float
    smallest: float  # the smallest p-value that a pair of rows can have with this number of streams


def ranked(entries: Sequence[Entry]) -> Ranks | None:
    """Rank the rows that all streams have by A_last; return None with fewer than three streams or three such rows.

    The tests follow Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", 2006, sections 3.1.3 and
    3.2.2, with Holm's correction of the p-values.
    """
    streams: dict[str, dict[Row, float]] = {}
    for entry in entries:
        streams.setdefault(entry.stream, {})[entry.row] = entry.means["last"]
    rows = [row for row in next(iter(streams.values()), {}) if all(row in shares for shares in streams.values())]
    if len(streams) < 3 or len(rows) < 3:
        return None
    values = np.array([[shares[row] for row in rows] for shares in streams.values()])
    means = rankdata(-values, axis=1).mean(axis=0)
    order = np.argsort(means, kind="stable").tolist()
    pairs = [values[:, order[0]] - values[:, place] for place in order[1:]]
    adjusted = _holm([float(wilcoxon(pair).pvalue) if pair.any() else 1.0 for pair in pairs])
    p = float(friedmanchisquare(*values.T).pvalue)
    return Ranks(
        [(rows[place], float(means[place]), p) for place, p in zip(order, [None, *adjusted], strict=True)],
        len(streams),
        1.0 if math.isnan(p) else p,
        2.0 ** (1 - len(streams)),
    )


def _holm(values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's step-down correction for multiple comparisons."""
    adjusted, most = [0.0] * len(values), 0.0
    for step, place in enumerate(np.argsort(values).tolist()):
        most = adjusted[place] = max(most, min(1.0, values[place] * (len(values) - step)))
    return adjusted
