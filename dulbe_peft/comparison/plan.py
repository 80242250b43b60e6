"""What a comparison consists of: a YAML file that names streams, methods, classifiers and seeds.

streams:                                  name -> settings of `dulbe-peft run`
  digits: {model: demo, data: demo-digits, increment: 2}
methods:                                  name -> settings of `dulbe-peft run`, on top of the stream's
  frozen: {strategy: frozen}
  DuLBE: {strategy: dulbe, choose: {learning_rate: [1e-4, 1e-3]}}
classifiers: [bridge, ranpac:features=1000]
drift: [none, linear]                     of what the classifiers keep of old classes
seeds: [0, 1, 2]                          of the learner, the class order and the drawn images
reference: {method: frozen, classifier: bridge}
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import quote

from dulbe_peft.classifiers import METHOD_CLASSIFIERS, make_classifier, parse_classifier
from dulbe_peft.runs.settings import read_yaml, setting_values, validated
from dulbe_peft.strategies import make_strategy
from dulbe_peft.strategies.base import Strategy
from dulbe_peft.utils.checks import check_number, is_int
from dulbe_peft.utils.specs import closest, parse_spec

DRIFTS = ("none", "linear")
CHOICE_FRACTION = 0.2  # of the training images, on which settings are chosen
# What a stream is: other images in a method's runs could not be compared with those of the others.
_STREAM_ONLY = {"data", "train_split", "test_split", "test_fraction", "class_names", "skip_unreadable", "max_tasks"}
_STREAM_ONLY |= {"class_order", "order_seed", "draw_seed", "images_per_class"}
_OWN_OF_METHOD, _OWN_OF_STREAM = {"choose"}, {"retention", "retention_scales"}  # keys that are no settings of a run
_FIXED = {
    "output": "the command line names one folder for all",
    "seed": "`seeds` names them",
    "drift": "`drift` names what to compare",
    "classifiers": "`classifiers` names those of all methods",
    "resume": "a comparison always goes on",
    "dry_run": "it is a flag of the command",
    "validation_fraction": "`choose` tests on held-back training images",
}


@dataclass(frozen=True)
class Row:
    """A row of the table: what is compared on every stream.

    Attributes:
        method: name of the method.
        classifier: spec of the classifier.
        drift: whether what it keeps moves along with the features, "none" or "linear".
    """

    method: str
    classifier: str
    drift: str = "none"

    @property
    def title(self) -> str:
        """The row as people call it.

        >>> Row("DuLBE", "lda", "linear").title
        'DuLBE with lda, drift linear'
        """
        return f"{self.method} with {self.classifier}" + ("" if self.drift == "none" else f", drift {self.drift}")


@dataclass(frozen=True)
class Cell:
    """One stream that one method trains with one seed: one run.

    Attributes:
        stream: name of the stream.
        method: name of the method.
        seed: of the learner, and of the class order and the drawn images where the stream does not set them.
        settings: of `dulbe-peft run`.
        folder: where it is kept, relative to the comparison's folder.
        retention: images of classes that are in no stream, to measure what the model still knows; or None.
        retention_scales: shares of what was learned, in [0, 1], to measure that with; none: only before and after.
    """

    stream: str
    method: str
    seed: int
    settings: dict[str, Any]
    folder: str
    retention: str | None = None
    retention_scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A comparison.

    Attributes:
        streams: name -> settings.
        methods: name -> settings.
        classifiers: specs.
        drifts: of `DRIFTS`.
        seeds: at least one.
        reference: the row that all others are compared with; None: the first one, see `baseline`.
        choices: method -> setting -> values to choose from on held-back training images.
        retentions: stream -> images of classes that are in no stream.
        retention_scales: stream -> the scales to measure them with, see `Cell`.
    """

    streams: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    classifiers: list[str]
    drifts: list[str]
    seeds: list[int]
    reference: Row | None = None
    choices: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    retentions: dict[str, str] = field(default_factory=dict)
    retention_scales: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def baseline(self) -> Row:
        """The row that all others are compared with."""
        return self.reference or self.rows(next(iter(self.methods)))[0]

    def strategy(self, method: str) -> Strategy:
        """The strategy of a method."""
        return make_strategy(self.methods[method].get("strategy", "dulbe"))

    def rows(self, method: str) -> list[Row]:
        """The rows of a method: the plan's classifiers and the method's own, with every drift that means something."""
        strategy = self.strategy(method)
        own = [spec for spec in strategy.classifiers if parse_spec(spec)[0] in METHOD_CLASSIFIERS]
        named = {parse_spec(spec)[0] for spec in self.classifiers}
        specs = [*self.classifiers, *(spec for spec in own if parse_spec(spec)[0] not in named)]
        rows = []
        for spec in specs:
            cls, settings = parse_classifier(spec)
            moves = strategy.adapts and cls.follows_drift(settings)
            rows += [Row(method, spec, drift) for drift in self.drifts if moves or drift == "none"]
            if not moves and "none" not in self.drifts:
                rows.append(Row(method, spec))
        return rows

    def cells(self, chosen: Mapping[tuple[str, str], dict[str, Any]] | None = None) -> list[Cell]:
        """All runs of the comparison.

        Args:
            chosen: (stream, method) -> the settings that were chosen for it.
        """
        chosen = chosen or {}
        return [
            self._cell(stream, method, seed, chosen.get((stream, method), {}), f"runs/{stream}/{method}/seed-{seed}")
            for stream, method, seed in itertools.product(self.streams, self.methods, self.seeds)
        ]

    def trials(self, stream: str, method: str) -> list[tuple[dict[str, Any], Cell]]:
        """The settings that a method may choose from on a stream, each with the run that tries it out.

        A trial learns from a part of the training images and is tested on the others, with the first seed.
        """
        grid = self.choices.get(method, {})
        combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        held_back = {"validation_fraction": CHOICE_FRACTION}
        found = []
        for values in combinations if grid else []:
            name = quote(",".join(f"{key}={value}" for key, value in values.items()), safe=" =,.+")
            if len(name) > 100:
                name = hashlib.sha256(name.encode()).hexdigest()
            folder = f"choices/{stream}/{method}/{name}"
            found.append((values, self._cell(stream, method, self.seeds[0], values | held_back, folder)))
        return found

    def _cell(self, stream: str, method: str, seed: int, more: dict[str, Any], folder: str) -> Cell:
        seeds = {"seed": seed, "order_seed": seed, "draw_seed": seed}
        if self.streams[stream].get("class_order") is not None:
            del seeds["order_seed"]
        elif self.streams[stream].get("max_tasks") is not None:
            seeds["order_seed"] = self.seeds[0]  # in another order, the first tasks would have other classes
        # Features from before each task are kept in any case, so that drift can be asked for later.
        drift = {"drift": "linear"} if self.strategy(method).adapts else {}
        settings = seeds | self.streams[stream] | self.methods[method] | more | drift
        scales = self.retention_scales.get(stream, ())
        return Cell(stream, method, seed, settings, folder, self.retentions.get(stream), scales)


def read_plan(path: str | Path) -> Plan:
    """Read a comparison's file; every name and setting in it is checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, or a name, a setting or a value in it is unknown; the message names it.
    """
    content = read_yaml(Path(path), "comparison")
    try:
        return _plan(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _plan(content: dict[str, Any]) -> Plan:
    known = ("streams", "methods", "classifiers", "drift", "seeds", "reference")
    for key in content:
        if key not in known:
            raise ValueError(f"unknown entry {key!r}{closest(str(key), known)}")
    streams, methods = (_named(content, key) for key in ("streams", "methods"))
    classifiers = [str(spec) for spec in _listed(content, "classifiers", ["bridge"])]
    for spec in classifiers:
        make_classifier(spec, 8)
    drifts = [str(drift) for drift in _listed(content, "drift", ["none"])]
    unknown = [drift for drift in drifts if drift not in DRIFTS]
    if unknown:
        raise ValueError(f"drift has the entry {unknown[0]!r}, expected some of {list(DRIFTS)}")
    if not isinstance(content.get("seeds", []), list):
        raise ValueError(f"seeds must be a list such as [0, 1, 2], got {content['seeds']!r:.100}")
    seeds = _listed(content, "seeds", [0])
    if not all(is_int(seed) and seed >= 0 for seed in seeds):
        raise ValueError(f"seeds must be integers of at least 0, got {seeds}")
    choices = {name: _choices(name, entry["choose"]) for name, entry in methods.items() if "choose" in entry}
    retentions = {name: _path(entry["retention"]) for name, entry in streams.items() if "retention" in entry}
    plan = Plan(
        {name: _settings(f"stream {name!r}", entry, False) for name, entry in streams.items()},
        {name: _settings(f"method {name!r}", entry, True) for name, entry in methods.items()},
        classifiers,
        drifts,
        seeds,
        None,
        choices,
        retentions,
        {name: _scales(name, entry) for name, entry in streams.items() if "retention_scales" in entry},
    )
    for cell in plan.cells():
        for name in ("model", "data"):
            if not cell.settings.get(name):
                raise ValueError(f"stream {cell.stream!r} names no {name}")
        validated(cell.settings)
    for stream, method in itertools.product(plan.streams, plan.choices):
        for _, cell in plan.trials(stream, method):
            validated(cell.settings)
    return replace(plan, reference=_reference(plan, content.get("reference")))


def _named(content: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    entries = content.get(key)
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{key} must name at least one entry with its settings, got {entries!r:.100}")
    for name, entry in entries.items():
        if not re.fullmatch(r"[\w ,.+=-]*\w[\w ,.+=-]*", str(name)) or str(name).startswith("."):
            raise ValueError(f"{key}: {name!r} must be of letters, digits, spaces and the signs , . + = - _")
        if not isinstance(entry, dict):
            raise ValueError(f"{key}: {name!r} must hold settings, got {entry!r:.100}")
    return {str(name): dict(entry) for name, entry in entries.items()}


def _listed(content: dict[str, Any], key: str, default: list[Any]) -> list[Any]:
    value = content.get(key, default)
    value = value if isinstance(value, list) else [value]
    if not value or len({str(entry) for entry in value}) < len(value):
        raise ValueError(f"{key} must be a list of different entries, got {value!r:.100}")
    return value


def _check_free(owner: str, names: Iterable[str], method: bool) -> None:
    """Raise a ValueError where a stream or a method sets what it cannot."""
    for name in names:
        if name in _FIXED:
            raise ValueError(f"{owner} sets {name!r}, which it cannot: {_FIXED[name]}")
        if method and name in _STREAM_ONLY:
            raise ValueError(
                f"{owner} sets {name!r}, which it cannot: it belongs to a stream, and is the same for all methods"
            )


def _settings(owner: str, entry: dict[str, Any], method: bool) -> dict[str, Any]:
    own = _OWN_OF_METHOD if method else _OWN_OF_STREAM
    given = {name: value for name, value in entry.items() if name not in own}
    _check_free(owner, given, method)
    settings = setting_values(given, owner)
    return {name: _path(value) if name in ("data", "model") else value for name, value in settings.items()}


def _scales(stream: str, entry: dict[str, Any]) -> tuple[float, ...]:
    scales, owner = entry["retention_scales"], f"stream {stream!r}: retention_scales"
    if not isinstance(scales, list) or not scales or "retention" not in entry:
        raise ValueError(f"{owner} must be a list of numbers, beside retention, got {scales!r:.100}")
    for scale in scales:
        check_number(owner, scale, least=0, most=1)
    return tuple(float(scale) for scale in scales)


def _choices(method: str, entry: Any) -> dict[str, list[Any]]:
    if not isinstance(entry, dict) or not all(isinstance(values, list) and values for values in entry.values()):
        raise ValueError(f"method {method!r}: choose must name settings with a list of values, got {entry!r:.100}")
    owner = f"choose of method {method!r}"
    _check_free(owner, entry, True)
    grid = {name: [setting_values({name: value}, owner)[name] for value in entry[name]] for name in entry}
    for name, values in grid.items():
        if len(set(map(str, values))) < len(values):
            raise ValueError(f"{owner}: {name} must list different values, got {values!r:.100}")
    return grid


def _path(text: Any) -> str:
    """A path in which variables of the environment stand for themselves, so that a file can be passed on."""
    path = os.path.expanduser(os.path.expandvars(str(text)))
    if "$" in path:
        raise ValueError(f"{text!r} names a variable of the environment that is not set")
    return path


def _reference(plan: Plan, entry: Any) -> Row | None:
    if entry is None:
        return None
    hints = get_type_hints(Row)
    if not isinstance(entry, dict) or not {"method", "classifier"} <= set(entry) <= set(hints):
        raise ValueError(
            f"reference must name {', '.join(hints)}, the last only if it is not none, got {entry!r:.100}"
        )
    row = Row(**{name: str(value) for name, value in entry.items()})
    known: Sequence[Row] = [row for method in plan.methods for row in plan.rows(method)]
    if row not in known:
        titles = [other.title for other in known]
        raise ValueError(f"reference is {row.title!r}, which is no row of this comparison{closest(row.title, titles)}")
    return row
