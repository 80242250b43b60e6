"""What to use for one's own images: training-free classifiers and one short probe of training, side by side.

Everything is measured on training images that are held back. Test images are never looked at.

    whole stream    the model as it is, every classifier                     which classifier
    first tasks     the model as it is, and trained with a few settings      whether training pays

Held-back images are few, and the best of several rows on few images is the best by luck. So `bayes` without training,
which was the best on average in docs/results.md, is the advice unless another row is clearly better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from dulbe_peft.comparison.cells import read_cell
from dulbe_peft.comparison.compare import ComparisonError, compare, shares_of
from dulbe_peft.comparison.plan import CHOICE_FRACTION, DRIFTS, Plan, Row
from dulbe_peft.metrics.bootstrap import Difference, mean_share, paired_difference
from dulbe_peft.utils.records import Record
from dulbe_peft.utils.specs import parse_spec

CLASSIFIERS = ("bayes", "bridge", "prototype", "lda", "ridge", "ranpac:features=1000", "text")
TRIALS: dict[str, dict[str, Any]] = {
    f"{name} {rate:g}": {"strategy": strategy, "learning_rate": rate}
    for name, strategy in (("DuLBE", "dulbe"), ("LoRA", "lora"))
    for rate in (1e-4, 3e-4)
}
FROZEN, USUAL = "frozen", "bayes"
WHOLE, PROBE = "whole", "probe"
PROBE_TASKS, PROBE_IMAGES = 3, 16
CHANCE = 0.05  # that something is called clearly better and is not
FEW_HELD_BACK = 100  # images, below which the figures are rough


class Contest(Record):
    """Whether `row`, the best of some rows, is better than what one would use otherwise.

    Both the interval of the gain and `clear`, a sign test at 5 %, allow for the choice among the rows.
    """

    row: Row
    gain: Difference
    clear: bool


class Advice(Record):
    """`advice.json`: what to use, and how sure that is. Accuracies are fractions, on held-back training images.

    `usual` is the advice unless another classifier (`rival`) or a way to train (`training`) is clearly better.
    """

    settings: dict[str, Any]
    classifiers: dict[str, float]
    usual: str
    rival: Contest | None
    training: Contest | None
    held_back: int
    seconds: dict[str, float]


def advice_plans(
    settings: Mapping[str, Any],
    classifiers: Sequence[str] = CLASSIFIERS,
    trials: Mapping[str, dict[str, Any]] = TRIALS,
    drifts: Sequence[str] = DRIFTS,
    seed: int = 0,
) -> tuple[Plan, Plan]:
    """The two comparisons that an advice is made of: the whole stream without training, and the probe."""
    whole = dict(settings) | {"validation_fraction": CHOICE_FRACTION}
    few = min(whole.get("images_per_class") or PROBE_IMAGES, PROBE_IMAGES)
    probe = whole | {"max_tasks": PROBE_TASKS, "images_per_class": few}
    frozen = {FROZEN: {"strategy": "frozen"}}
    return (
        Plan({WHOLE: whole}, frozen, list(classifiers), ["none"], [seed]),
        Plan({PROBE: probe}, {**frozen, **trials}, list(classifiers), list(drifts), [seed]),
    )


def advise(
    settings: Mapping[str, Any],
    output: str | Path,
    jobs: int | None = None,
    classifiers: Sequence[str] = CLASSIFIERS,
    trials: Mapping[str, dict[str, Any]] = TRIALS,
    seed: int = 0,
    drifts: Sequence[str] = DRIFTS,
    log: Callable[[str], None] = print,
) -> Advice:
    """Measure on held-back training images what to use; without `trials` the probe is left out."""
    output = Path(output)
    whole, probe = advice_plans(settings, classifiers, trials, drifts, seed)
    free, taken = _measured(whole, output, jobs, log)
    ranked = sorted(free, key=lambda row: -free[row].mean())
    usual = next((row for row in free if parse_spec(row.classifier)[0] == USUAL), ranked[0])
    rival = _contest(free, [row for row in ranked if row != usual], usual)
    chosen, seconds = rival.row if rival and rival.clear else usual, {WHOLE: taken[FROZEN]}
    training = None
    if trials:
        found, taken = _measured(probe, output, jobs, log)
        training = _contest(found, [row for row in found if row.method != FROZEN], Row(FROZEN, chosen.classifier))
        if training:
            chosen, seconds[PROBE] = training.row if training.clear else chosen, taken[training.row.method]
    use = {**probe.methods[chosen.method], "classifiers": chosen.classifier}
    if chosen.drift != "none":
        use["drift"] = chosen.drift
    accuracies = {row.classifier: mean_share(free[row]) for row in ranked}
    return Advice(
        settings=use,
        classifiers=accuracies,
        usual=usual.classifier,
        rival=rival,
        training=training,
        held_back=len(free[usual]),
        seconds=seconds,
    )


def _measured(
    plan: Plan, output: Path, jobs: int | None, log: Callable[[str], None]
) -> tuple[dict[Row, np.ndarray], dict[str, float]]:
    """Row -> whether it names each held-back image right after the last task; and method -> seconds of its run."""
    try:
        compare(plan, output, jobs, log=log)
    except ComparisonError as error:
        if "no test" in str(error) or "to hold" in str(error):
            few = "there are too few training images to hold some of each task back: use --strategy frozen "
            raise ValueError(few + f"--classifiers bayes, or give more images ({error})") from error
        raise
    found: dict[Row, np.ndarray] = {}
    seconds: dict[str, float] = {}
    for cell in plan.cells():
        folder = output / cell.folder
        done = read_cell(folder)
        seconds[cell.method] = done.cost.seconds if done else 0.0
        shares = {row: shares_of(folder, row) for row in plan.rows(cell.method)}
        # A classifier that needs text is not asked where the model has none.
        found |= {row: share for row, share in shares.items() if share is not None}
    return found, seconds


def _contest(found: Mapping[Row, np.ndarray], rows: Sequence[Row], against: Row) -> Contest | None:
    """The best of k rows against another one, each at the level 5 % / k (Bonferroni); None without two images."""
    if not rows or len(found[against]) < 2:
        return None
    best = max(rows, key=lambda row: found[row].mean())
    chance = CHANCE / len(rows)
    gain = paired_difference(found[best][None], found[against][None], level=1 - chance)
    wins, losses = (int((sign * (found[best] - found[against]) > 0).sum()) for sign in (1, -1))
    clear = wins > losses and binomtest(wins, wins + losses).pvalue < chance
    return Contest(row=best, gain=gain, clear=bool(clear))


def format_advice(advice: Advice) -> str:
    """The advice in plain words."""

    def points(found: Difference) -> str:
        return f"{100 * found.mean:+.1f} points, interval {100 * found.low:+.1f} to {100 * found.high:+.1f}"

    lines = ["Without training, right of the held-back training images:"]
    lines += [f"  {100 * accuracy:5.1f} %  {name}" for name, accuracy in advice.classifiers.items()]
    if advice.rival:
        rival = advice.rival.row.classifier
        ahead = f"{rival} is" if advice.rival.clear else "No other is"
        lines.append(f"{ahead} clearly ahead of {advice.usual} ({rival}: {points(advice.rival.gain)}).")
    if advice.training:
        verdict = "Training pays" if advice.training.clear else "Training does not pay clearly"
        lines.append(
            f"{verdict}: the best of the probe, {advice.training.row.title}, is {points(advice.training.gain)} from "
            f"no training on the first tasks. Its tasks took {advice.seconds[PROBE]:.0f} s; the whole stream without "
            f"training took {advice.seconds[WHOLE]:.0f} s."
        )
    if advice.held_back < FEW_HELD_BACK:
        lines.append(f"Only {advice.held_back} images could be held back, so all of this is rough.")
    lines.append("Use: " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in advice.settings.items()))
    return "\n".join(lines)
