"""`dulbe-peft suggest`: which photographs of a heap to label next."""

import os
import shutil
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
from small_runs import call

from dulbe_peft.data.digits import DIGITS
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos import suggesting
from dulbe_peft.utils.files import read_csv, write_csv


@pytest.fixture
def heap(digit_folders, tmp_path):
    """Forty photographs in a folder, of which some were learned, one is there twice and one cannot be read."""
    (tmp_path / "heap").mkdir()
    for file in (digit_folders(5, 8, 2) / "train").rglob("*.png"):
        name = file.parent.name
        shutil.copy(file, tmp_path / "heap" / f"{name}-{file.name}")
        if name in DIGITS[:3] and int(file.stem) < 3:
            (tmp_path / "june" / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / "june" / name / f"mine-{file.name}")
    shutil.copy(tmp_path / "heap" / "four-4.png", tmp_path / "heap" / "four-copy.png")
    (tmp_path / "heap" / "z-bad.png").write_bytes(b"no image")
    os.mkfifo(tmp_path / "heap" / "pipe.png")
    return tmp_path / "heap"


@pytest.fixture
def june(heap, tmp_path, capsys):
    """A learner of some of them."""
    model = ["--model", demo_model_folder(), "--classifiers", "lda"]
    assert call("run", "--data", tmp_path / "june", *model, "--output", tmp_path / "out") == 0
    capsys.readouterr()
    return tmp_path / "out"


def test_before_there_is_a_learner(heap, tmp_path, capsys):
    table, page = tmp_path / "label.csv", tmp_path / "label.html"
    words = ["--model", demo_model_folder(), heap, "--count", 5, "--csv", table, "--page", page]
    assert call("suggest", *words) == 0
    said = capsys.readouterr().out
    assert "5 photographs of 40" in said and "1 photograph in the data twice" in said
    assert "z-bad.png: it is none" in said and "neither a file nor a folder, such as" in said
    assert f"correct the column class of {table}, and call it label; then" in said
    assert f"--labels {table} --output labelled" in said
    header, *rows = read_csv(table)
    assert header == ["path", "reason", "class", "novelty"] and len(rows) == 5
    assert all(Path(path).parent == heap and not name and not novelty for path, _, name, novelty in rows)
    assert len({Path(path).name.split("-")[0] for path, *_ in rows}) >= 4, "groups are digits, more or less"
    text = page.read_text(encoding="utf-8")
    assert text.count("<figure>") == 5 and all(Path(path).name in text for path, *_ in rows)


def test_with_a_learner_nothing_that_it_knows_is_suggested(heap, june, tmp_path, capsys):
    table = tmp_path / "label.csv"
    assert call("suggest", june, heap, "--count", 12, "--csv", table) == 0
    said = capsys.readouterr().out
    assert "left out: 9 photographs learned before" in said and "z-bad.png: it is none" in said
    _, *rows = read_csv(table)
    known = {f"{name}-{number}.png" for name in DIGITS[:3] for number in range(3)}
    assert len(rows) == 12 and not known & {Path(path).name for path, *_ in rows}
    assert len({Path(path).read_bytes() for path, *_ in rows}) == 12
    assert all(isfinite(float(novelty)) and (name or "unlike" in why) for _, why, name, novelty in rows)
    assert any(why.startswith("unsure") for _, why, *_ in rows)
    for words, why in (
        ([june, heap / "one-0.png"], "no photograph is left that can be read and was not learned"),
        (["--model", demo_model_folder()], "name the photographs"),
        ([heap], "name a saved learner"),
    ):
        assert call("suggest", *words) == 2
        assert why in capsys.readouterr().err


def test_a_table_of_suggestions_is_learned_once_its_guesses_are_called_labels(june, tmp_path, capsys, monkeypatch):
    """The table lies in another folder than its paths begin in."""
    (tmp_path / "tables").mkdir()
    monkeypatch.chdir(tmp_path)
    table = Path("tables/label.csv")
    assert call("suggest", "out", "heap", "--count", 9, "--csv", table) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next: dulbe-peft learn "))
    words = command.removeprefix("next: dulbe-peft ").split()
    assert call(*words) == 2 and "rename the column to 'label'" in capsys.readouterr().err
    header, *rows = read_csv(table)
    assert all(Path(path).is_absolute() for path, *_ in rows)
    assert call("suggest", "out", "heap", "--csv", table) == 2
    assert "may hold your corrections" in capsys.readouterr().err and read_csv(table)[1:] == rows
    right = [[path, why, Path(path).name.split("-")[0], novelty] for path, why, _, novelty in rows]
    write_csv(table, ["label" if name == "class" else name for name in header], right)
    assert call(*words) == 0
    said = capsys.readouterr().out
    assert "cannot be read" not in said and "known classes get" in said
    assert call("suggest", "out", "nothing", "--csv", table, "--overwrite") == 2 and read_csv(table)[1:] == right
    assert call("suggest", "out", "heap", "--csv", table, "--overwrite") == 0
    assert read_csv(Path(f"{table}.old"))[1:] == right and len(read_csv(table)) > 1


def test_standard_output_is_written_to_and_stays(heap, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("-").write_text("mine")
    for name in ("-", "/dev/stdout"):
        assert call("suggest", "--model", demo_model_folder(), heap, "--csv", name, "--overwrite") == 0
        assert capfd.readouterr().out.startswith("path,reason,class,novelty")
    assert Path("-").read_text() == "mine" and Path("/dev/stdout").is_symlink()


def test_a_novelty_below_zero_is_a_number_in_the_table(heap, tmp_path, monkeypatch):
    found, table = suggesting.suggestions, tmp_path / "label.csv"
    monkeypatch.setattr(suggesting, "suggestions", lambda *given: [replace(found(*given)[0], novelty=-0.7056421)])
    assert call("suggest", "--model", demo_model_folder(), heap, "--csv", table) == 0
    assert read_csv(table)[1][3] == "-0.705642"
