"""Folders that are whole or not there: what a manifest catches, and what is left when writing fails at any point."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dulbe_peft
from dulbe_peft.utils.files import write_json
from dulbe_peft.utils.folders import (
    CheckpointError,
    clear_leftovers,
    commit_alone,
    commit_folder,
    exclusive,
    library_versions,
    read_manifest,
)


def fill(text):
    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "a.txt").write_text(text)
        write_json(folder / "b.json", {"text": text})

    return write


def content(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path):
    commit_folder(tmp_path / "saved", fill("old"), {"tasks": [["cat"]]})
    return tmp_path / "saved"


def test_the_manifest_says_what_wrote_the_folder_and_what_is_in_it(folder):
    manifest = read_manifest(folder)
    assert manifest["format_version"] == 1 and manifest["tasks"] == [["cat"]]
    assert manifest["versions"] == library_versions() and manifest["versions"]["dulbe_peft"] == dulbe_peft.__version__
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        "b.json": len((folder / "b.json").read_bytes()),
        "inner/a.txt": 3,
    }


def test_modes_are_those_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        commit_folder(tmp_path / "saved", fill("x"), {})
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert modes == {0o640}
    assert {stat.S_IMODE((tmp_path / "saved" / name).stat().st_mode) for name in (".", "inner")} == {0o750}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["files"].pop("b.json"), "SHA-256 differs"),
        (lambda m: m["tasks"].append(["dog"]), "SHA-256 differs"),
        (lambda m: m["versions"].update(torch="1.0"), "SHA-256 differs"),
        (lambda m: m["files"].update({"../b.json": {"sha256": "", "size": 1}}), "SHA-256 differs"),
        (lambda m: m.pop("sha256"), "KeyError: 'sha256'"),
        (lambda m: m.pop("format_version"), "KeyError: 'format_version'"),
        (lambda m: m.update(format_version=2), "has format version 2, this library reads 1"),
        (lambda m: m.update(format_version=None), "has format version None, this library reads 1"),
    ],
)
def test_a_changed_manifest_is_refused(folder, change, words):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=words):
        read_manifest(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '"a"', "[" * 100_000, "\0", "{}", '{"format_version": 1}']
)
def test_what_is_no_manifest_is_refused(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest.json is damaged"):
        read_manifest(folder)


def test_flipped_bits_cut_and_repeated_bytes_are_found_or_mean_the_same(folder):
    whole, before = read_manifest(folder), (folder / "manifest.json").read_bytes()
    generator = random.Random(0)
    refused = 0
    for _ in range(500):
        damaged, place = bytearray(before), generator.randrange(len(before))
        kind = generator.randrange(3)
        if kind == 0:
            damaged[place] ^= 1 << generator.randrange(8)
        else:
            damaged[place : place + generator.randrange(1, 40)] = damaged[:20] if kind == 1 else b""
        (folder / "manifest.json").write_bytes(damaged)
        try:
            assert read_manifest(folder) == whole
        except CheckpointError:
            refused += 1
    assert refused > 450


def test_a_missing_or_changed_file_is_named(folder):
    (folder / "inner" / "a.txt").write_text("odd")
    with pytest.raises(CheckpointError, match=r"a\.txt is damaged"):
        read_manifest(folder)
    (folder / "inner" / "a.txt").unlink()
    with pytest.raises(CheckpointError, match=r"misses 'inner/a\.txt'"):
        read_manifest(folder)
    with pytest.raises(CheckpointError, match=r"holds no manifest\.json"):
        read_manifest(folder.parent)


def test_a_folder_of_others_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(FileExistsError, match=r"mine' exists and was not written by this library"):
        commit_folder(tmp_path / "mine", fill("new"), {})
    assert content(tmp_path) == {"mine/thesis.txt": b"all of it"}
    (tmp_path / "mine" / "manifest.json").write_text('{"name": "a web app", "icons": []}')
    with pytest.raises(FileExistsError, match=r"mine' exists and was not written by this library"):
        commit_folder(tmp_path / "mine", fill("new"), {})
    assert len(content(tmp_path)) == 2
    with pytest.raises(FileExistsError, match=r"thesis\.txt' exists and was not written by this library"):
        commit_folder(tmp_path / "mine" / "thesis.txt", fill("new"), {})


def test_files_that_somebody_put_beside_ours_stay(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "inner" / "photo.jpg").write_bytes(b"jpg")
    (folder / "plans").mkdir()
    (folder / "link").symlink_to("/nowhere")
    for text in ("new", "newer"):
        commit_folder(folder, fill(text), {})
        assert read_manifest(folder)["files"].keys() == {"b.json", "inner/a.txt"}
        assert (folder / "inner" / "a.txt").read_text() == text
        assert (folder / "notes.txt").read_text() == "mine" and (folder / "inner" / "photo.jpg").read_bytes() == b"jpg"
        assert (folder / "plans").is_dir() and os.readlink(folder / "link") == "/nowhere"
        assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_somebody_s_file_is_not_overwritten(folder):
    (folder / "c.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"c\.txt was not written by this library and is in the way"):
        commit_folder(folder, lambda temporary: (temporary / "c.txt").write_text("ours") and None, {})
    assert (folder / "c.txt").read_text() == "mine" and (folder / "inner" / "a.txt").read_text() == "old"
    assert len(list(folder.parent.iterdir())) == 1


def test_an_edited_model_card_stays_and_another_one_is_replaced(tmp_path):
    def write(text):
        return lambda temporary: (temporary / "README.md").write_text(text) and None

    folder = tmp_path / "saved"
    commit_folder(folder, write("first"), {})
    commit_folder(folder, write("second"), {})
    assert (folder / "README.md").read_text() == "second"
    (folder / "README.md").write_text("edited")
    for text in ("third", "fourth"):
        commit_folder(folder, write(text), {})
        assert (folder / "README.md").read_text() == "edited"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_folder_stays_one(tmp_path, there):
    (tmp_path / "disk").mkdir()
    if there:
        commit_alone(tmp_path / "disk" / "saved", fill("old"), {})
    (tmp_path / "saved").symlink_to(tmp_path / "disk" / "saved")
    for text in ("new", "newer"):
        commit_alone(tmp_path / "saved", fill(text), {})
        assert (tmp_path / "saved").is_symlink()
        assert (tmp_path / "disk" / "saved" / "inner" / "a.txt").read_text() == text
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["saved"] and len(list(tmp_path.iterdir())) == 2


# ---------------------------------------------------------------------- writing that fails

STEPS = ["mkdtemp", "mkdir", "write_text", "touch", "chmod", "fsync", "replace"]


class Failing:
    """Raises in its n-th call, and not before or after."""

    def __init__(self, function, call, error):
        self.function, self.call, self.error, self.calls = function, call, error, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return self.function(*args, **kwargs)


def patch(monkeypatch, step, call, error):
    owner = {"mkdtemp": "tempfile", "chmod": "os", "fsync": "os", "replace": "os"}.get(step, "pathlib.Path")
    if owner == "pathlib.Path":
        failing = Failing(getattr(Path, step), call, error)
        monkeypatch.setattr(Path, step, lambda *args, **kwargs: failing(*args, **kwargs))
    else:
        module = __import__(owner)
        failing = Failing(getattr(module, step), call, error)
        monkeypatch.setattr(module, step, failing)
    return failing


@pytest.mark.parametrize(
    ("step", "error"),
    [(step, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) for step in STEPS]
    + [("mkdtemp", OSError(errno.EROFS, os.strerror(errno.EROFS))), ("chmod", OSError("no number"))]
    + [("replace", KeyboardInterrupt()), ("chmod", SystemExit(143)), ("write_text", RuntimeError("out of memory"))],
)
@pytest.mark.parametrize("existing", [True, False])
def test_whatever_fails_leaves_all_as_it_was(tmp_path, monkeypatch, step, error, existing):
    """Each call of a step fails once; an OSError's message has the folder, whatever was being written."""
    if existing:
        commit_folder(tmp_path / "saved", fill("old"), {})
    before = content(tmp_path)
    for call in range(1, 100):
        with monkeypatch.context() as context:
            failing = patch(context, step, call, error)
            try:
                commit_folder(tmp_path / "saved", fill("new"), {})
            except type(error) as raised:
                if isinstance(error, OSError):
                    assert raised.errno == error.errno and str(tmp_path / "saved") in str(raised)
                assert content(tmp_path) == before
                assert [path.name for path in tmp_path.iterdir()] == (["saved"] if existing else [])
            else:
                break
    assert call > 1 and failing.calls == call - 1
    assert read_manifest(tmp_path / "saved") and [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved" / "inner" / "a.txt").read_text() == "new"


def test_a_signal_leaves_the_old_folder_or_the_new_one_which_then_stays(tmp_path, monkeypatch):
    found: list[str] = []
    for call in range(1, 100):
        folder = tmp_path / str(call) / "saved"
        commit_folder(folder, fill("old"), {})
        calls = iter(range(1, 100))

        def interrupted(function, calls=calls, call=call):
            def run(*args):
                function(*args)
                if next(calls) == call:
                    raise KeyboardInterrupt

            return run

        with monkeypatch.context() as context:
            for name in ("fsync", "replace"):
                context.setattr(os, name, interrupted(getattr(os, name)))
            try:
                commit_folder(folder, fill("new"), {})
            except KeyboardInterrupt:
                assert read_manifest(folder) and [path.name for path in folder.parent.iterdir()] == ["saved"]
                found.append((folder / "inner" / "a.txt").read_text())
            else:
                break
    assert found == sorted(found, reverse=True) and set(found) == {"old", "new"}


def test_a_writer_s_bare_exception_is_an_os_error_with_the_folder(folder):
    def full(temporary):
        raise Exception("No space left on device (os error 28)")  # word for word what tokenizers raise

    with pytest.raises(OSError, match=r"saved cannot be written: No space left on device"):
        commit_folder(folder, full, {})
    assert (folder / "inner" / "a.txt").read_text() == "old" and len(list(folder.parent.iterdir())) == 1


def test_json_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "results.json"
    write_json(path, {"b": 1, "a": "ä"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "ä",\n  "b": 1\n}\n'
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ä", "b": 1} and len(list(tmp_path.iterdir())) == 1


# ---------------------------------------------------------------------- what killed processes leave


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    ours = ["task-003.dulbe-tmp-a1b2c3d4", "task-002.dulbe-tmp-a1b2c3d4.old", "results.json.dulbe-tmp-__345678"]
    others = ["other.dulbe-tmp-a1b2c3d4", "task-003.20251121", "task-003.20251121.old", "task-003.dulbe-tmp-short"]
    for name in ("task-002", ".task-003", *(f".{name}" for name in ours + others[:2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    for name in (".lock", ".task-004.dulbe-tmp-a1b2c3d4", *(f".{name}" for name in others[2:])):
        (tmp_path / name).write_text(name)
    clear_leftovers(tmp_path, r"task-\d+|results\.json")
    left = {".lock", ".task-003", "task-002", *(f".{name}" for name in others)}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_folder_that_stepped_aside_for_one_that_never_came_is_put_back(folder):
    before = content(folder)
    os.replace(folder, folder.with_name(".saved.dulbe-tmp-a1b2c3d4.old"))
    folder.with_name(".saved.dulbe-tmp-a1b2c3d4").mkdir()
    clear_leftovers(folder.parent, "saved")
    assert content(folder) == before and [path.name for path in folder.parent.iterdir()] == ["saved"]


# ---------------------------------------------------------------------- one holder at a time


def refused(path):
    with pytest.raises(CheckpointError) as caught, exclusive(path, "folder 'x'"):
        pass
    return str(caught.value)


def test_a_second_holder_is_refused_in_the_same_thread_and_in_another(tmp_path):
    path = tmp_path / "new" / "lock"
    with pytest.raises(ZeroDivisionError), exclusive(path, "folder 'x'"):
        assert path.read_bytes() == b""
        with ThreadPoolExecutor(1) as pool:
            said = [refused(path), pool.submit(refused, path).result()]
        assert all("folder 'x' is in use" in text and "choose another folder" in text for text in said)
        assert path.exists(), "one that was refused removed it"
        _ = 1 / 0
    assert not path.exists()
    path.touch()  # as a killed process leaves it
    with exclusive(path, "folder 'x'"):
        refused(path)
    assert not path.exists()


def hold(path, ready):
    with exclusive(path, "x"):
        ready.set()
        time.sleep(60)


@pytest.mark.slow
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    processes = multiprocessing.get_context("forkserver")
    ready = processes.Event()
    child = processes.Process(target=hold, args=(tmp_path / "lock", ready))
    child.start()
    try:
        assert ready.wait(60)
        assert "in use" in refused(tmp_path / "lock")
    finally:
        child.kill()
        child.join()
    with exclusive(tmp_path / "lock", "x"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["absent", "empty", "full"])
def test_a_link_in_the_lock_s_place_is_not_followed(tmp_path, monkeypatch, target):
    if target != "absent":
        (tmp_path / "target").write_text("all of it" if target == "full" else "")
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    before = content(tmp_path)
    assert f"{tmp_path / 'lock'} is not an empty file, as a lock is" in refused(tmp_path / "lock")
    # Also one that comes between the look and the opening.
    monkeypatch.setattr("dulbe_peft.utils.folders._absent_or_empty", lambda _: True)
    with pytest.raises(OSError, match="lock"), exclusive(tmp_path / "lock", "x"):
        pass
    assert content(tmp_path) == before and (tmp_path / "lock").is_symlink()


def test_a_file_of_others_in_the_lock_s_place_is_kept(tmp_path):
    path = tmp_path / "lock"
    path.write_text("all of it")
    assert "move it away" in refused(path) and path.read_text() == "all of it"
    path.unlink()
    for text in ("all of it", ""):
        with exclusive(path, "x"):
            path.unlink()
            path.write_text(text)
        assert path.read_text() == text
        path.unlink()


def test_saving_refuses_a_second_writer_and_removes_what_killed_ones_left(tmp_path):
    folder = tmp_path / "saved"
    commit_alone(folder, fill("old"), {})
    folder.rename(tmp_path / ".saved.dulbe-tmp-a1b2c3d4.old")
    (tmp_path / ".saved.dulbe-tmp-a1b2c3d4").mkdir()

    def fail(_):
        with pytest.raises(CheckpointError, match="saved is in use"):
            commit_alone(folder, fill("other"), {})
        raise RuntimeError

    with pytest.raises(RuntimeError):
        commit_alone(folder, fail, {})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert read_manifest(folder) and (folder / "inner" / "a.txt").read_text() == "old"
    commit_alone(folder, fill("new"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (folder / "inner" / "a.txt").read_text() == "new"
