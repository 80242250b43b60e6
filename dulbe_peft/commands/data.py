"""Images that a command is given: the flags that name them, and what they ask of the run."""

from __future__ import annotations

from typing import Any


def add_labelled(parser: Any) -> None:
    """The arguments that name labelled images to look at, and not to learn from."""
    parser.add_argument("--data", required=True, help="images: a folder of classes or of parquet files, or hf:NAME")
    parser.add_argument("--split", default="test", help="split of the data (%(default)s); '' for a folder of classes")
    parser.add_argument("--class-names", metavar="FILE", help="text file with the names of the classes, as for run")


def load_labelled(arguments: Any) -> Any:
    """The images that the arguments of `add_labelled` name."""
    from dulbe_peft.data.readers import load_data
    from dulbe_peft.streams.protocols import rename_classes

    data = load_data(arguments.data, split=arguments.split or None)
    return rename_classes(data, arguments.class_names) if arguments.class_names else data
