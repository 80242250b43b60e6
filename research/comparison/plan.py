"""The plan of a comparison: a YAML file with streams, methods, classifiers, drift corrections, seeds and a reference.

Streams have the settings of `dulbe-peft run`. The settings of a method are added to those of the stream.
"""

import hashlib
import itertools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationError

from dulbe_peft.classifiers.registry import parse_classifier
from dulbe_peft.photos.data.source import DataSource
from dulbe_peft.photos.runs.run_settings import GROUPS, ModelSettings, read_yaml, setting_values, validated
from dulbe_peft.strategies.base import Strategy
from dulbe_peft.strategies.registry import make_strategy
from dulbe_peft.utils.records import Fraction, Record, first_problem
from dulbe_peft.utils.settings import field_types
from dulbe_peft.utils.specs import closest

DRIFT = {"auto": "follow", "linear": "move"}  # value of `drift` -> what a rule must be able to do

CHOICE_FRACTION = 0.2  # fraction of the training images that is held out to choose settings
LAST_TASK = "last task"  # as `retention` of a stream: the last task is not learned, and its test images are measured
DRAWN = ("validation_fraction", "images_per_class", "test_images_per_class")  # without these, nothing is drawn
# Settings that neither a stream nor a method may have, with the reason.
_FIXED = {
    "output": "the command line sets one folder for all runs",
    "seed": "`seeds` lists the seeds",
    "drift": "`drift` lists the corrections to compare",
    "classifiers": "`classifiers` lists the classifiers of all methods",
    "dry_run": "a comparison always runs",
    "validation_fraction": "`choose` holds out training images itself",
}
# Settings that define a stream. A method that changed them would learn other images and could not be compared.
_STREAM_ONLY = (*field_types(DataSource), "class_order", "order_seed", "increment", "initial_increment")
SETTINGS = {name for kind in GROUPS.values() for name in field_types(kind)}  # of a run
_METHOD_FIXED = dict.fromkeys(_STREAM_ONLY, "it belongs to the stream and is the same for all methods") | _FIXED


def _different(values: list[Any]) -> list[Any]:
    if len(set(map(str, values))) < len(values):
        raise ValueError(f"the entries must be different, got {values!r:.100}")
    return values


Name = Annotated[str, BeforeValidator(str), Field(pattern=r"^[ ,+=-]*\w[\w ,.+=-]*$")]
Chosen = dict[tuple[str, "Row"], dict[str, Any]]  # the settings that were chosen for a stream's row
Work = list[tuple["Cell", list["Row"]]]
# Saved as a list to keep the order of the plan: the keys of a JSON object would be sorted by name.
Streams = Annotated[
    dict[str, dict[str, Any]], BeforeValidator(dict), PlainSerializer(lambda streams: list(streams.items()))
]
Listed = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
Different = AfterValidator(_different)


@dataclass(frozen=True)
class Row:
    """A row of the table: a method, a classifier, and a drift correction. Every row is compared on every stream."""

    method: str
    classifier: str
    drift: str = "none"

    @property
    def title(self) -> str:
        """The name of the row in tables and messages."""
        return f"{self.method} with {self.classifier}" + ("" if self.drift == "none" else f", drift {self.drift}")


@dataclass(frozen=True)
class Cell:
    """A run of one method on one stream with one seed. It is kept in `folder` inside the comparison's folder."""

    stream: str
    method: str
    seed: int
    settings: dict[str, Any]
    folder: str
    # A data set of classes that are never learned, `LAST_TASK` or None, followed by the scales of the update to test.
    retention: tuple[Any, ...] = (None,)


class Plan(Record):
    """A comparison of all rows with all seeds on all streams."""

    streams: Streams
    methods: dict[str, dict[str, Any]]
    choices: dict[str, dict[str, list[Any]]]  # method -> setting -> values to choose from on held-out images
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    reference: Row  # the row with which all others are compared
    # Stream -> `Cell.retention`. Not saved in `comparison.json`.
    retentions: Annotated[dict[str, tuple[Any, ...]], Field(exclude=True)] = {}

    def rows_of(self, method: str) -> list[Row]:
        return [row for row in self.rows if row.method == method]

    def cells(self, chosen: Chosen | None = None) -> Work:
        """Return all runs of the comparison, each with the rows that use it.

        A method has a separate run for each combination of settings that was chosen for some row. Without `chosen`, a
        method that has settings to choose from runs with its defaults.
        """
        work = []
        for stream, method, seed in itertools.product(self.streams, self.methods, self.seeds):
            groups: dict[str, tuple[dict[str, Any], list[Row]]] = {}
            for row in self.rows_of(method):
                selected = {} if chosen is None or method not in self.choices else chosen.get((stream, row))
                if selected is not None:  # otherwise no trial of the row was finished
                    groups.setdefault(as_text(selected), (selected, []))[1].append(row)
            for text, (selected, rows) in groups.items():
                folder = _run_folder(stream, method, text, seed)
                work.append((self._cell(stream, method, seed, selected, folder), rows))
        return work

    def trials(self) -> Work:
        """Return the runs that try the settings to choose from, each with the rows that use it."""
        work = []
        for stream, method in itertools.product(self.streams, self.choices):
            for values in self.combinations(method):
                folder = f"choices/{stream}/{method}/{_folder_name(as_text(values))}"
                held_out = values | {"validation_fraction": CHOICE_FRACTION}
                work.append((self._cell(stream, method, self.seeds[0], held_out, folder), self.rows_of(method)))
        return work

    def every_combination(self) -> Work:
        """Return the runs of all methods with all combinations of their settings to choose from, and all seeds."""
        work = []
        for stream, method in itertools.product(self.streams, self.methods):
            for values, seed in itertools.product(self.combinations(method), self.seeds):
                folder = _run_folder(stream, method, as_text(values), seed)
                work.append((self._cell(stream, method, seed, values, folder), self.rows_of(method)))
        return work

    def combinations(self, method: str) -> list[dict[str, Any]]:
        """Return all combinations of the settings to choose from, one of which is empty if there are none."""
        grid = self.choices.get(method, {})
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def trains(self, method: str) -> bool:
        """Return whether a method trains the model."""
        return _strategy(self.methods[method]).adapts

    def _cell(self, stream: str, method: str, seed: int, more: dict[str, Any], folder: str) -> Cell:
        seeds = {"seed": seed, "order_seed": seed, "draw_seed": seed}
        if self.streams[stream].get("class_order") is not None:
            del seeds["order_seed"]
        given = self.streams[stream] | self.methods[method] | more
        if all(given.get(name) is None for name in DRAWN):
            del seeds["draw_seed"]
        settings = seeds | given
        if self.trains(method):  # keeps the features from before each task, which any drift correction needs
            settings["drift"] = "linear"
        elif settings.get("precision", "auto") == "auto":
            settings["precision"] = "float32"  # as methods that train have with "auto"
        return Cell(stream, method, seed, settings, folder, self.retentions.get(stream, (None,)))


def as_text(values: Mapping[str, Any]) -> str:
    """Format settings as "name=value,name=value"."""
    return ",".join(f"{name}={value}" for name, value in values.items())


def _run_folder(stream: str, method: str, settings: str, seed: int) -> str:
    return "/".join(filter(None, ("runs", stream, method, _folder_name(settings), f"seed-{seed}")))


def _folder_name(text: str) -> str:
    name = quote(text, safe=" =,.+")
    return name if len(name) <= 100 else hashlib.sha256(name.encode()).hexdigest()


class _Stream(Record, extra="allow"):
    """A stream of the YAML file: the settings of a run as extra fields, and the data to measure retention on.

    `protocol` is a file for `dulbe-peft run`, relative to the YAML file. The stream has its settings, except those of
    the method, and its own settings override them. With `retention: last task`, the last task is not learned.
    """

    protocol: str | None = None
    retention: str | None = None
    retention_scales: Annotated[list[Fraction], Listed] = []


class _Method(Record, extra="allow"):
    """A method of the YAML file: the settings of a run as extra fields, and the values to choose from."""

    choose: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}


class _PlanFile(Record):
    """The content of the YAML file of a comparison."""

    streams: Annotated[dict[Name, _Stream], Field(min_length=1)]
    methods: Annotated[dict[Name, _Method], Field(min_length=1)]
    classifiers: Annotated[list[str], Listed, Field(min_length=1), Different] = ["bridge"]
    drift: Annotated[list[Literal["auto", "none", "linear"]], Listed, Field(min_length=1), Different] = ["auto"]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), Different] = [0]
    reference: dict[Literal["method", "classifier", "drift"], str] | None = None


def read_plan(path: str | Path) -> Plan:
    """Read and check the YAML file of a comparison. An error names the wrong entry."""
    content = read_yaml(Path(path), "comparison")
    try:
        return make_plan(content, Path(path).parent)
    except (ValueError, TypeError) as error:
        words = first_problem(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{path}: {words}") from error


def make_plan(content: dict[str, Any], folder: Path = Path()) -> Plan:
    """Check the content of a YAML file in `folder`, and return its plan."""
    file = _PlanFile.model_validate(content)
    streams, methods = file.streams.items(), file.methods.items()
    for name, stream in streams:
        if stream.retention_scales and stream.retention is None:
            raise ValueError(f"stream {name!r}: retention_scales has no effect without retention")
    settings = {name: _settings(f"method {name!r}", method.model_extra, _METHOD_FIXED) for name, method in methods}
    rows = tuple(row for name, values in settings.items() for row in _rows(name, values, file))
    plan = Plan(
        streams={name: _stream_settings(name, stream, folder) for name, stream in streams},
        methods=settings,
        choices={name: _choices(name, method.choose) for name, method in methods if method.choose},
        rows=rows,
        seeds=tuple(file.seeds),
        reference=rows[0] if file.reference is None else _reference(rows, file.reference),
        retentions={name: (_path(s.retention), *s.retention_scales) for name, s in streams if s.retention},
    )
    for cell, _ in plan.cells() + plan.trials():
        for name in ("model", "data"):
            if not cell.settings.get(name):
                raise ValueError(f"stream {cell.stream!r} has no setting {name!r}")
        validated(cell.settings)
    return plan


def _rows(method: str, settings: Mapping[str, Any], file: _PlanFile) -> list[Row]:
    """Return the rows of a method: the classifiers of the file and of the method, with each drift that can apply."""
    strategy = _strategy(settings)
    kinds = {text: parse_classifier(text).kind for text in (*file.classifiers, *strategy.classifiers)}
    listed = {kinds[text].name for text in file.classifiers}
    added = [
        text for text in strategy.classifiers if kinds[text].rule_type.belongs_to and kinds[text].name not in listed
    ]
    rows = []
    for text in (*file.classifiers, *added):
        corrections = [
            drift for drift in file.drift if strategy.adapts and DRIFT.get(drift) in kinds[text].rule_type.can
        ]
        uncorrected = ["none"] if "none" in file.drift or not corrections else []
        rows += [Row(method, text, drift) for drift in (*uncorrected, *corrections)]
    return rows


def _strategy(method: Mapping[str, Any]) -> Strategy:
    """Return the strategy of a method; the default is that of `dulbe-peft run`."""
    return make_strategy(method.get("strategy", ModelSettings.strategy))


def _stream_settings(name: str, stream: _Stream, folder: Path) -> dict[str, Any]:
    """Return the settings of a stream, with those of its protocol that do not belong to a method."""
    protocol = {}
    if stream.protocol is not None:
        content = read_yaml(folder / stream.protocol, "protocol")
        protocol = {key: value for key, value in content.items() if key not in (*_FIXED, "strategy")}
    return _settings(f"stream {name!r}", protocol | (stream.model_extra or {}), _FIXED)


def _settings(owner: str, given: dict[str, Any] | None, fixed: Mapping[str, str]) -> dict[str, Any]:
    """Convert the settings of a run; raise a ValueError for a setting that `owner` may not have."""
    for name in given or {}:
        if name in fixed:
            raise ValueError(f"{owner} must not set {name!r}: {fixed[name]}")
        if name not in SETTINGS:
            allowed = sorted(SETTINGS - fixed.keys() | ({"protocol", "retention"} if fixed is _FIXED else {"choose"}))
            raise ValueError(f"{owner} has an unknown setting {name!r}{closest(str(name), allowed)}")
    values = setting_values(given or {}, owner)
    return {name: _path(value) if name in ("data", "model") else value for name, value in values.items()}


def _choices(method: str, choose: dict[str, list[Any]]) -> dict[str, list[Any]]:
    owner = f"choose of method {method!r}"
    read = [[_settings(owner, {name: value}, _METHOD_FIXED) for value in values] for name, values in choose.items()]
    return {name: _different([value[name] for value in values]) for values in read for name in values[0]}


def _path(text: Any) -> str:
    """Return a path with its environment variables replaced by their values."""
    path = os.path.expanduser(os.path.expandvars(str(text)))
    if "$" in path:
        raise ValueError(f"{text!r} uses an environment variable that is not set")
    return path


def _reference(rows: Collection[Row], entry: Mapping[Any, str]) -> Row:
    if not {"method", "classifier"} <= set(entry):
        raise ValueError(f"reference must name method and classifier, got {dict(entry)}")
    row = Row(**entry)
    if "drift" not in entry:  # take the first row with this method and classifier
        row = next((known for known in rows if (known.method, known.classifier) == (row.method, row.classifier)), row)
    if row not in rows:
        hint = closest(row.title, [known.title for known in rows])
        raise ValueError(f"reference is {row.title!r}, which is not a row of this comparison{hint}")
    return row
