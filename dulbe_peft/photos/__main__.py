"""Start the command line: `dulbe-peft`, `python -m dulbe_peft` or `python -m dulbe_peft.photos`."""

import sys

from dulbe_peft.utils.extras import installed


def start() -> int:
    """Run the command line and return its exit status; Ctrl-C during the imports prints one line, not a traceback."""
    try:
        with installed("dulbe-peft"):
            from dulbe_peft.photos.commands.main import main
    except KeyboardInterrupt:
        print("dulbe-peft: stopped by SIGINT", file=sys.stderr)
        return 130
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    return main()


if __name__ == "__main__":
    sys.exit(start())
