"""Test the page that shows photographs grouped by their predicted class."""

import pytest
from pages import Page, check_self_contained
from PIL import Image

from dulbe_peft.photos.commands.main import main

SCRIPT = "<script>alert(1)</script>"


def test_photographs_are_grouped_by_class_least_certain_first(tmp_path, capsys):
    for number, grey in enumerate((10, 120, 240)):
        Image.new("RGB", (40, 30), (grey,) * 3).save(tmp_path / f"{number}.png")
    lines = ["path,predicted,probability", f"{tmp_path}/0.png,cat,0.9", f"{tmp_path}/0.png,{SCRIPT},0.1"]
    lines += [f"{tmp_path}/1.png,cat,0.4", f"{tmp_path}/2.png,,0.3", f"{tmp_path}/gone.png,{SCRIPT},0.8"]
    table = tmp_path / "holidays.csv"
    table.write_text("\n".join(lines) + "\n")
    assert main(["report", str(table)]) == 0
    assert f"written: {table}.html" in capsys.readouterr().out
    page = Page(f"{table}.html")
    check_self_contained(page)
    assert [title for level, title in page.headings if level == 2] == [f"{SCRIPT} (1)", "cat (2)", "none of these (1)"]
    assert [attributes["alt"] for tag, attributes in page.tags if tag == "img"] == ["1.png", "0.png", "2.png"]
    assert (
        "4 photographs" in page.words and "can no longer be read" in page.words and "<script>alert" not in page.source
    )


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("a,b\n", [], "begins with the columns"),
        ("path,predicted,probability\nx.png,cat,very\n", [], "line 2 of"),
        ("path,predicted,probability\n", ["--latex", "t.tex"], "give it alone"),
    ],
)
def test_invalid_table_of_predictions_is_refused(tmp_path, monkeypatch, capsys, text, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(text)
    assert main(["report", "t.csv", *flags]) == 2
    assert words in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["t.csv"]
