"""One process at a time: a lock file that says which process of which host holds it.

What the file says decides, so that it works on every file system; a process of this host that is gone is told from a
living one by its number and the time it started. Beside it a POSIX lock on the same file, where the file system has
them, settles who is first when several take over at once, and speaks for processes whose number means nothing here,
such as those of another container.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dulbe_peft.checkpoint import CheckpointError, clear_leftovers, commit_folder
from dulbe_peft.files import naming


@contextmanager
def only_process(path: Path, purpose: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; one that a dead process of this host left is taken over.

    Args:
        path: the lock file; its folder is made where it does not exist.
        purpose: what the lock keeps others from, for the message.

    Raises:
        CheckpointError: another process holds it, or a process of another host did not remove it.
        OSError: the file cannot be written.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = None
        while file is None:
            file = _acquire(path, purpose)
    try:
        yield
    finally:
        if _is_at(file, path):
            path.unlink()
        os.close(file)


def commit_alone(folder: Path, write: Callable[[Path], None], fields: dict[str, Any]) -> None:
    """`commit_folder` while no other process does, after what killed ones left beside `folder` has been removed.

    Raises:
        CheckpointError: another process is writing `folder`.
        OSError: as `commit_folder`.
    """
    folder = folder.absolute()
    with only_process(folder.with_name(f".{folder.name}.lock"), str(folder)):
        clear_leftovers(folder.parent, re.escape(folder.name))
        commit_folder(folder, write, fields)


def _acquire(path: Path, purpose: str) -> int | None:
    """The open lock file, ours now; None where its holder removed it meanwhile and another attempt is due."""
    created = True
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        created = False
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
    try:
        locked = _lock(file)
        if not _is_at(file, path):
            os.close(file)
            return None
        # Without POSIX locks an empty file is another's that has not been written yet, unless we have just made it.
        if locked is False or not (created or _is_free(_holder(file), unreadable_is_free=locked is True)):
            raise _in_use(path, purpose, file)
        _write(file, path)
        if locked is None:
            time.sleep(0.2)
            if _holder(file) != _this_process():
                raise _in_use(path, purpose, file)
    except BaseException:
        os.close(file)
        raise
    return file


def _lock(file: int) -> bool | None:
    """Whether we got the POSIX lock; None where the file system has none. A forked child does not inherit it."""
    import fcntl  # not on every system, where the package can be imported all the same

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _write(file: int, path: Path) -> None:
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(_this_process()).encode(), 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _holder(file: int) -> dict[str, Any] | None:
    """What the file says; None where that is nothing, or damaged."""
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return {"host": str(holder["host"]), "pid": int(holder["pid"]), "started": str(holder["started"])}
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _is_free(holder: dict[str, Any] | None, unreadable_is_free: bool) -> bool:
    if holder is None:
        return unreadable_is_free
    return holder["host"] == socket.gethostname() and _started(holder["pid"]) != holder["started"]


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    """When a process of this host started, which tells two with one number apart; empty where there is none."""
    try:
        # Its name, in parentheses, may hold anything; state and start time are the fields 3 and 22.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    except ProcessLookupError:
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"


def _in_use(path: Path, purpose: str, file: int) -> CheckpointError:
    for _ in range(20):  # whoever has just made it, or taken it over, writes its name next
        holder = _holder(file)
        if not _is_free(holder, unreadable_is_free=True):
            break
        time.sleep(0.05)
    who = f"process {holder['pid']} on host {holder['host']!r}" if holder else "an unknown process"
    return CheckpointError(
        f"{purpose} is in use by {who}: wait until that ends or choose another folder; if it is gone, remove {path}"
    )
