"""Write the first lines of a report: which classifier is best, and what to do next."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import bdtr

from dulbe_peft.classifiers.registry import CLASSIFIERS
from dulbe_peft.classifiers.teaching import TEACHING
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.metrics.accuracy import BESIDE_CLASSIFIERS, TITLES
from dulbe_peft.metrics.evaluation import ImageResult
from dulbe_peft.metrics.results import Results
from dulbe_peft.photos.report.run_folder import RunFolder
from dulbe_peft.photos.report.shares import ClassRow, ConfusionMatrix, Share, divided, item_of, listed
from dulbe_peft.photos.runs.setup import tests_of
from dulbe_peft.streams.training_cost import ADVICE, MUCH, significant_costs
from dulbe_peft.training.state import Estimate, about_names
from dulbe_peft.utils.terminal import counted, printable

_LEVEL = 0.05  # significance level of the sign test
_MOST_NAMES = 5  # names that a sentence lists
_WIDE = 0.1  # an interval wider than this calls for more test images
_FEW = 8  # with fewer images, no other classifier is recommended
_LOW = 0.75  # an estimate whose interval ends below this is low
_OFTEN = 3  # a confusion with at least this many images is reported


@dataclass(frozen=True)
class Method:
    """A row of the leaderboard. Classifiers with the same accuracy after every task share a row."""

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
        """Return the titles, separated by commas."""
        return ", ".join(self.titles)

    @property
    def titles(self) -> list[str]:
        """Return the title of each name. "text" has none beside "zero_shot", which has the same results."""
        return [TITLES.get(n, n) for n in self.names if n != "text" or "zero_shot" not in self.names]


def leaderboard(run: RunFolder) -> list[Method]:
    """Return the classifiers and the baselines, sorted by their accuracy after the last task."""
    groups: dict[tuple[float | None, ...], list[str]] = {}
    for name, measures in run.results.rows:
        groups.setdefault(tuple(measures.overall), []).append(name)
    taught = [time.phases for time in run.timings if time]
    rows = []
    for overall, names in groups.items():
        share = None if overall[-1] is None else counted_share(run, names, overall[-1])
        seconds = [phases[TEACHING + name] for phases in taught for name in names if TEACHING + name in phases]
        known = [CLASSIFIERS[name] for name in names if name in CLASSIFIERS]
        files = [run.learner / classifier.file_names()[1] for classifier in known] if run.learner else []
        size = min((file.stat().st_size for file in files if file.is_file()), default=None)
        meaning = "; ".join(dict.fromkeys(filter(None, map(summary, names))))
        rows.append(Method(names, overall, share, sum(seconds) if seconds else None, size, meaning))
    return sorted(rows, key=lambda row: -(row.last or 0))


def counted_share(run: RunFolder, names: Sequence[str], accuracy: float) -> Share | None:
    """Return how many test images one of `names` classified correctly, or None if this was not recorded.

    Only the zero-shot model, which is not in `predictions.csv`, is counted by its accuracy, if it fits these images.
    """
    rows = run.predictions
    for name in names if rows else ():
        if name == run.first:
            return Share.of(rows)
        if name in rows[0].others:
            return Share.counted([(row, row.others[name] == row.true) for row in rows])
    right = round(accuracy * len(rows))
    return Share(right, len(rows)) if rows and right / len(rows) == accuracy else None


def summary(name: str) -> str:
    """Describe a classifier or baseline in one line, or return "" for a third-party classifier without a summary."""
    return BESIDE_CLASSIFIERS.get(name) or (CLASSIFIERS[name].rule_type.summary if name in CLASSIFIERS else "")


def wrong_items(rows: Sequence[ImageResult]) -> list[list[ImageResult]]:
    """Return the items of which all photographs, `_OFTEN` or more, are predicted as the same wrong class."""
    items = divided(rows, lambda row: (item_of(row), row.true)).values()
    sizable = [of for of in items if len(of) >= _OFTEN and not of[0].right]
    alike = [of for of in sizable if len({row.predicted for row in of}) == 1]
    return sorted(alike, key=lambda of: -sum(row.probability for row in of) / len(of))


def clearly_better(run: RunFolder) -> str:
    """Return the classifier that is better than the first one by a sign test at 5 %, or "".

    Test images that were also learned do not count. An item counts once, for the classifier with more right images.
    """
    others = [name for name in run.results.classifiers if name != run.first]
    copies = {(copy.task, copy.position) for copy in run.pictures.copies}
    unseen = [row for row in run.predictions if (row.task, row.position) not in copies]
    counts = []
    for name in others:
        gains = Counter[object]()
        for row in (row for row in unseen if name in row.others):
            gains[item_of(row)] += (row.others[name] == row.true) - row.right
        counts.append((name, sum(gain > 0 for gain in gains.values()), sum(gain < 0 for gain in gains.values())))
    best, gained, lost = max(counts, key=lambda row: row[1] - row[2], default=("", 0, 0))
    # The test has two sides.
    clear = gained > lost and 2 * float(bdtr(lost, gained + lost, 0.5)) < _LEVEL / len(others)
    return best if clear else ""


@dataclass(frozen=True)
class Estimated:
    """The estimated accuracy of each classifier, the best first, with `words` that introduce the list."""

    words: str
    rows: list[tuple[str, Estimate]]
    few: bool = False  # whether there are too few images to recommend a classifier
    remarks: tuple[str, ...] = ()  # what the estimates mean


def estimated(results: Results) -> Estimated | None:
    """Return the accuracies that a run estimated without test images, or None if it has no estimate."""
    estimates = results.estimates
    rows = [(name, Estimate(*share)) for name, share in estimates.shares.items()]
    if not rows:
        return None
    classes = sum(len(task) for task in results.class_names)
    some = f" of {len(estimates.classes)} of the {classes} classes" if len(estimates.classes) < classes else ""
    few = estimates.images < _FEW
    some += " (too few for a reliable estimate)" * few
    images = f"{estimates.images:,} training image{'s' * (estimates.images != 1)}"
    images += f" of {counted(estimates.items, 'item')}" if estimates.items else ""
    words = f"accuracy estimated from {images}{some}, each left out in turn, with 95 % intervals:"
    remarks = estimates.remarks(classes)
    return Estimated(words, sorted(rows, key=lambda row: -row[1].share), few, remarks)


def about_data(run: RunFolder) -> list[str]:
    """Return what the training images say about the labels and about photographs of the same items."""
    known = sum(map(len, run.learned))
    # `next_steps` has the names.
    estimates = run.results.estimates.model_copy(update={"misnamed": (), "exchanged": ()})
    return [f"{line[0].upper()}{line[1:]}." for line in estimates.remarks(known)]


def estimate_leads(run: RunFolder) -> bool:
    """Return whether the page begins with the estimate and its remarks, because there are no test images."""
    estimate = estimated(run.results)
    return not run.tested and estimate is not None and not estimate.few


def chosen(run: RunFolder) -> tuple[str, str]:
    """Return the classifier to use, and why: by the estimate, or by the test images if no estimate is reliable."""
    estimate = estimated(run.results)
    if (estimate is None or estimate.few) and run.tested and (better := clearly_better(run)):
        return better, (
            f"recommended classifier: {better}, which classifies significantly more test images correctly than "
            f"{run.first}"
        )
    return recommended(estimate, run.first)


def recommended(estimate: Estimated | None, first: str) -> tuple[str, str]:
    """Return the classifier to use, and why: `first`, unless the estimate of another one is clearly better."""
    shares = dict(estimate.rows) if estimate else {}
    best = next(iter(shares), first)
    if estimate and estimate.few:
        return first, f"there are too few images to tell which classifier is best, so predict uses {first}"
    if best == first or first not in shares:
        return first, f"recommended classifier: {first}, which predict uses by default" if first in shares else ""
    points = f"{100 * (shares[best].share - shares[first].share):.1f} points"
    if shares[best].low > shares[first].high:
        return best, f"recommended classifier: {best}, whose estimate is {points} higher than that of {first}"
    return first, (
        f"recommended classifier: {first}, which predict uses by default; the estimate of {best} is {points} higher, "
        "which may be chance"
    )


def trained_away(results: Results) -> str:
    """Return a sentence on what training cost old classes and how to avoid it, or ""."""
    points, places = dict[str, float](), dict[str, list[str]]()
    for number, costs in enumerate(results.costs, 1):
        for name, cost in significant_costs(costs).items():
            points[name] = points.get(name, 0.0) + cost.points
            places.setdefault(name, []).append(str(number))
    if points:
        worst = sorted(points, key=lambda name: -points[name])
        each = (
            f"“{n}” {points[n]:.1f} points (task{'s' * (len(places[n]) > 1)} {', '.join(places[n])})" for n in worst
        )
        losses = listed(list(each), _MOST_NAMES)
        lowered = "Training lowered the accuracy on old classes by more than chance explains"
        return f"{lowered}: {losses}. Next time, {ADVICE}."
    changed = {number: share for number, share in enumerate(results.changed, 1) if share is not None}
    number = max(changed, key=lambda each: changed[each], default=0)
    if not number or changed[number] < MUCH:
        return ""
    return (
        f"Training on task {number} changed the most likely old class of {100 * changed[number]:.0f} % of its images, "
        "and old classes had too few test images to show what that means for them: test more of them, "
        f"{ADVICE}."
    )


def hardly_knows(results: Results) -> bool:
    """Return whether the names alone are near guessing, at most twice as good, and every estimate is low."""
    classes, names = sum(map(len, results.class_names)), results.zero_shot
    shares = [Estimate(*share) for share in results.estimates.shares.values()]
    guessing = names is not None and names.last_accuracy is not None and names.last_accuracy < 2 / max(classes, 2)
    return guessing and classes > 2 and bool(shares) and max(share.high for share in shares) < _LOW


def _items(share: Share) -> str:
    return f", {counted(share.items, 'item')}" if share.items else ""


def next_steps(run: RunFolder, rows: Sequence[ClassRow], matrix: ConfusionMatrix | None) -> list[tuple[str, str]]:
    """Return what to do next, each step with its command or "", the most useful step first."""
    folder, steps = shlex.quote(str(run.folder)), []
    if not run.predictions:
        flags = tests_of(run.source) if run.tested_before else {"data": "PHOTOS"}
        where = [word for name, value in flags.items() for word in (f"--{name}", value)]
        words = "Test the learner on images that it has not learned."
        steps.append((words, shlex.join(["dulbe-peft", "evaluate", str(run.folder), *where])))
    best, why = chosen(run)
    use = "" if best == run.first else f" --classifier {best}"
    if use:
        steps.append((f"{why[0].upper()}{why[1:]}.", f"dulbe-peft predict {folder} PHOTOS{use}"))
    if not estimate_leads(run):  # then its remarks name them
        names = about_names(run.results.estimates.misnamed, run.results.estimates.exchanged)
        steps += [(f"{words[0].upper()}{words[1:]}.", "") for words in names]
    if hardly_knows(run.results):
        words = "The names alone are hardly better than guessing with this model, and the estimate is low"
        steps.append((f"{words}: try a larger model.", ""))
    whole = Share.of(run.predictions) if run.predictions else None
    weak = [row for row in rows if whole and row.recall.interval[1] < whole.value]
    weak.sort(key=lambda row: (row.learned or 0, row.recall.value))  # classes with the fewest training images first
    for first in wrong_items(run.predictions)[:1]:
        name, other, label = first[0].image, first[0].predicted, first[0].true
        words = (
            f"Is the item of {printable(name)} labelled correctly? {len(first)} of {len(first)} photographs look like"
        )
        steps.append((f"{words} {other}, and none like {label}.", ""))
    if weak:
        counts = (f"{row.name} ({row.recall.right} of {row.recall.images} correct{_items(row.recall)}" for row in weak)
        taught = ("" if not row.learned else f", {counted(row.learned, 'training image')}" for row in weak)
        words = listed([f"{count}{more})" for count, more in zip(counts, taught, strict=True)], _MOST_NAMES)
        steps.append((f"Add photographs of the classes whose accuracy is clearly below average: {words}.", ""))
    items = Counter(
        (true, predicted) for _, true, predicted in {(item_of(r), r.true, r.predicted) for r in run.predictions}
    )
    often = [pair for pair in (matrix.mistakes if matrix else []) if items[pair[:2]] >= _OFTEN][:1]
    for true, predicted, count, number in often:
        words = f"Look at {true} and {predicted}: {count} of {number} test images of {true} are mistaken."
        steps.append((f"{words} Check the labels, and whether these should be two classes.", ""))
    if whole and whole.interval[1] - whole.interval[0] > _WIDE:
        what, number = ("item", whole.items) if whole.items else ("image", whole.images)
        words = f"Test on more than {counted(number, what)}: four times as many {what}s halve the interval."
        steps.append((words, ""))
    if run.base_model == str(demo_model_folder()) and run.source is None:  # the demo's learner knows only digits
        return [*steps, ("Check photographs of your own.", "dulbe-peft check YOUR-FOLDER")]
    return [*steps, ("Classify new photographs.", f"dulbe-peft predict {folder} PHOTOS{use}")]
