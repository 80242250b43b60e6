"""Test the list of photographs on the page of `serve`: filters, corrections, and undoing, also after a restart."""

from __future__ import annotations

import base64
import csv
import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from served import heap_of, photo, running, served, two_colours
from test_serving import ask

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.photos.serving import App
from dulbe_peft.utils.folders import CheckpointError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_colours(tmp_path_factory.mktemp("gallery"))


@pytest.fixture
def heap(tmp_path):
    return heap_of(tmp_path / "heap", "north", "south")


def start(folder, output, heap, **more):
    return App(ClassIncrementalLearner.from_pretrained(output if output.exists() else folder), output, heap, **more)


def colour(path):
    return Path(path).name.partition("-")[0]


def label(app, name=None):
    work = app.facts()["labelling"]
    if name == "":
        app.none({"photo": work["photo"]})
    else:
        app.label({"photo": work["photo"], "class": name or colour(work["name"])})
    return work["name"]


def kept(output):
    with Path(output, "labels.csv").open() as file:
        return {row["path"]: row["label"] for row in csv.DictReader(file)}


def listed(app, **request):
    return {row["name"]: row for row in app.look({"count": 100, **request})["rows"]}


def correct(app, name, to, **more):
    return app.correct({"id": listed(app, kind="all")[name]["id"], "class": to, **more})


def test_list_has_labels_and_answers_and_is_filtered_and_ordered(folder, heap, tmp_path):
    app = start(folder, tmp_path / "taught", heap)
    names = [label(app) for _ in range(6)]  # five are learned, the sixth waits
    none = label(app, "")
    rows = app.look({})["rows"]
    assert [row["name"] for row in rows] == [none, *reversed(names)], "the newest first"
    assert [row["state"] for row in rows] == ["none", "waits", *["learned"] * 5]
    assert [row["shown"] for row in rows] == ["none of these", *(colour(name) for name in reversed(names))]
    assert {row["site"] for row in rows} <= {"north", "south"} and not any(row["missing"] for row in rows)
    answers = app.look({"kind": "answers", "order": "doubt"})
    assert answers["total"] == len(answers["rows"]) == 5 and {row["state"] for row in answers["rows"]} == {"answer"}
    shares = [row["probability"] for row in answers["rows"]]
    assert shares == sorted(shares)
    for row in answers["rows"]:  # the same answer as `predict` gives
        (said,) = app.learner.predictions([Image.open(row["name"])])
        assert (row["shown"], row["probability"]) == (said.classes[0], pytest.approx(said.probabilities[0], abs=1e-5))
    everything = app.look({"kind": "all"})
    assert everything["total"] == 12 and sum(count for _, count in everything["sites"]) == 12
    for field, key in (("site", "sites"), ("class", "classes")):
        for value, count in everything[key]:
            found = app.look({"kind": "all", field: value})["rows"]
            assert len(found) == count and {row["site" if field == "site" else "shown"] for row in found} == {value}
    middle = sorted(shares)[2]
    assert app.look({"kind": "answers", "most": middle})["total"] == 3
    few = app.look({"kind": "all", "order": "name", "count": 2})
    assert few["total"] == 12 and [row["name"] for row in few["rows"]] == sorted(listed(app, kind="all"))[:2]
    for wrong in ({"kind": "mine"}, {"order": 1}, {"count": 0}, {"most": "a"}, {"count": True}):
        with pytest.raises(ValueError, match="expected|must be"):
            app.look(wrong)


def test_probabilities_of_answers_follow_what_is_learned(folder, heap, tmp_path):
    app = start(folder, tmp_path / "taught", heap)
    before = listed(app, kind="answers")
    for _ in range(5):
        label(app)
    after = listed(app, kind="answers")
    assert {row["shown"] for row in before.values()} <= {"red", "green"}
    assert all(after[name]["shown"] == colour(name) for name in after)


def given(app):
    """Label six photographs red, of which five are learned, and the seventh as none; return the names of all."""
    return [*(label(app, "red") for _ in range(6)), label(app, "")]


@pytest.fixture(scope="module")
def labelled(folder, tmp_path_factory):
    """A heap of photographs, and the output folder of a server to which labels were `given`, with their names."""
    root = tmp_path_factory.mktemp("labelled")
    heap = heap_of(root / "heap", "north", "south")
    return heap, root / "taught", given(start(folder, root / "taught", heap))


@pytest.mark.plain("learned-True-taken away", "waits-True-new", "none-False-none")
@pytest.mark.parametrize("to", ["green", "lime", "", None], ids=["known", "new", "none", "taken away"])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("which", ["learned", "waits", "none"])
def test_each_label_is_corrected_and_the_correction_undone(folder, labelled, tmp_path, which, restart, to):
    (heap, taught, names), output = labelled, tmp_path / "taught"
    if restart:
        shutil.copytree(taught, output)
    app = start(folder, output, heap)
    if not restart:
        assert given(app) == names
    name = {"learned": names[0], "waits": names[5], "none": names[6]}[which]
    if (which, to) == ("none", ""):
        assert correct(app, name, "")["undo"] == app.facts()["undo"] and kept(output)[name] == ""
        return
    before, counts = kept(output), app.facts()["counts"]
    facts = correct(app, name, to)
    assert facts["said"].startswith(f"{Path(name).name}: ")
    assert kept(output).get(name) == to and {**kept(output), name: 0} == {**before, name: 0}
    row = listed(app, kind="all")[name]
    assert row["shown"] == {"": "none of these", None: row["shown"]}.get(to, to)
    assert (row["state"] == "answer") == (to is None)
    if to is None:
        assert app.facts()["labelling"]["name"] == name, "it is asked for next"
    again = start(folder, output, heap)
    assert listed(again, kind="all")[name]["shown"] == row["shown"] and kept(output).get(name) == to
    learned = app.learner.state.known.class_of()
    key = bytes.fromhex(row["id"])
    assert learned.get(key) == (to or None if which == "learned" else None)
    app.undo({})
    assert {**kept(output)} == before
    app.finish()
    expected = {"learned": "red", "waits": "red", "none": None}[which]
    assert app.learner.state.known.class_of().get(key) == expected
    assert sum(app.facts()["counts"].values()) == 8 + 6 >= sum(counts.values())


def test_corrected_label_is_learned_as_if_it_had_been_given_first(folder, heap, tmp_path):
    once, twice = start(folder, tmp_path / "once", heap), start(folder, tmp_path / "twice", heap)
    name = None
    for app, first in ((once, "green"), (twice, "red")):
        for place in range(5):
            given = label(app, first if place == 0 else None)
            name = name or given
    correct(twice, name, "green")
    rows = once.labelling.features
    scores = (app.learner.classifier(rows) for app in (twice, once))  # the temperature follows the order of updates
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)
    assert kept(tmp_path / "once") == kept(tmp_path / "twice")


def test_last_photograph_of_a_class_is_corrected_but_not_that_of_the_only_class(folder, heap, tmp_path):
    app = start(folder, tmp_path / "taught", heap)
    name = label(app, "blue")
    app.finish()
    correct(app, name, "red")
    assert app.learner.class_names == ("red", "green") and app.facts()["counts"]["red"] == 5
    app.undo({})
    assert app.facts()["counts"]["blue"] == 1
    for other in ("red", "green"):
        app.forget({"class": other})
    with pytest.raises(ValueError, match="'blue' is the only class and would have no image left: rename it"):
        correct(app, name, "")
    assert kept(tmp_path / "taught") == {name: "blue"} and app.learner.class_names == ("blue",)


def test_new_class_of_a_correction_is_asked_for(folder, heap, tmp_path):
    app = start(folder, tmp_path / "taught", heap)
    name = label(app, "red")
    assert correct(app, name, "gren", ask=True)["ask"] == "new class 'gren'? You have 'green'."
    assert kept(tmp_path / "taught") == {name: "red"}
    correct(app, name, " GREEN ", ask=True)
    assert kept(tmp_path / "taught") == {name: "green"}


def test_taught_photograph_of_the_folder_is_listed_once(folder, heap, tmp_path):
    app = start(folder, tmp_path / "taught", heap)
    path = next(path for path in sorted(heap.rglob("*.png")) if colour(path) == "red")
    app.teach({"class": "red", "images": [base64.b64encode(path.read_bytes()).decode()]})
    rows = app.look({"kind": "all", "count": 100})["rows"]
    assert len(rows) == 12 and [row["state"] for row in rows if row["name"] == str(path)] == ["learned"]
    app.undo({})
    assert listed(app, kind="all")[str(path)]["state"] == "answer"


def test_answer_is_confirmed_in_the_list(folder, heap, tmp_path):
    app = start(folder, tmp_path / "taught", heap)
    names = [name for name, row in listed(app, kind="answers").items() if row["shown"] == colour(name)][:6]
    for name in names:
        correct(app, name, colour(name))
    assert kept(tmp_path / "taught") == {name: colour(name) for name in names}
    assert len(app.waiting) == 1 and sum(app.facts()["counts"].values()) == 8 + 5, "five were learned together"
    app.undo({})
    app.undo({})
    assert len(app.waiting) == 4 and kept(tmp_path / "taught").keys() == {*names[:4]}


def test_photograph_that_is_gone_renamed_or_another_one(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    names = [label(app) for _ in range(5)]
    waits = label(app)
    gone, moved, other = names[:3]
    Path(gone).unlink()
    Path(moved).rename(heap / "renamed.png")
    photo(2, 999).save(other)
    rows = listed(app)
    assert rows[gone]["missing"] and rows[moved]["missing"] and not rows[other]["missing"]
    before, state = kept(output), app.learner.state
    for name, words in ((gone, "No such file"), (moved, "No such file"), (other, "is another file now")):
        with pytest.raises(ValueError, match=f"{name}.*{words}.*put the photograph back"):
            correct(app, name, "")
    assert kept(output) == before and app.learner.state is state and len(app.waiting) == 1
    Path(waits).unlink()
    again = start(folder, output, heap)
    rows = listed(again)
    assert str(heap / "renamed.png") in rows and moved not in rows, "a renamed photograph is known by its content"
    correct(again, waits, "green")  # its file is not needed, because it has not been learned
    assert kept(output)[waits] == "green"
    correct(again, str(heap / "renamed.png"), "")
    assert kept(output)[str(heap / "renamed.png")] == "" and moved not in kept(output)


def test_file_that_became_another_photograph_takes_no_label(folder, heap, tmp_path):
    """Two names are swapped while the server runs: the page shows the other photograph."""
    app = start(folder, tmp_path / "taught", heap)
    work = app.facts()["labelling"]
    name, other = Path(work["name"]), Path(app.labelling.images.item_name(app.labelling.left[1]))
    kept_aside = name.rename(tmp_path / "aside.png")
    other.rename(name)
    kept_aside.rename(other)
    for act in (app.label, app.none):
        with pytest.raises(ValueError, match="was changed, moved or deleted since the server was started: skip it"):
            act({"photo": work["photo"], "class": "red"})
    assert not app.table.labels and app.facts()["labelling"]["photo"] == work["photo"]


def test_correction_that_cannot_be_saved_changes_nothing(folder, heap, tmp_path, monkeypatch):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    names = [label(app, "red") for _ in range(6)]
    app.finish()
    waits = label(app, "red")
    for name, to in ((names[0], "green"), (names[0], None), (waits, "green"), (waits, ""), (waits, None)):
        app.finish() if name == names[0] else None
        before, facts, left = kept(output), app.facts(), list(app.labelling.left)
        with monkeypatch.context() as patch:
            patch.setattr(type(app.table), "content", Mock(side_effect=OSError("the disk is full")))
            with pytest.raises(OSError, match="full"):
                correct(app, name, to)
        assert kept(output) == before and app.facts() == facts and app.labelling.left == left
    (output / "labels.csv").write_text((output / "labels.csv").read_text().replace(",red,", ",sky,", 1))
    with pytest.raises(CheckpointError, match="was changed or removed by another program"):
        correct(app, names[1], "green")


@pytest.mark.plain("green")
@pytest.mark.parametrize("to", ["green", "", None])
def test_hard_stop_between_the_table_and_the_learner_is_seen(folder, heap, tmp_path, monkeypatch, to):
    """A correction is in the table first. If the machine stops then, the next start says what differs."""
    output, stopped = tmp_path / "taught", tmp_path / "stopped"
    app = start(folder, output, heap)
    names = [label(app, "red") for _ in range(5)]
    save = app.learner.save_pretrained

    def save_after_a_copy(place):
        shutil.copytree(output, stopped)
        save(place)

    monkeypatch.setattr(app.learner, "save_pretrained", save_after_a_copy)
    correct(app, names[0], to)
    again = start(folder, stopped, heap)
    row = listed(again, kind="all")[names[0]]
    assert (row["shown"], row["state"]) == ("red", "learned") and kept(stopped).get(names[0]) == to
    if to is not None:
        assert again.notes and row["note"] == f"not learned again: the table says {to or 'none of these'}"
    correct(again, names[0], to)  # does the rest
    rows = listed(again, kind="all")
    assert (
        rows[names[0]]["state"] == {"green": "learned", "": "none", None: "answer"}[to] and not rows[names[0]]["note"]
    )
    assert again.facts()["counts"]["red"] == 8 and not start(folder, stopped, heap).notes


def test_two_windows_label_and_correct_at_once(folder, heap, tmp_path):
    with running(folder, output=tmp_path / "taught", photographs=heap) as server, ThreadPoolExecutor(8) as pool:
        url = "http://{}:{}".format(*server.server_address[:2])
        photo_now = ask(f"{url}/facts")[1]["labelling"]["photo"]
        same = [pool.submit(ask, f"{url}/label", {"photo": photo_now, "class": name}) for name in ("red", "green") * 4]
        statuses = sorted(answer.result()[0] for answer in same)
        assert statuses == [200] + [400] * 7, "one label counts, and the others are told"
        rows = ask(f"{url}/look", {"kind": "all"})[1]["rows"]
        asked = [pool.submit(ask, f"{url}/correct", {"id": row["id"], "class": "green"}) for row in rows * 2]
        assert {answer.result()[0] for answer in asked} == {200}
        facts = ask(f"{url}/facts")[1]
        assert facts["labelling"]["labelled"] == 12 and facts["labelling"]["left"] == 0
    assert set(kept(tmp_path / "taught").values()) == {"green"} and len(kept(tmp_path / "taught")) == 12


def test_edited_label_is_shown_and_corrected(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    name, *_ = [label(app, "red") for _ in range(5)]
    table = output / "labels.csv"
    table.write_text(table.read_text().replace(",red,", ",green,", 1))
    app = start(folder, output, heap)
    assert app.notes and listed(app)[name]["note"] == "not learned again: the table says green"
    correct(app, name, "green")
    assert app.facts()["counts"] == {"red": 8, "green": 5} and not listed(app)[name]["note"]
    app.undo({})
    correct(app, name, "red")
    assert kept(output)[name] == "red" and app.facts()["counts"]["red"] == 9
    assert not start(folder, output, heap).notes


def test_everything_is_labelled_and_yesterdays_labels_are_still_corrected(folder, heap, tmp_path):
    output = tmp_path / "taught"
    app = start(folder, output, heap)
    names = [label(app) for _ in range(12)]
    app.finish()
    shutil.copy(names[0], heap / "copy.png")
    app = start(folder, output, heap)
    work = app.facts()["labelling"]
    assert (work["photo"], work["left"], work["labelled"]) == (None, 0, 12) and app.facts()["undo"] is None
    rows = app.look({})["rows"]
    assert len(rows) == 12 and all(row["probability"] > 0.3 for row in rows)
    name = next(row["name"] for row in rows)
    correct(app, name, None)
    assert app.facts()["labelling"]["name"] == name and name not in kept(output)


def test_requests_of_the_page_by_http(folder, heap, tmp_path):
    with served(folder, output=tmp_path / "taught", photographs=heap) as url:
        begun = ask(f"{url}/facts")[1]["server"]
        row = ask(f"{url}/look", {"kind": "answers", "count": 1})[1]["rows"][0]
        for path, side in (("small", 400), ("photo", 16)):
            image = Image.open(io.BytesIO(ask(f"{url}/{path}/{row['id']}")[1]))
            assert image.format == "JPEG" and image.size == (side, side), "tiny pictures are enlarged in the list"
        assert ask(f"{url}/small/{'0' * 64}")[0] == 404
        assert ask(f"{url}/small/{row['id']}", Sec_Fetch_Site="cross-site")[0] == 403
        for request in ({"id": "0" * 64}, {"id": 3}, {"id": "x"}, {"id": row["id"], "class": 3}):
            assert ask(f"{url}/correct", {"class": "red", **request})[0] == 400
        first = ask(f"{url}/correct", {"id": row["id"], "class": "red"})[1]["last"]["number"]
        work = ask(f"{url}/facts")[1]["labelling"]
        last = ask(f"{url}/label", {"photo": work["photo"], "class": "red"})[1]["last"]
        assert last["photograph"] == Path(work["name"]).name
        status, answer = ask(f"{url}/undo", {"last": first})  # a page that has not seen the second label
        assert (status, answer["error"]) == (400, "the last change is another one now, the label red: reload the page")
        assert ask(f"{url}/undo", {"last": last["number"], "server": begun})[0] == 200
        status, answer = ask(f"{url}/undo", {"server": "of yesterday"})
        assert status == 400 and "the server was started again" in answer["error"]
    with served(folder) as url:
        assert "start the server with --photos FOLDER" in ask(f"{url}/look", {})[1]["error"]
