"""`predict` and `evaluate` on the command line: answers that come one by one, tables that go on, images sorted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from unittest.mock import DEFAULT, Mock

import pytest
from lives import content

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.classifiers import Classifier
from dulbe_peft.commands.main import main
from dulbe_peft.demo import demo_model_folder
from dulbe_peft.utils.files import read_csv

MACHINE = ["--device", "cpu", "--no-progress", "--num-workers", "0"]


@pytest.fixture(scope="module")
def folders(digit_folders):
    return digit_folders(4, 8, 3)


@pytest.fixture(scope="module")
def learner(folders, tmp_path_factory):
    """A run over one, three, two and zero."""
    out = tmp_path_factory.mktemp("learned") / "out"
    command = ["run", "--model", str(demo_model_folder()), "--data", str(folders), "--output", str(out), *MACHINE]
    assert main([*command, "--classifiers", "bridge,lda"]) == 0
    return out


def test_answers_come_batch_by_batch_and_a_table_goes_on(learner, folders, tmp_path, capsys, monkeypatch):
    predictions, calls = ClassIncrementalLearner.predictions, []

    def answer(*arguments, **keywords):
        """Ctrl-C at the third batch of two images, of which nothing is novel."""
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return [replace(row, novelty=-7.613412345) for row in predictions(*arguments, **keywords)]

    monkeypatch.setattr(ClassIncrementalLearner, "predictions", answer)
    command = ["predict", str(learner), str(folders / "test"), "--eval-batch-size", "2", *MACHINE]
    assert main(command) == 130
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 4 and captured.err == "dulbe-peft: stopped by SIGINT\n"
    calls.clear()
    file, partial = tmp_path / "answers.csv", tmp_path / "answers.csv.partial"
    command += ["--csv", str(file), "--top-k"]
    assert main([*command, "2"]) == 130
    said = capsys.readouterr().err
    assert f"the answers so far are kept in {partial}; to go on:" in said and not file.exists()
    assert len(partial.read_bytes().splitlines()) == 1 + 4
    partial.write_text(partial.read_text()[:-3])  # a line that was cut off
    assert main([*command, "3"]) == 2 and "was begun with other settings" in capsys.readouterr().err
    calls.clear()
    calls += "no more Ctrl-C"
    as_json = ["--json", str(tmp_path / "answers.json")]
    assert main([*command, "2", *as_json]) == 0 and not partial.exists()
    assert len(calls) == len("no more Ctrl-C") + 5, "three of twelve images had whole answers"
    assert "9 images, 3 were answered before" in capsys.readouterr().err
    found, also = read_csv(file), json.loads((tmp_path / "answers.json").read_text())
    assert main([*command, "2", "--overwrite"]) == 0 and read_csv(file) == found and len(found) == 1 + 2 * 12
    assert {row[3] for row in found[1:]} == {"-7.61341"}, "a number, and no formula"
    assert [row["path"] for row in also] == [row[0] for row in found[1::2]], "those of before stand in all files"
    assert main([*command, "2", "--coverage", "0.75"]) == 2 and "give one of them" in capsys.readouterr().err


@pytest.fixture
def begun(learner, folders, tmp_path, monkeypatch, capsys):
    """A command whose table and copies were stopped after the fifth of twelve images, by an error of the disk."""
    images = shutil.copytree(folders / "test", tmp_path / "images")
    shutil.copytree(learner, tmp_path / "out")
    command = ["predict", str(tmp_path / "out"), str(images), "--csv", str(tmp_path / "t.csv")]
    command += ["--sort-into", str(tmp_path / "sorted"), "--eval-batch-size", "4", *MACHINE]
    full = Mock(wraps=shutil.copyfileobj, side_effect=[DEFAULT] * 5 + [OSError(28, "No space left on device")])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        assert main(command) == 2
    assert "No space left on device" in capsys.readouterr().err
    return command


def test_an_answer_of_a_photograph_that_is_gone_is_in_no_table(begun, tmp_path, capsys):
    first = min((tmp_path / "images").rglob("*.png"))
    first.unlink()
    assert main([*begun, "--json", str(tmp_path / "t.json")]) == 0
    assert "7 images, 4 were answered before" in capsys.readouterr().err
    for file in ("t.csv", "t.json"):
        text = (tmp_path / file).read_text()
        assert text.count(".png") == 11 and str(first) not in text


def test_a_row_comes_after_its_copy_and_what_goes_on_ends_alike(begun, tmp_path, capsys):
    partial, sort = tmp_path / "t.csv.partial", tmp_path / "sorted"
    assert len(partial.read_bytes().splitlines()) == 1 + 5 and len(list(sort.rglob("*.png"))) == 5
    assert main(begun) == 0 and "7 images, 5 were answered before" in capsys.readouterr().err
    whole = [*begun]
    for flag, name in (("--csv", "whole.csv"), ("--sort-into", "whole")):
        whole[whole.index(flag) + 1] = str(tmp_path / name)
    assert main(whole) == 0
    assert (tmp_path / "whole.csv").read_bytes() == (tmp_path / "t.csv").read_bytes()
    assert content(sort) == content(tmp_path / "whole") and len(content(sort)) == 12
    assert {path.name for path in tmp_path.iterdir()} == {"images", "out", "sorted", "t.csv", "whole", "whole.csv"}


def relearned(root, command):
    """Another learner at the same path."""
    (root / "out").rename(root / "other")
    assert main(["forget", str(root / "other"), "zero", "--output", str(root / "out"), "--device", "cpu"]) == 0


def elsewhere(root, command):
    command[command.index("--sort-into") + 1] = str(root / "elsewhere")


def edited(root, command):
    """Another photograph under the name of one that was answered, with an old date as `cp -p` gives it."""
    time.sleep(0.05)  # times of files are not exact
    shutil.copy(next((root / "images" / "zero").iterdir()), root / "images" / "one" / "10.png")
    os.utime(root / "images" / "one" / "10.png", (1, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (relearned, "was begun with other settings (learner '"),
        (
            lambda root, command: command.extend(["--precision", "bfloat16"]),
            "other settings (encoded in 'float32', now",
        ),
        (elsewhere, "was begun with other settings (sort into '"),
        (lambda root, command: command.insert(2, str(root / "images" / "one")), "other settings (images '"),
        (edited, "10.png has changed since"),
    ],
)
def test_what_would_mix_two_tables_is_refused(begun, tmp_path, capsys, change, words):
    before = (tmp_path / "t.csv.partial").read_bytes()
    change(tmp_path, begun)
    capsys.readouterr()
    assert main(begun) == 2
    said = capsys.readouterr().err
    assert words in said and "--overwrite" in said and (tmp_path / "t.csv.partial").read_bytes() == before


def test_a_table_that_has_no_answer_yet_begins_anew(begun, tmp_path):
    partial = tmp_path / "t.csv.partial"
    partial.write_bytes(partial.read_bytes().splitlines(keepends=True)[0])
    assert main([*begun, "--top-k", "2"]) == 0 and len(read_csv(tmp_path / "t.csv")) == 1 + 2 * 12


def test_one_image_has_one_row_and_two_have_two_names(learner, folders, tmp_path, capsys):
    images = shutil.copytree(folders / "test" / "one", tmp_path / "images")
    command = ["predict", str(learner), str(images), str(images / "8.png"), "--csv", str(tmp_path / "t.csv"), *MACHINE]
    assert main(command) == 0 and len(read_csv(tmp_path / "t.csv")) == 1 + 3
    for name in ("a\nb.png", r"a\nb.png", "\udcff.png"):
        shutil.copy(images / "8.png", images / name)
    assert main(command) == 2 and r"would call two images" in capsys.readouterr().err
    (images / "a\nb.png").unlink()
    assert main(command) == 0 and b"/\xff.png,one," in (tmp_path / "t.csv").read_bytes()


def test_copies_are_no_further_images(learner, folders, tmp_path, capsys):
    images = shutil.copytree(folders / "test" / "one", tmp_path / "images")
    for place in (images, images / "sorted"):
        assert main(["predict", str(learner), str(images), "--sort-into", str(place), *MACHINE]) == 2
        assert "which is never changed: name another folder" in capsys.readouterr().err


OUTPUTS = {
    "predict --csv": ["predict", "{learner}", "{photos}", "--csv"],
    "predict --json": ["predict", "{learner}", "{photos}", "--json"],
    "report --output": ["report", "{learner}", "--output"],
    "report --latex": ["report", "{learner}", "--latex"],
    "check --csv": ["check", "{photos}", "--csv"],
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_pipe_and_standard_output_are_written_to(learner, folders, tmp_path, capfd, output):
    command = [word.format(learner=learner, photos=folders) for word in OUTPUTS[output]]
    machine = MACHINE if command[0] == "predict" else []
    suffix = {"--json": "json", "--latex": "tex", "--csv": "csv"}.get(command[-1], "html")
    file = tmp_path / f"file.{suffix}"
    assert main([*command, str(file), *machine]) == 0
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert main([*command, str(pipe), *machine]) == 0 and pipe.is_fifo()
    reader.join(20)
    assert found == [file.read_bytes()] and found[0]
    for name in ("-", "/dev/stdout") if machine else ("-",):
        capfd.readouterr()
        assert main([*command, name, *machine]) == 0
        assert capfd.readouterr().out.encode() == found[0]
    assert sorted(tmp_path.iterdir()) == [file, pipe]


def test_images_are_sorted_into_folders_and_nothing_is_replaced(learner, folders, tmp_path, monkeypatch, capsys):
    images = shutil.copytree(folders / "test" / "one", tmp_path / "images")
    (images / "again").mkdir()
    shutil.copy(folders / "test" / "one" / "8.png", images / "again" / "9.png")  # another image with the same name
    (images / "no.png").write_bytes(b"x")
    command = ["predict", str(learner), str(images), "--sort-into", str(tmp_path / "sorted"), *MACHINE]
    for _ in range(2):
        assert main(command) == 0
        assert content(tmp_path / "sorted").keys() == {"one/10.png", "one/8.png", "one/9-2.png", "one/9.png"}
    said = capsys.readouterr()
    assert "no.png cannot be read" in said.err and said.out.count("one") >= 8
    for area in (0.5, 0.9):
        monkeypatch.setattr(Classifier, "roc_area", area)
        assert main([*command, "--reject", "0.99"]) == 0 and (tmp_path / "sorted" / "none of these").is_dir()
        assert ("unknown things cannot be told here" in capsys.readouterr().err) == (area == 0.5)


def test_names_reach_the_terminal_and_tables_without_what_acts_on_them(learner, folders, tmp_path, capsys):
    images = tmp_path / "images"
    images.mkdir()
    name = "a\r=1+1\n\x1b[2J\u202eb.png"
    shutil.copy(folders / "test" / "one" / "8.png", images / name)
    (images / f"not {name}").write_bytes(b"x")
    shown = r"a\r=1+1\n\x1b[2J\u202eb.png"
    assert main(["predict", str(learner), str(images), *MACHINE]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{images}/{shown}\t") and said.out.count("\n") == 1
    assert f"not {shown} cannot be read" in said.err and "\x1b" not in said.err
    file = tmp_path / "table.csv"
    assert main(["predict", str(learner), str(images), "--csv", str(file), *MACHINE]) == 0
    assert [row[0] for row in read_csv(file)] == ["path", f"{images}/{shown}"]
    assert main(["predict", str(learner), str(tmp_path / "\x1b[2J"), *MACHINE]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_strangers_alone_can_be_measured(learner, folders, tmp_path, capsys):
    shutil.copytree(folders / "test" / "one", tmp_path / "test" / "nine\u202e")
    command = ["evaluate", str(learner), "--data", str(tmp_path), *MACHINE]
    assert main(command) == 2 and "--reject measures" in capsys.readouterr().err
    assert main([*command, "--reject", "0.25"]) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)["rejection"]
    assert figures["refused"] is None and f"{100 * figures['found']:.2f} % of those of other classes" in said.err
    shutil.copytree(folders / "test", tmp_path / "test", dirs_exist_ok=True)
    assert main([*command, "--reject", "0.25"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert r"not learned: nine\u202e (3 images)" in said.err and found["rejection"]["found"] == figures["found"]
    rows = ClassIncrementalLearner.from_pretrained(learner).predictions(str(folders / "test"), reject=0.25)
    assert found["rejection"]["refused"] == pytest.approx(sum(not row.known for row in rows) / len(rows))


@pytest.mark.parametrize(
    ("redirection", "status", "words"),
    [
        (">&-", 2, "standard output is closed"),
        (">/dev/full", 2, "standard output cannot be written to: No space left on device"),
        ("2>&-", 0, ""),
        (">/dev/full 2>/dev/full", 2, ""),
    ],
)
def test_closed_and_full_streams_end_in_a_message_and_a_status(redirection, status, words):
    command = f"{sys.executable} -m dulbe_peft --help {redirection}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=buffered)
    assert done.returncode == status and words in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == bool(words)


@pytest.mark.slow
def test_ctrl_c_while_starting_up_is_one_line(tmp_path):
    """Whatever is being imported when the signal comes."""
    output = str(tmp_path / "o")
    for module in ("click", "torch", "transformers", "peft"):
        script = (
            "import signal, sys\n"
            f"sys.addaudithook(lambda event, arguments: event == 'import' and arguments[0] == {module!r} "
            "and signal.raise_signal(signal.SIGINT))\n"
            f"sys.argv = ['', 'run', '--model', 'demo', '--data', 'demo-digits', '--output', {output!r}]\n"
            "from dulbe_peft.__main__ import start\nsys.exit(start())"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 130, done.stderr
        assert done.stderr.startswith("dulbe-peft: stopped by SIGINT\n") and "Traceback" not in done.stderr
