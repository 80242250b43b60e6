"""The page to try a learner: what it can ask for, what is refused, and the command."""

from __future__ import annotations

import base64
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

import numpy as np
import pytest
from PIL import Image
from served import photo, running, served, two_colours

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.commands.main import main
from dulbe_peft.commands.serve import _own
from dulbe_peft.metrics.suggesting import suggestions
from dulbe_peft.serving import App, make_server, server
from dulbe_peft.serving.app import MOST_UNDOS
from dulbe_peft.serving.labelling import NEXT


def sent(*images: Image.Image) -> list[str]:
    texts = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        texts.append(base64.b64encode(file.getvalue()).decode())
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_colours(tmp_path_factory.mktemp("served"))


def ask(url, content=None, **headers):
    """Status and answer."""
    data = None if content is None else content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
            body = answer.read()
            return answer.status, json.loads(body) if "json" in answer.headers["Content-Type"] else body
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def best(url, image):
    status, found = ask(f"{url}/predict", {"images": sent(image)})
    assert status == 200 and sum(row["probability"] for row in found["best"]) == pytest.approx(1, abs=1e-5)
    return found["best"][0]["class"]


def test_a_visit(folder, tmp_path):
    learner = ClassIncrementalLearner.from_pretrained(folder)
    with served(folder) as url:
        assert b"<title>Try the learner</title>" in ask(url + "/")[1]
        assert ask(f"{url}/facts")[1]["classes"] == ["red", "green"]
        assert best(url, photo(0)) == learner.predict(photo(0))[0] == "red"
        before = ask(f"{url}/predict", {"images": sent(photo(2))})[1]
        status, facts = ask(f"{url}/teach", {"class": " blue ", "images": sent(photo(2), photo(2, 1))})
        assert status == 200 and facts["classes"][-1] == "blue" and facts["undo"] == "2 images of blue"
        assert best(url, photo(2)) == "blue"
        ask(f"{url}/teach", {"class": "red", "images": sent(photo(0))})  # corrects an answer
        (tmp_path / "learner.zip").write_bytes(ask(f"{url}/learner.zip")[1])
        assert ask(f"{url}/undo", {})[1]["undo"] == "2 images of blue"
        taken_back = ask(f"{url}/undo", {})[1]
        assert taken_back.pop("said") == "taken back: 2 images of blue" and taken_back == ask(f"{url}/facts")[1]
        assert ask(f"{url}/predict", {"images": sent(photo(2))})[1] == before
        assert ask(f"{url}/undo", {}) == (400, {"error": "there is nothing to undo"})
    with zipfile.ZipFile(tmp_path / "learner.zip") as archive:
        archive.extractall(tmp_path)
    assert ClassIncrementalLearner.from_pretrained(tmp_path / "learner").predict(photo(2)) == ["blue"]


@pytest.mark.parametrize(
    ("path", "content", "headers", "status", "words"),
    [
        ("/predict", {"images": ["!"]}, {}, 400, "image 1 cannot be read"),
        ("/predict", b"[" * 10**5, {}, 400, ""),
        ("/predict", {"images": []}, {"Content_Type": "text/plain"}, 400, "as the page does"),
        ("/teach", {"class": " ", "images": sent(photo(0))}, {}, 400, "needs a name"),
        ("/teach", {"class": "red", "images": sent(photo(0)) * 201}, {}, 400, "from 1 to 200 images"),
        ("/../serving.py", None, {}, 404, "no such page"),
        ("/predict", {}, {"Content_Length": "99999999999"}, 413, "at most 64 MiB"),
        ("/facts", None, {"Origin": "http://evil.example"}, 403, "own address"),
        ("/facts", None, {"Host": "evil.example:80"}, 403, "own address"),
        ("/facts", None, {"Host": "127.0.0.1.evil.example"}, 403, "own address"),
        ("/facts", None, {"Host": "[::1"}, 403, "own address"),
        ("/undo", {}, {"Origin": "null"}, 403, "own address"),
        ("/teach", {"class": "\ud800", "images": sent(photo(2))}, {}, 400, "cannot be written as UTF-8"),
    ],
)
def test_what_is_refused(folder, path, content, headers, status, words):
    with served(folder) as url:
        found, answer = ask(url + path, content, **headers)
        assert found == status and words in answer["error"]
        assert ask(f"{url}/facts")[1]["undo"] is None


MACHINE = socket.gethostname()
HOSTS = {  # the address to listen on -> what a browser may call it, and what it may not
    "127.0.0.1": (
        ["localhost", "127.0.0.1", "LOCALHOST:7860", "[::1]:7860"],
        ["192.168.1.5", MACHINE, "localhost@evil"],
    ),
    "localhost": (["localhost:8000"], ["localhost.evil.example", "evil.example/localhost", "evil.example?localhost"]),
    "0.0.0.0": (
        ["192.168.1.5:7860", "[fe80::1]", "localhost", f"{MACHINE}:80", f"{MACHINE}.local"],
        ["evil.example", ""],
    ),
}


@pytest.mark.parametrize("listened", HOSTS)
def test_the_page_is_opened_by_its_own_address_alone(folder, listened):
    """The name of another website may lead here: what its script asks for has that name."""
    with running(folder, host=listened, names=["Photos.example.org"]) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        own, others = HOSTS[listened]
        for host in (*own, "photos.example.org:443"):
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host}), timeout=30) as answer:
                assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
            assert ask(f"{url}/facts", Host=host, Origin=f"http://{host}")[0] == 200
        for host in (*others, "1e100.net", "127.0.0.1.nip.io"):
            for path, content in (("/", None), ("/facts", None), ("/learner.zip", None), ("/undo", {})):
                status, answer = ask(url + path, content, Host=host)
                assert status == 403 and "own address" in answer["error"]


def test_no_address_is_not_the_whole_network(folder):
    with pytest.raises(ValueError, match="the host is '', expected the address to listen on"):
        make_server(ClassIncrementalLearner.from_pretrained(folder), "", 0)


LARGE = {"classes": ["x" * 2**20] * 16}  # more than the buffers of a connection take


@pytest.mark.parametrize("path", ["/facts", "/learner.zip", "/predict", "/teach", "/undo"])
def test_a_client_that_is_slow_to_read_holds_up_nobody(folder, monkeypatch, path):
    name = "download" if path == "/learner.zip" else path[1:]
    asked = threading.Event()

    def large(*_):
        asked.set()
        return json.dumps(LARGE).encode() if name == "download" else LARGE

    with running(folder) as server:
        address = server.server_address[:2]
        with monkeypatch.context() as patch, socket.create_connection(address) as slow:
            patch.setattr(server.app, name, large)
            method = "GET" if path in ("/facts", "/learner.zip") else "POST"
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
            assert asked.wait(30)
            patch.undo()
            assert best("http://{}:{}".format(*address), photo(1)) == "green"
            assert ask("http://{}:{}/learner.zip".format(*address))[0] == 200
            slow.settimeout(30)
            parts = iter(lambda: slow.recv(2**20), b"")
            assert b"".join(parts).partition(b"\r\n\r\n")[2] == json.dumps(LARGE).encode(), "it has all of it at last"


def test_clients_that_are_slow_to_send_hold_up_nobody(folder):
    head = b"POST /teach HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with running(folder) as server, ExitStack() as opened:
        address = server.server_address[:2]
        for sent_so_far in (b"", head[:9], head[:-2], head, head + b'{"class'):
            for _ in range(20):
                opened.enter_context(socket.create_connection(address)).sendall(sent_so_far)
        assert best("http://{}:{}".format(*address), photo(1)) == "green"
        assert ask("http://{}:{}/facts".format(*address))[1]["undo"] is None


def test_many_ask_at_once_and_some_go_away(folder, capfd):
    """Thirty images and ten corrections at once, after uploads that end in the middle: none is lost."""
    with served(folder) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for reset in (True, False):
            gone = socket.create_connection(address)
            gone.sendall(b"POST /teach HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            gone.sendall(b'Content-Length: 1000\r\n\r\n{"class": "red", "images": ["')
            if reset:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()
        with ThreadPoolExecutor(40) as pool:
            taught = [
                pool.submit(ask, f"{url}/teach", {"class": "red", "images": sent(photo(0, number))})
                for number in range(10)
            ]
            found = list(pool.map(lambda _: best(url, photo(1)), range(30)))
            assert found == ["green"] * 30 and [change.result()[0] for change in taught] == [200] * 10
        for _ in range(10):
            status, facts = ask(f"{url}/undo", {})
            assert status == 200
        assert facts["undo"] is None
    assert "Traceback" not in capfd.readouterr().err


def test_a_learner_that_trains_takes_corrections_and_no_new_class(folder, monkeypatch):
    app = App(ClassIncrementalLearner.from_pretrained(folder))
    monkeypatch.setattr(type(app.learner.strategy), "adapts", True)
    assert not app.facts()["teachable"]
    assert app.teach({"class": "red", "images": sent(photo(0))})["undo"] == "1 image of red"
    with pytest.raises(ValueError, match="'blue' is a new class.*dulbe-peft learn"):
        app.teach({"class": "blue", "images": sent(photo(2))})


def test_what_is_taught_is_saved_after_each_change(folder, tmp_path):
    output = tmp_path / "taught"
    with served(folder, output=output) as url:
        facts = ask(f"{url}/facts")[1]
        assert facts["output"] == str(output) and not facts["unsaved"] and not output.exists()
        assert facts["counts"] == {"red": 4, "green": 4}
        facts = ask(f"{url}/teach", {"class": "blue", "images": sent(photo(2), photo(2, 1))})[1]
        assert facts["counts"] == {"red": 4, "green": 4, "blue": 2} and not facts["unsaved"]
        assert ClassIncrementalLearner.from_pretrained(output).predict(photo(2, 2)) == ["blue"]
        ask(f"{url}/undo", {})
        assert ClassIncrementalLearner.from_pretrained(output).class_names == ("red", "green")
        ask(f"{url}/teach", {"class": "red", "images": sent(photo(0, 1))})
    with served(output, output=output) as url:  # the next day
        assert ask(f"{url}/facts")[1]["counts"] == {"red": 5, "green": 4}
        again = ask(f"{url}/teach", {"class": "red", "images": sent(photo(0, 1))})
        assert again == (400, {"error": "nothing was learned: 1 photograph learned before"})


def test_a_change_that_cannot_be_saved_is_none(folder, tmp_path, monkeypatch):
    app = App(ClassIncrementalLearner.from_pretrained(folder), tmp_path / "taught")
    app.teach({"class": "blue", "images": sent(photo(2))})

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(app.learner, "save_pretrained", full)
    for change in (lambda: app.teach({"class": "red", "images": sent(photo(0))}), lambda: app.undo({})):
        before = app.facts()
        with pytest.raises(OSError, match="no space left"):
            change()
        assert app.facts() == before and before["undo"] == "1 image of blue"


def test_a_photograph_is_learned_once_and_that_is_said(folder):
    app = App(ClassIncrementalLearner.from_pretrained(folder))
    found = app.teach({"class": "blue", "images": sent(photo(2), photo(2), photo(2, 1))})
    assert found["said"] == "learned: blue; left out: 1 photograph in the data twice" and found["unsaved"]
    assert found["counts"]["blue"] == 2 and app.predict({"images": sent(photo(2))})["learned"] == "blue"
    assert app.predict({"images": sent(photo(0))})["learned"] is None
    before = app.learner.state
    found = app.teach({"class": "red", "images": sent(photo(2), photo(2))})
    assert found["said"] == "learned: red; no longer: blue" and found["counts"] == {"red": 5, "green": 4, "blue": 1}
    assert app.predict({"images": sent(photo(2))})["learned"] == "red"
    with pytest.raises(ValueError, match="'blue' has one image alone"):
        app.teach({"class": "red", "images": sent(photo(2, 1))})
    app.undo({})
    assert app.learner.state is before and not app.undo({})["unsaved"]


def test_a_picture_that_no_browser_shows_comes_as_jpeg(folder):
    packed = io.BytesIO()
    photo(0).resize((2000, 1000)).save(packed, "TIFF")
    app = App(ClassIncrementalLearner.from_pretrained(folder))
    found = app.predict({"images": [base64.b64encode(packed.getvalue()).decode()]})["picture"]
    shown = Image.open(io.BytesIO(base64.b64decode(found.removeprefix("data:image/jpeg;base64,"))))
    assert (shown.format, shown.size) == ("JPEG", (1024, 512))
    assert app.predict({"images": sent(photo(0))})["picture"] is None


@pytest.fixture(scope="module")
def heap(tmp_path_factory):
    """Twelve photographs of three colours that nobody has labelled, a copy of one, and a file that is none."""
    root = tmp_path_factory.mktemp("heap")
    for number in range(12):
        photo(number % 3, 100 + number).save(root / f"{('red', 'green', 'blue')[number % 3]}-{number}.png")
    shutil.copy(root / "red-0.png", root / "red-copy.png")
    (root / "broken.png").write_bytes(b"no photograph")
    return root


def colour(work):
    return Path(work["name"]).name.partition("-")[0]


def test_photographs_are_labelled_a_few_at_a_time(folder, heap, tmp_path):
    output = tmp_path / "taught"
    with served(folder, output=output, photographs=heap) as url:
        work = ask(f"{url}/facts")[1]["labelling"]
        assert (
            work["left"] == 12 and work["labelled"] == 0 and {row["class"] for row in work["best"]} == {"red", "green"}
        )
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
        assert facts["undo"] == f"the label {list(names.values())[-1]}" and facts["unsaved"], "it waits for others"
        for count in (10, 9):  # the second of them was learned with four others
            work = ask(f"{url}/undo", {})[1]["labelling"]
            name = names.popitem()[0]
            assert (work["labelled"], work["name"], work["waiting"]) == (count, name, count % 5)
        assert sum(ask(f"{url}/facts")[1]["counts"].values()) == 13
        rows = ask(f"{url}/labels.csv")[1].decode().splitlines()
        assert rows == ["path,label", *(f"{name},{said}" for name, said in names.items())]
        again = ask(f"{url}/label", {"photo": -5, "class": "red"})
        assert again[0] == 400 and "is not to be labelled any more" in again[1]["error"]
        assert ask(f"{url}/photo/999")[0] == 404
    with served(output, output=output, photographs=heap) as url:  # what was learned is not asked again
        assert ask(f"{url}/facts")[1]["labelling"]["left"] == 7


def test_labels_wait_and_are_taken_back_whatever_else_changes_the_learner(folder, heap):
    app = App(ClassIncrementalLearner.from_pretrained(folder), photographs=heap)

    def label(name):
        return app.label({"photo": app.facts()["labelling"]["photo"], "class": name})

    label("red")
    app.learner.rename_class("green", "lime")
    assert label("lime")["labelling"]["waiting"] == 2
    assert app.undo({})["labelling"]["waiting"] == 1 and app.learner.class_names == ("red", "lime")
    label("lime")
    app.finish()
    assert app.facts()["counts"] == {"red": 5, "lime": 5} and not app.facts()["labelling"]["waiting"]
    found = app.undo({})  # the other one, which was learned with it, waits again
    assert found["counts"] == {"red": 4, "lime": 4} and found["labelling"]["waiting"] == 1
    assert found["undo"] == "the label red"
    for number in range(30):
        app.teach({"class": "red", "images": sent(photo(0, 300 + number))})
    assert len(app.before) == MOST_UNDOS


def test_a_photograph_that_was_taught_meanwhile_is_not_labelled_too(folder, heap):
    app = App(ClassIncrementalLearner.from_pretrained(folder), None, heap)
    place = app.labelling.left[0]
    image = Image.open(app.labelling.facts()["name"])
    with image:
        file = base64.b64encode(Path(image.filename).read_bytes()).decode()
    app.teach({"class": "red", "images": [file]})
    with pytest.raises(ValueError, match="was learned as 'red' meanwhile"):
        app.label({"photo": place, "class": "green"})
    assert place not in app.labelling.left and not app.waiting


def test_a_folder_that_a_server_holds_is_not_put_aside(folder, tmp_path, capsys):
    output = tmp_path / "taught"
    shutil.copytree(folder, output)
    with _own(str(output), str(output), None, False):
        assert main(["serve", str(folder), "--output", str(output), "--overwrite", "--port", "0"]) == 2
    assert "in use by another process" in capsys.readouterr().err
    assert output.is_dir() and not (tmp_path / "taught.old").exists()


def test_the_order_is_that_of_suggest_and_new_after_each_few(folder, heap):
    app = App(ClassIncrementalLearner.from_pretrained(folder), None, heap)
    work, before = app.labelling, []
    for count in range(10):
        now = work.facts()
        if count in (0, 5):
            places = sorted(set(work.left) - set(work.skipped))
            found = suggestions(work.features[places], NEXT, app.learner.classifier)
            work.left = places + work.skipped
            work.sort()
            assert work.left[: len(found)] == [places[one.row] for one in found] and work.left != before
            assert work.facts()["reason"] == found[0].reason
            before, now = list(work.left), work.facts()
        app.skip({"photo": now["photo"]}) if count == 1 else None
        now = work.facts()
        app.label({"photo": now["photo"], "class": colour(now)})
    assert work.left == work.skipped or work.left[-1] == work.skipped[-1], "what was skipped stays last"


def test_labels_that_wait_are_learned_before_the_end_and_one_that_fails_is_none(folder, heap, tmp_path, monkeypatch):
    app = App(ClassIncrementalLearner.from_pretrained(folder), tmp_path / "taught", heap)
    for _ in range(4):
        work = app.labelling.facts()
        app.label({"photo": work["photo"], "class": colour(work)})
    with monkeypatch.context() as patch:
        patch.setattr(app.learner, "save_pretrained", lambda _: (_ for _ in ()).throw(OSError("no space left")))
        before = app.facts()
        with pytest.raises(OSError, match="no space left"):
            app.label({"photo": before["labelling"]["photo"], "class": "red"})
        assert app.facts() == before and before["labelling"]["waiting"] == 4
    app.finish()
    known = ClassIncrementalLearner.from_pretrained(tmp_path / "taught").state.known
    assert sum(map(len, known.learned.values())) == 12 and not app.waiting
    with pytest.raises(ValueError, match="start with --photos FOLDER"):
        App(app.learner).label({"photo": 0, "class": "red"})


def test_a_folder_without_anything_to_label_is_refused(folder, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert main(["serve", str(folder), "--photos", str(tmp_path), "--port", "0"]) == 2
    assert "has no photograph that can be read and that the learner has not learned" in capsys.readouterr().err


def test_the_commands_of_the_page_are_an_api(folder, tmp_path):
    """Each `curl` of the docs, as it stands there."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    text = (Path(__file__).parents[2] / "docs" / "predicting.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if "curl" in line and "127.0.0.1:7860" in line]
    photo(2).save(tmp_path / "photo.jpg")
    found = []
    with served(folder) as url:
        for line in commands:
            line = line.replace("127.0.0.1:7860", url)
            done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, check=True)
            found.append(done.stdout)
        for text, key in zip(found, ("classes", "best", "said", "said"), strict=False):
            assert key in json.loads(text)
        assert json.loads(found[2])["classes"][-1] == "cat" and json.loads(found[3])["classes"] == ["red", "green"]
    assert (tmp_path / "learner.zip").read_bytes()[:2] == b"PK" and len(found) == 5


def test_the_command_prints_the_address_and_what_is_lost(folder, monkeypatch, capsys, tmp_path):
    def stopped(self):
        self.app.teach({"class": "red", "images": sent(photo(0))})
        raise KeyboardInterrupt

    monkeypatch.setattr(server.PageServer, "serve_forever", stopped)
    assert main(["serve", str(folder), "--port", "0"]) == 0
    said = capsys.readouterr()
    assert "open http://127.0.0.1:" in said.out and "nothing that it learns is saved without --output" in said.out
    assert "what it was taught is not saved, and gone: --output FOLDER keeps it" in said.err
    assert "next:" not in said.out
    taught = str(tmp_path / "taught")
    assert main(["serve", str(folder), "--port", "0", "--output", taught]) == 0
    said = capsys.readouterr()
    assert "not saved" not in said.err and said.out.endswith(f"next: dulbe-peft predict {taught} PHOTOS\n")
    assert main(["serve", str(folder), "--port", "0", "--output", taught]) == 2
    assert f"serve {taught} --output {taught} goes on with what is there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taught"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port]) == 2
    words = f"127.0.0.1:{port} cannot be listened on: Address already in use; take another --port or --host"
    assert words in capsys.readouterr().err
