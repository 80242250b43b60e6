"""The lock file: who holds it, who takes it over, and who is refused."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import socket
import time

import pytest

from dulbe_peft import lock
from dulbe_peft.checkpoint import CheckpointError, read_manifest
from dulbe_peft.lock import commit_alone, only_process

NO_PROCESS = 2**22 + 1  # above the largest number that Linux gives


def refused(path):
    with pytest.raises(CheckpointError) as caught, only_process(path, "output_dir 'x'"):
        pass
    return str(caught.value)


@pytest.fixture(params=["POSIX locks", "no POSIX locks"], autouse=True)
def file_system(request, monkeypatch):
    if request.param == "no POSIX locks":
        monkeypatch.setattr(lock, "_lock", lambda _: None)
        monkeypatch.setattr(lock.time, "sleep", lambda _: None)
    return request.param


def test_it_is_there_while_it_is_held_and_says_by_whom(tmp_path):
    path = tmp_path / "new" / ".lock"
    with only_process(path, "output_dir 'x'"):
        holder = json.loads(path.read_text())
        assert holder["pid"] == os.getpid() and holder["host"] == socket.gethostname()
        said = refused(path)
        assert said.startswith(f"output_dir 'x' is in use by process {os.getpid()} on host {socket.gethostname()!r}")
        assert path.exists(), "one that was refused removed it"
    assert not path.exists()
    with only_process(path, "x"):
        pass


def test_an_error_releases_it(tmp_path):
    with pytest.raises(RuntimeError), only_process(tmp_path / ".lock", "x"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pid", [NO_PROCESS, "own"])
def test_a_dead_process_s_is_taken_over(tmp_path, pid):
    """Its number is free, or another process has got it since, which a different start tells."""
    holder = {"host": socket.gethostname(), "pid": os.getpid() if pid == "own" else pid, "started": "12"}
    (tmp_path / ".lock").write_text(json.dumps(holder) + " " * 500)
    with only_process(tmp_path / ".lock", "x"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        assert "is in use by" in refused(tmp_path / ".lock")
    assert not list(tmp_path.iterdir())


def test_a_zombie_is_dead(tmp_path):
    child = os.spawnlp(os.P_NOWAIT, "true", "true")
    while lock._started(child):
        time.sleep(0)
    try:
        (tmp_path / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": child, "started": "12"}))
        with only_process(tmp_path / ".lock", "x"):
            pass
    finally:
        os.waitpid(child, 0)


def test_another_host_s_is_never_taken_over(tmp_path):
    (tmp_path / ".lock").write_text(json.dumps({"host": "node-7", "pid": NO_PROCESS, "started": "12"}))
    said = refused(tmp_path / ".lock")
    assert re.search(rf"process {NO_PROCESS} on host 'node-7'.*remove {re.escape(str(tmp_path / '.lock'))}$", said)
    assert "node-7" in (tmp_path / ".lock").read_text()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\0" * 80, '{"host": "x"}', '{"host": "x", "pid": "y", "started": 1}']
)
def test_one_that_says_nothing_is_taken_over_only_where_posix_locks_tell_that_nobody_writes_it(
    tmp_path, text, file_system
):
    (tmp_path / ".lock").write_text(text)
    if file_system == "no POSIX locks":
        assert "by an unknown process" in refused(tmp_path / ".lock")
    else:
        with only_process(tmp_path / ".lock", "x"):
            pass


def test_a_successor_s_is_not_removed(tmp_path):
    with only_process(tmp_path / ".lock", "x"):
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text("a successor's")
    assert (tmp_path / ".lock").read_text() == "a successor's"


def test_without_proc_the_number_alone_decides(monkeypatch):
    class Nowhere(type(lock.Path())):
        def __new__(cls, _):
            return super().__new__(cls, "/no/such/place")

    monkeypatch.setattr(lock, "Path", Nowhere)
    assert lock._started(NO_PROCESS) == "" and lock._started(os.getpid()) == "unknown" == lock._started(1)


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock.os, "pwrite", full)
    with (
        pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path / '.lock'}'")),
        only_process(tmp_path / ".lock", "x"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_saving_waits_for_nobody_and_clears_up_after_the_dead(tmp_path):
    """Also where one was killed between the two renames that replace a folder."""

    def write(text):
        return lambda folder: (folder / "a").write_text(text) and None

    folder = tmp_path / "saved"
    commit_alone(folder, write("old"), {})
    folder.rename(tmp_path / ".saved.a1b2c3d4.old")
    (tmp_path / ".saved.a1b2c3d4").mkdir()

    def fail(_):
        with pytest.raises(CheckpointError, match=rf"saved is in use by process {os.getpid()} on"):
            commit_alone(folder, write("other"), {})
        raise RuntimeError

    with pytest.raises(RuntimeError):
        commit_alone(folder, fail, {})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert read_manifest(folder) and (folder / "a").read_text() == "old"
    commit_alone(folder, write("new"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"] and (folder / "a").read_text() == "new"


# ---------------------------------------------------------------------- several processes


def contend(path, posix, barrier, outcomes):
    if not posix:
        lock._lock = lambda _: None
    barrier.wait()
    try:
        with only_process(path, "x"):
            outcomes.put(("won", os.getpid()))
            barrier.wait()
    except CheckpointError as error:
        outcomes.put(("lost", str(error)))
        barrier.wait()


def hold(path, ready):
    with only_process(path, "x"):
        ready.set()
        time.sleep(60)


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dulbe_peft.lock"])
    return context


@pytest.mark.slow
@pytest.mark.parametrize("stale", [True, False])
def test_of_processes_that_start_at_once_exactly_one_wins(tmp_path, processes, stale, file_system):
    for number in range(5):
        path = tmp_path / str(number) / ".lock"
        if stale:
            path.parent.mkdir()
            path.write_text(json.dumps({"host": socket.gethostname(), "pid": NO_PROCESS, "started": "12"}))
        barrier, outcomes = processes.Barrier(6), processes.Queue()
        arguments = (path, file_system == "POSIX locks", barrier, outcomes)
        children = [processes.Process(target=contend, args=arguments) for _ in range(6)]
        for child in children:
            child.start()
        ended = [outcomes.get(timeout=60) for _ in children]
        for child in children:
            child.join()
        winners = [pid for outcome, pid in ended if outcome == "won"]
        assert len(winners) == 1 and not path.exists()
        # Without POSIX locks a loser may have read the name of another that lost a moment later.
        name = winners[0] if file_system == "POSIX locks" else r"\d+"
        assert all(re.search(f"process {name} on", said) for outcome, said in ended if outcome == "lost")


@pytest.mark.slow
def test_a_killed_process_s_is_taken_over(tmp_path, processes, file_system):
    ready = processes.Event()
    child = processes.Process(target=hold, args=(tmp_path / ".lock", ready))
    child.start()
    assert ready.wait(60)
    assert f"by process {child.pid} on" in refused(tmp_path / ".lock")
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with only_process(tmp_path / ".lock", "x"):
        pass
    assert not list(tmp_path.iterdir())
