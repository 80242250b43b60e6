"""Test the page of `serve`: its requests, which requests are refused, and the command."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import socket
import struct
import subprocess
import threading
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from documents import text_of
from PIL import Image
from served import photo, running, served, two_colours

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.commands.serve import _reserved
from dulbe_peft.photos.serving import App, server
from dulbe_peft.photos.serving.changes import MOST_UNDOS
from dulbe_peft.photos.serving.labelling import NEXT
from dulbe_peft.photos.suggesting import suggestions


def sent(*images: Image.Image, kind: str = "PNG") -> list[str]:
    files = [io.BytesIO() for _ in images]
    for image, file in zip(images, files, strict=True):
        image.save(file, kind)
    return [base64.b64encode(file.getvalue()).decode() for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_colours(tmp_path_factory.mktemp("served"))


@pytest.fixture
def learner(folder):
    return ClassIncrementalLearner.from_pretrained(folder)


@pytest.fixture
def app(learner):
    return App(learner)


def ask(url, content=None, **headers):
    """Send a request, and return the status and the answer."""
    data = None if content is None else content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
            body = answer.read()
            return answer.status, json.loads(body) if "json" in answer.headers["Content-Type"] else body
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def best(url, image):
    status, found = ask(f"{url}/predict", {"images": sent(image)})
    assert status == 200 and sum(row["probability"] for row in found["best"]) == pytest.approx(1, abs=1e-5)
    return found["best"][0]["class"]


def test_learner_is_taught_undone_and_downloaded(folder, learner, tmp_path):
    with served(folder) as url:
        assert b"<title>Try the learner</title>" in ask(url + "/")[1]
        assert ask(f"{url}/facts")[1]["classes"] == ["red", "green"]
        assert best(url, photo(0)) == learner.predict(photo(0)) == "red"
        before = ask(f"{url}/predict", {"images": sent(photo(2))})[1]
        status, facts = ask(f"{url}/teach", {"class": " blue ", "images": sent(photo(2), photo(2, 1))})
        assert status == 200 and facts["classes"][-1] == "blue" and facts["undo"] == "2 images of blue"
        assert best(url, photo(2)) == "blue"
        ask(f"{url}/teach", {"class": "red", "images": sent(photo(0))})  # corrects a prediction
        (tmp_path / "learner.zip").write_bytes(ask(f"{url}/learner.zip")[1])
        assert ask(f"{url}/undo", {})[1]["undo"] == "2 images of blue"
        undone = ask(f"{url}/undo", {})[1]
        assert undone.pop("said") == "undone: 2 images of blue" and undone == ask(f"{url}/facts")[1]
        assert ask(f"{url}/predict", {"images": sent(photo(2))})[1] == before
        assert ask(f"{url}/undo", {}) == (400, {"error": "there is nothing to undo"})
    with zipfile.ZipFile(tmp_path / "learner.zip") as archive:
        archive.extractall(tmp_path)
    assert ClassIncrementalLearner.from_pretrained(tmp_path / "learner").predict(photo(2)) == "blue"


@pytest.mark.parametrize(
    ("path", "content", "headers", "status", "words"),
    [
        ("/predict", {"images": ["!"]}, {}, 400, "image 1 cannot be read"),
        ("/predict", {"images": ["bm8gaW1hZ2U="]}, {}, 400, "image 1 cannot be read: it is none of the formats JPEG"),
        ("/predict", b"[" * 10**5, {}, 400, ""),
        ("/predict", {"images": []}, {"Content_Type": "text/plain"}, 400, "expected JSON"),
        ("/teach", {"class": " ", "images": sent(photo(0))}, {}, 400, "needs a name"),
        ("/teach", {"class": "red", "images": sent(photo(0)) * 201}, {}, 400, "a list of 1 to 200 images"),
        ("/../serving.py", None, {}, 404, "no such page"),
        ("/predict", {}, {"Content_Length": "99999999999"}, 413, "at most 64 MiB"),
        ("/facts", None, {"Origin": "http://evil.example"}, 403, "own address"),
        ("/facts", None, {"Host": "[::1"}, 403, "own address"),
        ("/undo", {}, {"Origin": "null"}, 403, "own address"),
        ("/learner.zip", None, {"Sec_Fetch_Site": "cross-site"}, 403, "own address"),
        ("/photo/0", None, {"Sec_Fetch_Site": "same-site"}, 403, "own address"),  # another port
        ("/teach", {"class": "\ud800", "images": sent(photo(2))}, {}, 400, "cannot be written as UTF-8"),
    ],
)
def test_invalid_request_is_refused_and_changes_nothing(folder, path, content, headers, status, words):
    with served(folder) as url:
        found, answer = ask(url + path, content, **headers)
        assert found == status and words in answer["error"]
        assert ask(f"{url}/facts")[1]["undo"] is None


FULL = Mock(side_effect=OSError("no space left"))
MACHINE = "studio"
HOSTS = {  # the address to listen on -> names that are accepted, and names that are refused
    "127.0.0.1": (
        ["localhost", "127.0.0.1", "LOCALHOST:7860", "[::1]:7860"],
        ["192.168.1.5", MACHINE, "localhost@evil", "127.0.0.1.evil.example", "evil.example/localhost"],
    ),
    "0.0.0.0": (
        ["192.168.1.5:7860", "[fe80::1]", "localhost", f"{MACHINE}:80", f"{MACHINE}.local"],
        ["evil.example", ""],
    ),
}


@pytest.mark.parametrize("listened", HOSTS)
def test_page_is_opened_only_by_its_own_address(folder, listened, monkeypatch):
    """Another website could let its name point here; the requests of its scripts would have this name."""
    monkeypatch.setattr(socket, "gethostname", lambda: MACHINE)
    with running(folder, host=listened, names=["Photos.example.org"]) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        accepted, refused = HOSTS[listened]
        for host in (*accepted, "photos.example.org:443"):
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host}), timeout=30) as answer:
                assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
            assert ask(f"{url}/facts", Host=host, Origin=f"http://{host}")[0] == 200
        for host in (*refused, "1e100.net", "127.0.0.1.nip.io"):
            for path, content in (("/", None), ("/facts", None), ("/learner.zip", None), ("/undo", {})):
                status, answer = ask(url + path, content, Host=host)
                assert status == 403 and "own address" in answer["error"]


LARGE = {"classes": ["x" * 2**20] * 16}  # more than the buffers of a connection hold


@pytest.mark.parametrize("path", ["/facts", "/learner.zip", "/teach"])
def test_client_that_reads_slowly_does_not_delay_others(folder, monkeypatch, path):
    name = "download" if path == "/learner.zip" else path[1:]
    asked = threading.Event()

    def large(*_):
        asked.set()
        return json.dumps(LARGE).encode() if name == "download" else LARGE

    with running(folder) as server:
        address = server.server_address[:2]
        with monkeypatch.context() as patch, socket.create_connection(address) as slow:
            patch.setattr(server.app, name, large)
            method = "POST" if path == "/teach" else "GET"
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
            assert asked.wait(30)
            patch.undo()
            assert best("http://{}:{}".format(*address), photo(1)) == "green"
            slow.settimeout(30)
            parts = iter(lambda: slow.recv(2**20), b"")
            assert b"".join(parts).partition(b"\r\n\r\n")[2] == json.dumps(LARGE).encode(), (
                "the slow client gets the whole answer"
            )


def test_clients_that_send_slowly_do_not_delay_others(folder):
    head = b"POST /teach HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with running(folder) as server, ExitStack() as opened:
        address = server.server_address[:2]
        for sent_so_far in (b"", head[:9], head[:-2], head, head + b'{"class'):
            for _ in range(20):
                opened.enter_context(socket.create_connection(address)).sendall(sent_so_far)
        assert best("http://{}:{}".format(*address), photo(1)) == "green"
        assert ask("http://{}:{}/facts".format(*address))[1]["undo"] is None


def test_simultaneous_requests_are_all_answered(folder, capfd):
    """Thirty predictions and ten corrections arrive at once, after two uploads that break off."""
    with served(folder) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for reset in (True, False):
            with socket.create_connection(address) as gone:
                gone.sendall(b"POST /teach HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
                gone.sendall(b'Content-Length: 1000\r\n\r\n{"class": "red", "images": ["')
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
        with ThreadPoolExecutor(40) as pool:
            rows = [{"class": "red", "images": sent(photo(0, number))} for number in range(10)]
            taught = [pool.submit(ask, f"{url}/teach", row) for row in rows]
            found = list(pool.map(lambda _: best(url, photo(1)), range(30)))
            assert found == ["green"] * 30 and [change.result()[0] for change in taught] == [200] * 10
        assert [ask(f"{url}/undo", {})[0] for _ in range(11)] == [200] * 10 + [400]
    assert "Traceback" not in capfd.readouterr().err


def test_learner_that_trains_accepts_corrections_but_no_new_class(app, monkeypatch):
    monkeypatch.setattr(type(app.learner.strategy), "adapts", True)
    assert not app.facts()["teachable"]
    assert app.teach({"class": "red", "images": sent(photo(0))})["undo"] == "1 image of red"
    with pytest.raises(ValueError, match="'blue' is a new class.*dulbe-peft learn"):
        app.teach({"class": "blue", "images": sent(photo(2))})


def test_page_is_told_whether_percentages_are_calibrated(app, monkeypatch):
    assert app.facts()["doubt"] == ""
    monkeypatch.setattr(type(app.learner.classifier), "calibrated", False)
    assert "no image could be left out" in app.facts()["doubt"]


def test_learner_is_saved_after_each_change(folder, tmp_path):
    output = tmp_path / "taught"
    with served(folder, output=output) as url:
        facts = ask(f"{url}/facts")[1]
        assert facts["output"] == str(output) and not facts["unsaved"] and not output.exists()
        facts = ask(f"{url}/teach", {"class": "blue", "images": sent(photo(2), photo(2, 1))})[1]
        assert facts["counts"] == {"red": 4, "green": 4, "blue": 2} and not facts["unsaved"]
        assert ClassIncrementalLearner.from_pretrained(output).predict(photo(2, 2)) == "blue"
        ask(f"{url}/undo", {})
        assert ClassIncrementalLearner.from_pretrained(output).class_names == ("red", "green")
        ask(f"{url}/teach", {"class": "red", "images": sent(photo(0, 1))})
    with served(output, output=output) as url:  # the next day
        assert ask(f"{url}/facts")[1]["counts"] == {"red": 5, "green": 4}
        again = ask(f"{url}/teach", {"class": "red", "images": sent(photo(0, 1))})
        assert again == (400, {"error": "nothing was learned: 1 photograph learned before"})


def test_change_that_cannot_be_saved_is_reverted(learner, tmp_path, monkeypatch):
    app = App(learner, tmp_path / "taught")
    app.teach({"class": "blue", "images": sent(photo(2))})
    monkeypatch.setattr(app.learner, "save_pretrained", FULL)
    for change in (lambda: app.teach({"class": "red", "images": sent(photo(0))}), lambda: app.undo({})):
        before = app.facts()
        with pytest.raises(OSError, match="no space left"):
            change()
        assert app.facts() == before and before["undo"] == "1 image of blue"


def test_photograph_is_learned_only_once_and_the_answer_says_so(app):
    found = app.teach({"class": "blue", "images": sent(photo(2), photo(2), photo(2, 1))})
    assert found["said"] == "learned: blue; left out: 1 photograph in the data twice" and found["unsaved"]
    assert found["counts"]["blue"] == 2 and app.predict({"images": sent(photo(2))})["learned"] == "blue"
    assert app.predict({"images": sent(photo(0))})["learned"] is None
    before = app.learner.state
    found = app.teach({"class": "red", "images": sent(photo(2), photo(2))})
    assert found["said"] == "learned: red; no longer: blue" and found["counts"] == {"red": 5, "green": 4, "blue": 1}
    assert app.predict({"images": sent(photo(2))})["learned"] == "red"
    found = app.teach({"class": "red", "images": sent(photo(2, 1))})  # the last image of its class
    assert found["said"] == "learned: red; no longer: blue" and found["counts"] == {"red": 6, "green": 4}
    assert app.undo({})["counts"] == {"red": 5, "green": 4, "blue": 1}
    app.undo({})
    assert app.learner.state is before and not app.undo({})["unsaved"]


def test_image_that_browsers_cannot_show_is_sent_as_jpeg(app):
    found = app.predict({"images": sent(photo(0).resize((2000, 1000)), kind="TIFF")})["picture"]
    shown = Image.open(io.BytesIO(base64.b64decode(found.removeprefix("data:image/jpeg;base64,"))))
    assert (shown.format, shown.size) == ("JPEG", (1024, 512))
    assert app.predict({"images": sent(photo(0))})["picture"] is None


@pytest.fixture(scope="module")
def heap(tmp_path_factory):
    """Write twelve photographs of three colours without labels, a copy of one of them, and a damaged file."""
    root = tmp_path_factory.mktemp("heap")
    for number in range(12):
        photo(number % 3, 100 + number).save(root / f"{('red', 'green', 'blue')[number % 3]}-{number}.png")
    shutil.copy(root / "red-0.png", root / "red-copy.png")
    (root / "broken.png").write_bytes(b"no photograph")
    return root


def colour(work):
    return Path(work["name"]).name.partition("-")[0]


def test_labels_are_learned_five_at_a_time(folder, heap, tmp_path):
    output = tmp_path / "taught"
    with served(folder, output=output, photographs=heap) as url:
        work = ask(f"{url}/facts")[1]["labelling"]
        assert (work["left"], work["labelled"]) == (12, 0)
        assert {row["class"] for row in work["best"]} == {"red", "green"}
        shown = Image.open(io.BytesIO(ask(f"{url}/photo/{work['photo']}")[1]))
        said = np.asarray(Image.open(work["name"])).astype(int)
        assert shown.format == "JPEG" and np.abs(np.asarray(shown).mean((0, 1)) - said.mean((0, 1))).max() < 9
        skipped = work["photo"]
        work = ask(f"{url}/skip", {"photo": skipped})[1]["labelling"]
        assert work["left"] == 12 and work["photo"] != skipped
        names = {}
        for count in range(1, 12):
            names[work["name"]] = colour(work)
            facts = ask(f"{url}/label", {"photo": work["photo"], "class": colour(work)})[1]
            work = facts["labelling"]
            assert (work["labelled"], work["waiting"], work["left"]) == (count, count % 5, 12 - count)
            assert sum(facts["counts"].values()) == 8 + count - count % 5
        assert ClassIncrementalLearner.from_pretrained(output).class_names[:2] == ("red", "green")
        assert facts["undo"] == f"the label {list(names.values())[-1]}" and not facts["unsaved"], "each label is kept"
        for count in (10, 9):  # the second one was learned with four others
            work = ask(f"{url}/undo", {})[1]["labelling"]
            name = names.popitem()[0]
            assert (work["labelled"], work["name"], work["waiting"]) == (count, name, count % 5)
        assert sum(ask(f"{url}/facts")[1]["counts"].values()) == 13
        rows = ask(f"{url}/labels.csv")[1].decode().splitlines()
        assert rows == ["path,label,sha256", *(f"{name},{said},{sha256(name)}" for name, said in names.items())]
        assert (output / "labels.csv").read_text().splitlines() == rows
        again = ask(f"{url}/label", {"photo": -5, "class": "red"})
        assert again[0] == 400 and "is no longer to be labelled" in again[1]["error"]
        assert ask(f"{url}/photo/999")[0] == 404
    with served(output, output=output, photographs=heap) as url:  # learned photographs are not shown again
        work = ask(f"{url}/facts")[1]["labelling"]
        assert (work["left"], work["waiting"]) == (3, 4)


def test_files_of_the_page_are_refused_to_other_websites(folder, heap):
    with served(folder, photographs=heap) as url:
        for path in ("/", "/photo/0", "/learner.zip", "/labels.csv", "/facts"):
            for where in ("same-origin", "none"):  # a request of the page itself, and an address that was typed
                headers = {"Sec-Fetch-Site": where}
                with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers)) as answer:
                    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
            status = ask(url + path, Sec_Fetch_Site="cross-site")[0]
            assert status == (200 if path == "/" else 403), "another site may link to the page"


@pytest.mark.parametrize("photo", [True, 1.0, "0", [0], None])
def test_photograph_number_of_another_type_is_refused(learner, heap, photo):
    app = App(learner, photographs=heap)
    before = app.facts()
    for request in (app.label, app.skip):
        with pytest.raises(ValueError, match="is no longer to be labelled"):
            request({"photo": photo, "class": "red"})
    assert app.facts() == before


def test_photograph_with_a_refused_label_stays_current(learner, heap):
    app = App(learner, photographs=heap)
    work = app.facts()["labelling"]
    app.teach({"class": "red", "images": [base64.b64encode(Path(work["name"]).read_bytes()).decode()]})
    with pytest.raises(ValueError, match="was learned as 'red' in the meantime"):
        app.label({"photo": work["photo"], "class": "green"})
    now = app.facts()["labelling"]
    assert (now["photo"], now["left"], now["labelled"]) == (work["photo"], 12, 0)
    assert app.skip({"photo": work["photo"]})["labelling"]["left"] == 12, "it can be skipped"


def test_downloads_are_made_under_the_lock(folder, heap, monkeypatch):
    with running(folder, photographs=heap) as server:
        app, url = server.app, f"http://127.0.0.1:{server.server_address[1]}"
        held = []
        monkeypatch.setattr(app.table, "content", lambda: held.append(app.lock.locked()) or b"")
        monkeypatch.setattr(app, "download", lambda: held.append(app.lock.locked()) or b"")
        assert [ask(url + path)[0] for path in ("/labels.csv", "/learner.zip")] == [200, 200] and held == [True, True]
        monkeypatch.setattr(app, "download", FULL)
        assert ask(f"{url}/learner.zip") == (500, {"error": "/learner.zip cannot be made: no space left"})


def test_labels_csv_has_corrected_labels_and_absolute_paths(learner, heap, monkeypatch):
    monkeypatch.chdir(heap.parent)
    app = App(learner, photographs=heap.name)
    work = app.facts()["labelling"]
    app.label({"photo": work["photo"], "class": "red"})
    with pytest.raises(ValueError, match="is reserved for images of"):
        app.label({"photo": app.facts()["labelling"]["photo"], "class": "None of these"})
    path = Path(work["name"]).absolute()
    assert app.table.content().decode().splitlines()[1:] == [f"{path},red,{sha256(path)}"]
    app.teach({"class": "green", "images": [base64.b64encode(path.read_bytes()).decode()]})
    assert app.table.content().decode().splitlines()[1:] == [f"{path},green,{sha256(path)}"]


def test_labels_wait_and_are_undone_among_other_changes(learner, heap):
    app = App(learner, photographs=heap)

    def label(name):
        return app.label({"photo": app.facts()["labelling"]["photo"], "class": name})

    label("red")
    app.learner.rename_class("green", "lime")
    assert label("lime")["labelling"]["waiting"] == 2
    assert app.undo({})["labelling"]["waiting"] == 1 and app.learner.class_names == ("red", "lime")
    label("lime")
    app.finish()
    assert app.facts()["counts"] == {"red": 5, "lime": 5} and not app.facts()["labelling"]["waiting"]
    facts = app.undo({})  # the other label, which was learned with it, waits again
    assert facts["counts"] == {"red": 4, "lime": 4} and facts["labelling"]["waiting"] == 1
    assert facts["undo"] == "the label red"
    place, file = app.labelling.left[0], Path(app.labelling.facts()["name"]).read_bytes()
    app.teach({"class": "red", "images": [base64.b64encode(file).decode()]})
    with pytest.raises(ValueError, match="was learned as 'red' in the meantime"):
        app.label({"photo": place, "class": "lime"})
    assert place in app.labelling.left and not app.waiting
    for number in range(30):
        app.teach({"class": "red", "images": sent(photo(0, 300 + number))})
    assert len(app.changes) == MOST_UNDOS
    assert [app.undo({})["counts"]["red"] for _ in range(MOST_UNDOS)] == list(range(35, 35 - MOST_UNDOS, -1))


def test_photographs_are_ranked_as_by_suggest_after_every_five_labels(learner, heap):
    app = App(learner, photographs=heap)
    work = app.labelling
    app.skip({"photo": work.left[0]})
    first = work.reasons
    for count in range(8):
        if count == 5:
            assert work.reasons is not first
            places = sorted(set(work.left) - set(work.skipped))
            work.left = places + work.skipped
            work.sort()
            found = suggestions(work.features[places], NEXT, app.learner.classifier)
            assert work.left == [places[suggestion.row] for suggestion in found] + work.skipped
            assert work.facts()["reason"] == found[0].reason
        now = work.facts()
        app.label({"photo": now["photo"], "class": colour(now)})
    assert work.left[-1:] == work.skipped, "skipped photographs stay last"


def test_photograph_of_no_class_is_not_shown_again(learner, heap):
    app = App(learner, photographs=heap)

    def say(name):
        work = app.labelling.facts()
        app.none({"photo": work["photo"]}) if name is None else app.label({"photo": work["photo"], "class": name})
        return work["photo"]

    first, gone, *_ = [say(name) for name in ("red", None, "red", "lime")]
    facts = app.facts()["labelling"]
    assert (facts["none"], facts["labelled"], facts["waiting"], facts["left"]) == (1, 3, 3, 8)
    rows = app.table.content().decode().splitlines()
    assert rows[2].startswith(f"{app.labelling.images.item_name(gone)},,") and len(rows) == 5
    for name in ("lime", "red"):  # the fifth label is learned with the others, but not the photograph of no class
        say(name)
    assert sum(app.facts()["counts"].values()) == 8 + 5 and not app.waiting
    assert gone not in app.labelling.left and gone not in app.labelling.labels
    app.undo({})
    assert len(app.waiting) == 4 and gone not in app.waiting
    for _ in range(3):
        app.undo({})
    app.undo({})
    assert app.labelling.left[0] == gone and app.waiting == [first] and app.facts()["undo"] == "the label red"
    with pytest.raises(ValueError, match="is no longer to be labelled"):
        app.none({"photo": first})


def test_waiting_labels_are_learned_at_the_end_and_a_failed_label_is_reverted(learner, heap, tmp_path, monkeypatch):
    app = App(learner, tmp_path / "taught", heap)
    for _ in range(4):
        work = app.labelling.facts()
        app.label({"photo": work["photo"], "class": colour(work)})
    with monkeypatch.context() as patch:
        patch.setattr(app.learner, "save_pretrained", FULL)
        before = app.facts()
        with pytest.raises(OSError, match="no space left"):
            app.label({"photo": before["labelling"]["photo"], "class": "red"})
        assert app.facts() == before and before["labelling"]["waiting"] == 4
    app.finish()
    known = ClassIncrementalLearner.from_pretrained(tmp_path / "taught").state.known
    assert sum(map(len, known.learned.values())) == 12 and not app.waiting
    with pytest.raises(ValueError, match="start the server with --photos FOLDER"):
        App(app.learner).label({"photo": 0, "class": "red"})


def test_curl_commands_of_the_docs_work(folder, tmp_path):
    """Each `curl` command of the docs is run unchanged."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines = text_of("docs/predicting.md").splitlines()
    commands = [line for line in lines if "curl" in line and "127.0.0.1:7860" in line]
    photo(2).save(tmp_path / "photo.jpg")
    found = []
    with served(folder) as url:
        for line in commands:
            command = ["bash", "-c", line.replace("127.0.0.1:7860", url)]
            found.append(subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout)
        assert [key in json.loads(text) for text, key in zip(found, ("classes", "best"), strict=False)] == [True] * 2
        assert json.loads(found[2])["classes"][-1] == "cat" and json.loads(found[3])["classes"] == ["red", "green"]
    assert (tmp_path / "learner.zip").read_bytes()[:2] == b"PK" and len(found) == 5


def test_command_prints_its_address_and_warns_of_unsaved_changes(folder, heap, monkeypatch, capsys, tmp_path):
    def stopped(self):
        self.app.teach({"class": "red", "images": sent(photo(0))})
        raise KeyboardInterrupt

    monkeypatch.setattr(server.PageServer, "serve_forever", stopped)
    assert main(["serve", str(folder), "--port", "0"]) == 0
    said = capsys.readouterr()
    assert "open http://127.0.0.1:" in said.out and "changes are not saved without --output" in said.out
    assert "the changes were not saved: next time, give --output FOLDER" in said.err
    assert "next:" not in said.out
    assert main(["serve", str(folder), "--port", "0", "--photos", str(heap)]) == 0
    said = capsys.readouterr().out
    assert "1 photograph in the data twice" in said and "broken.png: it is none" in said
    taught = str(tmp_path / "taught")
    assert main(["serve", str(folder), "--port", "0", "--output", taught]) == 0
    said = capsys.readouterr()
    assert "not saved" not in said.err and said.out.endswith(f"next: dulbe-peft predict {taught} PHOTOS\n")
    assert main(["serve", str(folder), "--port", "0", "--output", taught]) == 2
    assert f"serve {taught} --output {taught} continues with it" in capsys.readouterr().err
    with _reserved(taught, taught, None, False):  # as a running server holds it
        assert main(["serve", str(folder), "--output", taught, "--overwrite", "--port", "0"]) == 2
    assert "in use by another process" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"taught"}
    (tmp_path / "bad.png").write_bytes(b"no image")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags, words in (
            (["--port", port], f"cannot listen on 127.0.0.1:{port}: Address already in use; give another --port"),
            (["--port", "0", "--host", ""], "the host is '', expected the address to listen on"),
            (["--port", "0", "--photos", str(tmp_path)], "no readable photograph is left that was not learned"),
        ):
            assert main(["serve", str(folder), *flags]) == 2
            assert words in capsys.readouterr().err


def test_labelling_shows_each_item_once_and_learns_the_groups(learner, heap):
    """The photographs of a colour are one item here. Labels that were just given count, too."""
    app = App(learner, photographs=heap, group="([a-z]+)-")
    work = app.labelling
    numbers = work.images.groups
    assert len(set(numbers[work.left[: len(set(numbers))]].tolist())) == len(set(numbers))
    place = work.left[0]
    work.add_label(place, "zero")
    work.sort()
    rest = [number for number in numbers[work.left].tolist() if number != numbers[place]]
    assert numbers[work.left[0]] != numbers[place] or not rest
    work.learn([place])
    assert learner.state.known.groups[work.content[place]] == numbers[place]
    file = Path(work.images.item_name(place)).read_bytes()
    app.teach({"class": "moved", "images": [base64.b64encode(file).decode()]})
    known = app.learner.state.known
    assert known.class_of()[work.content[place]] == "moved" and known.groups[work.content[place]] == numbers[place]
