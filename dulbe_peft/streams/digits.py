"""A stream of tasks from the package's handwritten digits, for demonstrations without a network."""

from dulbe_peft.data.digits import load_digit_images
from dulbe_peft.streams.tasks import Task, class_incremental_tasks


def digit_tasks(increment: int = 2, initial_increment: int | None = None) -> list[Task]:
    """Make tasks of `increment` new digits each; the first task has `initial_increment` digits if it is given.

    Three quarters of the 1,797 digits are training images, the rest are test images.

    >>> [task.class_names for task in digit_tasks(increment=5)]
    [('zero', 'one', 'two', 'three', 'four'), ('five', 'six', 'seven', 'eight', 'nine')]
    """
    train, test = load_digit_images("train"), load_digit_images("test")
    return class_incremental_tasks(train, test, increment=increment, initial_increment=initial_increment)
