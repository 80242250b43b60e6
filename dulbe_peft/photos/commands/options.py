"""Build commands: make flags from settings, show short and long help, and load the learner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields
from functools import partial, wraps
from inspect import cleandoc, signature
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_args, get_origin, get_type_hints

import click

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.photos.commands.flags import NO_STORE
from dulbe_peft.photos.commands.paths import check_given, noted
from dulbe_peft.photos.data.source import READ, DataSource
from dulbe_peft.photos.runs.run_settings import GROUPS, from_text
from dulbe_peft.utils.extras import garbage_collection_off
from dulbe_peft.utils.settings import field_types, setting
from dulbe_peft.utils.terminal import announce

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.learner import ClassIncrementalLearner

_USUAL = {"class_names", "strict", "leave_out", "group"}  # settings of reading that `--help` shows
_MACHINE = ("device", "num_workers", "eval_batch_size", "progress")
_ENCODING = ("precision", "backend", "force")  # settings of commands that encode images
Decorator = Callable[[Any], Any]


class Load(Protocol):
    """A function that loads the learner given to a command; keywords override arguments of `load_learner`."""

    def __call__(self, **changes: object) -> ClassIncrementalLearner: ...


class Option(click.Option):
    """An option in a titled group of the help; only `--help-all` shows a `rare` one."""

    def __init__(
        self, *names: Any, group: str = "options", rare: bool = False, usual: bool = True, **settings: Any
    ) -> None:
        super().__init__(*names, **settings)
        self.group, self.rare, self.usual = group, rare, usual

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return flags and help. Of a switch that is usually off, `--no-...` only undoes a YAML file's value."""
        record = None if self.rare and not ctx.meta.get("help-all") else super().get_help_record(ctx)
        return record if record is None or self.usual else (record[0].partition(" / ")[0], record[1])

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return no defaults and limits: the help texts give defaults, and limits such as 1.2e-38 would distract."""
        return {}


class Command(click.Command):
    """A command whose help shows its options in groups, and its examples with their line breaks."""

    kept = ""  # a sentence on what is kept if the command is stopped; "" if it cannot be continued

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat a flag before each of its values, as click expects, so that `--image *.jpg` works."""
        multiple = {name for parameter in self.params if parameter.multiple for name in parameter.opts}
        expanded, flag = list[str](), ""
        for arg in args:
            if flag and not arg.startswith("-") and expanded[-1] != flag:
                expanded.append(flag)
            elif arg.startswith("-"):
                flag = arg if arg in multiple else ""
            expanded.append(arg)
        ctx.meta["words"] = args
        try:
            return super().parse_args(ctx, expanded)
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            raise click.UsageError(error.message + self._commas(args), ctx) from error

    def _commas(self, args: list[str]) -> str:
        """Say how several values of an option are written, if a word after one of them was meant as a second value."""
        for place, flag in enumerate(args):
            words = list(takewhile(lambda word: not word.startswith("-"), args[place + 1 :]))
            if flag in self._lists() and len(words) > 1:
                return f". Write several values of {flag} with commas: {flag} {','.join(words)}."
        return ""

    def _lists(self) -> set[str]:
        """Return the flags of the options that take a list, in words that commas separate."""
        listed = [p for p in self.params if isinstance(p.type, _Setting) and "list" in str(p.type.hint)]
        return {name for parameter in listed for name in parameter.opts} | {"--classifiers"}

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
    """Make a function a command, whose help ends with the docstring of the function, or else of its module.

    A parameter whose default is a `setting` becomes a flag, or an argument if the setting has `place=True`. It is
    required if the setting's default is `...`. The parameters of `learner_options` come first, then `settings`, then
    those of the function. The function returns the exit status, or None for 0.
    """

    def make(function: Callable[..., int | None]) -> Command:
        text = cleandoc(function.__doc__ or sys.modules[function.__module__].__doc__ or "")
        hints = get_type_hints(function, include_extras=True)
        defaults = [(name, parameter.default) for name, parameter in signature(function).parameters.items()]
        declared = [_parameter(name, d, hints[name], declared=True) for name, d in defaults if isinstance(d, Field)]
        parameters = [*getattr(function, "parameters", []), *settings, *declared]
        result = Command(None, callback=function, params=parameters, epilog=text, options_metavar=usage)
        result.kept = kept
        return result

    return make


def help_all() -> Option:
    """Return the option that shows rare options, too."""

    def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:  # click parses resiliently to complete a line
            ctx.meta["help-all"] = True
            click.echo(ctx.get_help())
            ctx.exit()

    text = "Show all settings and exit."
    return Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, help=text)


def run_settings(shown: Collection[str]) -> list[click.Parameter]:
    """Return the settings of a run as options, of which `--help` shows those in `shown`."""
    options: list[click.Parameter] = [help_all()]
    for title, kind in GROUPS.items():
        names = field_types(kind).keys()
        options += settings_of(kind, names, title, rare=names - set(shown))
    return options


def data_settings(*names: str, rare: Collection[str] = ()) -> list[click.Parameter]:
    """Return the settings of how labelled images are read, and the fields `names` of a source, as options."""
    return [help_all(), *settings_of(DataSource, {*READ, *names}, rare={*READ, *rare} - _USUAL)]


def settings_of(
    kind: type, names: Collection[str], group: str = "options", rare: Collection[str] = ()
) -> list[click.Parameter]:
    """Return the fields `names` of a dataclass as options, whose value is None if they are not given."""
    hints, chosen = field_types(kind), [field for field in fields(kind) if field.name in names]
    return [_parameter(f.name, f, hints[f.name], group=group, rare=f.name in rare) for f in chosen]


def _parameter(name: str, field: Field[object], hint: Any, declared: bool = False, **shown: Any) -> click.Parameter:
    """Make a command's parameter from a setting.

    The value of a parameter that is not given is the setting's default if the command's function declares the setting,
    and None otherwise, so that a configuration file can give the value.
    """
    facts, required = dict(field.metadata), field.default is ...
    flag, multiple = facts.pop("flag", "--" + name.replace("_", "-")), facts.pop("repeated", get_origin(hint) is tuple)
    default: dict[str, Any] = {"required": True} if required else {"default": field.default if declared else None}
    facts = default | facts
    if facts.pop("place", False):
        return click.Argument([name], nargs=-1 if multiple else 1, **facts)
    if field.default not in (None, "", False, (), ...):
        facts["help"] += f" (default: {field.default})"
    if hint is bool:
        flags = flag if declared else f"{flag}/--no-{flag[2:]}"
        return Option([flags, name], is_flag=declared or None, usual=bool(field.default), **facts | shown)
    # The first argument of a union such as list[int] | None is the type to show.
    kind = hint if get_origin(hint) in (Annotated, Literal) else (get_args(hint) or [hint])[0]
    if get_origin(kind) is Literal or "choice" in facts:
        return Option([flag, name], type=click.Choice(facts.pop("choice", get_args(kind))), **facts | shown)
    plain, *limits = get_args(kind) if get_origin(kind) is Annotated else [kind]
    words = [word for word in limits if isinstance(word, str)]
    metavar = words[0] if words else {int: "INTEGER", float: "FLOAT", str: "TEXT"}.get(plain, "A,B,...")
    types = {"type": plain, "multiple": True} if multiple else {"type": _Setting(name, hint)}
    return Option([flag, name], **{"metavar": metavar + "..." * multiple} | types | facts | shown)


class _Setting(click.ParamType):
    """The type of a setting, which is converted and checked as in a YAML file."""

    def __init__(self, name: str, hint: object) -> None:
        self.name, self.hint = name, hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> object:
        try:
            return from_text(self.name, value, self.hint)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


def learner_options(optional: bool = False, choose: bool = False, encodes: bool = True) -> Decorator:
    """Give a command the parameters LEARNER, --model and the machine's settings, and `load`, which loads the learner.

    Args:
        optional: Whether LEARNER may be omitted, so that --model names a model that has learned no classes.
        choose: Whether the command has --classifier.
        encodes: Whether the command encodes images, and has settings for that.
    """
    names: tuple[str, ...] = (*_MACHINE, *_ENCODING) if encodes else _MACHINE
    names += ("whole_images",) if optional else ()  # a saved learner has its own setting
    alone = "; without LEARNER, the model to use" if optional else ""
    text = "a saved learner: a run's folder, one of its tasks, or a Hub id"
    given = {"learner": setting(None if optional else ..., text, place=True)}
    given["model"] = setting(None, f"the base model, if it was moved{alone}")
    if choose:
        given["classifier"] = setting(None, "classifier that predicts (default: the first one)")

    def add(function: Any) -> Any:
        @wraps(function)
        def call(
            learner: str | None,
            model: str | None,
            classifier: str | None = None,
            no_store: bool = True,
            **flags: Any,
        ) -> object:
            machine = {name: value for name in names if (value := flags.pop(name)) is not None}
            check_given(None if optional else learner, model, flags.get("data") or flags.get("labels"))
            store = not no_store
            load = partial(load_learner, learner=learner, model=model, machine=machine, first=classifier, store=store)
            return function(learner=learner, load=load, **flags)

        parameters = [_parameter(name, field, str, declared=True) for name, field in given.items()]
        parameters += settings_of(LearnerArguments, names, "machine")
        if encodes:
            parameters.append(_parameter("no_store", NO_STORE, bool, declared=True, group="machine"))
        call.parameters = parameters  # type: ignore[attr-defined]
        return call

    return add


@garbage_collection_off()
def load_learner(
    learner: str | None,
    model: str | None,
    machine: dict[str, Any],
    store: bool,
    first: str | None = None,
    **defaults: Any,
) -> ClassIncrementalLearner:
    """Load a saved learner, or make an untrained learner from a model; `store` is that of `open_store`.

    `first` is the name of the classifier that predicts. `machine` overrides `defaults`.
    """
    check_given(learner, model)
    if learner is None and model is None:
        raise ValueError("name a saved learner, or an untrained model with --model")
    if first is not None and learner is not None:
        _check_first(first, learner, noted(learner).get("classifiers", [first]))
    if machine.get("progress") is not False:
        announce(f"loading {learner or model}")
    from dulbe_peft.data.store import open_store
    from dulbe_peft.encoders.loading import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner

    if first is not None and learner is None:
        raise ValueError(f"--classifier is {first!r}, but {model!r} has learned nothing: give a learner, or omit it")
    given, base = defaults | machine, None if model is None else load_dual_encoder(model)
    if learner is not None:
        whole = given.pop("whole_images", None)
        loaded = ClassIncrementalLearner.from_pretrained(learner, base_model=base and base[0], machine=given)
        if whole not in (None, loaded.args.whole_images):
            flags = {True: "--whole-images", False: "--no-whole-images"}
            raise ValueError(
                f"{flags[whole]} does not fit {learner!r}, which has learned with {flags[not whole]}: omit it, or "
                "learn again with it"
            )
    elif base is not None:
        loaded = ClassIncrementalLearner(*base, args=LearnerArguments(**given), strategy="frozen")
    loaded.use_store(open_store(store))
    if first is not None:
        _check_first(first, learner, loaded.classifiers)
        loaded.keep_classifiers([first, *(name for name in loaded.classifiers if name != first)])
    return loaded


def _check_first(first: str, learner: str | None, classifiers: Collection[str]) -> None:
    if first not in classifiers:
        raise ValueError(f"{learner!r} has no classifier {first!r}; its classifiers are {', '.join(classifiers)}")


def answers_of(only: str | None, sum_up: str | None, known: Sequence[str]) -> dict[str, Any]:
    """Return the fields `only` and `sum_up` of a `Query` from files, and print the classes that were not learned.

    Raises:
        ValueError: If no class of a file has been learned, or a table has other columns.
    """
    from dulbe_peft.data.names import NONE, check_class_names, class_key
    from dulbe_peft.data.tables import csv_lines
    from dulbe_peft.utils.files import read_lines

    learned = {class_key(name): name for name in known}
    fields: dict[str, Any] = {}
    for flag, file in (("only", only), ("sum_up", sum_up)):
        if file is None:
            continue
        rows = [[line] for line in read_lines(file)] if flag == "only" else csv_lines(Path(file))
        rows = rows[1:] if rows and [cell.lower() for cell in rows[0]] == ["class", "group"] else rows
        wrong = next((row for row in rows if len(row) != (1 if flag == "only" else 2)), None)
        if wrong is not None:
            raise ValueError(f"{file} has the line {','.join(wrong)!r:.200}, expected a class and its group")
        unknown = [row[0] for row in rows if class_key(row[0]) not in learned]
        if unknown:
            print(f"{file}: not learned, so never answered: {', '.join(unknown)}", file=sys.stderr)
        if len(unknown) == len(rows):
            raise ValueError(f"{file} names no class that the learner knows; it knows {', '.join(known[:5])} ...")
        pairs = [(learned[class_key(row[0])], row[-1]) for row in rows if class_key(row[0]) in learned]
        twice = next((name for name, group in pairs if flag == "sum_up" and dict(pairs)[name] != group), None)
        if twice is not None:
            raise ValueError(f"{file} puts the class {twice!r} into two groups: keep one of them")
        if flag == "sum_up":
            for group in dict(pairs).values():
                if class_key(group) == class_key(NONE):
                    raise ValueError(f"{file} has the group {group!r}, which is the answer for images of no class")
                check_class_names([group])
        fields[flag] = tuple(dict.fromkeys(name for name, _ in pairs)) if flag == "only" else dict(pairs)
    return fields
