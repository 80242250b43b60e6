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


def test_item_has_one_card_with_a_strip_of_its_photographs(tmp_path, capsys):
    lines = ["path,predicted,probability,novelty,group"]
    for number in range(8):
        Image.new("RGB", (40, 30), (30 * number,) * 3).save(tmp_path / f"{number}.png")
        item = "vase 1" if number < 5 else "vase 2" if number < 7 else f"{tmp_path}/7.png"
        lines.append(f"{tmp_path}/{number}.png,{'cup' if number == 6 else 'vase'},0.{9 - number // 5},0.1,{item}")
    (tmp_path / "items.csv").write_text("\n".join(lines) + "\n")
    assert main(["report", str(tmp_path / "items.csv")]) == 0
    page = Page(tmp_path / "items.csv.html")
    assert [title for level, title in page.headings if level == 2] == ["cup (1)", "vase (3)"]
    shown = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert shown == ["6.png", "5.png", "7.png", "0.png", "1.png", "2.png", "3.png"], "at most four of an item"
    assert "8 photographs of 3 items" in page.words and "vase 15 photographs90.0 %" in page.words


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
