"""Test tables that spreadsheets open."""

import pytest

from dulbe_peft.utils.files import read_csv, write_csv


@pytest.mark.parametrize(("text", "mark"), [("M\u00fctze", b"\xef\xbb\xbf"), ("Mutze", b"")])
def test_table_with_other_letters_than_ascii_has_a_mark_for_excel(tmp_path, capsys, text, mark):
    write_csv(tmp_path / "t.csv", ["path", "label"], iter([["a.png", text]]))
    assert (tmp_path / "t.csv").read_bytes() == mark + f"path,label\na.png,{text}\n".encode()
    assert read_csv(tmp_path / "t.csv") == [["path", "label"], ["a.png", text]]
    write_csv("-", ["path"], [[text]])
    assert capsys.readouterr().out == f"path\n{text}\n", "another program reads a pipe"
