"""Quick settings, a learner over the demo model, tasks from folders of digits, and what a command is called with."""

import copy
import shutil

import torch
from peft import get_peft_model

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, class_incremental_tasks
from dulbe_peft.data.readers import load_data
from dulbe_peft.photos.commands.main import commands, main
from dulbe_peft.strategies import make_strategy

QUICK = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "device": "cpu", "progress": False, "pixel_cache_mb": 0}
MACHINE = ["--device", "cpu", "--no-progress"]


def learner_of(base, strategy="dulbe", classifiers=("bridge",), adapter=None, seed=0, **fields):
    """A learner over a copy of the fixture `base`; `adapter` holds settings of its configuration."""
    model, processor = copy.deepcopy(base[0]), base[1]
    torch.manual_seed(seed)
    if make_strategy(strategy).adapts:
        config = {"residual_rank": 2, "support_rank": 8} | (adapter or {})
        model = get_peft_model(model, DualModeLoraConfig(**config))
    args = LearnerArguments(**QUICK | {"seed": seed} | fields)
    return ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=classifiers)


def tasks_of(root, order=None):
    """Tasks of two classes each; `order` holds names or numbers of the classes, None is that of the names."""
    order = None if order is None else list(order)
    return class_incremental_tasks(load_data(root, "train"), load_data(root, "test"), increment=2, class_order=order)


def some(photos, folder, names, first=0, last=9, called=None):
    """A folder with some classes of `photos`, whose training images are those from `first` to before `last`."""
    for split in ("train", "test"):
        for name in names:
            target = folder / split / (called or {}).get(name, name)
            for file in sorted((photos / split / name).iterdir()):
                if split == "test" or first <= int(file.stem) < last:
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, target)
    return folder


def call(*words):
    """The status of a command that works quietly on the processor."""
    return main([*map(str, words), *MACHINE])


def parse(argv):
    """What a command would be called with; a `click.UsageError` where it would refuse its arguments."""
    with commands.make_context("dulbe-peft", list(argv)) as root:
        name, command, rest = commands.resolve_command(root, list(argv))
        return command.make_context(name, rest, parent=root).params
