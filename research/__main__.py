"""`python -m research`: comparisons, published numbers and figures, from a clone of the project."""

import sys

from dulbe_peft.photos.commands.main import Commands, main

GROUPS = {
    "Research": {
        "compare": "run methods and classifiers side by side",
        "report": "write a page about a comparison",
        "figures": "write what training changed in a run, as pictures and numbers",
        "verify": "measure published numbers, and show them beside ours",
    }
}
commands = Commands(
    "python -m research", "research.commands", GROUPS, help="Compare methods, and measure what papers have published."
)


def run(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status, as `dulbe-peft` does."""
    return main(argv, commands)


if __name__ == "__main__":
    sys.exit(run())
