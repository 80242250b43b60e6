"""Compare finished runs of the files in `examples/papers` with published numbers.

`published.yaml` has the published numbers, and `reproduced.json` those of runs, which the command `verify --run` adds.
docs/reproduce.md shows both.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from dulbe_peft.photos.report.run_folder import RunFolder, read_run
from dulbe_peft.photos.runs.run_settings import given_settings, read_yaml, validated
from dulbe_peft.utils.records import Record, read_record, write_record
from dulbe_peft.utils.settings import field_types

FILES = Path(__file__).parents[2] / "examples" / "papers"
REPRODUCED = Path(__file__).with_name("reproduced.json")


class Ours(Record):
    """The numbers of a run, in percent, and what they depend on."""

    average: float
    last: float
    classifier: str
    model: str
    seed: int | None
    date: str
    versions: dict[str, str]


class Reproduced(Record):
    """The content of `reproduced.json`: the name of a file in `examples/papers` -> the numbers of a run of it."""

    runs: dict[str, Ours] = {}


def add_run(folder: str | Path, path: Path) -> tuple[str, Ours]:
    """Add the numbers of a finished run to the file `path`, and return the name of its settings file and the numbers.

    Raises:
        ValueError: If the run is not finished, its strategy has no file, or its settings are not those of the file.
    """
    run = read_run(folder)
    name = run.strategy
    file = FILES / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(f"{folder} was run with the strategy {name!r}, which has no file in examples/papers")
    if not run.finished or not run.tested:
        raise ValueError(f"{folder} is not finished or was not tested: repeat the command of the run")
    if wrong := differences(run, given_settings(str(file), {})):
        raise ValueError(f"{folder} is not a run of examples/papers/{file.name}: {'; '.join(wrong)}")
    scores = run.results.classifiers[run.first]
    base, last = run.base_model or "unknown", scores.overall[-1]
    if last is None:
        raise ValueError(f"{folder} has no test images of its last classes: test it first")
    ours = Ours(
        average=round(100 * scores.average_accuracy, 2),
        last=round(100 * last, 2),
        classifier=run.first,
        model=Path(base).name if os.path.isdir(base) else base,
        seed=run.results.seed,
        date=time.strftime("%Y-%m-%d"),
        versions=dict(run.results.versions),
    )
    known = read_record(path, Reproduced) if path.exists() else Reproduced()
    write_record(path, Reproduced(runs=dict(sorted((known.runs | {name: ours}).items()))))
    return name, ours


def differences(run: RunFolder, settings: dict[str, Any]) -> list[str]:
    """Return how the settings of a run differ from those of a file, in words; the model and the data may differ."""
    wanted_run = validated(settings)
    stream, strategy = wanted_run.stream, wanted_run.model.methods[0]
    wanted: dict[str, Any] = {"strategy": {"name": strategy.name, **strategy.settings()}}
    found: dict[str, Any] = {"strategy": run.settings["strategy"]}
    parts: list[tuple[str, Any]] = [("adapter", wanted_run.adapter), ("arguments", wanted_run.learner)]
    for part, given in parts:
        kind: Any = type(given)
        names = settings.keys() & field_types(kind).keys()
        actual = run.settings.get(part) or {}
        wanted |= {name: getattr(given, name) for name in names}
        found |= {name: actual.get(name, getattr(given, name)) for name in names}
    sizes = [len(task) for task in run.results.class_names]
    wanted["classes of the first task"] = stream.initial_increment or stream.increment
    found["classes of the first task"] = sizes[0]
    if len(sizes) > 1:
        wanted["classes of the second task"], found["classes of the second task"] = stream.increment, sizes[1]
    return [
        f"{name} is {found[name]!r:.200}, and {wanted[name]!r:.200} in the file"
        for name in wanted
        if json.dumps(found[name], default=str) != json.dumps(wanted[name], default=str)
    ]


def reproduced_table(path: Path = REPRODUCED) -> list[tuple[str, ...]]:
    """Return the head and the rows of the table: a file, the published number with its model, and ours."""
    known = read_record(path, Reproduced).runs if path.exists() else {}
    published = read_yaml(Path(__file__).with_name("published.yaml"), "published numbers")
    rows: list[tuple[str, ...]] = [("file", "published", "with", "here", "with")]
    for file in sorted(FILES.glob("*.yaml")):
        paper, ours = published.get(file.stem), known.get(file.stem)
        theirs = ("", "") if paper is None else (f"{paper['average']:.1f} / {paper['last']:.1f}", paper["model"])
        here = ("", "") if ours is None else (f"{ours.average:.1f} / {ours.last:.1f}", ours.model)
        rows.append((f"`{file.stem}`", *theirs, *here))
    return rows
