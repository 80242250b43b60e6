"""The command line, `dulbe-peft` or `python -m dulbe_peft`.

Every flag of `run` is a field of [`DualModeLoraConfig`], [`LearnerArguments`] or `StreamArguments`; a YAML file takes
the same names. Flags win over the file, the file over the defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import platform
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.checkpoint import CheckpointError, library_versions

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class StreamArguments:
    """Where a stream comes from and where it goes."""

    model: str = dataclasses.field(
        default="", metadata={"help": "Dual encoder such as CLIP or SigLIP: a folder, or a Hub id. Required."}
    )
    data: str = dataclasses.field(
        default="",
        metadata={"help": "Images: a folder split/class/*.jpg, an .npz file, or hf:NAME for datasets. Required."},
    )
    output: str = dataclasses.field(default="", metadata={"help": "Folder for checkpoints and results. Required."})
    strategy: str = dataclasses.field(
        default="dulbe",
        metadata={"help": "What is trained: a name, or name:key=value,key=value. 'frozen' trains nothing."},
    )
    classifiers: str | None = dataclasses.field(
        default=None,
        metadata={"help": "Classifiers with commas between them: bridge,ranpac:features=4000. None: the strategy's."},
    )
    increment: int = dataclasses.field(default=10, metadata={"help": "Classes per task."})
    initial_increment: int | None = dataclasses.field(
        default=None, metadata={"help": "Classes of the first task, where it differs."}
    )
    train_split: str = dataclasses.field(default="train", metadata={"help": "Name of the split to learn from."})
    test_split: str = dataclasses.field(default="test", metadata={"help": "Name of the split to test on."})
    class_order: str | None = dataclasses.field(
        default=None, metadata={"help": "Order of the classes: icarl, or a text file with a name or number a line."}
    )
    order_seed: int | None = dataclasses.field(
        default=None, metadata={"help": "Seed of a random class order (1993 in the paper); none: as in the data."}
    )
    revision: str | None = dataclasses.field(default=None, metadata={"help": "Revision of a model on the Hub."})
    attn_implementation: str | None = dataclasses.field(
        default=None, metadata={"help": "Attention kernel: eager or sdpa. None: eager on a CPU, the faster one there."}
    )
    resume: bool = dataclasses.field(default=True, metadata={"help": "Go on after the newest valid task folder."})
    dry_run: bool = dataclasses.field(
        default=False, metadata={"help": "Print adapted layers, ranks, trainable parameters and memory, and exit."}
    )

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(StreamArguments).items():
            value = getattr(self, name)
            if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
                raise TypeError(f"{name} must be of type {inspect.formatannotation(hint)}, got {value!r}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 2 for an error of the user's, 130 and 143 after a signal."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    terminated: list[int] = []
    try:
        with _terminable(terminated):
            return arguments.call(arguments)
    except (KeyboardInterrupt, SystemExit) as stop:
        return _stopped(arguments, argv, signal.SIGTERM if isinstance(stop, SystemExit) else signal.SIGINT)
    except (ValueError, TypeError, OSError, ImportError, CheckpointError) as error:
        if terminated:  # the signal ended a process that reads images, too, and its end is this error
            return _stopped(arguments, argv, signal.SIGTERM)
        print(f"dulbe-peft: {error}", file=sys.stderr)
        return 2


@contextmanager
def _terminable(received: list[int]) -> Iterator[None]:
    """Make SIGTERM an exception, as SIGINT is one, and note it in `received`."""

    def stop(number: int, _: Any) -> None:
        received.append(number)
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _stopped(arguments: argparse.Namespace, argv: list[str], number: signal.Signals) -> int:
    """Say how to go on with a stream that was stopped; returns the exit status."""
    print(f"dulbe-peft: stopped by {number.name}", file=sys.stderr)
    if arguments.call in (_run, _demo):
        off = arguments.call is _run and not _settings(arguments).get("resume", True)
        command = [sys.executable, "-m", "dulbe_peft", *argv, *(["--resume"] if off else [])]
        print(f"finished tasks are kept; to go on:\n{shlex.join(command)}", file=sys.stderr)
    return 128 + number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dulbe-peft", description="CLIP models that keep learning new classes.")
    commands = parser.add_subparsers(required=True, title="commands")
    demo = commands.add_parser("demo", help="learn ten handwritten digits in five tasks, offline, in about a minute")
    demo.add_argument("--output", default="dulbe-demo", help="folder for results.json and the plot (%(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the learner (%(default)s)")
    demo.set_defaults(call=_demo)

    run = commands.add_parser("run", help="learn a class-incremental stream and write results.json")
    run.add_argument("--config", help="YAML file with any of the settings below, by their names")
    for cls, title in ((StreamArguments, "stream"), (DualModeLoraConfig, "adapter"), (LearnerArguments, "learner")):
        group = run.add_argument_group(title)
        for field in _fields(cls):
            _add_flag(group, field, get_type_hints(cls)[field.name])
    run.set_defaults(call=_run)

    evaluate = commands.add_parser("evaluate", help="test a saved learner on images")
    evaluate.add_argument("folder", help="a task folder of a run, or what save_pretrained wrote")
    evaluate.add_argument("--data", required=True, help="images, as for run")
    evaluate.add_argument("--split", default="test", help="split of the data (%(default)s)")
    evaluate.add_argument("--model", help="the base model, where it is not where it was")
    evaluate.set_defaults(call=_evaluate)

    export = commands.add_parser("export", help="write a saved learner's adapter as stock LoRA")
    export.add_argument("folder", help="a task folder of a run, or what save_pretrained wrote")
    export.add_argument("output", help="folder for the LoRA adapter")
    export.add_argument("--model", help="the base model, where it is not where it was")
    export.add_argument(
        "--compress-to", type=int, metavar="RANK", help="best approximation of this rank; prints its relative error"
    )
    export.set_defaults(call=_export)

    env = commands.add_parser("env", help="print versions and the accelerator, for a bug report")
    env.set_defaults(call=_env)
    return parser


def _fields(cls: Any) -> list[Any]:
    return cls.own_fields() if hasattr(cls, "own_fields") else list(dataclasses.fields(cls))


def _add_flag(group: Any, field: Any, hint: Any) -> None:
    flag = "--" + field.name.replace("_", "-")
    default = "" if field.default in (None, "") else f" (default: {field.default})"
    text = (field.metadata["help"] + default).replace("%", "%%")
    if hint is bool:
        group.add_argument(
            flag, dest=field.name, help=text, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS
        )
        return
    kinds = get_args(hint) or (hint,)  # of list[int] | int | None: list[int], int and None's type
    metavar = "A,B,..." if get_origin(kinds[0]) is list else kinds[0].__name__.upper()
    group.add_argument(
        flag,
        dest=field.name,
        help=text,
        type=_converter(kinds),
        choices=field.metadata.get("choices"),
        default=argparse.SUPPRESS,
        metavar=None if "choices" in field.metadata else metavar,
    )


def _converter(kinds: tuple[Any, ...]) -> Any:
    """How a flag's text becomes one of the field's types; commas separate the entries of a list."""
    if list[int] in kinds:
        return lambda text: [int(part) for part in text.split(",")]
    if list[str] in kinds and str in kinds:
        return lambda text: text.split(",") if re.fullmatch(r"[\w.,]+", text) else text
    return (lambda text: text.split(",")) if list[str] in kinds else kinds[0]


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The YAML file's settings, with the flags' on top."""
    classes = (StreamArguments, DualModeLoraConfig, LearnerArguments)
    hints = {field.name: get_type_hints(cls)[field.name] for cls in classes for field in _fields(cls)}
    known = set(hints)
    settings: dict[str, Any] = {}
    if arguments.config:
        import yaml

        path = Path(arguments.config)
        if not path.is_file():
            raise FileNotFoundError(f"configuration file {str(path)!r} does not exist")
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"configuration file {str(path)!r} is not YAML: {error}") from error
        if not isinstance(loaded, dict):
            kind = type(loaded).__name__
            raise ValueError(f"configuration file {str(path)!r} must hold names and values, got a {kind}")
        for name in loaded:
            if name not in known:
                close = difflib.get_close_matches(str(name), sorted(known), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"configuration file {str(path)!r} has an unknown setting {name!r}{hint}")
        settings.update({name: _from_yaml(value, hints[name]) for name, value in loaded.items()})
    settings.update({name: value for name, value in vars(arguments).items() if name in known})
    return settings


def _from_yaml(value: Any, hint: Any) -> Any:
    """What was meant by the two values that YAML reads otherwise: 1e-3, for it a text, and no, for it false."""
    if hint is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if hint is str and isinstance(value, bool):
        return "yes" if value else "no"
    return value


def _pick(cls: Any, settings: dict[str, Any]) -> Any:
    return cls(**{field.name: settings[field.name] for field in _fields(cls) if field.name in settings})


def _run(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    stream: StreamArguments = _pick(StreamArguments, settings)
    config: DualModeLoraConfig = _pick(DualModeLoraConfig, settings)
    args: LearnerArguments = _pick(LearnerArguments, settings)
    for name in ("model",) if stream.dry_run else ("model", "data", "output"):
        if not getattr(stream, name):
            raise ValueError(f"--{name} is required")
    import torch

    from dulbe_peft.backbone import load_dual_encoder
    from dulbe_peft.distributed import leave, world
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.report import format_summary
    from dulbe_peft.specs import split_specs
    from dulbe_peft.strategies import make_strategy

    strategy = make_strategy(stream.strategy)
    classifiers = None if stream.classifiers is None else split_specs(stream.classifiers)
    tasks = None if stream.dry_run else _tasks(stream)
    model: Any
    model, processor = load_dual_encoder(stream.model, stream.revision, stream.attn_implementation)
    torch.manual_seed(args.seed)
    if strategy.adapts:
        from peft import get_peft_model

        if config.target_modules is None and strategy.target_modules is not None:
            config.target_modules = sorted(strategy.target_modules)
        model = get_peft_model(model, config, revision=stream.revision)
    if tasks is None:
        print(_describe(model, strategy) if strategy.adapts else "nothing is trained, no layer is adapted")
        return 0
    learner = ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=classifiers)
    results = learner.run(tasks, stream.output, resume=stream.resume)
    if world()[0] == 0:
        if "classifiers" in results:
            print(format_summary(results))
        print(f"written: {Path(stream.output) / 'results.json'}")
    leave()
    return 0


def _tasks(stream: StreamArguments) -> Any:
    from dulbe_peft.streams.readers import load_data
    from dulbe_peft.streams.samples import dataset_class_names
    from dulbe_peft.streams.tasks import class_incremental_tasks

    train, test = (load_data(stream.data, split=split) for split in (stream.train_split, stream.test_split))
    order: Any = stream.class_order
    if order is not None and order != "icarl":
        if not Path(order).is_file():
            raise FileNotFoundError(f"class order {order!r} is neither 'icarl' nor a file")
        lines = [line.strip() for line in Path(order).read_text(encoding="utf-8").splitlines()]
        order = [line for line in lines if line]
        if not set(order) <= set(dataset_class_names(train) or ()) and all(line.isdecimal() for line in order):
            order = [int(line) for line in order]
    return class_incremental_tasks(
        train,
        test,
        increment=stream.increment,
        initial_increment=stream.initial_increment,
        class_order=order,
        seed=stream.order_seed,
    )


def _describe(model: Any, strategy: Strategy) -> str:
    """Adapted layers with their ranks, trainable parameters, and the memory of the statistics, found by one image."""
    import torch

    from dulbe_peft.backbone import image_size, unit_image_embeds
    from dulbe_peft.statistics import OccupationStatistics, collect_statistics

    config = model.active_peft_config
    clip = model.get_base_model()
    image = torch.zeros(1, 3, image_size(clip), image_size(clip))
    statistics = collect_statistics(
        model, [image], lambda _, batch: unit_image_embeds(clip, batch), into=OccupationStatistics()
    )
    lines = []
    for name, layer in model.dual_mode_layers().items():
        support = min(config.support_rank, layer.in_features - config.residual_rank)
        lines.append(
            f"{name}  {layer.in_features} -> {layer.out_features}  shared {config.shared_rank}  "
            f"residual {config.residual_rank}  support <= {support}"
        )
    bases = sum(layer.dulbe_P["default"].numel() for layer in model.dual_mode_layers().values())
    visual = sum(p.numel() for p in (*model.shared_parameters(), *model.residual_parameters()))
    visual += bases * strategy.trains_bases
    total = sum(p.numel() for p in model.parameters() if p.requires_grad) + bases * strategy.trains_bases
    lines.append(f"adapted visual layers: {len(model.dual_mode_layers())}")
    lines.append(f"trainable parameters: {total:,} ({visual:,} visual, {total - visual:,} other)")
    if strategy.remembers_inputs:
        lines.append(f"statistics: {statistics.nbytes / 2**20:.2f} MiB")
    return "\n".join(lines)


def _load(folder: str, model: str | None) -> Any:
    from dulbe_peft.backbone import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner

    base = None if model is None else load_dual_encoder(model)[0]
    return ClassIncrementalLearner.from_pretrained(folder, base_model=base)


def _evaluate(arguments: argparse.Namespace) -> int:
    from dulbe_peft.streams.readers import load_data
    from dulbe_peft.streams.samples import dataset_class_names
    from dulbe_peft.streams.tasks import select_classes

    learner = _load(arguments.folder, arguments.model)
    data = load_data(arguments.data, split=arguments.split)
    known = [name for name in dataset_class_names(data) or () if name in set(learner.class_names)]
    if not known:
        raise ValueError(f"none of the classes in {arguments.data!r} has been learned by {arguments.folder!r}")
    figures = learner.evaluate(select_classes(data, known), known)
    print(json.dumps(figures | {"num_classes": len(known)}, indent=2))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from dulbe_peft.adapter.export import COMPRESSION_FILE, export_lora

    learner = _load(arguments.folder, arguments.model)
    if learner.state.adapter is None:
        raise ValueError(
            f"{arguments.folder!r} has no adapter to export: its strategy {learner.strategy.name!r} trains nothing"
        )
    model = learner.model
    folder = export_lora(model, arguments.output, arguments.compress_to)
    if arguments.compress_to is not None:
        report = json.loads((folder / COMPRESSION_FILE).read_text(encoding="utf-8"))
        errors = {name: row["relative_error"] for name, row in report["layers"].items()}
        worst = max(errors, key=errors.__getitem__)
        print(f"relative error {report['relative_error']:.2e} over all layers, most in {worst}: {errors[worst]:.2e}")
    print(f"written: {folder}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from dulbe_peft.demo import run_demo

    run_demo(arguments.output, arguments.seed)
    return 0


def _env(_: argparse.Namespace) -> int:
    import torch

    for name, version in library_versions().items():
        print(f"{name}: {version}")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    print(f"platform: {platform.platform()}")
    found = "none" if accelerator is None else accelerator.type
    print(f"accelerator: {found}, CPU threads: {torch.get_num_threads()}")
    return 0
