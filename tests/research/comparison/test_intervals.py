"""Test intervals and ranks against literal formulas."""

import numpy as np
import pytest
import torch
from compared import entry
from scipy.stats import friedmanchisquare, wilcoxon
from scipy.stats import t as student

from dulbe_peft.metrics.accuracy import accuracy_matrix, forgetting
from dulbe_peft.metrics.task_features import Answers
from research.comparison.intervals import estimated, holm_intervals, image_shares, mean_interval, mean_share
from research.comparison.plan import Row
from research.comparison.ranks import ranked


def answers_of(orders, seed):
    """Return answers for a stream with two classes per task and three images per class, correct at random."""
    random = np.random.default_rng(seed)
    answers = []
    for count in range(2, len(orders) + 1, 2):
        truth = torch.arange(count).repeat_interleave(3)
        predicted = torch.where(torch.from_numpy(random.random(len(truth)) < 0.6), truth, (truth + 1) % count)
        answers.append(Answers(truth, predicted, torch.rand(len(truth)), truth // 2 + 1))
    return answers


def test_measures_are_the_means_of_image_shares():
    names = ["d", "a", "c", "b", "f", "e"]
    answers = answers_of(names, 0)
    shares = image_shares(answers, names)
    accuracies = [float(step.right.float().mean()) for step in answers]
    assert shares["last"].mean() == pytest.approx(accuracies[-1])
    assert shares["average"].mean() == pytest.approx(np.mean(accuracies))
    by_task = [
        [float(s.right[s.task == i].double().mean()) for i in range(1, t + 1)] for t, s in enumerate(answers, 1)
    ]
    assert shares["forgetting"].mean() == pytest.approx(forgetting(accuracy_matrix(by_task)))
    # Images are ordered by class name: those of class "a", the second one to be learned, come first.
    assert shares["last"][:3].tolist() == answers[-1].right[3:6].double().tolist()
    assert not image_shares(answers[:1], names)["forgetting"].any()
    all_right = np.full(10, 1 + 1e-15)
    assert all_right.mean() > 1 and mean_share(all_right) == 1


def test_holm_s_intervals_exclude_zero_exactly_where_the_step_down_test_rejects():
    random = np.random.default_rng(4)
    values = [random.normal(shift, 1, (3, 60)) for shift in (0.9, 0.02, 0.45, 0.28, 0.2)]
    means = [estimated(each) for each in values]
    p = [2 * student.sf(abs(m.mean) / m.variance**0.5, m.freedom) for m in means]
    assert [m.p for m in means] == pytest.approx(p)
    order, rejected = np.argsort(p).tolist(), set()
    for place, left in zip(order, range(len(p), 0, -1), strict=True):
        if p[place] > 0.05 / left:
            break
        rejected.add(place)
    plain, corrected = [m.interval() for m in means], holm_intervals(means)
    assert {place for place, each in enumerate(corrected) if each.clear} == rejected
    assert len(rejected) < sum(each.clear for each in plain) < len(p), "the correction must make a difference here"
    for number, place in enumerate(order):
        level = 0.05 / (len(p) - min(number, len(rejected)))
        half = student.ppf(1 - level / 2, means[place].freedom) * means[place].variance ** 0.5
        assert corrected[place].high - corrected[place].mean == pytest.approx(half)
    assert holm_intervals([]) == [] and holm_intervals(means[:1]) == plain[:1]
    assert not holm_intervals([estimated(np.zeros((3, 4)))])[0].clear


def test_interval_equals_a_literal_formula():
    values = np.random.default_rng(0).normal(0.1, 1, (3, 40))
    seeds, images = values.mean(axis=1), values.mean(axis=0)
    a = sum((x - values.mean()) ** 2 for x in seeds) / 2 / 3
    b = sum((x - values.mean()) ** 2 for x in images) / 39 / 40
    half = student.ppf(0.975, (a + b) ** 2 / (a**2 / 2 + b**2 / 39)) * (a + b) ** 0.5
    interval = mean_interval(values)
    assert (interval.mean, interval.low, interval.high) == pytest.approx(
        (values.mean(), values.mean() - half, values.mean() + half)
    )
    single = mean_interval(values[:1])
    assert single.high - single.mean == pytest.approx(student.ppf(0.975, 39) * values[0].std(ddof=1) / 40**0.5)
    same = mean_interval(np.zeros((3, 40)))
    assert (same.mean, same.low, same.high, same.clear) == (0, 0, 0, False)


def test_ranks_and_p_values_over_streams_equal_scipy():
    table = {"a": (0.9, 0.8, 0.7), "b": (0.9, 0.8, 0.8), "c": (0.5, 0.6, 0.4), "d": (0.9, 0.5, 0.4)}
    entries = [
        entry(Row("frozen", name), value, stream=stream)
        for stream, values in table.items()
        for name, value in zip("xyz", values, strict=True)
    ]
    ranks = ranked([*entries, entry(Row("frozen", "alone"), 0.94, stream="a")])
    assert [(row.classifier, rank) for row, rank, _ in ranks.rows] == [("x", 1.25), ("y", 1.875), ("z", 2.875)]
    assert ranks.p == pytest.approx(friedmanchisquare(*zip(*table.values(), strict=True)).pvalue)
    x, y, z = np.array(list(table.values())).T
    p_values = sorted(wilcoxon(x, other).pvalue for other in (y, z))
    assert [p for *_, p in ranks.rows] == [
        None,
        *sorted([max(2 * p_values[0], p_values[1]), 2 * p_values[0]], reverse=True),
    ]
    assert ranks.smallest == 0.125 and ranked(entries[:6]) is None
