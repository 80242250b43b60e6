"""What a comparison consists of: a YAML file that names streams, methods, classifiers, drifts, seeds and a reference.

A stream's settings are those of `dulbe-peft run`; a method's come on top of them.
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
from dulbe_peft.photos.runs.settings import StreamArguments, read_yaml, setting_values, validated
from dulbe_peft.photos.runs.sources import FIELDS
from dulbe_peft.strategies.base import Strategy
from dulbe_peft.strategies.registry import make_strategy
from dulbe_peft.utils.records import Fraction, Record, first_problem
from dulbe_peft.utils.specs import closest

CHOICE_FRACTION = 0.2  # of the training images, on which settings are chosen
# Settings that neither a stream nor a method may have, and why.
_FIXED = {
    "output": "the command line names one folder for all",
    "seed": "`seeds` names them",
    "drift": "`drift` names what to compare",
    "classifiers": "`classifiers` names those of all methods",
    "dry_run": "a comparison runs",
    "validation_fraction": "`choose` tests on held-back training images",
}
# What a stream is: other images in a method's runs could not be compared with those of the others.
_STREAM_ONLY = (*FIELDS, "class_order", "order_seed", "increment", "initial_increment")
_METHOD_FIXED = dict.fromkeys(_STREAM_ONLY, "it belongs to a stream, and is the same for all methods") | _FIXED


def _different(values: list[Any]) -> list[Any]:
    if len(set(map(str, values))) < len(values):
        raise ValueError(f"the entries must be different, got {values!r:.100}")
    return values


Name = Annotated[str, BeforeValidator(str), Field(pattern=r"^[ ,+=-]*\w[\w ,.+=-]*$")]
Chosen = dict[tuple[str, "Row"], dict[str, Any]]  # the settings that were chosen for a stream's row
Work = list[tuple["Cell", list["Row"]]]
# The streams stand in the order of the plan; as a JSON object they would be sorted by their names.
Streams = Annotated[
    dict[str, dict[str, Any]], BeforeValidator(dict), PlainSerializer(lambda streams: list(streams.items()))
]
Listed = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
Different = AfterValidator(_different)


@dataclass(frozen=True)
class Row:
    """A row of the table, which is compared on every stream: a method, a classifier, and a drift."""

    method: str
    classifier: str
    drift: str = "none"

    @property
    def title(self) -> str:
        """The row as people call it."""
        return f"{self.method} with {self.classifier}" + ("" if self.drift == "none" else f", drift {self.drift}")


@dataclass(frozen=True)
class Cell:
    """One stream that one method trains with one seed: one run, kept in `folder` of the comparison's folder."""

    stream: str
    method: str
    seed: int
    settings: dict[str, Any]
    folder: str
    retention: tuple[Any, ...] = (None,)  # images of classes in no stream or None; then scales of the update


class Plan(Record):
    """A comparison and its runs: every row with every seed on every stream."""

    streams: Streams
    methods: dict[str, dict[str, Any]]
    choices: dict[str, dict[str, list[Any]]]  # settings of methods to choose from on held-back images
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    reference: Row  # that all others are compared with
    # Each stream's `Cell.retention`; `comparison.json` does not have it.
    retentions: Annotated[dict[str, tuple[Any, ...]], Field(exclude=True)] = {}

    def rows_of(self, method: str) -> list[Row]:
        return [row for row in self.rows if row.method == method]

    def cells(self, chosen: Chosen | None = None) -> Work:
        """All runs of the comparison with the rows that each serves: a run for each choice that some row has made.

        Without `chosen`, a method that has a choice runs with its defaults.
        """
        work = []
        for stream, method, seed in itertools.product(self.streams, self.methods, self.seeds):
            groups: dict[str, tuple[dict[str, Any], list[Row]]] = {}
            for row in self.rows_of(method):
                own = {} if chosen is None or method not in self.choices else chosen.get((stream, row))
                if own is not None:  # else no trial of the row was finished
                    groups.setdefault(as_text(own), (own, []))[1].append(row)
            for text, (own, rows) in groups.items():
                folder = "/".join(filter(None, ("runs", stream, method, _folder_name(text), f"seed-{seed}")))
                work.append((self._cell(stream, method, seed, own, folder), rows))
        return work

    def trials(self) -> Work:
        """The runs that try out the settings that methods may choose from, with the rows that each serves."""
        work = []
        for stream, (method, grid) in itertools.product(self.streams, self.choices.items()):
            for combination in itertools.product(*grid.values()):
                values = dict(zip(grid, combination, strict=True))
                folder = f"choices/{stream}/{method}/{_folder_name(as_text(values))}"
                values["validation_fraction"] = CHOICE_FRACTION
                work.append((self._cell(stream, method, self.seeds[0], values, folder), self.rows_of(method)))
        return work

    def trains(self, method: str) -> bool:
        """Return whether a method trains the model."""
        return _strategy(self.methods[method]).adapts

    def _cell(self, stream: str, method: str, seed: int, more: dict[str, Any], folder: str) -> Cell:
        seeds = {"seed": seed, "order_seed": seed, "draw_seed": seed}
        if self.streams[stream].get("class_order") is not None:
            del seeds["order_seed"]
        settings = seeds | self.streams[stream] | self.methods[method] | more
        if self.trains(method):  # features from before each task let drift be asked for later
            settings["drift"] = "linear"
        return Cell(stream, method, seed, settings, folder, self.retentions.get(stream, (None,)))


def as_text(values: Mapping[str, Any]) -> str:
    """Settings as one reads them."""
    return ",".join(f"{name}={value}" for name, value in values.items())


def _folder_name(text: str) -> str:
    name = quote(text, safe=" =,.+")
    return name if len(name) <= 100 else hashlib.sha256(name.encode()).hexdigest()


class _Stream(Record, extra="allow"):
    """Settings of a run, as further fields, and what a stream says beside them."""

    retention: str | None = None
    retention_scales: Annotated[list[Fraction], Listed] = []


class _Method(Record, extra="allow"):
    """Settings of a run, as further fields, and those to choose from."""

    choose: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}


class _PlanFile(Record):
    """The YAML file of a comparison."""

    streams: Annotated[dict[Name, _Stream], Field(min_length=1)]
    methods: Annotated[dict[Name, _Method], Field(min_length=1)]
    classifiers: Annotated[list[str], Listed, Field(min_length=1), Different] = ["bridge"]
    drift: Annotated[list[Literal["auto", "none", "linear"]], Listed, Field(min_length=1), Different] = ["auto"]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), Different] = [0]
    reference: dict[Literal["method", "classifier", "drift"], str] | None = None


def read_plan(path: str | Path) -> Plan:
    """Read a comparison's file; every name and setting in it is checked, and messages name what is wrong."""
    content = read_yaml(Path(path), "comparison")
    try:
        return make_plan(content)
    except (ValueError, TypeError) as error:
        words = first_problem(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{path}: {words}") from error


def make_plan(content: dict[str, Any]) -> Plan:
    """The plan that the content of a YAML file asks for, checked."""
    file = _PlanFile.model_validate(content)
    streams, methods = file.streams.items(), file.methods.items()
    for name, one in streams:
        if one.retention_scales and one.retention is None:
            raise ValueError(f"stream {name!r}: retention_scales must stand beside retention")
    settings = {name: _settings(f"method {name!r}", one.model_extra, _METHOD_FIXED) for name, one in methods}
    rows = tuple(row for name, own in settings.items() for row in _rows(name, own, file))
    plan = Plan(
        streams={name: _settings(f"stream {name!r}", one.model_extra, _FIXED) for name, one in streams},
        methods=settings,
        choices={name: _choices(name, one.choose) for name, one in methods if one.choose},
        rows=rows,
        seeds=tuple(file.seeds),
        reference=rows[0] if file.reference is None else _reference(rows, file.reference),
        retentions={name: (_path(one.retention), *one.retention_scales) for name, one in streams if one.retention},
    )
    for cell, _ in plan.cells() + plan.trials():
        for name in ("model", "data"):
            if not cell.settings.get(name):
                raise ValueError(f"stream {cell.stream!r} names no {name}")
        validated(cell.settings)
    return plan


def _rows(method: str, settings: Mapping[str, Any], file: _PlanFile) -> list[Row]:
    """The rows of a method: the file's classifiers and the method's own, with every drift that means something."""
    strategy = _strategy(settings)
    asked = {text: parse_classifier(text).kind for text in (*file.classifiers, *strategy.classifiers)}
    named = {asked[text].name for text in file.classifiers}
    own = [text for text in strategy.classifiers if asked[text].belongs_to and asked[text].name not in named]
    rows = []
    for text in (*file.classifiers, *own):
        moving = [drift for drift in file.drift if strategy.adapts and asked[text].follows_drift(drift)]
        still = ["none"] if "none" in file.drift or not moving else []
        rows += [Row(method, text, drift) for drift in (*still, *moving)]
    return rows


def _strategy(method: Mapping[str, Any]) -> Strategy:
    """What a method trains by; where it names none, as `run` does."""
    return make_strategy(method.get("strategy", StreamArguments.strategy))


def _settings(owner: str, given: dict[str, Any] | None, fixed: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a run, converted; a ValueError where a stream or a method sets what it cannot."""
    for name in given or {}:
        if name in fixed:
            raise ValueError(f"{owner} sets {name!r}, which it cannot: {fixed[name]}")
    found = setting_values(given or {}, owner)
    return {name: _path(value) if name in ("data", "model") else value for name, value in found.items()}


def _choices(method: str, choose: dict[str, list[Any]]) -> dict[str, list[Any]]:
    owner = f"choose of method {method!r}"
    read = [[_settings(owner, {name: value}, _METHOD_FIXED) for value in values] for name, values in choose.items()]
    return {name: _different([one[name] for one in given]) for given in read for name in given[0]}


def _path(text: Any) -> str:
    """A path with the values of its variables of the environment."""
    path = os.path.expanduser(os.path.expandvars(str(text)))
    if "$" in path:
        raise ValueError(f"{text!r} names a variable of the environment that is not set")
    return path


def _reference(rows: Collection[Row], entry: Mapping[Any, str]) -> Row:
    if not {"method", "classifier"} <= set(entry):
        raise ValueError(f"reference must name method and classifier, got {dict(entry)}")
    row = Row(**entry)
    if "drift" not in entry:  # the first of those that differ in their drift alone
        row = next((known for known in rows if (known.method, known.classifier) == (row.method, row.classifier)), row)
    if row not in rows:
        hint = closest(row.title, [known.title for known in rows])
        raise ValueError(f"reference is {row.title!r}, which is no row of this comparison{hint}")
    return row
