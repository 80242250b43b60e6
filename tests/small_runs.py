"""Settings for quick runs, a learner with the demo model, tasks from folders of digits, and calls of commands."""

import copy
import shutil

import torch
from peft import get_peft_model

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, class_incremental_tasks
from dulbe_peft.data.readers import load_data
from dulbe_peft.metrics.results import Results, StrategyPart
from dulbe_peft.photos.commands.main import commands, main
from dulbe_peft.photos.data.source import DataSource
from dulbe_peft.strategies import make_strategy

QUICK = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "update_share": 1.0, "device": "cpu", "progress": False}
QUICK |= {"pixel_cache_mb": 0}
MACHINE = ["--device", "cpu", "--no-progress"]


def learner_of(base, strategy="dulbe", classifiers=("bridge",), adapter=None, seed=0, **fields):
    """Return a learner with a copy of the fixture `base`. `adapter` holds settings of the adapter's configuration."""
    model, processor = copy.deepcopy(base[0]), base[1]
    torch.manual_seed(seed)
    if make_strategy(strategy).adapts:
        config = {"residual_rank": 2, "support_rank": 8} | (adapter or {})
        model = get_peft_model(model, DualModeLoraConfig(**config))
    args = LearnerArguments(**QUICK | {"seed": seed} | fields)
    return ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=classifiers)


def tasks_of(root, order=None):
    """Return tasks of two classes each. `order` lists the classes by name or number; None sorts them by name."""
    order = None if order is None else list(order)
    return class_incremental_tasks(load_data(root, "train"), load_data(root, "test"), increment=2, class_order=order)


def some(photos, folder, names, first=0, last=9, called=None):
    """Copy some classes of `photos` into `folder`, with the training images from `first` to `last` - 1.

    `called` maps class names to the names of their copies.
    """
    for split in ("train", "test"):
        for name in names:
            target = folder / split / (called or {}).get(name, name)
            for file in sorted((photos / split / name).iterdir()):
                if split == "test" or first <= int(file.stem) < last:
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, target)
    return folder


def opened(data, *splits, **settings):
    """Return the training images, the test images and the inventory of a source; an unreadable image is an error."""
    return DataSource(data, *splits, **{"strict": True} | settings).open()


def call(*words):
    """Run a command on the CPU without a progress bar, and return its exit status."""
    return main([*map(str, words), *MACHINE])


def parse(argv):
    """Return the parameters that a command would get, or raise the `click.UsageError` that it would end with."""
    with commands.make_context("dulbe-peft", list(argv)) as root:
        name, command, rest = commands.resolve_command(root, list(argv))
        return command.make_context(name, rest, parent=root).params


def results_with(**parts):
    """Return the results of a stream of two classes that was not tested, with further parts."""
    needed = {"configuration": {}, "class_names": [["a", "b"]], "strategy": StrategyPart(name="dulbe")}
    return Results(**needed | {"tasks": [None], "versions": {}} | parts)
