"""What to use for one's own images: training-free classifiers, augmentation, and one short probe of training.

Everything is measured on training images that are held back: every classifier on the whole stream, and a few ways to
train on its first tasks. What is best there is the advice; training must be clearly better, because it takes far
longer. How far such advice was below the best that one could have done is in `assets/advice/regret.json`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Self

import numpy as np
from scipy.stats import binomtest

from dulbe_peft.checkpoints.card import render_card
from dulbe_peft.checkpoints.layout import RESULTS_FILE
from dulbe_peft.comparison.cells import read_cell
from dulbe_peft.comparison.compare import ComparisonError, compare, shares_of
from dulbe_peft.comparison.intervals import Difference, mean_interval, mean_share
from dulbe_peft.comparison.plan import CHOICE_FRACTION, DRIFTS, Plan, Row
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, read_predictions
from dulbe_peft.utils.files import read_json
from dulbe_peft.utils.records import Record, read_record

CLASSIFIERS = ("bayes", "gda", "bridge", "prototype", "lda", "ridge", "ranpac:features=1000", "text")
TRIALS: dict[str, dict[str, Any]] = {
    f"{name} {rate:g}": {"strategy": name.lower(), "learning_rate": rate}
    for name in ("DuLBE", "LoRA")
    for rate in (1e-4, 3e-4)
}
FROZEN = "frozen"
# Without training, too. Characters must not be mirrored, so held-back images decide.
AUGMENTED: dict[str, dict[str, Any]] = {
    f"{FROZEN} {augment}": {"strategy": "frozen", "augment": augment, "copies": 3}
    for augment in ("affine", "crop+flip")
}
WHOLE, PROBE = "whole", "probe"
PROBE_TASKS, PROBE_IMAGES = 3, 16
CHANCE = 0.05  # that something is called clearly better and is not
FEW_HELD_BACK = 100  # images, below which the figures are rough
UNEQUAL = 3  # times as many images in one class as in another, from which on all classes count the same


class Contest(Record):
    """Whether `row`, the best of some, beats what one would use otherwise; `gain` and `clear` allow for the choice."""

    row: Row
    gain: Difference
    clear: bool


class ClassCounts(Record):
    """How many classes there are, and how many images the smallest and the largest one learned from."""

    classes: int
    fewest: int
    most: int

    @classmethod
    def of(cls, results: Mapping[str, Any]) -> Self:
        """The counts of a run, from its `results.json`."""
        images = [count for task in results["tasks"] for count in task["images"].values()]
        return cls(classes=len(images), fewest=min(images), most=max(images))

    @property
    def unequal(self) -> bool:
        """Whether classes are so different that each must count the same."""
        return self.most > UNEQUAL * self.fewest


class Regret(Record):
    """How many points such advice was below the best row on test images: over streams, with its 95 % interval."""

    streams: int
    cases: int
    mean: float
    low: float
    high: float
    largest: float


class Advice(Record):
    """`advice.json`: what to use, and how sure that is. Accuracies are fractions, on held-back training images."""

    settings: dict[str, Any]
    classifiers: dict[str, float]
    lead: Contest | None  # the best row without training against the second one
    training: Contest | None  # the best trained row against the best without
    held_back: int
    counts: ClassCounts
    zero_shot: float | None
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
    few = whole.get("images_per_class") or PROBE_IMAGES
    if not isinstance(few, str):
        few = [min(count, PROBE_IMAGES) for count in few] if isinstance(few, list) else min(few, PROBE_IMAGES)
    probe = whole | {"max_tasks": PROBE_TASKS, "images_per_class": few}
    frozen = {FROZEN: {"strategy": "frozen"}}
    views = AUGMENTED if trials and not settings.get("augment") else {}
    return (
        Plan({WHOLE: whole}, frozen | views, list(classifiers), ["none"], [seed]),
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
    """Measure on held-back training images what to use; without `trials`, classifiers alone, without augmentation."""
    output = Path(output)
    whole, probe = advice_plans(settings, classifiers, trials, drifts, seed)
    free, taken = _measured(whole, output, jobs, log)
    ranked = sorted(free, key=lambda row: -free[row].mean())
    chosen, training, seconds = ranked[0], None, {WHOLE: taken[FROZEN]}
    lead = _contest(free, ranked[:1], ranked[1], len(ranked) - 1) if len(ranked) > 1 else None
    if trials:
        found, taken = _measured(probe, output, jobs, log)
        trained = [row for row in found if row.method != FROZEN]
        training = _contest(found, trained, Row(FROZEN, chosen.classifier), len(trained))
    if training:
        seconds[PROBE] = taken[training.row.method]
        chosen = training.row if training.clear else chosen
    use = {**(whole.methods | probe.methods)[chosen.method], "classifiers": chosen.classifier}
    if chosen.drift != "none":
        use["drift"] = chosen.drift
    titles = {row: row.classifier + row.method.removeprefix(FROZEN).replace(" ", ", augment ", 1) for row in ranked}
    results = read_json(output / whole.cells()[0][0].folder / RESULTS_FILE)
    return Advice(
        settings=use,
        classifiers={titles[row]: mean_share(free[row]) for row in ranked},
        lead=lead,
        training=training,
        held_back=len(free[ranked[0]]),
        counts=ClassCounts.of(results),
        zero_shot=results.get("zero_shot", {}).get("last_accuracy"),
        seconds=seconds,
    )


def _measured(
    plan: Plan, output: Path, jobs: int | None, log: Callable[[str], None]
) -> tuple[dict[Row, np.ndarray], dict[str, float]]:
    """Row -> what each held-back image adds to its accuracy after the last task; and method -> seconds of its run."""
    try:
        compare(plan, output, jobs, log=log)
    except ComparisonError as error:
        if "no test" in str(error) or "to hold" in str(error):
            few = "there are too few training images to hold some of each task back: use --strategy frozen "
            raise ValueError(few + f"--classifiers bayes, or give more images ({error})") from error
        raise
    found: dict[Row, np.ndarray] = {}
    seconds: dict[str, float] = {}
    for cell, rows in plan.cells():
        folder = output / cell.folder
        done, weights = read_cell(folder), _weights(folder)
        seconds[cell.method] = done.cost.seconds if done else 0.0
        shares = {row: shares_of(folder, row) for row in rows}
        # A classifier that needs text is not asked where the model has none.
        found |= {row: share * weights for row, share in shares.items() if share is not None}
    return found, seconds


def _weights(run: Path) -> np.ndarray:
    """What each held-back image counts, (n,), in the order of the classes' names; unequal classes count the same."""
    held_back = Counter(row.true for row in read_predictions(run / PREDICTIONS_FILE))
    counts = np.array([held_back[name] for name in sorted(held_back)])
    if not ClassCounts.of(read_json(run / RESULTS_FILE)).unequal:
        return np.ones(counts.sum())
    return np.repeat(counts.sum() / (len(counts) * counts), counts)


def _contest(found: Mapping[Row, np.ndarray], rows: Sequence[Row], against: Row, tried: int) -> Contest | None:
    """The best of the rows against another one, at the level 5 % / tried (Bonferroni); None without two images."""
    if not rows or len(found[against]) < 2:
        return None
    best, chance = max(rows, key=lambda row: found[row].mean()), CHANCE / tried
    ahead = found[best] - found[against]
    gain = mean_interval(ahead[None], level=1 - chance)
    wins, losses = int((ahead > 0).sum()), int((ahead < 0).sum())
    clear = gain.mean > 0 and wins > losses and binomtest(wins, wins + losses).pvalue < chance
    return Contest(row=best, gain=gain, clear=bool(clear))


def known_regret() -> Regret | None:
    """How good such advice was where `benchmarks.advising` measured it."""
    path = Path(str(resources.files("dulbe_peft") / "assets" / "advice" / "regret.json"))
    return read_record(path, Regret) if path.is_file() else None


def format_advice(advice: Advice) -> str:
    """The advice as people read it in a terminal."""
    return render_card("advice.txt", advice=advice, few=FEW_HELD_BACK, regret=known_regret()).rstrip()
