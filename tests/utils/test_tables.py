"""What was got done is kept, and gone on with; copies are whole."""

import os

import pytest

from dulbe_peft.utils import tables
from dulbe_peft.utils.files import TEMPORARY_MARK
from dulbe_peft.utils.folders import CheckpointError
from dulbe_peft.utils.tables import kept, sorted_folder

SETTINGS = {"learner": "a1", "top_k": 2, "sort into": None}
IMAGES = {"é.png": ["Käfer"], "\udcff.png": [0.1], "=1+1\n.png": [], "猫": [None]}


class Killed(BaseException):
    """Nothing is done after it, as after SIGKILL, but that the lock goes."""


def write(path, stop=None, settings=SETTINGS, killed=False, **options):
    """Answer for all images that are not done, or for those before `stop`; gives what was done before."""
    with kept(str(path), settings, **options) as table:
        for name, answer in IMAGES.items():
            if name == stop:
                raise Killed
            if name not in table.done:
                table.add(name, answer)
        if killed:
            raise Killed
    return table.done


def test_a_table_goes_on_from_every_byte_at_which_it_may_be_cut(tmp_path):
    """Also in the middle of the settings; nothing is lost but the line that was cut."""
    path, partial = tmp_path / "t.csv", tmp_path / "t.csv.partial"
    with pytest.raises(Killed):
        write(path, killed=True)
    content = partial.read_bytes()
    head = content.index(b"\n") + 1
    for cut in range(len(content) + 1):
        partial.write_bytes(content[:cut])
        with pytest.raises(Killed):
            write(path, stop="é.png")  # which is killed before its first line
        assert partial.read_bytes()[: max(cut, head)] == content[: max(cut, head)], "going on loses nothing"
        with pytest.raises(Killed), kept(str(path), SETTINGS) as table:
            assert list(table.done.items()) == list(IMAGES.items())[: max(0, content[:cut].count(b"\n") - 1)]
            for name in IMAGES.keys() - table.done.keys():
                table.add(name, IMAGES[name])
            raise Killed
        assert write(path) == IMAGES and not partial.exists()


def test_other_settings_are_refused_by_name_and_what_is_there_stays(tmp_path, capsys):
    path, partial, other = tmp_path / "t.csv", tmp_path / "t.csv.partial", SETTINGS | {"learner": "b2"}
    with pytest.raises(Killed):
        write(path, stop="=1+1\n.png")
    content = partial.read_bytes()
    with pytest.raises(ValueError, match=r"\(learner 'a1', now 'b2'\)"):
        write(path, settings=other)
    assert partial.read_bytes() == content
    write(path, settings=other, anew=True)
    old = tmp_path / "t.csv.partial.old"
    assert old.read_bytes() == content and f"is now in {old}" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["precious", "precious\n", "[1]\n", "{}\n[]\n", "{}\n1\n"])
def test_a_file_of_somebody_else_in_the_place_of_the_beginning_is_refused(tmp_path, content):
    partial = tmp_path / "t.csv.partial"
    partial.write_text(content)
    with pytest.raises(FileExistsError, match="is not of an earlier call: move it away"):
        write(tmp_path / "t.csv")
    assert partial.read_text() == content


def test_of_two_on_one_table_or_in_one_folder_the_second_is_refused(tmp_path):
    (tmp_path / "link.csv").symlink_to("t.csv")
    words = r"link\.csv is in use by another process"
    with kept(str(tmp_path / "t.csv"), SETTINGS), pytest.raises(CheckpointError, match=words):
        write(tmp_path / "link.csv")
    folder = str(tmp_path / "sorted")
    with sorted_folder(folder), pytest.raises(CheckpointError, match="sorted is in use"), sorted_folder(folder):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv"]


def test_copies_are_whole_and_replace_nothing(tmp_path, monkeypatch):
    long, place = f"{'n' * 250}.png", tmp_path / "sorted" / "a%2Fb"
    for name in ("1.png", "2.png", long):
        (tmp_path / name).write_bytes(name.encode())
    place.mkdir(parents=True)
    (place / "1.png").write_bytes(b"another picture")
    (place / "1-2.png").symlink_to("nowhere")
    (place / f".2.png{TEMPORARY_MARK}abcd_123").mkdir()  # of a copy that was killed
    with sorted_folder(str(tmp_path / "sorted")) as copy:
        for name in ("1.png", "2.png", long, "1.png"):
            copy(tmp_path / name, "a/b")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(tables.shutil, "copyfileobj", lambda source, target: target.write(b"x") and no_space())
            copy(tmp_path / "1.png", "full")
        with pytest.raises(OSError, match=r"No such file or directory: '.*gone\.png'"):
            copy(tmp_path / "gone.png", "a/b")
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.exists()} == {
        "1.png": b"another picture",
        "1-3.png": b"1.png",
        "2.png": b"2.png",
        long: long.encode(),
    }
    assert os.readlink(place / "1-2.png") == "nowhere" and not list((tmp_path / "sorted" / "full").iterdir())


def no_space():
    raise OSError(28, "No space left on device")
