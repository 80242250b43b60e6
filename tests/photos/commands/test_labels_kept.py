"""Test that no label of the labelling page is lost: it is in labels.csv before the page is answered."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import pytest
from processes import Process
from served import COLOURS, heap_of, photo, two_colours

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.arguments import Query
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.serving import App
from dulbe_peft.utils.folders import CheckpointError, put_back


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_colours(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def heap(tmp_path):
    return heap_of(tmp_path / "heap")


def start(folder, output, heap):
    return App(ClassIncrementalLearner.from_pretrained(output if output.exists() else folder), output, heap)


def label(app, name=None, **more):
    work = app.facts()["labelling"]
    app.label({"photo": work["photo"], "class": name or Path(work["name"]).name.partition("-")[0], **more})
    return work["name"]


def kept(output):
    """Return what labels.csv says, by the names of the files, after a check of each SHA-256."""
    with Path(output, "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if Path(row["path"]).exists():
            assert row["sha256"] == hashlib.sha256(Path(row["path"]).read_bytes()).hexdigest()
    return {row["path"]: row["label"] for row in rows}


def test_label_is_in_the_file_before_the_answer_and_waits_after_a_restart(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    given = {}
    for count in range(1, 8):
        name = label(app)
        given[name] = Path(name).name.partition("-")[0]
        assert kept(output) == given and len(app.waiting) == count % 5
    none = app.facts()["labelling"]
    app.none({"photo": none["photo"]})
    given[none["name"]] = ""
    assert kept(output) == given
    # As after `kill -9`: nothing is closed.
    again = start(folder, output, heap)
    work = again.facts()["labelling"]
    assert (work["waiting"], work["none"], work["left"]) == (2, 1, 4) and kept(output) == given
    assert again.undo({})["said"] == "undone: none of these" and len(kept(output)) == 7
    assert again.undo({})["said"].startswith("undone: the label") and len(kept(output)) == 6
    label(again)
    assert again.facts()["labelling"]["name"] == none["name"], "it is asked for again"
    again.none({"photo": again.facts()["labelling"]["photo"]})
    again.finish()
    assert sum(again.facts()["counts"].values()) == 8 + 7 and kept(output).keys() == given.keys()
    third = start(folder, output, heap)
    assert (third.facts()["labelling"]["waiting"], third.facts()["labelling"]["left"]) == (0, 4)


def test_corrections_renames_and_forgotten_classes_reach_the_file(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    names = [label(app) for _ in range(5)]
    blue = [name for name in names if "blue" in name]
    app.rename({"class": "blue", "to": "navy"})
    assert blue and all(kept(output)[name] == "navy" for name in blue)
    app.undo({})
    assert all(kept(output)[name] == "blue" for name in blue)
    app = start(folder, output, heap)  # labels of an earlier start follow, too
    app.rename({"class": "blue", "to": "Red"})
    assert all(kept(output)[name] == "red" for name in blue) and app.learner.class_names == ("red", "green")
    app.undo({})
    app.forget({"class": "blue"})
    assert kept(output).keys() == {*names} - {*blue}
    app.undo({})
    assert kept(output).keys() == {*names}
    for request, words in (({"class": "bleu"}, "has not been learned"), ({"class": 3}, "has not been learned")):
        with pytest.raises(ValueError, match=words):
            app.forget(request)


def test_labels_follow_a_learner_that_the_command_line_corrects(folder, heap, tmp_path):
    output, renamed, without = (tmp_path / name for name in ("taught", "renamed", "without"))
    app = start(folder, output, heap)
    names = [label(app) for _ in range(7)]  # two of them wait
    none = app.facts()["labelling"]
    app.none({"photo": none["photo"]})
    of = {name: Path(name).name.partition("-")[0] for name in names} | {none["name"]: ""}
    assert main(["rename", str(output), "blue", "navy", "--output", str(renamed)]) == 0
    assert kept(renamed) == {name: "navy" if colour == "blue" else colour for name, colour in of.items()}
    learned = next(name for name in names[:5] if "red" in name)
    assert main(["forget", str(renamed), "navy", "--image", learned, "--output", str(without)]) == 0
    assert kept(without) == {name: of[name] for name in of if of[name] != "blue" and name != learned}
    work = start(folder, without, heap).facts()["labelling"]
    assert work["none"] == 1 and work["waiting"] == sum(of[name] != "blue" for name in names[5:])


def test_photograph_that_is_gone_waits_and_the_others_are_learned(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    first = Path(label(app))
    aside = first.rename(tmp_path / "elsewhere.png")
    for _ in range(4):
        label(app)
    facts = app.facts()
    assert facts["labelling"]["lost"] == [str(first)] and facts["labelling"]["waiting"] == 1
    assert sum(facts["counts"].values()) == 8 + 4 and str(first) in kept(output)
    for _ in range(4):
        label(app)
    assert len(app.waiting) == 5 and app.lost, "the lost one does not count among the five"
    with pytest.raises(ValueError, match="waits, because its file is gone"):
        app.rename({"class": Path(first).name.partition("-")[0], "to": "other"})
    assert len(app.waiting) == 1, "the others are learned before a class is changed"
    aside.rename(first)
    label(app)
    app.finish()
    assert not app.waiting and not app.lost and sum(app.facts()["counts"].values()) == 8 + 10


def test_folder_that_another_program_changed_is_not_replaced(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    for _ in range(4):
        label(app)
    other = ClassIncrementalLearner.from_pretrained(output)
    other.rename_class("green", "lime")
    other.save_pretrained(output)
    assert len(kept(output)) == 4, "saving the learner keeps the labels"
    with pytest.raises(CheckpointError, match="was changed by another program: stop the server"):
        label(app)
    assert ClassIncrementalLearner.from_pretrained(output).class_names == ("red", "lime") and len(kept(output)) == 4
    app = start(folder, output, heap)
    (output / "labels.csv").write_text((output / "labels.csv").read_text().replace(",blue,", ",sky,"))
    for act in (lambda: label(app), lambda: app.none({"photo": app.labelling.left[0]}), lambda: app.undo({})):
        with pytest.raises(CheckpointError, match=r"labels.csv was changed or removed by another program"):
            act()
    assert len(app.waiting) == 4 and len(app.labelling.left) == 8


def test_undo_keeps_the_other_labels_of_a_new_class(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    names = [label(app, "navy") for _ in range(5)]
    assert "navy" in app.learner.class_names
    app.undo({})
    assert "navy" not in app.learner.class_names and kept(output) == dict.fromkeys(names[:4], "navy")
    assert start(folder, output, heap).facts()["labelling"]["waiting"] == 4


def test_undo_that_cannot_be_saved_changes_nothing(folder, heap, tmp_path, monkeypatch):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    for count in (4, 1):  # labels that wait, then labels that were learned
        for _ in range(count):
            label(app)
        before, facts = kept(output), app.facts()
        with monkeypatch.context() as patch:
            patch.setattr(type(app.table), "content", Mock(side_effect=OSError("the disk is full")))
            with pytest.raises(OSError, match="full"):
                app.undo({})
        assert app.facts() == facts and kept(output) == before
        app.undo({})
        assert len(kept(output)) == len(before) - 1
        label(app)


def test_old_name_of_a_renamed_class_is_a_new_class(folder, heap, tmp_path):
    app = start(folder, tmp_path / "taught", heap)
    for _ in range(5):
        label(app, "bleu")
    app.rename({"class": "bleu", "to": "navy"})
    answer = app.label({"photo": app.facts()["labelling"]["photo"], "class": "bleu", "ask": True})
    assert answer["ask"].startswith("new class 'bleu'?")


def test_labels_wait_after_a_restart_in_the_order_and_spelling_of_the_table(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    names = [label(app, colour) for colour in ("green", "navy", "red", "navy")]
    table = output / "labels.csv"
    table.write_text(table.read_text().replace(",navy,", ",Navy,", 1))
    again = start(folder, output, heap)
    assert [again.labelling.labels[place] for place in again.waiting] == ["green", "Navy", "red", "Navy"]
    assert again.facts()["undo"] == "the label Navy"
    again.undo({})
    assert kept(output).keys() == {*names[:3]}
    again.finish()
    assert again.learner.class_names == ("red", "green", "Navy")


def test_edited_label_of_a_learned_photograph_is_reported(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    for _ in range(5):
        label(app, "navy")
    assert app.notes == start(folder, output, heap).notes == []
    table = output / "labels.csv"
    table.write_text(table.read_text().replace(",navy,", ",red,", 1))
    (note,) = start(folder, output, heap).notes
    assert "labels.csv, 1 label not used" in note and "learned as 'navy', is 'red'" in note


@pytest.mark.parametrize(
    "line, words",
    [
        ("a.png,red,12", "line 2 is 'a.png,red,12', expected a path, a label and a SHA-256 of 64 digits"),
        (f"a.png,red,{'0' * 64}\nb.png,green,{'0' * 64}", "line 3 labels a photograph a second time"),
    ],
)
def test_damaged_table_is_refused(folder, heap, tmp_path, line, words):
    output = shutil.copytree(folder, tmp_path / "taught")
    (output / "labels.csv").write_text(f"path,label,sha256\n{line}\n")
    with pytest.raises(CheckpointError, match=words):
        start(folder, output, heap)
    (output / "labels.csv").write_text("path,label\n")
    with pytest.raises(CheckpointError, match="has the columns path, label, expected path, label, sha256"):
        start(folder, output, heap)


def test_new_class_is_asked_for_once_and_a_spelling_is_taken(folder, heap, tmp_path):
    app = start(folder, tmp_path / "taught", heap)
    work = app.facts()["labelling"]
    request = {"photo": work["photo"], "class": "gren", "ask": True}
    answer = app.label(request)
    assert answer["ask"] == "new class 'gren'? You have 'green'." and not app.waiting
    assert app.label(request | {"class": "saxophone"})["ask"] == "new class 'saxophone'?"
    app.label(request | {"ask": False})
    assert label(app, " GREN ", ask=True) and label(app, "Red", ask=True)
    assert sorted(kept(tmp_path / "taught").values()) == ["gren", "gren", "red"]


def test_learn_reads_the_table_of_the_page(folder, heap, tmp_path, capsys):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    for _ in range(3):
        label(app)
    app.none({"photo": app.labelling.left[0]})
    table = shutil.copy(output / "labels.csv", tmp_path / "mine.csv")
    arguments = ["learn", str(folder), "--labels", str(table), "--output", str(tmp_path / "learned")]
    assert main([*arguments, "--test-split", "none"]) == 0, capsys.readouterr().err
    learned = ClassIncrementalLearner.from_pretrained(tmp_path / "learned")
    assert sum(map(len, learned.state.known.learned.values())) == 8 + 3


def test_writer_killed_between_its_renames_loses_nothing(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    output.rename(tmp_path / ".taught.dulbe-tmp-abcdefgh.old")
    app.learner.rename_class("green", "lime")
    app.learner.save_pretrained(tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / ".taught.dulbe-tmp-abcdefgh")
    put_back(output)
    assert ClassIncrementalLearner.from_pretrained(output).class_names == ("red", "lime")
    assert not list(tmp_path.glob(".taught*"))


def _server(folder, output, heap, printed):
    """Start `serve` in a process of its own, which prints to a file; return the process and its address."""
    given = output if output.exists() else folder
    arguments = ["serve", given, "--output", output, "--photos", heap, "--port", "0"]
    with printed.open("w") as file:
        process = Process("-m", "dulbe_peft", *arguments, stdout=file)
    while not (address := re.search(r"^open (\S+).*\n", printed.read_text(), re.MULTILINE)):
        assert process.poll() is None, "the server has not started"
        time.sleep(0.01)
    return process, address[1]


def _ask(url, content=None):
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.rare("SIGTERM")
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM], ids=lambda how: how.name)
def test_killed_server_has_kept_every_answered_label(folder, heap, tmp_path, how):
    """The number of rounds is in the environment variable ROUNDS; each round kills the server while it labels."""
    output, chance, given = tmp_path / "taught", random.Random(how), {}
    for number in range(40):
        photo(number % 3, 200 + number).save(heap / f"{COLOURS[number % 3]}-{number}b.png")
    for _ in range(int(os.environ.get("ROUNDS", 3))):
        if len(given) == 52:  # nothing is left to label
            break
        process, url = _server(folder, output, heap, tmp_path / "printed")
        killed = time.monotonic() + chance.uniform(0.05, 1)
        try:
            while time.monotonic() < killed:
                work = _ask(f"{url}/facts")["labelling"]
                if work["photo"] is None:
                    break
                name = Path(work["name"]).name.partition("-")[0]
                _ask(f"{url}/label", {"photo": work["photo"], "class": name})
                given[work["name"]] = name
        finally:
            process.send_signal(how)
            process.wait(60)
        assert kept(output).items() >= given.items(), "an answered label is lost"
    learned = ClassIncrementalLearner.from_pretrained(output).state.known.learned
    assert how == signal.SIGKILL or sum(map(len, learned.values())) == 8 + len(kept(output))


def test_waiting_labels_of_photographs_that_are_not_shown_follow_rename_and_forget(folder, heap, tmp_path):
    output, others = tmp_path / "taught", tmp_path / "others"
    app = start(folder, output, heap)
    names = [label(app, name) for name in ("red", "green", "red")]  # wait when the server is killed
    others.mkdir()
    photo(0, 900).save(others / "red-900.png")
    app = start(folder, output, others)
    assert not app.waiting
    app.rename({"class": "red", "to": "scarlet"})
    assert [*kept(output).values()] == ["scarlet", "green", "scarlet"]
    app.forget({"class": "green"})
    assert kept(output) == {names[0]: "scarlet", names[2]: "scarlet"}
    app.undo({})
    assert [*kept(output).values()] == ["scarlet", "green", "scarlet"]
    app.forget({"class": "green"})
    app = start(folder, output, heap)
    assert app.known() == ["scarlet"] and len(app.waiting) == 2, "no class comes back after a hard stop"
    app.finish()
    assert app.learner.class_names == ("scarlet",)


def test_only_possible_classes_are_proposed_for_labels(folder, heap, tmp_path):
    learner = ClassIncrementalLearner.from_pretrained(folder)
    app = App(learner, None, heap, only=("green",), sum_up={"green": "plants"})
    for _ in range(6):
        shown = app.facts()["labelling"]
        assert [row["class"] for row in shown["best"]] == ["green"] and shown["best"][0]["probability"] == 1
        assert "red" not in shown["reason"]
        label(app)
    app.rename({"class": "green", "to": "lime"})
    assert [row["class"] for row in app.facts()["labelling"]["best"]] == ["lime"]
    (prediction,) = learner.predictions([photo(1, 1)], Query(**app.possible()))
    assert prediction.classes == ("plants",), "groups follow, too"
    with pytest.raises(ValueError, match="no class that is possible would be left: start the server without --only"):
        app.forget({"class": "lime"})
    assert "lime" in app.learner.class_names
    app.undo({})
    assert [row["class"] for row in app.facts()["labelling"]["best"]] == ["green"]
