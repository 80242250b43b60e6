"""CPU seconds until the command line answers what needs no model: every command's --help, --version, usage errors.

python -m benchmarks.startup
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

from dulbe_peft.commands.main import COMMANDS

WRONG_VALUES = (["run", "--epochs", "many"], ["run", "--epochs", "0"], ["run", "--lerning-rate", "1"])
ERRORS = (["predcit"], [], ["run"], ["forget", "june"], *WRONG_VALUES)


def cpu_seconds(command: list[str], repeats: int) -> float:
    """The least user and system time of several runs of a command."""
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def main() -> None:
    """Print one line for each answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command, of which the fastest counts")
    repeats = parser.parse_args().repeats
    print(f"{cpu_seconds([sys.executable, '-c', ''], repeats):6.3f}  python itself")
    for arguments in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), *ERRORS):
        seconds = cpu_seconds([sys.executable, "-m", "dulbe_peft", *arguments], repeats)
        print(f"{seconds:6.3f}  dulbe-peft {' '.join(arguments)}")


if __name__ == "__main__":
    main()
