"""Test `predict` and `evaluate` on the command line: printed predictions, tables, and sorted images."""

import base64
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from lives import content
from PIL import ExifTags, Image

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.arguments import Query
from dulbe_peft.classifiers import Classifier, novelty
from dulbe_peft.data.camtrap import HEADER, observation
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.output_files import only_writer
from dulbe_peft.utils.files import read_csv

MACHINE = ["--device", "cpu", "--no-progress", "--num-workers", "0"]


@pytest.fixture(scope="module")
def folders(digit_folders):
    return digit_folders(4, 8, 3)


@pytest.fixture(scope="module")
def learner(folders, tmp_path_factory):
    """Return the folder of a run over one, three, two and zero."""
    out = tmp_path_factory.mktemp("learned") / "out"
    command = ["run", "--model", str(demo_model_folder()), "--data", str(folders), "--output", str(out), *MACHINE]
    assert main([*command, "--classifiers", "bridge,lda"]) == 0
    return out


def test_after_a_table_comes_its_page(learner, folders, tmp_path, capsys):
    table = tmp_path / "holidays.csv"
    assert main(["predict", str(learner), str(folders / "test"), "--csv", str(table), *MACHINE]) == 0
    command = capsys.readouterr().err.splitlines()[-1].removeprefix("next: dulbe-peft ")
    assert command == f"report {table}" and main(command.split()) == 0
    assert main(["predict", str(learner), str(folders / "test"), "--json", f"{table}.json", *MACHINE]) == 0
    assert "--sort-into sorted" in capsys.readouterr().err.splitlines()[-1]


def test_items_are_answered_by_the_mean_of_their_log_probabilities(learner, folders, tmp_path, capsys):
    heap, table, events = tmp_path / "heap", tmp_path / "t.json", tmp_path / "events.csv"
    files = sorted((folders / "test").rglob("*.png"))
    for number, file in enumerate(files):
        item = heap / f"item {number % 3}" if number else heap
        item.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = f"2026:05:01 10:00:{number:02d}"
        with Image.open(file) as image:
            image.save(item / f"{number}.jpg", exif=exif)
    command = ["predict", str(learner), str(heap), *MACHINE]
    assert main([*command, "--by-group", str(events)]) == 2
    assert "give --group or --group-seconds, too" in capsys.readouterr().err
    assert main([*command, "--json", str(table), "--top-k", "4"]) == 0
    logs, times = defaultdict(list), defaultdict(list)
    for entry in json.loads(table.read_text()):
        path, shares = Path(entry["path"]), {row["class"]: row["probability"] for row in entry["classes"]}
        item = str(path) if path.parent == heap else path.parent.name
        logs[item].append([math.log(shares[name]) for name in ("one", "three", "two", "zero")])
        times[item].append(f"2026-05-01 10:00:{int(path.stem):02d}")
    capsys.readouterr()
    assert main([*command, "--group", "folder", "--by-group", str(events)]) == 0
    following = capsys.readouterr().err.splitlines()[-1]
    assert "--sort-into sorted" in following and "--group folder" in following, "into which an item goes as a whole"
    header, *rows = read_csv(events)
    assert header == ["group", "predicted", "probability", "images", "agreeing", "first", "last", "site"]
    assert len(rows) == 4
    for item, predicted, probability, count, agreeing, first, last, site in rows:
        shares = np.exp(np.mean(logs[item], axis=0))
        shares /= shares.sum()
        assert predicted == ("one", "three", "two", "zero")[shares.argmax()]
        assert float(probability) == pytest.approx(shares.max(), abs=2e-5) and int(count) == len(logs[item])
        own = [("one", "three", "two", "zero")[np.argmax(each)] for each in logs[item]]
        assert int(agreeing) == own.count(predicted) and site == (item if Path(item).parent == Path() else "")
        assert (first, last) == (min(times[item]), max(times[item]))


def test_photographs_of_an_item_get_one_answer_in_every_output(learner, folders, tmp_path, capsys):
    """Each item has photographs of two classes, so their own answers contradict one another."""
    heap, sorted_into = tmp_path / "heap", tmp_path / "sorted"
    for name in ("one", "two"):
        for number, file in enumerate(sorted((folders / "test" / name).glob("*.png"))):
            (heap / f"item {number}").mkdir(parents=True, exist_ok=True)
            shutil.copy(file, heap / f"item {number}" / f"{name}.png")
    tables = [tmp_path / "t.csv", tmp_path / "t.json", tmp_path / "keywords.csv"]
    flags = ["--csv", tables[0], "--json", tables[1], "--exiftool", tables[2], "--sort-into", sorted_into]
    flags += ["--group", "folder", "--by-group", tmp_path / "items.csv", "--top-k", "2"]
    assert main(["predict", str(learner), str(heap), *map(str, flags), *MACHINE]) == 0
    items = {row[0]: (row[1], float(row[2]), row[4]) for row in read_csv(tmp_path / "items.csv")[1:]}
    assert len(items) == 3 and "1" in {agreeing for *_, agreeing in items.values()}, "some contradict one another"
    header, *rows = read_csv(tables[0])
    assert header == ["path", "predicted", "probability", "novelty", "predicted_2", "probability_2", "group"]
    assert len(rows) == 6 and all((row[1], float(row[2])) == items[row[6]][:2] for row in rows)
    entries = json.loads(tables[1].read_text())
    assert [entry["classes"][0]["class"] for entry in entries] == [items[entry["group"]][0] for entry in entries]
    assert [row[1] for row in read_csv(tables[2])[1:]] == [f"dulbe|{items[row[6]][0]}" for row in rows]
    copied = sorted(path.parent.name for path in sorted_into.rglob("*.png"))
    assert copied == sorted(row[1] for row in rows)
    capsys.readouterr()
    assert main(["predict", str(learner), str(heap), "--group", "folder", *MACHINE]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(item, words.rpartition(" ")[0].rpartition(" ")[0]) for item, words in lines] == [
        (item, name) for item, (name, *_) in items.items()
    ]
    assert main(["predict", str(learner), str(heap), "--group", "folder", "--coverage", "0.5", *MACHINE]) == 2
    assert "--coverage sets for images" in capsys.readouterr().err


def test_photograph_without_a_group_does_not_join_the_group_with_its_name(
    learner, folders, tmp_path, capsys, monkeypatch
):
    (tmp_path / "item").mkdir()
    for name, file in (("one", "a.png"), ("two", "item/a.png")):
        shutil.copy(min((folders / "test" / name).glob("*.png")), tmp_path / file)
    monkeypatch.chdir(tmp_path)
    command = ["predict", str(learner), "a.png", "item/a.png", "--by-group", "items.csv", *MACHINE]
    assert main([*command, "--group", "/(.+)"]) == 2
    assert "a.png has no group, and a group of others has its name" in capsys.readouterr().err
    assert main([*command, "--group", "/(.)"]) == 0
    assert [row[0] for row in read_csv(tmp_path / "items.csv")[1:]] == ["a.png", "a"]


def test_groups_of_a_package_are_its_events_and_deployments(learner, folders, tmp_path, capsys):
    """An ID of an event that two deployments use is two events, and so is one that two packages use."""
    files = sorted((folders / "test").rglob("*.png"))[:8]
    for package in ("spring", "autumn"):
        media, seen = ["mediaID,deploymentID,timestamp,filePath"], ["mediaID,observationType,scientificName,eventID"]
        for number, file in enumerate(files):
            place = f"d{number // 4}"
            (tmp_path / package / place).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / package / place / f"{number}.png")
            media.append(f"m{number},{place},2026-05-01T10:00:0{number}Z,{place}/{number}.png")
            seen += [f"m{number},unclassified,,e{number // 2 % 2 if number != 2 else 2}"] * (number != 7)
        (tmp_path / package / "media.csv").write_text("\n".join(media))
        (tmp_path / package / "observations.csv").write_text("\n".join(seen))
    command, table = ["predict", str(learner), *MACHINE], tmp_path / "events.csv"
    command += ["--by-group", str(table), "--overwrite"]
    one, two = str(tmp_path / "spring"), str(tmp_path / "autumn")
    assert main([*command, one, "--group", "eventID"]) == 0
    rows = {row[0]: [row[3], *row[5:]] for row in read_csv(table)[1:]}
    day = "2026-05-01 10:00:0"
    assert rows == {
        "d0/e0": ["2", f"{day}0", f"{day}1", "d0"],
        "e2": ["1", f"{day}2", f"{day}2", "d0"],
        "d0/e1": ["1", f"{day}3", f"{day}3", "d0"],
        "d1/e0": ["2", f"{day}4", f"{day}5", "d1"],
        "d1/e1": ["1", f"{day}6", f"{day}6", "d1"],
        f"{one}/d1/7.png": ["1", f"{day}7", f"{day}7", "d1"],
    }
    assert "1 image without a group" in capsys.readouterr().err, "nobody says to which event it belongs"
    assert main([*command, one, "--group-seconds", "1"]) == 0, "within a deployment"
    assert [row[0] for row in read_csv(table)[1:]] == [f"d0 at {day}0", f"d1 at {day}4"]
    assert main([*command, one, two, "--group", "deploymentID"]) == 0
    assert [row[0] for row in read_csv(table)[1:]] == [f"{each}: d{n}" for each in (one, two) for n in (0, 1)]


def test_answers_come_batch_by_batch_until_a_signal(learner, folders, capsys, monkeypatch):
    stop_at(3, monkeypatch)
    assert main(["predict", str(learner), str(folders / "test"), "--eval-batch-size", "2", *MACHINE]) == 130
    captured = capsys.readouterr()
    said, stopped = captured.err.splitlines()
    assert len(captured.out.splitlines()) == 4 and stopped == "dulbe-peft: stopped by SIGINT"
    assert said.startswith("many of the learned photographs look like one another"), "as these do"


def stop_at(batch, monkeypatch):
    """Send Ctrl-C at one batch of `predict`."""
    predictions, calls = ClassIncrementalLearner.predictions, []

    def interrupted(*arguments, **keywords):
        calls.append(1)
        if len(calls) == batch:
            signal.raise_signal(signal.SIGINT)
        return predictions(*arguments, **keywords)

    monkeypatch.setattr(ClassIncrementalLearner, "predictions", interrupted)


@pytest.fixture
def stopped(learner, digit_folders, tmp_path, monkeypatch, capsys):
    """Return a command that was stopped after two of its three batches of eight images."""
    images = shutil.copytree(digit_folders(4, 8, 6) / "test", tmp_path / "images")
    command = ["predict", str(learner), str(images), "--csv", str(tmp_path / "t.csv"), "--top-k", "2"]
    command += ["--sort-into", str(tmp_path / "sorted"), "--eval-batch-size", "8", *MACHINE]
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        assert main(command) == 130
    assert {path.name for path in tmp_path.iterdir()} == {"images", "sorted"}
    assert len(content(tmp_path / "sorted")) == 16
    return command


def whole(command, root, monkeypatch):
    """Run a command without an interruption and without stored features; return its table and its sorted images."""
    command = [*command]
    for flag, name in (("--csv", "whole.csv"), ("--sort-into", "whole")):
        command[command.index(flag) + 1] = str(root / name)
    with monkeypatch.context() as patch:
        patch.setenv("DULBE_PEFT_STORE", str(root / "another.sqlite"))
        assert main(command) == 0
    return read_csv(root / "whole.csv"), content(root / "whole")


def check_equal(table, expected):
    """Assert that two tables are equal up to the rounding of float32 features in different batches."""
    assert [row[:2] for row in table] == [row[:2] for row in expected]
    for column, limit in ((2, 1e-5), (3, 1e-3)):
        values, others = ([float(row[column]) for row in rows[1:]] for rows in (table, expected))
        assert values == pytest.approx(others, rel=1e-4, abs=limit)


def test_repeated_command_encodes_only_the_missing_images(stopped, tmp_path, reads, capsys, monkeypatch):
    assert main([*stopped, "--json", str(tmp_path / "t.json")]) == 0
    assert len(reads) == 8 and set(reads.values()) == {1}
    assert "24 images; written:" in capsys.readouterr().err
    table = read_csv(tmp_path / "t.csv")
    assert table[0] == ["path", "predicted", "probability", "novelty", "predicted_2", "probability_2"]
    assert len(table) == 1 + 24 and len(json.loads((tmp_path / "t.json").read_text())) == 24
    expected, copies = whole(stopped, tmp_path, monkeypatch)
    check_equal(table, expected)
    assert content(tmp_path / "sorted") == copies and len(copies) == 24


def other_card(root):
    """Replace the photographs by different ones with the same names and modification times."""
    (root / "images").rename(root / "first card")
    for place in (root / "first card").rglob("*.png"):
        other = next((root / "first card" / {"one": "zero", "zero": "one"}.get(place.parent.name, "two")).iterdir())
        copy = root / "images" / place.relative_to(root / "first card")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(other, copy)
        os.utime(copy, ns=(place.stat().st_atime_ns, place.stat().st_mtime_ns))


def test_replaced_photographs_of_the_same_names_are_predicted_anew(stopped, tmp_path, monkeypatch):
    assert main(stopped) == 0
    first = read_csv(tmp_path / "t.csv")
    other_card(tmp_path)
    assert main(stopped) == 0
    table = read_csv(tmp_path / "t.csv")
    assert [row[0] for row in table] == [row[0] for row in first]
    names = {Path(row[0]).parent.name: set() for row in table[1:]}
    for path, name, *_ in table[1::2]:
        names[Path(path).parent.name].add(name)
    assert names["one"] == {"zero"} and names["zero"] == {"one"}
    check_equal(table, whole(stopped, tmp_path, monkeypatch)[0])


def test_different_learner_or_setting_writes_a_new_table(stopped, tmp_path, monkeypatch):
    """The table has no rows of the stopped command and none of a deleted photograph."""
    next((tmp_path / "images" / "one").iterdir()).unlink()
    assert main(["forget", stopped[1], "zero", "--output", str(tmp_path / "out"), "--device", "cpu"]) == 0
    other = [stopped[0], str(tmp_path / "out"), *stopped[2:], "--coverage", "0.5", "--top-k", "1"]
    assert main(other) == 0
    table = read_csv(tmp_path / "t.csv")
    assert len({row[0] for row in table[1:]}) == 23 and "zero" not in {row[1] for row in table}
    check_equal(table, whole(other, tmp_path, monkeypatch)[0])


def test_second_process_on_same_table_is_refused(learner, folders, tmp_path, capsys):
    with only_writer(str(tmp_path / "t.csv")):
        command = ["predict", str(learner), str(folders / "test"), "--csv", str(tmp_path / "t.csv"), *MACHINE]
        assert main(command) == 2 and "t.csv is in use by another process" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(command) == 0 and [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_each_image_has_one_row_and_a_unique_name(learner, folders, tmp_path, capsys):
    images = shutil.copytree(folders / "test" / "one", tmp_path / "images")
    command = ["predict", str(learner), str(images), str(images / "8.png"), "--csv", str(tmp_path / "t.csv"), *MACHINE]
    assert main(command) == 0 and len(read_csv(tmp_path / "t.csv")) == 1 + 3
    strange = ["a\nb.png", r"a\nb.png", "\udcff.png"]
    for name in strange:
        shutil.copy(images / "8.png", images / name)
    assert main(command) == 0 and b"/\xff.png,one," in (tmp_path / "t.csv").read_bytes()
    assert {str(images / name) for name in strange} < {row[0] for row in read_csv(tmp_path / "t.csv")}


def test_sorting_into_the_folder_of_images_is_refused(learner, folders, tmp_path, capsys):
    images = shutil.copytree(folders / "test" / "one", tmp_path / "images")
    for place in (images, images / "sorted"):
        assert main(["predict", str(learner), str(images), "--sort-into", str(place), *MACHINE]) == 2
        assert "which is never changed: choose another folder" in capsys.readouterr().err


OUTPUTS = {
    "predict --csv": ["predict", "{learner}", "{photos}", "--csv"],
    "predict --json": ["predict", "{learner}", "{photos}", "--json"],
    "report --output": ["report", "{learner}", "--output"],
    "report --latex": ["report", "{learner}", "--latex"],
    "check --csv": ["check", "{photos}", "--csv"],
}


@pytest.mark.plain("predict --csv", "report --latex", "check --csv")
@pytest.mark.parametrize("output", OUTPUTS)
def test_outputs_can_be_a_pipe_or_standard_output(learner, folders, tmp_path, capfd, output):
    command = [word.format(learner=learner, photos=folders) for word in OUTPUTS[output]]
    machine = MACHINE if command[0] == "predict" else []
    suffix = {"--json": "json", "--latex": "tex", "--csv": "csv"}.get(command[-1], "html")
    file = tmp_path / f"file.{suffix}"
    assert main([*command, str(file), *machine]) == 0
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert main([*command, str(pipe), *machine]) == 0 and pipe.is_fifo()
    reader.join(20)
    assert received == [file.read_bytes()] and received[0]
    for name in ("-", "/dev/stdout") if machine else ("-",):
        capfd.readouterr()
        assert main([*command, name, *machine]) == 0
        assert capfd.readouterr().out.encode() == received[0]
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
    captured = capsys.readouterr()
    assert "no.png cannot be read" in captured.err and captured.out.count("one") >= 8
    for area in (0.5, 0.9):
        monkeypatch.setattr(Classifier, "roc_area", area)
        monkeypatch.setattr(Classifier, "roc_interval", (area - 0.1, area + 0.1))
        monkeypatch.setattr(novelty, "found", lambda tasks, share: 0.62 if share == 0.99 else None)
        assert main([*command, "--reject", "0.99"]) == 0 and (tmp_path / "sorted" / "none of these").is_dir()
        said = capsys.readouterr().err
        assert ("--reject is not reliable here" in said) == (area == 0.5)
        assert ("in 50 of 100 pairs (95 % interval 40 to 60); chance" in said) == (area == 0.5)
        assert "62 of 100 of its images were recognised as unknown" in said


def test_control_characters_in_names_are_escaped(learner, folders, tmp_path, capsys, monkeypatch):
    images = tmp_path / "images"
    images.mkdir()
    name = "a\r=1+1\n\x1b[2J\u202eb.png"
    shutil.copy(folders / "test" / "one" / "8.png", images / name)
    (images / f"not {name}").write_bytes(b"x")
    shown = r"a\r=1+1\n\x1b[2J\u202eb.png"
    assert main(["predict", str(learner), str(images), *MACHINE]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{images}/{shown}\t") and captured.out.count("\n") == 1
    assert f"not {shown} cannot be read" in captured.err and "\x1b" not in captured.err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["predict", str(learner), str(images), "--csv", "-", *MACHINE]) == 0
    assert f"\n{images}/{shown},one," in capsys.readouterr().out
    assert main(["predict", str(learner), str(tmp_path / "\x1b[2J"), *MACHINE]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_learn_finds_the_images_of_a_table_whose_names_have_control_characters(learner, folders, tmp_path, capsys):
    images = tmp_path / "images"
    images.mkdir()
    names = ["a\r=1+1\n\x1b[2J\u202eb.png", "\u202ec.png", "\u2028d.png"]
    for number, name in enumerate(names, start=8):
        shutil.copy(folders / "test" / "one" / f"{number}.png", images / name)
    table = tmp_path / "t.csv"
    assert main(["predict", str(learner), str(images), "--csv", str(table), *MACHINE]) == 0
    assert {row[0] for row in read_csv(table)[1:]} == {str(images / name) for name in names}
    table.write_bytes(table.read_bytes().replace(b",predicted,", b",label,", 1))
    command = ["learn", str(learner), "--labels", str(table), "--output", str(tmp_path / "o"), *MACHINE]
    assert main(command) == 2 and "has learned all of its images, or is tested on them" in capsys.readouterr().err
    assert main([*command, "--test-split", "none", "--again"]) == 0, capsys.readouterr().err


def test_rejection_can_be_measured_on_unknown_classes_only(learner, folders, tmp_path, capsys):
    shutil.copytree(folders / "test" / "one", tmp_path / "test" / "nine\u202e")
    command = ["evaluate", str(learner), "--data", str(tmp_path), *MACHINE]
    assert main(command) == 2 and "--reject measures" in capsys.readouterr().err
    assert main([*command, "--reject", "0.25"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)["rejection"]
    assert (
        figures["refused"] is None and f"{100 * figures['found']:.2f} % of the images of other classes" in captured.err
    )
    shutil.copytree(folders / "test", tmp_path / "test", dirs_exist_ok=True)
    assert main([*command, "--reject", "0.25"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert r"not learned: nine\u202e (3 images)" in captured.err and found["rejection"]["found"] == figures["found"]
    rows = ClassIncrementalLearner.from_pretrained(learner).predictions(str(folders / "test"), Query(reject=0.25))
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
def test_closed_and_full_streams_give_a_message_and_a_status(redirection, status, words):
    command = f"{sys.executable} -m dulbe_peft --help {redirection}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=buffered)
    assert done.returncode == status and words in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == bool(words)


@pytest.mark.rare
def test_ctrl_c_during_imports_prints_one_line(tmp_path):
    """The signal comes while different packages are being imported."""
    output = str(tmp_path / "o")
    for module in ("click", "torch", "transformers", "peft"):
        script = (
            "import signal, sys\n"
            f"sys.addaudithook(lambda event, arguments: event == 'import' and arguments[0] == {module!r} "
            "and signal.raise_signal(signal.SIGINT))\n"
            f"sys.argv = ['', 'run', '--model', 'demo', '--data', 'demo-digits', '--output', {output!r}]\n"
            "from dulbe_peft.photos.__main__ import start\nsys.exit(start())"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 130, done.stderr
        assert done.stderr.startswith("dulbe-peft: stopped by SIGINT\n") and "Traceback" not in done.stderr


def test_only_possible_classes_are_answered_with_renormalised_probabilities(learner, folders, tmp_path, capsys):
    model, test = ClassIncrementalLearner.from_pretrained(learner), str(folders / "test")
    (tmp_path / "site.txt").write_text("ONE\ntwo\nwolf\n")
    file = tmp_path / "answers.json"
    command = ["predict", str(learner), test, "--only", str(tmp_path / "site.txt"), "--json", str(file), *MACHINE]
    assert main([*command, "--top-k", "4"]) == 0
    assert "site.txt: not learned, so never answered: wolf" in capsys.readouterr().err
    plain = {row.image: row for row in model.predictions(test, Query(top_k=4))}
    for row in json.loads(file.read_text()):
        before = dict(zip(plain[row["path"]].classes, plain[row["path"]].probabilities, strict=True))
        total = before["one"] + before["two"]
        found = {answer["class"]: answer["probability"] for answer in row["classes"]}
        assert found == pytest.approx({name: before[name] / total for name in ("one", "two")}, rel=1e-4, abs=1e-6)
    assert set(model.predict(test, only=["one"])) == {"one"}
    for names, words in ((["wolf"], "'wolf' has not been learned"), ([], "only is empty")):
        with pytest.raises(ValueError, match=words):
            model.predict(test, only=names)
    (tmp_path / "site.txt").write_text("wolf\n")
    assert main(command) == 2 and "names no class that the learner knows" in capsys.readouterr().err


def test_groups_get_the_sums_of_their_classes(learner, folders, tmp_path, capsys):
    model, test = ClassIncrementalLearner.from_pretrained(learner), str(folders / "test")
    (tmp_path / "groups.csv").write_text("class;group\none;odd\nthree;odd\ntwo;even\n")
    file = tmp_path / "answers.csv"
    command = ["predict", str(learner), test, "--sum-up", str(tmp_path / "groups.csv"), "--csv", str(file), *MACHINE]
    assert main([*command, "--top-k", "3"]) == 0
    found: dict = {}
    header, *rows = read_csv(file)
    assert header[:6] == ["path", "predicted", "probability", "novelty", "predicted_2", "probability_2"]
    for path, name, probability, _, *others in rows:
        pairs = zip([name, *others[::2]], [probability, *others[1::2]], strict=True)
        found[path] = {group: float(share) for group, share in pairs}
    for row in model.predictions(test, Query(top_k=4)):
        p = dict(zip(row.classes, row.probabilities, strict=True))
        expected = {"odd": p["one"] + p["three"], "even": p["two"], "zero": p["zero"]}
        assert found[row.image] == pytest.approx(expected, abs=2e-6)
    groups = {"one": "odd", "three": "odd", "two": "even", "zero": "even"}
    (tmp_path / "groups.csv").write_text("class;group\none;odd\nOne;prime\n")
    assert main([*command, "--overwrite"]) == 2
    assert "groups.csv puts the class 'one' into two groups" in capsys.readouterr().err
    for group, words in (("None of these", "the answer for images of no class"), (" ", "must not be blank")):
        (tmp_path / "groups.csv").write_text(f"class,group\none,{group}\n")
        assert main([*command, "--overwrite"]) == 2 and words in capsys.readouterr().err
    sets = model.predict(test, coverage=0.75, sum_up=groups)
    for inside, outside in zip(model.predict(test, coverage=0.75), sets, strict=True):
        assert {groups[name] for name in inside} <= set(outside) <= {"odd", "even"}
    (tmp_path / "groups.csv").write_text("one,odd,more\n")
    assert main(command) == 2


def test_missing_file_is_named_and_gives_status_1(learner, folders, tmp_path, capsys):
    there = str(next((folders / "test" / "one").iterdir()))
    assert main(["predict", str(learner), there, str(tmp_path / "gone.png"), *MACHINE]) == 1
    captured = capsys.readouterr()
    assert "1 file missing, such as " in captured.err and "gone.png" in captured.err and "one" in captured.out
    (tmp_path / "damaged.png").write_bytes(b"x")
    assert main(["predict", str(learner), there, str(tmp_path / "damaged.png"), *MACHINE]) == 0


def test_bytes_are_refused(learner, folders):
    content = next((folders / "test" / "one").iterdir()).read_bytes()
    for images in (content, [content], memoryview(content)):
        with pytest.raises(TypeError, match=r"an image is a (bytes|memoryview): pass io.BytesIO\(content\)"):
            ClassIncrementalLearner.from_pretrained(learner).predict(images)


def test_predictions_are_observations_of_a_camtrap_package(learner, folders, tmp_path, capsys):
    package = tmp_path / "package"
    (package / "media").mkdir(parents=True)
    lines = ["mediaID,deploymentID,timestamp,filePath"]
    for number, name in enumerate(("one", "two")):
        shutil.copy(next((folders / "test" / name).iterdir()), package / "media" / f"{number}.png")
        lines.append(f"m{number},d,2026-05-01T00:00:00Z,media/{number}.png")
    (package / "media.csv").write_text("\n".join(lines))
    file = tmp_path / "observations.csv"
    command = ["predict", str(learner), str(package), "--camtrap-dp", str(file), *MACHINE]
    assert main(command) == 0
    header, *rows = read_csv(file)
    rows = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["mediaID"] for row in rows] == ["m0", "m1"]
    assert {row["observationType"] for row in rows} == {"animal"} and {row["deploymentID"] for row in rows} == {"d"}
    assert all(row["scientificName"] in ("one", "two", "three", "zero") for row in rows)
    assert all(
        row["classifiedBy"] == "dulbe_peft, bridge" and row["classificationMethod"] == "machine" for row in rows
    )
    shutil.copy(package / "media" / "0.png", package / "media" / "other.png")
    assert main([*command, "--overwrite"]) == 0 and len(read_csv(file)) == 3
    assert tuple(header) == HEADER, "a package without observations gets the columns of the standard"
    shutil.copy(file, package / "observations.csv")  # the answers are a machine's labels, of which run can learn
    images = load_data(package, None, machine_labels=True)
    assert [images.class_names[label] for label in images.labels] == [row["scientificName"] for row in rows]
    columns = [*HEADER[:5], "further", *HEADER[5:]]
    (package / "observations.csv").write_text(",".join(columns) + "\n" + "," * len(columns[1:]) + "\n")
    assert main([*command, "--overwrite"]) == 0 and read_csv(file)[0] == columns
    assert "1 image without an observation, because media.csv does not list them" in capsys.readouterr().err
    assert main(["predict", str(learner), str(folders / "test"), *command[3:]]) == 2
    assert "--camtrap-dp needs the folder of a Camtrap DP package" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, kind, scientific",
    [
        ("Vulpes vulpes", "animal", "Vulpes vulpes"),
        ("Homo sapiens", "human", "Homo sapiens"),
        ("blank", "blank", ""),
        ("", "unclassified", ""),
    ],
)
def test_observation_has_the_type_of_its_class(name, kind, scientific):
    row = observation({"mediaID": "m"}, name, 0.5, "me")
    assert row.keys() <= {*HEADER}
    assert (row["observationType"], row["scientificName"]) == (kind, scientific)
    assert row["classificationProbability"] == ("0.5000" if name else "")


def test_page_answers_with_the_classes_of_a_site(learner, folders):
    from dulbe_peft.photos.serving import App

    image = Path(next((folders / "test" / "one").iterdir())).read_bytes()
    app = App(
        ClassIncrementalLearner.from_pretrained(learner), only=("two", "zero"), sum_up={"two": "even", "zero": "even"}
    )
    best = app.predict({"images": [base64.b64encode(image).decode()]})["best"]
    assert [row["class"] for row in best] == ["even"] and best[0]["probability"] == pytest.approx(1)
