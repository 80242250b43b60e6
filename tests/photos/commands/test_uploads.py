"""Test that requests and uploads of any size and content get an answer in words, and leave no memory behind."""

import base64
import errno
import http.client
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from served import running, two_colours

from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.serving.app import MOST_PIXELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_colours(tmp_path_factory.mktemp("uploads"))


def ask(server, path, content, **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | headers
    connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def sent(side):
    """Return the base64 of a PNG with side * side pixels of 1 bit, which is small."""
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return [base64.b64encode(file.getvalue()).decode()]


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 16, "-1", "1_0", "", "٣"])
def test_content_length_that_is_no_number_in_the_limit_is_refused(folder, capfd, length):
    with running(folder) as server:
        status, answer = ask(server, "/predict", {}, Content_Length=length.encode("utf-8").decode("latin-1"))
    assert (status, answer) == (413, {"error": "send at most 64 MiB"})
    assert "Traceback" not in capfd.readouterr().err


def test_upload_with_too_many_pixels_is_refused_before_it_is_decoded(folder):
    side = int(MOST_PIXELS**0.5) + 1
    with running(folder) as server:
        for path, more in (("/predict", {}), ("/teach", {"class": "red"})):
            status, answer = ask(server, path, {"images": sent(side)} | more)
            assert (
                status == 400 and f"image 1 cannot be read: it has {side} x {side} pixels: at most" in answer["error"]
            )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_of_decoded_uploads_is_given_back(folder):
    with running(folder) as server:
        assert ask(server, "/predict", {"images": sent(64)})[0] == 200
        large, before = {"images": sent(4000)}, resident()  # 48 MB in RGB
        for _ in range(3):
            assert ask(server, "/predict", large)[0] == 200
        assert resident() - before < 40e6


def test_full_disk_is_said_in_words(folder, tmp_path, monkeypatch):
    with running(folder, output=tmp_path / "out") as server:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device", "/disk/learner")

        monkeypatch.setattr(server.app.learner, "save_pretrained", full)
        status, answer = ask(server, "/forget", {"class": "red"})
    assert status == 500 and answer["error"] == (
        "nothing was changed: the disk is full, so /disk/learner cannot be written: make room, and repeat the command"
    )


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_said_in_words_by_commands(folder, tmp_path, monkeypatch, capsys, code):
    def full(*_):
        raise OSError(code, "No space left on device", "/disk/learner")

    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    monkeypatch.setattr("dulbe_peft.utils.files.output_file", full)
    given = ["--csv", str(tmp_path / "t.csv"), "--device", "cpu", "--no-progress"]
    assert main(["predict", str(folder), str(tmp_path / "x.png"), *given]) == 2
    expected = "the disk is full, so /disk/learner cannot be written: make room, and repeat the command"
    assert capsys.readouterr().err.endswith(f"dulbe-peft: {expected}\n")
