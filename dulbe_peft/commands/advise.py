"""`dulbe-peft advise`: what to use for one's own images, found out on held-back training images."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dulbe_peft.commands.options import command, option, setting_options
from dulbe_peft.commands.outputs import as_flags, check_folder, data_name, overwrite_option, say_next
from dulbe_peft.runs.settings import given_settings, validated

# Settings of `run` that the advice chooses itself, or that have another meaning here.
_HIDDEN = (
    *("strategy", "classifiers", "resume", "dry_run", "validation_fraction", "max_tasks", "output", "drift", "seed"),
    *("engine", "address", "jobs"),
)
_SHOWN = ("model", "data", "increment", "images_per_class", "skip_unreadable", "epochs", "prompt_template", "device")


@command(usage="--model MODEL --data DATA [OPTIONS]", kept="finished runs are kept")
@option("--output", help="folder for the runs and advice.json (advice-NAME, after the data)")
@option("--jobs", type=int, help="runs at once (one a core, or one on an accelerator)")
@option("--no-training", is_flag=True, help="try the classifiers alone, which takes a few minutes")
@option("--classifiers", metavar="A,B,...", help="the classifiers to choose from, with their settings")
@option("--seed", type=int, default=0, help="of what is held back, and of the class order (0)")
@overwrite_option
@setting_options(_SHOWN, _HIDDEN)
def advise(
    output: str | None,
    jobs: int | None,
    no_training: bool,
    classifiers: str | None,
    seed: int,
    overwrite: bool,
    config: str | None,
    **flags: Any,
) -> int:
    """example:
      dulbe-peft advise --model openai/clip-vit-base-patch16 --data photos

    It tries every classifier without training, and a few ways to train on the first tasks. Test images are not
    looked at. What is finished stays; the same command goes on.
    """
    settings = {name: value for name, value in given_settings(config, flags).items() if name not in _HIDDEN}
    for name in ("model", "data"):
        if not settings.get(name):
            raise ValueError(f"--{name} is required")
    data = settings["data"]
    folder = Path(output or f"advice-{data_name(data)}")
    check_folder(str(folder), data, config, overwrite=overwrite)
    from dulbe_peft.classifiers import CLASSIFIERS as EVERY_CLASSIFIER
    from dulbe_peft.comparison.advice import CLASSIFIERS, TRIALS, Advice, advice_plans, advise, format_advice
    from dulbe_peft.comparison.cells import is_done
    from dulbe_peft.runs.sources import DATA_FIELDS, open_source, source_of
    from dulbe_peft.strategies import STRATEGIES
    from dulbe_peft.utils.folders import check_replaceable
    from dulbe_peft.utils.records import write_record
    from dulbe_peft.utils.specs import parse_spec, split_specs

    source = source_of(validated(settings)[0])
    open_source({name: source[name] for name in DATA_FIELDS})  # says what there is
    trials = {} if no_training else TRIALS
    specs = CLASSIFIERS if classifiers is None else split_specs(classifiers)
    path = folder / "advice.json"
    check_replaceable([path], Advice)
    plans = advice_plans(settings, specs, trials, seed=seed)[: 2 if trials else 1]
    cells = [pair for plan in plans for pair in plan.cells()]
    steps = sum(not is_done(cell, folder.absolute(), rows) for cell, rows in cells)
    advice = advise(settings, folder, jobs, specs, trials, seed, log=_steps(steps))
    write_record(path, advice)
    print(format_advice(advice))
    tried = {"frozen", *(str(trial["strategy"]) for trial in trials.values())}
    left_out = {
        "strategies": [name for name in STRATEGIES if name not in tried],
        "classifiers": [name for name in EVERY_CLASSIFIER if name not in {parse_spec(spec)[0] for spec in specs}],
    }
    listed = "; ".join(f"{kind} {', '.join(names)}" for kind, names in left_out.items() if names)
    print(f"not tried: {listed}. `dulbe-peft compare` tries what you name")
    print(f"written: {path}")
    say_next("run", *as_flags(settings | advice.settings), "--output", f"out-{data_name(data)}")
    return 0


def _steps(number: int) -> Callable[[str], None]:
    """A log that counts the finished runs, and says about how long the others will take."""
    from dulbe_peft.commands.dry_run import duration

    started, done = time.monotonic(), 0

    def log(line: str) -> None:
        nonlocal done
        finished = re.match(r"\d+/\d+ ", line)
        if finished:
            done += 1
            left = (time.monotonic() - started) / done * (number - done)
            about = f", about {duration(left)} to go" if done < number else ""
            line = f"step {done} of {number}{about}: {line[finished.end() :]} is finished"
        print(line, flush=True)

    return log
