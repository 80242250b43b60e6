"""Test that help and errors about wrong names, paths and flags come before slow imports."""

import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest
from PIL import Image

from dulbe_peft.photos.commands.main import commands

CALL = """
import contextlib, io, json, sys
from dulbe_peft.photos.commands.main import main

for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        status = main(argv)
    print(json.dumps([status, said.getvalue(), list(sys.modules)]))
"""
HEAVY = {"torch", "transformers", "scipy", "matplotlib", "peft", "sklearn", "accelerate"}
HELP = [["--help"], ["--version"], *([name, "--help"] for name in commands.lines)]
REFUSED = [
    ("run", "--model is required"),
    ("run --data gone", "gone does not exist"),
    ("check gone --check-labels", "gone does not exist"),
    ("predict gone {data}", "'gone' is not a folder"),
    ("predict {saved} gone.jpg", "gone.jpg does not exist"),
    ("predict {saved} x.jpg --precison float32", "No such option"),
    ("predict {saved} x.jpg --backend tensorrt", "'tensorrt' is not one of"),
    ("run --model gone --data {data} --output o", "'gone' is not a folder"),
    ("run --model demo --data gone --output o", "gone does not exist"),
    ("run --model demo --data {data} --output o --class-order gone", "--class-order 'gone' is not a file"),
    ("run --model demo --data {data} --output o --class-names gone", "--class-names 'gone' is not a file"),
    ("run --model demo --data {data} --output o --epochs 0", "Invalid value for '--epochs': epochs must be"),
    ("run --model demo --data {data} --output {data}/o", "lies in"),
    ("learn {saved} --data gone --output o", "gone does not exist"),
    ("evaluate gone --data {data}", "'gone' is not a folder"),
    ("evaluate {saved} --data gone", "gone does not exist"),
    ("features --model gone --data {data}", "'gone' is not a folder"),
    ("features --model demo --data gone", "gone does not exist"),
    ("serve gone", "'gone' is not a folder"),
    ("export gone o", "'gone' is not a folder"),
    ("forget gone cat --output o", "'gone' is not a folder"),
    ("report gone --csv t.csv", "gone is not a folder"),
    ("check gone", "gone does not exist"),
    ("suggest {saved} {data} --count 0", "count must be at least 1"),
    ("suggest {saved} gone gone-too", "gone does not exist, nor do the others"),
    ("suggest {saved} empty", "empty holds no image"),
    ("suggest {saved} {data} --classifier nix", "has no classifier 'nix'; its classifiers are bridge"),
    ("suggest {data}", "name a saved learner"),
    ("serve {saved} --photos gone --output kept --overwrite", "--photos gone is not a folder"),
    ("serve {saved} --photos empty", "empty holds no image"),
    ("serve {saved} --host 8.8.8.8", "cannot listen on 8.8.8.8:7860"),
    ("learn {saved} --labels guesses.csv --output o", "correct the predictions, and rename the column to 'label'"),
    ("learn {saved} --labels wrong.csv --output o", "wrong.csv has the paths in 'where', but it does not say"),
    ("evaluate {saved} --labels wrong.csv --data {data}", "omit --data"),
    ("evaluate {saved}", "--data is required, or --labels"),
    ("learn {saved} --labels tags.csv --output o", "give a vocabulary, a file that lists the keywords that are"),
    ("learn {saved} --labels tags.csv --vocabulary gone --output o", "--vocabulary 'gone' is not a file"),
    ("learn {saved} --data {data} --class-names gone --output o", "--class-names 'gone' is not a file"),
    ("learn {saved} --data {data} --test-fraction 2 --output o", "test_fraction must be less than 1"),
    ("learn {saved} --data {data} --train-split gone --output o", "has no split 'gone'"),
    ("learn {saved} --data {data}/train/cat --output o", "has no folder; one folder per class is needed"),
    ("learn gone --data {data} --output kept --overwrite", "'gone' is not a folder"),
    ("run --model demo --labels guesses.csv --output o", "rename the column to 'label'"),
    ("merge {saved} gone --output kept --overwrite", "'gone' is not a folder"),
    ("rename {saved} a9 swan --output kept --overwrite", "class 'a9' has not been learned, so it cannot be renamed"),
    ("rename {saved} a0 a0 --output o", "already has this name"),
    ("forget {saved} a9 --output kept --overwrite", "class 'a9' has not been learned, so it cannot be forgotten"),
    ("forget {saved} --image gone.jpg --output o", "gone.jpg does not exist"),
    ("convert-openclip gone o --tokenizer t", "gone"),
]


def test_missing_inputs_are_refused_before_torch_is_imported(finished_run, tmp_path):
    """One process runs all calls in order: first those of help, which import few packages, then the refused ones."""
    data = tmp_path / "photos"
    (data / "train" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(data / "train" / "cat" / "1.png")
    rows = [("guesses", "path,predicted,novelty", "cat,0"), ("wrong", "where,what,why", "cat,x")]
    rows.append(("tags", "SourceFile,Subject", "cat"))
    for name, header, values in rows:
        (tmp_path / f"{name}.csv").write_text(f"{header}\nphotos/train/cat/1.png,{values}\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "kept").mkdir()
    calls = [*HELP, *(argv.format(saved=finished_run, data=data).split() for argv, _ in REFUSED)]
    command = [sys.executable, "-c", CALL, json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert not (HEAVY | {"pydantic", "numpy"}) & {name for *_, modules in results[: len(HELP)] for name in modules}
    for (argv, words), (status, error, modules) in zip(REFUSED, results[len(HELP) :], strict=True):
        assert status == 2 and words in error and not HEAVY & set(modules), (argv, error)
    names = {"photos", "guesses.csv", "wrong.csv", "tags.csv", "empty", "kept"}
    assert {path.name for path in tmp_path.iterdir()} == names, "--overwrite renames nothing before it is needed"


WATCHED = """
import importlib.abc, json, os, sys
from dulbe_peft.photos.commands.main import main

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("importing torch", file=sys.stderr, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
sys.exit(main(json.loads(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="the line is for terminals")
@pytest.mark.parametrize(
    ("argv", "first"),
    [
        ("run --model demo --data {data} --output out --dry-run", "reading {data} ..."),
        ("predict {saved} {data}", "loading {saved} ..."),
        ("predict {saved} {data} --no-progress", "importing torch"),
        ("check {data} --check-labels --model demo", "loading demo ..."),
    ],
)
def test_terminal_shows_what_a_command_does_before_torch_is_imported(argv, first, finished_run, tmp_path):
    place = tmp_path / "photos" / "train" / "cat"
    place.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(place / "1.png")
    names = {"saved": finished_run, "data": tmp_path / "photos"}
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", WATCHED, json.dumps(argv.format(**names).split())]
    done = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, cwd=tmp_path)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux reports the end of a terminal as an error
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    done.wait()
    lines = shown.decode().split("\r\n")
    assert lines[0] == first.format(**names) and "importing torch" in lines
