"""example:
  dulbe-peft run --model openai/clip-vit-base-patch16 --data photos --output out

photos holds train/CLASS/*.jpg and test/CLASS/*.jpg, or CLASS/*.jpg and --test-fraction 0.2.
Nothing is trained, and all classes are one task, unless --strategy and --increment say otherwise.
The same command goes on where a run was stopped, and where classes were added.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.photos.commands.named import FOLDER, check_given, claim, say_next
from dulbe_peft.photos.commands.options import LABELS, OVERWRITE, File, command, run_settings
from dulbe_peft.photos.runs.settings import GROUPS, given_settings, pick
from dulbe_peft.photos.runs.sources import check_source, data_or_labels, source_of
from dulbe_peft.utils.settings import field_types, setting

# What `--help` shows; `--help-all` shows the rest.
ESSENTIAL = (
    *("model", "data", "output", "strategy", "classifiers", "increment", "test_fraction", "class_order", "dry_run"),
    *("strict", "vocabulary", "epochs", "learning_rate", "prompt_template", "seed", "num_workers", "device"),
)


@command("--model MODEL --data DATA --output OUT [OPTIONS]", "finished tasks are kept", run_settings(ESSENTIAL))
def run(
    config: File | None = setting(None, "YAML file with settings of run, by their names"),
    labels: str | None = LABELS,
    overwrite: bool = OVERWRITE,
    **flags: Any,
) -> None:
    settings = given_settings(config, flags)
    if labels is not None:
        settings["data"] = data_or_labels(flags["data"], labels)
    _take_noted_model(settings)
    stream, adapter, args = (pick(kind, settings) for kind in GROUPS.values())
    if stream.data:  # a folder that is not there is said first, also where flags are missing
        check_given(vocabulary=stream.vocabulary)
        check_source(source_of(stream))
    for name in ("model",) if settings.get("dry_run") else ("model", "data", "output"):
        if not settings.get(name):
            raise ValueError(f"--{name} is required")
    order = None if stream.class_order == "icarl" else stream.class_order
    files = {"class_names": stream.class_names, "class_texts": stream.class_texts, "class_order": order}
    check_given(None, None if stream.revision else stream.model, **files)
    output, reads = ("--output", stream.output, FOLDER), [stream.model, config]
    if not stream.dry_run:
        claim(output, reads=reads, apart=[stream.data])
    _ = stream.methods  # a strategy or a classifier that is not there is said before anything steps aside
    if overwrite and not stream.dry_run:
        claim(output, reads=reads, apart=[stream.data], overwrite=True)
    from dulbe_peft.photos.commands.dry_run import describe
    from dulbe_peft.photos.runs.setup import set_up

    setup = set_up(stream, adapter, args)
    trains = {"epochs", "batch_size", "learning_rate", *field_types(AdapterSettings)} & set(settings)
    if trains and not setup.learner.strategy.adapts:
        flags_of = ", ".join("--" + name.replace("_", "-") for name in sorted(trains))
        print(f"{flags_of} changes nothing, because nothing is trained: --strategy dulbe trains", file=sys.stderr)
    if stream.dry_run:
        describe(setup)
        return
    results, tests, learned = setup.run(), [task.test for task in setup.tasks], [task.train for task in setup.tasks]
    close_run(setup.learner, stream.output, results, tests, learned, setup.left_out)


def _take_noted_model(settings: dict[str, Any]) -> None:
    """Take the model that a table of features notes, where none is named."""
    path = Path(str(settings.get("data") or ""))
    if settings.get("model") or not path.name or not path.exists():
        return
    from dulbe_peft.data.features import encoder_note

    note = encoder_note(path)
    if note is not None:
        settings |= {"model": note.model} | ({} if note.revision is None else {"revision": note.revision})


def close_run(
    learner: Any, output: str, results: dict[str, Any], tests: list[Any], learned: list[Any], notes: list[str]
) -> None:
    """Write the pictures of a run and say what it came to, in the first of several processes; then all leave."""
    from dulbe_peft.photos.report.pictures import write_pictures
    from dulbe_peft.utils.processes import leave, world

    if world()[0] == 0:
        write_pictures(output, tests, results, notes, learner, learned)
        say_results(results, output, learner.classifier.name)
    leave()


def say_results(results: dict[str, Any], output: str, first: str) -> None:
    """The table of a run, what training images say that were left out, and the next command; `first` answers."""
    from dulbe_peft.photos.report import format_summary
    from dulbe_peft.photos.report.verdict import estimated, recommended

    if results.get("classifiers"):
        print(format_summary(results))
    print(f"written: {Path(output) / 'results.json'}")
    if (found := estimated(results)) is not None:
        print(f"{found.words} {', '.join(f'{name} {share}' for name, share in found.rows)}")
        best, words = recommended(found, first)
        if words:
            print(words)
        if best != first:
            print(f"to let it answer: dulbe-peft predict {shlex.quote(output)} PHOTOS --classifier {best}")
    say_next("report", output)
