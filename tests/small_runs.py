"""Quick settings, tasks of two classes each from folders of digits, and what a command would be called with."""

from dulbe_peft import class_incremental_tasks, load_data
from dulbe_peft.commands.main import commands

QUICK = {"epochs": 1, "batch_size": 4, "device": "cpu", "progress": False, "pixel_cache_mb": 0}


def tasks_of(root, order=None):
    """Tasks of two classes each; `order` holds names or numbers of the classes, None is that of the names."""
    order = None if order is None else list(order)
    return class_incremental_tasks(load_data(root, "train"), load_data(root, "test"), increment=2, class_order=order)


def parse(argv):
    """What a command would be called with; a `click.UsageError` where it would refuse its arguments."""
    with commands.make_context("dulbe-peft", list(argv)) as root:
        name, command, rest = commands.resolve_command(root, list(argv))
        return command.make_context(name, rest, parent=root).params
