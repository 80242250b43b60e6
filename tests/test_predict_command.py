"""`predict` and `evaluate` on the command line: answers that come one by one, tables that go on, images sorted."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.commands.main import main
from dulbe_peft.demo import demo_model_folder

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


def table(path):
    return list(csv.reader(Path(path).read_text(encoding="utf-8").splitlines()))


def test_answers_come_batch_by_batch_and_a_table_goes_on(learner, folders, tmp_path, capsys, monkeypatch):
    predictions, calls = ClassIncrementalLearner.predictions, []

    def answer(*arguments, **keywords):
        """Ctrl-C at the third batch of two images."""
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return predictions(*arguments, **keywords)

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
    assert len(table(partial)) == 2 + 2 * 4
    partial.write_text(partial.read_text()[:-3])  # a line that was cut off
    assert main([*command, "3"]) == 2 and "was begun with other settings" in capsys.readouterr().err
    calls.clear()
    calls += "no more Ctrl-C"
    assert main([*command, "2"]) == 0 and not partial.exists()
    assert len(calls) == len("no more Ctrl-C") + 5, "three of twelve images had whole answers"
    assert "9 images, 3 were answered before" in capsys.readouterr().err
    found = table(file)
    assert main([*command, "2", "--overwrite"]) == 0 and table(file) == found and len(found) == 1 + 2 * 12
    assert main([*command, "2", "--coverage", "0.75"]) == 2 and "give one of them" in capsys.readouterr().err


def test_images_are_sorted_into_folders_and_nothing_is_replaced(learner, folders, tmp_path, capsys):
    images = shutil.copytree(folders / "test" / "one", tmp_path / "images")
    (images / "again").mkdir()
    shutil.copy(folders / "test" / "one" / "8.png", images / "again" / "9.png")  # another image with the same name
    (images / "no.png").write_bytes(b"x")
    command = ["predict", str(learner), str(images), "--sort-into", str(tmp_path / "sorted"), *MACHINE]
    for _ in range(2):
        assert main(command) == 0
        found = sorted(
            path.relative_to(tmp_path / "sorted").as_posix() for path in (tmp_path / "sorted").rglob("*.png")
        )
        assert found == ["one/10.png", "one/8.png", "one/9-2.png", "one/9.png"]
    said = capsys.readouterr()
    assert "no.png cannot be read" in said.err and said.out.count("one") >= 8
    assert main([*command, "--reject", "0.99"]) == 0
    assert (tmp_path / "sorted" / "none of these").is_dir()


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
    assert [row[0] for row in table(file)] == ["path", f"{images}/{shown}"]
    assert main(["predict", str(learner), str(tmp_path / "\x1b[2J"), *MACHINE]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_strangers_alone_can_be_measured(learner, folders, tmp_path, capsys):
    shutil.copytree(folders / "test" / "one", tmp_path / "strangers" / "test" / "nine\u202e")
    command = ["evaluate", str(learner), "--data", str(tmp_path / "strangers"), *MACHINE]
    assert main(command) == 2 and "--reject measures" in capsys.readouterr().err
    assert main([*command, "--reject", "0.25"]) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)["rejection"]
    assert figures["refused"] is None and f"{100 * figures['found']:.2f} % of those of other classes" in said.err
    shutil.copytree(folders / "test", tmp_path / "both" / "test")
    shutil.move(tmp_path / "strangers" / "test" / "nine\u202e", tmp_path / "both" / "test")
    command = ["evaluate", str(learner), "--data", str(tmp_path / "both"), "--reject", "0.25", *MACHINE]
    assert main(command) == 0
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
    for module in ("click", "torch", "transformers", "peft"):
        script = (
            "import signal, sys\n"
            f"sys.addaudithook(lambda event, arguments: event == 'import' and arguments[0] == {module!r} "
            "and signal.raise_signal(signal.SIGINT))\n"
            f"sys.argv = ['', 'run', '--model', 'm', '--data', 'demo-digits', '--output', {str(tmp_path / 'o')!r}]\n"
            "from dulbe_peft.__main__ import start\nsys.exit(start())"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 130, done.stderr
        assert done.stderr.startswith("dulbe-peft: stopped by SIGINT\n") and "Traceback" not in done.stderr
