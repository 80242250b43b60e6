"""The package's handwritten digits as a stream of tasks, for demonstrations without a network."""

from dulbe_peft.data.digits import load_digit_images
from dulbe_peft.streams.tasks import Task, class_incremental_tasks


def digit_tasks(increment: int = 2, initial_increment: int | None = None) -> list[Task]:
    """Make tasks of `increment` new digits each, the first one of `initial_increment` where it is given.

    Three quarters of the 1,797 digits are there to learn from, the rest to test on.

    >>> [task.class_names for task in digit_tasks(increment=5)]
    [('zero', 'one', 'two', 'three', 'four'), ('five', 'six', 'seven', 'eight', 'nine')]
    """
    train, test = load_digit_images("train"), load_digit_images("test")
    return class_incremental_tasks(train, test, increment=increment, initial_increment=initial_increment)
