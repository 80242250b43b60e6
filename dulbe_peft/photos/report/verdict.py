"""The first lines of a report: what is best, and what to do next."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dulbe_peft.classifiers.closing import TEACHING
from dulbe_peft.classifiers.registry import CLASSIFIERS
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.metrics.accuracy import BESIDE_CLASSIFIERS, TITLES, result_rows
from dulbe_peft.photos.report.run_folder import RunFolder
from dulbe_peft.photos.report.shares import ClassRow, ConfusionMatrix, Share, listed
from dulbe_peft.photos.runs.sources import tests_of
from dulbe_peft.streams.falls import ADVICE, MUCH, Cost, fallen
from dulbe_peft.training.state import Estimate
from dulbe_peft.utils.terminal import counted

_LEVEL = 0.05
_NAMED = 5  # classes that a sentence names
_WIDE = 0.1  # an interval that leaves much open
_FEW = 8  # images, by which no classifier is recommended
_OFTEN = 3  # images of one class that are taken for one other


@dataclass(frozen=True)
class Method:
    """A row of the leaderboard; several names, with what they mean, where their figures are the same throughout."""

    names: list[str]
    overall: tuple[float | None, ...]
    share: Share | None
    seconds: float | None
    size: int | None
    meaning: str

    @property
    def last(self) -> float | None:
        return self.overall[-1]

    @property
    def title(self) -> str:
        """What people call it."""
        return ", ".join(self.titles)

    @property
    def titles(self) -> list[str]:
        """What people call each of its names."""
        return [TITLES.get(n, n) for n in self.names if n != "text" or "zero_shot" not in self.names]


def leaderboard(run: RunFolder) -> list[Method]:
    """The classifiers and the baselines, the best after the last task first."""
    groups: dict[tuple[float | None, ...], list[str]] = {}
    for name, block in result_rows(run.results):
        groups.setdefault(tuple(block["overall"]), []).append(name)
    number, taught = len(run.predictions), [time.get("phases", {}) for time in run.timings if time]
    rows = []
    for overall, names in groups.items():
        right = overall[-1]
        share = Share(round(right * number), number) if number and right is not None else None
        seconds = [found[TEACHING + name] for found in taught for name in names if TEACHING + name in found]
        own = [CLASSIFIERS[name] for name in names if name in CLASSIFIERS]
        files = [run.learner / classifier.file_names()[1] for classifier in own] if run.learner else []
        size = min((file.stat().st_size for file in files if file.is_file()), default=None)
        meaning = "; ".join(dict.fromkeys(filter(None, map(summary, names))))
        rows.append(Method(names, overall, share, sum(seconds) if seconds else None, size, meaning))
    return sorted(rows, key=lambda row: -(row.last or 0))


def summary(name: str) -> str:
    """What a row of the results is; "" for a classifier from elsewhere that does not say it."""
    return BESIDE_CLASSIFIERS.get(name) or (CLASSIFIERS[name].summary if name in CLASSIFIERS else "")


def clearly_better(run: RunFolder) -> str:
    """The classifier that a sign test at 5 % finds better than the first, or ""."""
    from scipy.stats import binomtest

    others = [name for name in run.results["classifiers"] if name != run.first]
    found = []
    for name in others:
        answers = [(row.others[name] == row.true, row.right) for row in run.predictions if name in row.others]
        found.append((name, answers.count((True, False)), answers.count((False, True))))
    best, gained, lost = max(found, key=lambda row: row[1] - row[2], default=("", 0, 0))
    clear = gained > lost and binomtest(gained, gained + lost).pvalue < _LEVEL / len(others)
    return best if clear else ""


@dataclass(frozen=True)
class Estimated:
    """What `words` say before it: each classifier with its estimate, the best first."""

    words: str
    rows: list[tuple[str, Estimate]]
    few: bool = False  # images, so that no classifier can be recommended by them


def estimated(results: Mapping[str, Any]) -> Estimated | None:
    """What a run estimates without test images; None where it cannot."""
    found = results.get("estimates", {})
    rows = [(name, Estimate(*share)) for name, share in found.get("shares", {}).items()]
    if not rows:
        return None
    classes = sum(len(task) for task in results["class_names"])
    some = f" of {len(found['classes'])} of the {classes} classes" if len(found["classes"]) < classes else ""
    few = found["images"] < _FEW
    some += ", too few to tell" * few
    images = f"{found['images']:,} training image{'s' * (found['images'] != 1)}"
    words = f"estimate from {images}{some}, each left out, with its 95 % interval:"
    return Estimated(words, sorted(rows, key=lambda row: -row[1].share), few)


def recommended(found: Estimated | None, first: str) -> tuple[str, str]:
    """The classifier that should answer, and why; it is the first one where none is clearly better, or none known."""
    shares = dict(found.rows) if found else {}
    best = next(iter(shares), first)
    if found and found.few:
        return first, f"so few images cannot tell which classifier is best: {first} answers"
    if best == first or first not in shares:
        return first, f"recommended by it: {first}, which answers" if first in shares else ""
    ahead = f"{100 * (shares[best].share - shares[first].share):.1f} points more"
    if shares[best].low > shares[first].high:
        return best, f"recommended by it: {best}, with {ahead} than {first}"
    return first, f"recommended by it: {first}, which answers; {best} has {ahead}, which may be chance"


def trained_away(results: Mapping[str, Any]) -> str:
    """What training cost old classes, in a sentence with what to do, or ""."""
    points, places = dict[str, float](), dict[str, list[str]]()
    for number, saved in enumerate(results.get("costs", []), 1):
        for name, cost in fallen({name: Cost(**own) for name, own in saved.items()}).items():
            points[name] = points.get(name, 0.0) + cost.points
            places.setdefault(name, []).append(str(number))
    if points:
        worst = sorted(points, key=lambda name: -points[name])
        each = (
            f"“{n}” {points[n]:.1f} points (task{'s' * (len(places[n]) > 1)} {', '.join(places[n])})" for n in worst
        )
        said = listed(list(each), _NAMED)
        return f"Training cost old classes more than chance explains: {said}. To keep them, {ADVICE}."
    share = max((each for each in results.get("changed", []) if each is not None), default=0.0)
    if share < MUCH:
        return ""
    return (
        f"After a task's training, {100 * share:.0f} % of its images look like another old class than before. Old "
        f"classes without test images may have suffered: test them, {ADVICE}."
    )


def next_steps(run: RunFolder, rows: Sequence[ClassRow], matrix: ConfusionMatrix | None) -> list[tuple[str, str]]:
    """What to do, each with its command or "", the most useful first."""
    folder, steps = shlex.quote(str(run.folder)), []
    if not run.predictions:
        where = tests_of(run.source) if run.tested_before else ["--data", "PHOTOS"]
        words = "Test it on images that it did not learn from."
        steps.append((words, shlex.join(["dulbe-peft", "evaluate", str(run.folder), *where])))
    found = estimated(run.results)
    name, _ = recommended(found, run.first)
    if found and name != run.first:
        shares = dict(found.rows)
        words = (
            f"Use “{name}”, which is clearly better than “{run.first}” on training images that were left out: "
            f"{shares[name]} against {shares[run.first]}."
        )
        steps.append((words, f"dulbe-peft predict {folder} PHOTOS --classifier {name}"))
    whole = Share.of(run.predictions) if run.predictions else None
    weak = [row for row in rows if whole and row.share.interval[1] < whole.value]
    weak.sort(key=lambda row: (row.learned or 0, row.share.value))  # those with the fewest training images first
    if weak:
        counts = (f"{row.name} ({row.share.right} of {row.share.images} right" for row in weak)
        taught = ("" if row.learned is None else f", learned from {row.learned}" for row in weak)
        words = listed([f"{count}{more})" for count, more in zip(counts, taught, strict=True)], _NAMED)
        steps.append((f"Photograph more of the classes that are clearly below the others: {words}.", ""))
    often = [pair for pair in (matrix.mistakes if matrix else []) if pair[2] >= _OFTEN][:1]
    for true, taken, count, number in often:
        words = f"Look at {true} and {taken}: {count} of {number} test images of the first are taken for the second."
        steps.append((f"{words} Are the labels right, and are these two classes?", ""))
    if whole and whole.interval[1] - whole.interval[0] > _WIDE:
        tested = counted(whole.images, "image")
        steps.append((f"Test on more than {tested}: four times as many images halve the interval.", ""))
    if run.base_model == str(demo_model_folder()) and run.source is None:  # it knows digits, and no photographs
        return [*steps, ("Look through photographs of your own.", "dulbe-peft check YOUR-FOLDER")]
    return [*steps, ("Let it name new photographs.", f"dulbe-peft predict {folder} PHOTOS")]
