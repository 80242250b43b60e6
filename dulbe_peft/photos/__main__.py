"""Start the command line: `dulbe-peft`, `python -m dulbe_peft` or `python -m dulbe_peft.photos`."""

import sys
from importlib.util import find_spec

from dulbe_peft.utils.extras import PHOTOS, installed


def start() -> int:
    """Run the command line and return its exit status; Ctrl-C during the imports prints one line, not a traceback."""
    try:
        with installed("dulbe-peft"):
            for module in PHOTOS:  # now, instead of after minutes of work
                if find_spec(module) is None:
                    raise ModuleNotFoundError(f"No module named {module!r}", name=module)
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
