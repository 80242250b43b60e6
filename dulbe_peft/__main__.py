"""`python -m dulbe_peft` is the command line, and so is `dulbe-peft`."""

import sys


def start() -> int:
    """Call the command line; Ctrl-C while it is imported is one line, too."""
    try:
        from dulbe_peft.commands.main import main
    except KeyboardInterrupt:
        print("dulbe-peft: stopped by SIGINT", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(start())
