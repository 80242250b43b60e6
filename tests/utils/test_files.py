"""Test tables that spreadsheets open, and paths as seen from a folder."""

import pytest

from dulbe_peft.utils.files import below, read_csv, write_csv


@pytest.mark.parametrize(("text", "mark"), [("M\u00fctze", b"\xef\xbb\xbf"), ("Mutze", b"")])
def test_table_with_other_letters_than_ascii_has_a_mark_for_excel(tmp_path, capsys, text, mark):
    write_csv(tmp_path / "t.csv", ["path", "label"], iter([["a.png", text]]))
    assert (tmp_path / "t.csv").read_bytes() == mark + f"path,label\na.png,{text}\n".encode()
    assert read_csv(tmp_path / "t.csv") == [["path", "label"], ["a.png", text]]
    write_csv("-", ["path"], [[text]])
    assert capsys.readouterr().out == f"path\n{text}\n", "another program reads a pipe"


@pytest.mark.parametrize(
    ("path", "seen"),
    [("a/b/c.png", "b/c.png"), ("a/..b/c.png", "..b/c.png"), ("b/c.png", None), ("a", "."), (".", None)],
)
def test_path_is_seen_from_a_folder_or_lies_outside(path, seen):
    assert below(path, "a") == seen
