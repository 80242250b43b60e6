"""Measure what a method gives and what it costs, as a curve, at every setting and share of what was learned.

A point is a method with some settings and a share of its finished update (`ClassIncrementalLearner.scaled`). Its
coordinates are the accuracy on classes that are never learned and the accuracy on all learned classes. A method's
curve is the upper hull of its points, which begins at the model before training:

    learned
      |        ___ o
      |     o'         o    the points below the curve are settings that another one surpasses
      |                 \\
      |   x      x       o  before training
      +------------------------ never learned

No setting is selected: a curve is what each method can reach, as seen on the test images, with equal freedom.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.utils.folders import check_outside_saved
from dulbe_peft.utils.settings import check_int
from dulbe_peft.utils.workers import number_of_jobs
from research.comparison.cells import is_done, read_cell
from research.comparison.compare import ComparisonError, run_missing
from research.comparison.intervals import Difference, mean_interval
from research.comparison.measured import TEXT, Measured, measured, read_measured, write_measured
from research.comparison.plan import Cell, Plan, Row, as_text

LOSSES = (0.005, 0.01, 0.02, 0.04, 0.08)  # of accuracy on never learned classes, at which curves are compared


def frontier(
    plan: Plan,
    output: str | Path,
    cells: str | Path | None = None,
    jobs: int | None = None,
    log: Callable[[str], None] = print,
    draw: bool = False,
) -> list[Measured]:
    """Run the cells that have no file in `output` or in the folder `cells`, which is only read, and write their files.

    Return all that are measured. With `draw`, run nothing.

    Raises:
        ValueError: A file or a run has other settings, images or another model. Nothing is run.
        ComparisonError: Some runs failed. The files of the others are written.
    """
    if jobs is not None:
        check_int("jobs", jobs, 1)
    output = Path(output).absolute()
    check_outside_saved(output, "write a frontier")
    for name in plan.streams:
        if name not in plan.retentions:
            raise ValueError(f"stream {name!r} has no retention; a frontier needs classes that are never learned")
    work = [
        _Work(cell, rows, point_of(plan, cell), output / "cells" / _file(cell))
        for cell, rows in plan.every_combination()
    ]
    found = {one.path: read_measured(one.path, one.cell, one.point, one.rows) for one in work}
    for one in work:
        if found[one.path] is None and cells is not None:
            found[one.path] = read_measured(Path(cells) / _file(one.cell), one.cell, one.point, one.rows)
    missing = [one for one in work if found[one.path] is None]
    for one in missing:
        is_done(one.cell, output, one.rows)  # refuses a run with other settings before hours of others
    log(f"{len(work) - len(missing)} of {len(work)} cells are measured")
    if draw:
        return [record for record in found.values() if record is not None]
    try:
        calls = [(one.cell, one.rows) for one in missing]
        failed, taken = run_missing(output, number_of_jobs(jobs, None), "local", None, log, calls)
        if taken:
            log(f"another process is doing {len(taken)} runs: repeat the command for all curves")
    finally:
        for one in missing:
            folder = output / one.cell.folder
            if is_done(one.cell, output, one.rows) and (done := read_cell(folder)) is not None:
                found[one.path] = measured(one.cell, one.point, done, folder, one.rows)
                write_measured(one.path, found[one.path])
    if failed:
        raise ComparisonError(f"{len(failed)} of {len(missing)} runs failed; the first one: {failed[0]}")
    return [record for record in found.values() if record is not None]


@dataclass(frozen=True)
class _Work:
    cell: Cell
    rows: list[Row]
    point: dict[str, Any]
    path: Path


def point_of(plan: Plan, cell: Cell) -> dict[str, Any]:
    return {name: cell.settings[name] for name in plan.choices.get(cell.method, {})}


def _file(cell: Cell) -> str:
    return cell.folder.removeprefix("runs/") + ".json"


# ---------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Place:
    """One point of a curve: accuracies by seed, as fractions."""

    settings: str
    share: float
    unlearned: dict[int, float]
    learned: dict[int, float]

    @property
    def x(self) -> float:
        return float(np.mean(list(self.unlearned.values())))

    @property
    def y(self) -> float:
        return float(np.mean(list(self.learned.values())))


@dataclass(frozen=True)
class Curve:
    """The places of a method on one stream, with one classifier. All have the same seeds."""

    method: str
    places: list[Place]
    hull: list[Place]  # in descending order of the accuracy on never learned classes

    @property
    def seeds(self) -> set[int]:
        return set(self.places[0].learned)

    def learned_at(self, unlearned: float) -> dict[int, float] | None:
        """Return the learned accuracy, by seed, with at least `unlearned` on classes that are never learned.

        Between two places, it is interpolated. It is None if no place knows that much.
        """
        if unlearned > self.hull[0].x:
            return None
        for right, left in zip(self.hull, self.hull[1:]):
            if left.x <= unlearned:
                share = (right.x - unlearned) / (right.x - left.x)
                return {s: (1 - share) * right.learned[s] + share * left.learned[s] for s in self.seeds}
        return self.hull[-1].learned


def curves(records: Iterable[Measured], stream: str, classifier: str = TEXT) -> dict[str, Curve]:
    """Return the curve of each method on a stream, with the same seeds in all its places.

    Places that lack seeds of the method's most complete place are left out. The model before training is the first
    place of every curve.

    Raises:
        ValueError: If records of the stream were measured with different models or images.
    """
    records = [record for record in records if record.stream == stream]
    check_same_origin(records)
    places: dict[str, dict[tuple[str, float], Place]] = {}
    before = Place("", 0.0, {}, {})
    for record in records:
        found = places.setdefault(record.method, {})
        for point in (point for point in record.points if classifier in point.learned):
            place = before
            if point.share and record.trains:
                key = (as_text(record.point), point.share)
                place = found.setdefault(key, Place(*key, {}, {}))
            place.unlearned[record.seed] = point.unlearned
            place.learned[record.seed] = point.learned[classifier]
    return {method: _curve(method, [before, *found.values()]) for method, found in places.items()}


def check_same_origin(records: Sequence[Measured]) -> None:
    """Raise a `ValueError` if records of one stream were measured with different models or images."""
    for record in records[1:]:
        for name in ("model", "images"):
            here, there = getattr(record, name), getattr(records[0], name)
            if here != there:
                raise ValueError(
                    f"stream {record.stream!r} was measured with {name} = {there!r} by {records[0].method}, and with "
                    f"{here!r} by {record.method}: curves need the same"
                )


def _curve(method: str, places: Sequence[Place]) -> Curve:
    trained = [place for place in places if place.share] or places
    seeds = max((set(place.learned) for place in trained), key=len)
    whole = [_only(place, seeds) for place in places if place.learned and seeds <= set(place.learned)]
    return Curve(method, whole, hull(whole))


def _only(place: Place, seeds: Iterable[int]) -> Place:
    unlearned, learned = (
        {seed: values[seed] for seed in sorted(seeds)} for values in (place.unlearned, place.learned)
    )
    return Place(place.settings, place.share, unlearned, learned)


def hull(places: Sequence[Place]) -> list[Place]:
    """Return the places on the upper hull, from the one that knows most to the one that has learned most."""
    top = max(places, key=lambda place: (place.y, place.x))
    chain: list[Place] = []
    for place in sorted(places, key=lambda place: (-place.x, -place.y)):
        if place.x < top.x or (chain and place.y <= chain[-1].y):
            continue
        while len(chain) > 1 and _below(chain[-1], chain[-2], place):
            chain.pop()
        chain.append(place)
    return chain


def _below(middle: Place, right: Place, left: Place) -> bool:
    """Return whether a place is on or below the line through two others."""
    return (right.x - middle.x) * (left.y - right.y) >= (right.x - left.x) * (middle.y - right.y)


def difference(curve: Curve, other: Curve, unlearned: float) -> Difference | None:
    """Return how far a curve is above another one where both know as much of the classes that are never learned.

    The interval is over the seeds. It is None if a curve does not know as much, or if they have no common seed.
    """
    here, there = curve.learned_at(unlearned), other.learned_at(unlearned)
    if here is None or there is None or not curve.seeds & other.seeds:
        return None
    seeds = sorted(curve.seeds & other.seeds)
    return mean_interval(np.array([[here[seed] - there[seed]] for seed in seeds]))


def interval(values: dict[int, float]) -> Difference | None:
    """Return the mean over the seeds with its interval, or None for a single seed."""
    return mean_interval(np.array([[value] for value in values.values()])) if len(values) > 1 else None


def not_measured(plan: Plan, records: Iterable[Measured]) -> list[str]:
    """Return a line for each stream, method and settings that lack seeds."""
    done = {(record.stream, record.method, as_text(record.point), record.seed) for record in records}
    lines: dict[tuple[str, str, str], list[str]] = {}
    for cell, _ in plan.every_combination():
        key = (cell.stream, cell.method, as_text(point_of(plan, cell)))
        if (*key, cell.seed) not in done:
            lines.setdefault(key, []).append(str(cell.seed))
    number = f"seed{'s' * (len(plan.seeds) > 1)}"
    return [": ".join(filter(None, (*key, f"{number} {', '.join(seeds)}"))) for key, seeds in lines.items()]
