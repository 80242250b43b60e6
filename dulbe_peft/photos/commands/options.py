"""What commands have in common: flags made of dataclass fields, the two lengths of help, and a learner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_args, get_origin, get_type_hints

import click

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.photos.commands.named import check_given, noted
from dulbe_peft.photos.runs.settings import GROUPS, from_text
from dulbe_peft.utils.extras import uncollected
from dulbe_peft.utils.settings import field_types, setting

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.learner import ClassIncrementalLearner

_MACHINE = ("device", "num_workers", "eval_batch_size", "progress")
_ENCODING = ("precision", "backend", "force")  # of commands that encode images
Decorator = Callable[[Any], Any]

# Texts and numbers with the words that the help has for them.
File = Annotated[str, "FILE"]
Page = Annotated[str, "FILE.html"]
Folder = Annotated[str, "FOLDER"]
Share = Annotated[float, "SHARE"]
# What several commands have.
DATA = setting(..., "images: a folder of classes or of parquet files, or hf:NAME")
CLASS_NAMES = setting(None, "text file with the names of the classes, as for run", metavar="FILE")
STRICT = setting(False, "stop where an image cannot be read; else such images are left out")
LABELS = setting(
    None, "in place of --data: a table with path,label[,split], or exiftool's SourceFile,Subject", metavar="FILE.csv"
)
NO_STORE = setting(False, "keep no features of images, and find none that were kept")
OVERWRITE = setting(False, "begin anew where something else stands, which becomes NAME.old")


class Load(Protocol):
    """What makes the learner that a command was given; keywords change how."""

    def __call__(self, **changes: Any) -> ClassIncrementalLearner: ...


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
        """Read `--image *.jpg`, which a shell makes several words of, as `--image` before each, which click knows."""
        several = {name for parameter in self.params if parameter.multiple for name in parameter.opts}
        expanded, flag = list[str](), ""
        for arg in args:
            if flag and not arg.startswith("-") and expanded[-1] != flag:
                expanded.append(flag)
            elif arg.startswith("-"):
                flag = arg if arg in several else ""
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


def command(usage: str = "[OPTIONS]", kept: str = "", settings: Sequence[click.Parameter] = ()) -> Decorator:
    """Make a function a command; the docstring of its file ends the help.

    A parameter whose default is a `setting` is a flag, or an argument where the setting has `place=True`; it is
    required where the setting's default is `...`. Before these stand `settings`, before them `learner_options`. The
    function returns the exit status; None is 0.
    """

    def make(function: Callable[..., int | None]) -> Command:
        text, hints = sys.modules[function.__module__].__doc__ or "", get_type_hints(function, include_extras=True)
        own = [(name, one.default) for name, one in signature(function).parameters.items()]
        declared = [_parameter(name, one, hints[name], own=True) for name, one in own if isinstance(one, Field)]
        parameters = [*getattr(function, "parameters", []), *settings, *declared]
        made = Command(None, callback=function, params=parameters, epilog=text.strip(), options_metavar=usage)
        made.kept = kept
        return made

    return make


def run_settings(shown: Collection[str]) -> list[click.Parameter]:
    """The settings of a run as options. `--help` shows those in `shown`."""

    def show(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
        if asked and not ctx.resilient_parsing:  # which completes a line
            ctx.meta["help-all"] = True
            click.echo(ctx.get_help())
            ctx.exit()

    how: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": show}
    found: list[click.Parameter] = [Option(["--help-all"], help="Show all settings and exit.", **how)]
    for title, kind in GROUPS.items():
        names = field_types(kind).keys()
        found += settings_of(kind, names, title, rare=names - set(shown))
    return found


def settings_of(
    kind: Any, names: Collection[str], group: str = "options", rare: Collection[str] = ()
) -> list[click.Parameter]:
    """The named fields of a dataclass as options. One that is not given is None."""
    hints, of = field_types(kind), [field for field in fields(kind) if field.name in names]
    return [_parameter(one.name, one, hints[one.name], group=group, rare=one.name in rare) for one in of]


def _parameter(name: str, field: Field[Any], hint: Any, own: bool = False, **shown: Any) -> click.Parameter:
    """A setting as a parameter of a command; unless it is the command's `own`, it is None where it is not given."""
    told, required = dict(field.metadata), field.default is ...
    flag, several = told.pop("flag", "--" + name.replace("_", "-")), told.pop("repeated", get_origin(hint) is tuple)
    facts: dict[str, Any] = {"required": required} if required else {"default": field.default if own else None}
    if told.pop("place", False):
        return click.Argument([name], nargs=-1 if several else 1, **facts | told)
    if field.default not in (None, "", False, (), ...):
        told["help"] += f" (default: {field.default})"
    if hint is bool:
        return Option([flag if own else f"{flag}/--no-{flag[2:]}", name], is_flag=own or None, **facts | told | shown)
    kind = hint if get_origin(hint) in (Annotated, Literal) else (get_args(hint) or [hint])[0]  # of list[int] | None
    if get_origin(kind) is Literal or "choice" in told:
        return Option([flag, name], type=click.Choice(told.pop("choice", get_args(kind))), **facts | told | shown)
    plain, *limits = get_args(kind) if get_origin(kind) is Annotated else [kind]
    words = [word for word in limits if isinstance(word, str)]
    shows = words[0] if words else {int: "INTEGER", float: "FLOAT", str: "TEXT"}.get(plain, "A,B,...")
    facts["metavar"] = shows + "..." * several
    facts |= {"type": plain, "multiple": True} if several else {"type": _Setting(name, hint)}
    return Option([flag, name], **facts | told | shown)


class _Setting(click.ParamType):
    """A setting, read and checked as in a YAML file."""

    def __init__(self, name: str, hint: Any) -> None:
        self.name, self.hint = name, hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return from_text(self.name, value, self.hint)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


def learner_options(optional: bool = False, choose: bool = False, encodes: bool = True) -> Decorator:
    """The learner (where `optional`, or a pristine model), the flags of its machine, and `load`, which makes it."""
    own = (*_MACHINE, *_ENCODING) if encodes else _MACHINE
    alone = "; without LEARNER: a model that has learned nothing" if optional else ""
    what = "a saved learner: a run's folder, one of its tasks, or a Hub id"
    given = {"learner": setting(None if optional else ..., what, place=True)}
    given["model"] = setting(None, f"the base model, where it is not where it was{alone}")
    if choose:
        given["classifier"] = setting(None, "which of the learner's classifiers answers; none: its first")

    def add(function: Any) -> Any:
        @wraps(function)
        def call(
            learner: str | None, model: str | None, classifier: str | None = None, no_store: bool = True, **flags: Any
        ) -> Any:
            machine = {name: value for name in own if (value := flags.pop(name)) is not None}
            check_given(None if optional else learner, model, flags.get("data"))
            store = not no_store
            load = partial(load_learner, learner=learner, model=model, machine=machine, first=classifier, store=store)
            return function(learner=learner, load=load, **flags)

        made = [_parameter(name, one, str, own=True) for name, one in given.items()]
        made += settings_of(LearnerArguments, own, "machine")
        if encodes:
            made.append(_parameter("no_store", NO_STORE, bool, own=True, group="machine"))
        call.parameters = made  # type: ignore[attr-defined]
        return call

    return add


@uncollected()
def load_learner(
    learner: str | None,
    model: str | None,
    machine: dict[str, Any],
    store: bool,
    first: str | None = None,
    **defaults: Any,
) -> ClassIncrementalLearner:
    """A saved learner, or a pristine model that has learned nothing; `store` as in `open_store`."""
    check_given(learner, model)
    if learner is None and model is None:
        raise ValueError("name a saved learner, or a pristine model with --model")
    if first is not None and learner is not None:
        _check_first(first, learner, noted(learner).get("classifiers", [first]))
    from dulbe_peft.data.store import open_store
    from dulbe_peft.encoders.loading import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner

    given, base = defaults | machine, None if model is None else load_dual_encoder(model)
    if learner is not None:
        loaded = ClassIncrementalLearner.from_pretrained(learner, base_model=base and base[0], machine=given)
    elif base is not None:
        loaded = ClassIncrementalLearner(*base, args=LearnerArguments(**given), strategy="frozen")
    loaded.use_store(open_store(store))
    if first is not None:
        _check_first(first, learner, loaded.classifiers)
        loaded.keep_classifiers([first, *(name for name in loaded.classifiers if name != first)])
    return loaded


def _check_first(first: str, learner: str | None, classifiers: Collection[str]) -> None:
    if first not in classifiers:
        raise ValueError(f"{learner!r} has no classifier {first!r}; it has {', '.join(classifiers)}")
