"""`python -m dulbe_peft` is the command line, and so is `dulbe-peft`."""

import sys

from dulbe_peft.utils.extras import installed


def start() -> int:
    """Call the command line; Ctrl-C while it is imported is one line, too."""
    try:
        with installed("dulbe-peft"):
            from dulbe_peft.commands.main import main
    except KeyboardInterrupt:
        print("dulbe-peft: stopped by SIGINT", file=sys.stderr)
        return 130
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    return main()


if __name__ == "__main__":
    sys.exit(start())
