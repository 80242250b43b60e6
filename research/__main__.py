"""The command `python -m research`: comparisons, published numbers and figures. It needs a clone of the project."""

import sys

from dulbe_peft.photos.commands.main import Commands, main

GROUPS = {
    "Research": {
        "compare": "run several methods and classifiers on the same streams",
        "frontier": "draw what each method gives against what it costs, at every setting",
        "report": "write the page of a comparison",
        "figures": "plot what training changed in a run",
        "verify": "reproduce published numbers and compare them with ours",
    }
}
commands = Commands(
    "python -m research", "research.commands", GROUPS, help="Compare methods and reproduce published numbers."
)


def run(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status, like `dulbe-peft`."""
    return main(argv, commands)


if __name__ == "__main__":
    sys.exit(run())
