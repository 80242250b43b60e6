"""Test that no output of a command replaces a file that the command reads, under any of the file's names."""

import hashlib
import io
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from dulbe_peft.photos.commands.main import GROUPS, commands, main

# For each command with outputs that are files: its arguments, and the flags of these outputs.
# `{saved}` is a learner, `{model}` a model, `{data}` a folder of photographs with tables, `{table}` one of the tables.
OUTPUTS = {
    "check": ("{data}", ("--page", "--csv")),
    "suggest": ("--model {model} {data}", ("--csv", "--page")),
    "report": ("{data}", ("--output", "--csv", "--latex")),
    "predict": (
        "{saved} {data} --only {table}",
        ("--csv", "--json", "--by-group", "--exiftool", "--timelapse", "--label-studio", "--camtrap-dp"),
    ),
    "features": ("--model {model} --data {data}", ("--output",)),
}
FILES = ("metadata.csv", "media.csv", "answers.json", "deep/train.parquet", "a/0.png", "table.csv")


@pytest.fixture
def read(tmp_path):
    """Make a folder of photographs with tables beside them, and a table elsewhere."""
    data = tmp_path / "data"
    for name in FILES[:-1]:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(f"precious {name}")
    for number in range(2):
        Image.new("RGB", (9, 9), (number, 90, 0)).save(data / "a" / f"{number}.png")
    (tmp_path / "table.csv").write_text("a\n")
    return tmp_path


def test_table_of_outputs_has_every_flag_that_writes_a_file():
    for name in [name for group in GROUPS.values() for name in group]:
        options = commands.get_command(None, name).params
        files = {option.opts[0] for option in options if getattr(option, "metavar", "") in ("FILE", "FILE.html")}
        read = {"--only", "--sum-up", "--class-names", "--config", "--vocabulary"}
        listed = {*OUTPUTS.get(name, ("", ()))[1]} - {"--camtrap-dp"}  # which has the metavar FILE.csv, as --labels
        assert files - read == listed, name


def digests(folder):
    return {hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}


def cases():
    for name, (_, flags) in OUTPUTS.items():
        for flag in flags:
            for file in FILES if name == "predict" else FILES[:-1]:
                yield name, flag, file


@pytest.mark.plain("media.csv", "a/0.png")
@pytest.mark.parametrize("name, flag, file", [*cases()])
def test_output_replaces_no_file_that_is_read(finished_run, tiny_model, read, capsys, name, flag, file):
    inside = read / file if file == "table.csv" else read / "data" / file
    words = OUTPUTS[name][0].format(saved=finished_run, model=tiny_model, data=read / "data", table=read / "table.csv")
    words += " --group folder" if flag == "--by-group" else ""
    hard, soft, around = read / f"hard{inside.suffix}", read / f"soft{inside.suffix}", read / "around"
    hard.hardlink_to(inside)
    soft.symlink_to(inside)
    around.symlink_to(inside.parent)
    before = digests(read)
    for place in (inside, soft, around / inside.name, hard):
        assert main([name, *words.split(), flag, str(place)]) == 2
        said = capsys.readouterr().err
        assert f"{flag} {place} " in said and "choose another name" in said, said
        assert digests(read) == before
    main([name, *words.split(), flag, str(inside), "--overwrite"])
    assert before <= digests(read), "--overwrite keeps NAME.old"


@pytest.mark.parametrize("flag", OUTPUTS["predict"][1][:-1])
def test_paths_on_standard_input_are_read_too(finished_run, read, monkeypatch, capsys, flag):
    before = digests(read)
    groups = ["--group", "folder"] if flag == "--by-group" else []
    for given, output in (("data", "data/media.csv"), ("data/a/0.png", "data/a/0.png"), ("data/a", "data/a/1.png")):
        lines = io.BytesIO(f"{read / given}\n".encode())
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=lines, isatty=lambda: False))
        assert main(["predict", str(finished_run), "-", flag, str(read / output), *groups]) == 2
        said = capsys.readouterr().err
        assert f"{flag} {read / output} " in said and "choose another name" in said, said
        assert digests(read) == before


@pytest.mark.parametrize("name", ["metadata.csv", "deep/photos.parquet"])
def test_output_that_would_take_the_place_of_photographs_is_refused(tiny_model, tmp_path, capsys, name):
    Image.new("RGB", (9, 9)).save((tmp_path / "deep").mkdir() or tmp_path / "deep" / "x.png")
    command, flag = ("check", "--csv") if name == "metadata.csv" else ("features", "--output")
    given = [str(tmp_path)] if command == "check" else ["--model", str(tiny_model), "--data", str(tmp_path)]
    assert main([command, *given, flag, str(tmp_path / name)]) == 2
    assert "whose images would no longer be read" in capsys.readouterr().err and not (tmp_path / name).exists()


def test_output_outside_of_the_inputs_is_replaced_as_before(tmp_path):
    shutil.copytree(Path(__file__).parent, tmp_path / "data", ignore=lambda *_: ["__pycache__"])
    Image.new("RGB", (9, 9)).save((tmp_path / "data" / "a").mkdir() or tmp_path / "data" / "a" / "x.png")
    for _ in range(2):
        assert main(["check", str(tmp_path / "data"), "--csv", str(tmp_path / "found.csv")]) == 0
    assert [path.name for path in tmp_path.iterdir()].count("found.csv.old") == 0


def test_existing_file_of_the_reads_is_kept_by_a_copy_where_links_are_impossible(read, monkeypatch):
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    before = digests(read)
    main(["check", str(read / "data"), "--csv", str(read / "data" / "media.csv"), "--overwrite"])
    assert before <= digests(read) and (read / "data" / "media.csv.old").read_text() == "precious media.csv"


def test_folder_that_was_moved_for_an_output_comes_back_if_nothing_was_written(tiny_model, read, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    for name in ("metadata.csv", "media.csv", "answers.json", "deep/train.parquet"):
        (read / "data" / name).unlink()
    given = ["run", "--model", str(tiny_model), "--data", str(read / "data"), "--group-seconds", "5", "--no-store"]
    assert main([*given, "--output", str(out), "--overwrite"]) == 2  # the photographs do not say when they were taken
    said = capsys.readouterr().err
    assert f"renamed {out}.old back to {out}, because nothing was written" in said, said
    assert (out / "mine.txt").read_text() == "precious" and not Path(f"{out}.old").exists()
