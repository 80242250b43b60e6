"""Test atomic writing of folders: damage that a manifest detects, and what remains if writing fails at any point."""

import copy
import errno
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from failing_files import Failing, edited
from lives import content, tiny_base

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.checkpoints.locating import check_there
from dulbe_peft.encoders.registry import find_model
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.commands.paths import claim
from dulbe_peft.photos.report.run_folder import read_run
from dulbe_peft.utils import folders
from dulbe_peft.utils.files import write_json
from dulbe_peft.utils.folders import CheckpointError, clear_leftovers, exclusive, put_back, read_manifest


def fill(text):
    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "a.txt").write_text(text)
        write_json(folder / "b.json", {"text": text})

    return write


def commit(folder, text="new", **options):
    folders.commit_folder(folder, "learner", fill(text), **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    commit(tmp_path / "saved", "old", notes={"tasks": [["cat"]]})
    return tmp_path / "saved"


def test_file_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        commit(tmp_path / "saved")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert modes == {0o640}
    assert {stat.S_IMODE((tmp_path / "saved" / name).stat().st_mode) for name in (".", "inner")} == {0o750}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("notes", {}, "SHA-256 differs"), ("format_version", 2, "format_version: Input should be 1, got 2")],
)
def test_changed_manifest_is_refused_and_can_be_overwritten(folder, field, value, words):
    edited(folder / "manifest.json", field, value)
    with pytest.raises(CheckpointError, match=rf"manifest\.json is damaged.*{words}"):
        read_manifest(folder)
    with pytest.raises(FileExistsError):
        commit(folder)
    commit(folder, overwrite=True)
    assert read_manifest(folder) and (folder / "inner" / "a.txt").read_text() == "new"


def test_error_names_the_missing_or_changed_file(folder):
    (folder / "inner" / "a.txt").write_text("odd")
    with pytest.raises(CheckpointError, match=r"a\.txt is damaged"):
        read_manifest(folder)
    (folder / "inner" / "a.txt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the file 'inner/a\.txt'"):
        read_manifest(folder)
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        read_manifest(folder.parent)


def test_folder_not_written_by_this_library_is_not_replaced(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, text in (("thesis.txt", "all of it"), ("manifest.json", '{"name": "a web app", "icons": []}')):
        (mine / name).write_text(text)
        before = content(tmp_path)
        for path in (mine, mine / name):
            with pytest.raises(FileExistsError, match=rf"{path.name}' exists and was not written by this library"):
                commit(path)
        assert content(tmp_path) == before


def test_saved_folder_of_another_kind_is_not_replaced(folder):
    before = content(folder)
    with pytest.raises(FileExistsError, match="saved is a folder of kind 'learner', expected 'export'"):
        folders.commit_folder(folder, "export", fill("new"))
    with pytest.raises(FileExistsError, match="saved is a saved folder of kind 'learner': write the export to a"):
        folders.commit_folder(folder / "inner" / "lora", "export", fill("new"))
    assert content(folder) == before


def test_files_that_a_user_added_are_kept(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "inner" / "photo.jpg").write_bytes(b"jpg")
    (folder / "link").symlink_to("/nowhere")
    for text in ("new", "newer"):
        commit(folder, text)
        assert read_manifest(folder).files.keys() == {"b.json", "inner/a.txt"}
        assert (folder / "inner" / "a.txt").read_text() == text and names(folder.parent) == ["saved"]
        assert (folder / "notes.txt").read_text() == "mine" and (folder / "inner" / "photo.jpg").read_bytes() == b"jpg"
        assert os.readlink(folder / "link") == "/nowhere"
    before = content(folder)
    with pytest.raises(FileExistsError, match=r"notes\.txt was not written by this library and is in the way"):
        folders.commit_folder(folder, "learner", lambda new: (new / "notes.txt").write_text("ours") and None)
    assert content(folder) == before


def test_model_card_is_kept_if_edited_and_replaced_otherwise(tmp_path):
    def write(text):
        card = partial(Path.write_text, data=text)
        folders.commit_folder(tmp_path / "saved", "learner", lambda folder: card(folder / "README.md") and None)
        return (tmp_path / "saved" / "README.md").read_text()

    assert [write("first"), write("second")] == ["first", "second"]
    (tmp_path / "saved" / "README.md").write_text("edited")
    assert [write("third"), write("fourth")] == ["edited", "edited"]
    assert read_manifest(tmp_path / "saved")


def test_symbolic_link_to_a_folder_is_kept(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "saved").symlink_to(tmp_path / "disk" / "saved")
    for text in ("new", "newer"):
        commit(tmp_path / "saved", text)
        assert (tmp_path / "saved").is_symlink()
        assert (tmp_path / "disk" / "saved" / "inner" / "a.txt").read_text() == text
    assert names(tmp_path / "disk") == ["saved"] and names(tmp_path) == ["disk", "saved"]


def test_failed_commit_leaves_the_old_or_the_new_folder(tmp_path):
    """Each file operation fails once. The error names the folder, and the next commit removes all leftovers."""
    for at in range(200):
        error = KeyboardInterrupt() if at % 2 else OSError(errno.EACCES, os.strerror(errno.EACCES))
        folder = tmp_path / str(at) / "saved"
        commit(folder, "old")
        before = content(folder)
        failing = Failing(folder.parent, at, error)
        try:
            with failing:
                commit(folder)
        except (OSError, KeyboardInterrupt) as raised:
            assert isinstance(error, KeyboardInterrupt) or str(folder.parent) in str(raised)
            if content(folder) != before:
                assert read_manifest(folder) and (folder / "inner" / "a.txt").read_text() == "new"
        commit(folder, "newer")
        assert read_manifest(folder) and names(folder.parent) == ["saved"]
        if len(failing.done) <= at:
            break
    assert 20 < at < 199


def test_failed_write_leaves_no_partial_or_temporary_file(tmp_path):
    for at in range(100):
        (tmp_path / str(at)).mkdir()
        failing = Failing(tmp_path / str(at), at)
        with suppress(OSError), failing:
            write_json(tmp_path / str(at) / "a.json", {})
        assert names(tmp_path / str(at)) in ([], ["a.json"]), failing.done[at]
        if len(failing.done) <= at:
            break
    assert 5 < at < 99 and names(tmp_path / str(at)) == ["a.json"]


def test_only_leftovers_of_killed_writers_are_removed(tmp_path):
    ours = [".task-003.dulbe-tmp-a1b2c3d4", ".task-002.dulbe-tmp-a1b2c3d4.old", ".results.json.dulbe-tmp-__345678"]
    others = [".other.dulbe-tmp-a1b2c3d4", ".task-003.20251121", ".task-003.dulbe-tmp-short", ".task-003", "task-002"]
    for name in ours + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / ".task-004.dulbe-tmp-a1b2c3d4").write_text("a file")
    clear_leftovers(tmp_path, r"task-\d+|results\.json")
    assert set(names(tmp_path)) == set(others)


def killed_between_the_renames(folder):
    shutil.copytree(folder, folder.with_name(f".{folder.name}.dulbe-tmp-a1b2c3d4"))
    folder.rename(folder.with_name(f".{folder.name}.dulbe-tmp-a1b2c3d4.old"))


def find_model_or_refuse(folder):
    with suppress(ValueError):
        find_model(str(folder))


@pytest.mark.parametrize(
    "opened",
    [
        lambda folder: ClassIncrementalLearner.from_pretrained(folder, copy.deepcopy(tiny_base()[0])),
        read_run,
        lambda folder: check_there(str(folder)),
        lambda folder: claim(("--output", str(folder), "folder")),
        find_model_or_refuse,
    ],
    ids=["from_pretrained", "report", "commands", "outputs", "models"],
)
def test_opening_restores_the_folder_that_a_killed_writer_moved(run_copy, capsys, opened):
    folder = run_copy / "task-002"
    before = content(folder)
    killed_between_the_renames(folder)
    opened(folder)
    assert content(folder) == before and f"restored {folder}, which a killed program" in capsys.readouterr().err
    assert not [name for name in names(run_copy) if "dulbe-tmp" in name or name.endswith(".lock")]


def test_server_does_not_overwrite_what_a_killed_server_left(run_copy, tmp_path):
    saved = shutil.copytree(run_copy / "task-002", tmp_path / "taught")
    killed_between_the_renames(saved)
    assert main(["serve", str(run_copy), "--output", str(saved), "--port", "0"]) == 2
    assert read_manifest(saved) and names(tmp_path) == ["run", "taught"]


def test_error_names_the_folder_that_cannot_be_restored(folder, monkeypatch):
    killed_between_the_renames(folder)
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(CheckpointError, match=r"is now in .*/\.saved\.dulbe-tmp-a1b2c3d4\.old: rename it yourself"):
        put_back(folder)


def test_saving_restores_the_folder_that_a_killed_writer_moved(folder):
    folder.rename(folder.with_name(".saved.dulbe-tmp-a1b2c3d4.old"))
    folder.with_name(".saved.dulbe-tmp-a1b2c3d4").mkdir()
    full = Mock(side_effect=Exception("No space left on device (os error 28)"))  # the exact message of tokenizers
    with pytest.raises(OSError, match=r"saved cannot be written: No space left on device"):
        folders.commit_folder(folder, "learner", full)
    assert names(folder.parent) == ["saved"] and read_manifest(folder)
    assert (folder / "inner" / "a.txt").read_text() == "old"


def refusal(path):
    with pytest.raises(CheckpointError) as caught, exclusive(path, "folder 'x'"):
        pass
    return str(caught.value)


def test_error_names_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    if Path("/proc/self").exists():  # filelock waits if the folder exists but a file in it cannot be created
        with pytest.raises(OSError, match=r"^/proc cannot be written to \(.*\): choose another folder"):
            commit(Path("/proc/export"))
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(errno.EACCES, "Permission denied")))
    with pytest.raises(
        OSError, match=rf"^{tmp_path} cannot be written to \(Permission denied\): choose another folder"
    ):
        commit(tmp_path / "saved")


def test_second_lock_is_refused_in_same_and_other_thread(tmp_path):
    path = tmp_path / "new" / "lock"
    with pytest.raises(ZeroDivisionError), exclusive(path, "folder 'x'"):
        with ThreadPoolExecutor(1) as pool:
            errors = [refusal(path), pool.submit(refusal, path).result()]
        assert all("folder 'x' is in use" in error for error in errors)
        assert path.exists(), "a refused process must not remove the lock"
        _ = 1 / 0
    assert not path.exists()
    path.touch()  # a killed process leaves its lock
    with exclusive(path, "folder 'x'"):
        refusal(path)
    path.write_text("all of it")
    assert "is not an empty lock file" in refusal(path) and path.read_text() == "all of it"
