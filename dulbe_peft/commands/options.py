"""What commands have in common: flags made of dataclass fields, the two lengths of help, and a learner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields, replace
from functools import partial, wraps
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import click

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.commands.given import check_given, noted
from dulbe_peft.runs.settings import GROUPS, from_text
from dulbe_peft.utils.settings import field_types

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.learner import ClassIncrementalLearner

_MACHINE = ("device", "num_workers", "eval_batch_size", "progress")
_ENCODING = ("precision", "backend", "force")  # of commands that encode images
Decorator = Callable[[Any], Any]


class Option(click.Option):
    """An option with the title that it stands under in the help; a rare one appears in `--help-all` alone."""

    def __init__(self, *names: Any, group: str = "options", rare: bool = False, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group, self.rare = group, rare

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return None if self.rare and not ctx.meta.get("help-all") else super().get_help_record(ctx)

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Nothing: a line says itself what it takes, and limits such as 1.2e-38 would hide it."""
        return {}


class Command(click.Command):
    """A command whose help shows its options in groups, and its examples as they were typed."""

    kept = ""  # of a command that goes on where it was stopped: what is kept

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read `--scale 0.25 0.5` as `--scale 0.25 --scale 0.5`, which is all that click knows."""
        repeated = {name for parameter in self.params if parameter.multiple for name in parameter.opts}
        expanded: list[str] = []
        flag = ""
        for arg in args:
            if flag and not arg.startswith("-") and expanded[-1] != flag:
                expanded.append(flag)
            elif arg.startswith("-"):
                flag = arg if arg in repeated else ""
            expanded.append(arg)
        return super().parse_args(ctx, expanded)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", "options"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=28)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{self.epilog}\n")


def command(usage: str = "[OPTIONS]", kept: str = "") -> Decorator:
    """Make a function a command; the decorators below it declare its parameters, its docstring ends the help."""

    def make(function: Callable[..., int]) -> Command:
        made: Command = click.command(cls=Command, help="", epilog=cleandoc(function.__doc__ or ""))(function)
        made.kept, made.options_metavar = kept, usage
        return made

    return make


def argument(name: str, help: str, **settings: Any) -> Decorator:
    """An argument by its place, with a help text."""
    return click.argument(name, help=help, **settings)


def option(*names: str, choice: Sequence[str] = (), **settings: Any) -> Decorator:
    """A flag; `choice` names the values that it takes."""
    kind = {"type": click.Choice(choice)} if choice else {}
    return click.option(*names, cls=Option, **kind, **settings)


def setting_options(shown: Collection[str], hidden: Collection[str] = ()) -> Decorator:
    """The settings of a run and `--config`. `--help` shows those in `shown`; the command lacks those in `hidden`."""

    def add(function: Any) -> Any:
        eager: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
        function = option("--help-all", help="Show all settings and exit.", **eager)(function)
        for title, kind in reversed(GROUPS.items()):
            names = [field.name for field in fields(kind) if field.name not in hidden]
            function = field_options(kind, names, title, rare=set(names) - set(shown))(function)
        return option("--config", metavar="FILE", help="YAML file with settings of run, by their names")(function)

    return add


def field_options(kind: Any, names: Collection[str], group: str = "options", rare: Collection[str] = ()) -> Decorator:
    """The named fields of a dataclass as options. One that is not given is None."""

    def add(function: Any) -> Any:
        for field in reversed([field for field in fields(kind) if field.name in names]):
            facts = _option_facts(field, field_types(kind)[field.name])
            flag = facts.pop("flag", "--" + field.name.replace("_", "-"))
            function = option(flag, field.name, group=group, rare=field.name in rare, **facts)(function)
        return function

    return add


def _option_facts(field: Field[Any], hint: Any) -> dict[str, Any]:
    default = "" if field.default in (None, "", False) else f" (default: {field.default})"
    facts: dict[str, Any] = {"help": field.metadata["help"] + default, "default": None}
    if hint is bool:
        flag = field.name.replace("_", "-")
        return facts | {"flag": f"--{flag}/--no-{flag}"}
    kind = hint if get_origin(hint) in (Annotated, Literal) else (get_args(hint) or [hint])[0]  # of list[int] | None
    if get_origin(kind) is Literal:
        return facts | {"type": click.Choice(get_args(kind))}
    if field.metadata.get("repeated"):
        return facts | {"multiple": True, "metavar": "TEXT"}
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    shown = {int: "INTEGER", float: "FLOAT", str: "TEXT"}.get(kind, "A,B,...")
    return facts | {"type": _Setting(field.name, hint), "metavar": shown}


class _Setting(click.ParamType):
    """A setting, read and checked as in a YAML file."""

    def __init__(self, name: str, hint: Any) -> None:
        self.name, self.hint = name, hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return from_text(self.name, value, self.hint)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["help-all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def labels_option(function: Any) -> Any:
    """The flag `--labels`."""
    table = "in place of --data: a table with path,label[,split], or exiftool's SourceFile,Subject"
    return option("--labels", metavar="FILE.csv", help=table)(function)


def store_option(function: Any) -> Any:
    """The flag `--no-store`."""
    kept = "keep no features of images, and find none that were kept"
    return option("--no-store", is_flag=True, group="machine", help=kept)(function)


def learner_options(optional: bool = False, choose: bool = False, encodes: bool = True) -> Decorator:
    """The learner, its machine and `load`, which makes it; `optional`: or a pristine model; `choose`: --classifier.

    A command that `encodes` images has the flags `--no-store`, `--precision`, `--backend` and `--force`.
    """
    alone = "; without LEARNER: a model that has learned nothing" if optional else ""
    own = (*_MACHINE, *_ENCODING) if encodes else _MACHINE

    def add(function: Any) -> Any:
        @wraps(function)
        def call(learner: str | None, model: str | None, **flags: Any) -> int:
            machine = {name: value for name in own if (value := flags.pop(name)) is not None}
            first = flags.pop("classifier", None)
            store = not flags.pop("no_store", True)
            load = partial(load_learner, learner=learner, model=model, machine=machine, first=first, store=store)
            load.keywords["data"] = flags.get("data")
            if not optional:
                check_given(learner, model, flags.get("data"))
            status: int = function(learner=learner, load=load, **flags)
            return status

        made = store_option(call) if encodes else call
        made = field_options(LearnerArguments, own, "machine")(made)
        if choose:
            what = "which of the learner's classifiers answers; none: its first"
            made = option("--classifier", metavar="NAME", help=what)(made)
        what = f"the base model, where it is not where it was{alone}"
        made = option("--model", metavar="MODEL", help=what)(made)
        what = "a saved learner: a run's folder, one of its tasks, or a Hub id"
        return argument("learner", what, required=not optional)(made)

    return add


def load_learner(
    learner: str | None,
    model: str | None,
    machine: dict[str, Any],
    first: str | None = None,
    store: bool | None = None,
    data: str | None = None,
    **defaults: Any,
) -> ClassIncrementalLearner:
    """A saved learner, or a pristine model that has learned nothing; `store` as in `open_store`, None: none.

    What is not there, also `data`, is said before torch is imported.
    """
    check_given(learner, model, data)
    if learner is None and model is None:
        raise ValueError("name a saved learner, or a pristine model with --model")
    if first is not None and learner is not None:
        _check_first(first, learner, noted(learner).get("classifiers", [first]))
    from dulbe_peft.data.store import open_store
    from dulbe_peft.encoders.loading import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner

    given = defaults | machine
    if learner is None:
        assert model is not None
        clip, processor = load_dual_encoder(model)
        loaded = ClassIncrementalLearner(clip, processor, args=LearnerArguments(**given), strategy="frozen")
    else:
        base = None if model is None else load_dual_encoder(model)[0]
        loaded = ClassIncrementalLearner.from_pretrained(learner, base_model=base, machine=given)
    loaded.encoder.store = None if store is None else open_store(store)
    if first is not None:
        _check_first(first, learner, loaded.classifiers)
        chosen = {first: loaded.classifiers[first], **loaded.classifiers}
        loaded.state = replace(loaded.state, classifiers=chosen)
    return loaded


def _check_first(first: str, learner: str | None, classifiers: Collection[str]) -> None:
    if first not in classifiers:
        raise ValueError(f"{learner!r} has no classifier {first!r}; it has {', '.join(classifiers)}")
