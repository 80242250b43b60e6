"""Kill a process at each step of a commit: `dying_commits.py FOLDER`. It forks often, and imports little."""

import os
import signal
import sys
from pathlib import Path

from dulbe_peft.utils.folders import commit_folder


def every_commit_that_dies(folder):
    """Replace `folder/1/saved`, `folder/2/saved`, ... in one process each, until a process survives.

    Each process dies one step later than the previous one.
    """
    for call in range(1, 200):
        saved = folder / str(call) / "saved"
        commit_folder(saved, "learner", lambda temporary: (temporary / "a").write_text("old") and None)
        child = os.fork()
        if not child:
            commit_and_die(saved, call)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))
        assert os.WTERMSIG(status) == signal.SIGKILL


def commit_and_die(folder, call):
    """Replace a folder, and die before step number `call` that changes the disk."""
    steps = iter(range(1, 1000))

    def hook(event, arguments):
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")) and next(steps) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    commit_folder(folder, "learner", lambda temporary: (temporary / "a").write_text("new") and None)
    os._exit(0)


if __name__ == "__main__":
    every_commit_that_dies(Path(sys.argv[1]))
