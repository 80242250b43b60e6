"""What `run` says of the data before it trains, and what a file that cannot be read does to a stream."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from dulbe_peft.commands.main import main
from dulbe_peft.data.decoding import IMAGE_SUFFIXES
from dulbe_peft.demo import demo_model_folder
from dulbe_peft.runs.setup import fit_increment

QUICK = ["--epochs", "1", "--residual-rank", "2", "--support-rank", "8", "--device", "cpu", "--no-progress"]
FROZEN = ["--strategy", "frozen", "--classifiers", "prototype"]


@pytest.fixture
def photos(digit_folders, tmp_path):
    """Four digits, one, three, two and zero, with five images each to learn and three to test, to be damaged."""
    return shutil.copytree(digit_folders(4, 5, 3), tmp_path / "photos")


def run(photos, *more: str) -> int:
    return main(["run", "--model", str(demo_model_folder()), "--data", str(photos), *QUICK, *more])


def test_a_run_says_what_there_is_and_tests_on_what_is_held_back(photos, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(photos / "train", "--test-fraction", "0.4", "--output", str(out), *FROZEN) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 classes; images: ") and "in test" in said.splitlines()[0]
    assert "increment is not set: tasks of 2, about half of the 4 classes" in said and "task 2/2: 4 classes" in said
    assert "prototype" in json.loads((out / "results.json").read_text())["classifiers"]
    assert run(photos, "--test-fraction", "0.4", "--output", str(out), *FROZEN) == 2
    assert "has the test split 'test'" in capsys.readouterr().err


def test_a_run_without_test_images(photos, tmp_path, capsys):
    shutil.rmtree(photos / "test")
    assert run(photos, "--increment", "9", "--output", str(tmp_path / "out"), *FROZEN) == 0
    said = capsys.readouterr().out
    assert f"{photos} has no test images" in said and "--test-fraction" in said
    assert "increment is 9, there are 4 classes: they are learned as one task" in said and "task 1/1" in said
    assert "classifiers" not in json.loads((tmp_path / "out" / "results.json").read_text())


def test_unreadable_images_stop_a_run_before_the_model_is_loaded(photos, tmp_path, capsys):
    bad = photos / "train" / "two" / "1.png"
    bad.write_bytes(bad.read_bytes()[:60])
    (photos / "test" / "two" / "notes.txt").write_text("x")
    command = ["run", "--model", "no-such-model", "--data", str(photos), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("dulbe-peft: 1 of the images") and f"{bad}: " in said and "--skip-unreadable" in said
    assert run(photos, "--skip-unreadable", "--output", str(tmp_path / "out"), *FROZEN) == 0
    said = capsys.readouterr().out
    assert f"  {bad}: " in said and "left out: 1" in said and "files ending in .txt are not read, such as" in said
    assert "two             4       3" in said and "4 classes      19      12" in said and "task 2/2" in said


def test_a_file_that_breaks_in_a_later_task_loses_no_finished_one(photos, tmp_path, capsys, monkeypatch):
    from dulbe_peft.runs.run import run_stream

    bad, out = photos / "train" / "zero" / "3.png", tmp_path / "out"
    whole = bad.read_bytes()

    def meanwhile(*arguments):
        """The file was whole when the run began."""
        bad.write_bytes(whole[:60])
        return run_stream(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("dulbe_peft.runs.run.run_stream", meanwhile)
        assert run(photos, "--output", str(out), *FROZEN) == 2
    captured = capsys.readouterr()
    assert "task 1/2" in captured.out and str(bad) in captured.err and (out / "task-001").is_dir()
    assert run(photos, "--output", str(out), *FROZEN) == 2
    assert str(bad) in capsys.readouterr().err
    bad.write_bytes(whole)
    assert run(photos, "--output", str(out), *FROZEN) == 0
    said = capsys.readouterr().out
    assert "resuming after task-001" in said and "task 2/2" in said and "task 1/2" not in said


@pytest.mark.parametrize("strategy", ["dulbe", "frozen", "bofa"])
def test_a_dry_run_opens_the_data(photos, capsys, strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    quick = ["--classifiers", "prototype"] if strategy == "frozen" else []
    assert run(photos, "--dry-run", "--strategy", strategy, *quick) == 0
    said = capsys.readouterr().out
    assert "task 1: 2 classes, 10 images to learn from, 6 to test on: one, three" in said
    assert "pixel cache: 0.0 MiB" in said and "the whole run: about " in said and " MiB with 4 classes" in said
    if strategy == "frozen":
        assert "nothing is trained, no layer is adapted" in said
    elif strategy == "bofa":
        assert "visual_projection  96 -> 64  1 layer " in said
    else:
        assert "k_proj  96 -> 96  4 layers  shared 1  residual 2  support <= 8" in said
        assert "fc2  256 -> 96  4 layers" in said and "kept from task to task beside the adapter: " in said
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_a_single_class_and_of_images_that_are_read_each_time(photos, capsys):
    for name in ("one", "three", "two"):
        for split in ("train", "test"):
            shutil.rmtree(photos / split / name)
    assert run(photos, "--dry-run", "--pixel-cache-mb", "0", "--num-workers", "1") == 0
    said = capsys.readouterr().out
    assert "task 1: 1 class," in said and "pixel cache: none" in said and "in this process alone" in said


@pytest.mark.parametrize("names", ["text_projection", "k_porj"])
@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_names_of_no_visual_layer_stop_a_run_before_it_trains(photos, tmp_path, capsys, names, more):
    assert run(photos, "--output", str(tmp_path / "out"), "--target-modules", names, *more) == 2
    said = capsys.readouterr().err
    assert names in said and ("text_target_modules" in said) == names.startswith("text")
    assert not (tmp_path / "out").exists()


def test_the_increment_is_fitted_to_the_classes():
    without = {100: 10, 20: 10, 19: 10, 5: 3, 1: 1}
    assert {classes: fit_increment(None, classes) for classes in without} == without
    assert [fit_increment(asked, 5) for asked in (7, 5, 2)] == [5, 5, 2]


def test_the_page_s_code_runs(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    model, namespace = "openai/clip-vit-base-patch16", {"__name__": "page"}
    pieces = re.findall(r"```(bash|python)\n(.*?)```", text, flags=re.DOTALL)
    assert [language for language, _ in pieces] == ["bash", "python", "bash", "bash", "python"]
    for language, code in pieces:
        if language == "python":
            exec(compile(code, "docs/data.md", "exec"), namespace)
            continue
        (command,) = code.replace("\\\n", " ").strip().splitlines()
        words = [str(demo_model_folder()) if word == model else word for word in command.split()[1:]]
        assert main([*words, *QUICK, *FROZEN]) == 0
    assert (tmp_path / "held-back" / "results.json").is_file()
    assert "the whole run: about" in capsys.readouterr().out
    for suffix in IMAGE_SUFFIXES:
        assert f"`{suffix}`" in text
