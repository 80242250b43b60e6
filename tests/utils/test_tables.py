"""Tables that grow and go on, copies that are whole, and outputs that are pipes."""

import os

import pytest

from dulbe_peft.utils import tables
from dulbe_peft.utils.files import TEMPORARY_MARK
from dulbe_peft.utils.folders import CheckpointError
from dulbe_peft.utils.tables import growing_table, sorted_folder
from dulbe_peft.utils.terminal import printable

HEADER, SETTINGS = ["path", "class"], {"learner": "a1", "top_k": 2}
NAMES = ("é.png", "\udcff.png", "=1+1\n.png", "猫")
IMAGES = {name: [[name, "Käfer"], [name, 'a "b", c']] for name in NAMES}


class Killed(BaseException):
    """Nothing is done after it, as after SIGKILL, but that the lock goes."""


def write(path, stop=None, settings=SETTINGS, **options):
    """Answer for all images that are not done, or for those before `stop`; gives what was done before."""
    with growing_table(path, HEADER, settings, **options) as table:
        for name, rows in IMAGES.items():
            if name == stop:
                raise Killed
            if printable(name) not in table.done:
                table.add(rows)
    return table.done


def test_a_table_goes_on_from_every_byte_at_which_it_may_be_cut(tmp_path):
    """Also in the middle of a letter, of the settings, and between the two rows of an image."""
    path, partial = tmp_path / "t.csv", tmp_path / "t.csv.partial"
    with pytest.raises(Killed), growing_table(path, HEADER, SETTINGS) as table:
        for rows in IMAGES.values():
            table.add(rows)
        raise Killed
    content = partial.read_bytes()
    write(path)
    whole = path.read_bytes()
    lines = [b"path,class\n", "é.png,Käfer\n".encode(), 'é.png,"a ""b"", c"\n'.encode(), b"\xff.png,K\xc3\xa4fer\n"]
    assert whole.startswith(b"".join(lines)) and b"\n'=1+1\\n.png,K" in whole and whole.count(b"\n") == 9
    head = content.index(b"path,class\n") + len(b"path,class\n")
    for cut in range(len(content) + 1):
        partial.write_bytes(content[:cut])
        with pytest.raises(Killed):
            write(path, stop=NAMES[0])  # which is killed before its first row
        kept = partial.read_bytes()
        assert kept[: max(cut, head)] == content[: max(cut, head)], "going on loses nothing"
        rows, done = content[head:cut].count(b"\n"), write(path)
        assert path.read_bytes() == whole and not partial.exists()
        assert len(done) == (max(rows, 1) - 1) // 2, "the last image alone may lack a row"


def test_the_rows_of_an_image_that_is_gone_give_way_to_the_next_ones(tmp_path):
    with pytest.raises(Killed):
        write(tmp_path / "t.csv", stop=NAMES[2])
    with pytest.raises(Killed), growing_table(tmp_path / "t.csv", HEADER, SETTINGS) as table:
        table.add([["x", "y"]])
        raise Killed
    rows = (tmp_path / "t.csv.partial").read_bytes().splitlines()
    assert len(rows) == 5 and rows[-1] == b"x,y"
    with growing_table(tmp_path / "t.csv", HEADER, SETTINGS) as table:
        pass  # nor is x there any more
    assert (tmp_path / "t.csv").read_bytes().splitlines() == rows[1:4] and table.done == {NAMES[0]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"learner": "b2", "top_k": 2}, "(learner 'a1', now 'b2')"), ({"learner": "a1", "top_k": 3}, "(top_k 2, now 3)")],
)
def test_other_settings_are_refused_by_name_and_what_is_there_stays(tmp_path, capsys, settings, words):
    path, partial = tmp_path / "t.csv", tmp_path / "t.csv.partial"
    with pytest.raises(Killed):
        write(path, stop=NAMES[2])
    content = partial.read_bytes()
    with pytest.raises(ValueError) as error:
        write(path, settings=settings)
    assert words in str(error.value) and partial.read_bytes() == content
    write(path, settings=settings, anew=True)
    old = tmp_path / "t.csv.partial.old"
    assert old.read_bytes() == content and f"is now in {old}" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["precious", "precious\n", '["settings"]\n', "settings,[]\n", "settings,x\n"])
def test_a_file_of_somebody_else_in_the_place_of_the_beginning_is_refused(tmp_path, content):
    partial = tmp_path / "t.csv.partial"
    partial.write_text(content)
    with pytest.raises(FileExistsError, match="is not of an earlier call: move it away"):
        write(tmp_path / "t.csv")
    assert partial.read_text() == content


def test_of_two_on_one_table_or_in_one_folder_the_second_is_refused(tmp_path):
    (tmp_path / "link.csv").symlink_to("t.csv")
    with growing_table(tmp_path / "t.csv", HEADER, SETTINGS) as table:
        table.add(IMAGES[NAMES[0]])
        with pytest.raises(CheckpointError, match=r"link\.csv is in use by another process"):
            write(tmp_path / "link.csv")
    folder = str(tmp_path / "sorted")
    with sorted_folder(folder), pytest.raises(CheckpointError, match="sorted is in use"), sorted_folder(folder):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "t.csv"]


def test_an_error_while_a_table_grows_keeps_its_own_name(tmp_path):
    with pytest.raises(OSError, match="'gone.png'"), growing_table(tmp_path / "t.csv", HEADER, SETTINGS):
        raise FileNotFoundError(2, "No such file or directory", "gone.png")


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
