"""A page in the browser to try a learner: drop photographs, correct answers, add classes, undo, download.

The page and this server use Python's standard library alone. It listens on this machine unless told otherwise. Each
connection has a thread; what one client is slow to send or to read, others do not wait for.
"""

import base64
import io
import json
import shutil
import socket
import sys
import tempfile
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dulbe_peft.data.decoding import image_problem
from dulbe_peft.data.names import normalized
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.files import paths_below

PAGE = Path(__file__).parent / "assets" / "serve" / "page.html"
MOST_BYTES = 64 * 2**20  # of one upload
MOST_IMAGES = 200  # of one upload
SHOWN = 5  # classes of an answer
REJECT = 0.05  # false alarms accepted for "none of these"
MOST_UNDOS = 20  # each keeps what the classifiers were
LOCAL = {"127.0.0.1", "localhost", "::1"}
# The page runs its own script and shows pictures that it was given; no other page may frame it.
POLICY = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class App:
    """What the page can ask for, one request at a time; the last changes can be undone."""

    def __init__(self, learner: ClassIncrementalLearner) -> None:
        self.learner = learner
        self.before: deque[tuple[str, LearnerState]] = deque(maxlen=MOST_UNDOS)
        self.turn = threading.Lock()

    def facts(self) -> dict[str, Any]:
        """The classes, whether new ones can be added here, and what an undo would take back."""
        return {
            "classes": list(self.learner.class_names),
            "classifier": self.learner.classifier.name,
            "teachable": not self.learner.strategy.adapts,
            "undo": self.before[-1][0] if self.before else None,
            "most_bytes": MOST_BYTES,
        }

    def predict(self, request: dict[str, Any]) -> dict[str, Any]:
        """The best classes of one image with their probabilities, and whether it is likely one of them at all."""
        (image,) = pictures(request, 1)
        names = self.learner.class_names
        (found,) = self.learner.predictions(image, min(SHOWN, len(names)))
        try:
            threshold = self.learner.classifier.rejection_threshold(REJECT)
        except ValueError:  # too few images were held back to choose one
            threshold = 0.0
        sure = found.probabilities[0] >= threshold
        best = [{"class": name, "probability": p} for name, p in zip(found.classes, found.probabilities, strict=True)]
        return {"best": best, "known": bool(sure)}

    def teach(self, request: dict[str, Any]) -> dict[str, Any]:
        """Give images to a class: a known one takes them in, a new one is learned."""
        name, images = request.get("class"), pictures(request, MOST_IMAGES)
        if not isinstance(name, str) or not name.strip():
            raise ValueError("the class needs a name")
        name = normalized(name.strip())
        state, known = self.learner.state, name in self.learner.class_names
        if not known and self.learner.strategy.adapts:
            raise ValueError(f"{name!r} is a new class, for which this learner trains: use dulbe-peft learn")
        rows = [{"image": image, "label": 0} for image in images]
        (self.learner.update_classes if known else self.learner.learn_task)(rows, [name])
        count = f"{len(rows)} image{'s' * (len(rows) != 1)}"
        self.before.append((f"{count} of {name}", state))
        return self.facts()

    def undo(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self.before:
            raise ValueError("there is nothing to undo")
        _, self.learner.state = self.before.pop()
        return self.facts()

    def download(self) -> bytes:
        """The learner as it is, as `save_pretrained` writes it, in a zip archive."""
        packed = io.BytesIO()
        with tempfile.TemporaryDirectory() as root, zipfile.ZipFile(packed, "w") as archive:
            folder = Path(root, "learner")
            self.learner.save_pretrained(folder)
            for path in paths_below(folder):
                archive.write(path, path.relative_to(root))
        return packed.getvalue()


def pictures(request: dict[str, Any], most: int) -> list[io.BytesIO]:
    """The files of the images of a request, which come as base64; a ValueError says which cannot be read, and why."""
    given = request.get("images")
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise ValueError(f"from 1 to {most} images can be sent at once")
    found = []
    for number, text in enumerate(given, start=1):
        try:
            found.append(io.BytesIO(base64.b64decode(text, validate=True)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"image {number} cannot be read: {error}") from error
        problem = image_problem(found[-1], in_full=True)
        if problem is not None:
            raise ValueError(f"image {number} cannot be read: {problem}")
    return found


class PageServer(ThreadingHTTPServer):
    """Serves the page for one learner, to those who open it by a name or an address of its own."""

    request_queue_size = 128

    def __init__(self, learner: ClassIncrementalLearner, host: str, port: int, names: Iterable[str]) -> None:
        if not host:  # which would be the whole network
            raise ValueError("the host is '', expected the address to listen on, such as 127.0.0.1")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), PageHandler)
        self.app, self.address = App(learner), ip_address(str(self.server_address[0]))
        self.names = {host.lower(), str(self.address), *map(str.lower, names)}
        if self.address.is_loopback or self.address.is_unspecified:
            self.names |= LOCAL
        if self.address.is_unspecified:
            machine = socket.gethostname().lower()
            self.names |= {machine, f"{machine}.local"}

    def is_own(self, address: str) -> bool:
        """Whether a request's `Host` is ours. Else another website may have made its own name lead here."""
        with suppress(ValueError):
            parts = urlsplit(f"//{address}")
            name = parts.hostname or ""
            if parts.netloc == address and "@" not in address:
                return name in self.names or (self.address.is_unspecified and ip_address(name) is not None)
        return False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class PageHandler(BaseHTTPRequestHandler):
    """Answers one connection."""

    timeout = 60  # seconds that a silent client may hold a connection
    server: PageServer

    def do_GET(self) -> None:
        """The page, the facts, or the learner in a zip archive."""
        app = self.server.app
        if not self._trusted():
            return
        if self.path == "/":
            self._answer(HTTPStatus.OK, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/facts":
            with app.turn:
                facts = app.facts()
            self._json(HTTPStatus.OK, facts)
        elif self.path == "/learner.zip":
            with app.turn:
                packed = app.download()
            self._answer(HTTPStatus.OK, packed, "application/zip")
        else:
            self._json(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})

    def do_POST(self) -> None:
        """What the page asks for, as JSON."""
        app = self.server.app
        asked = {"/predict": app.predict, "/teach": app.teach, "/undo": app.undo}
        if not self._trusted():
            return
        length = self.headers.get("Content-Length", "")
        if self.path not in asked or self.headers.get_content_type() != "application/json":
            self._json(HTTPStatus.BAD_REQUEST, {"error": "ask as the page does"})
        elif not length.isascii() or not length.isdigit() or int(length) > MOST_BYTES:
            self.close_connection = True
            self._json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"send at most {MOST_BYTES >> 20} MiB"})
        else:
            self._work(asked[self.path], self.rfile.read(int(length)))

    def _work(self, ask: Callable[[dict[str, Any]], dict[str, Any]], body: bytes) -> None:
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("ask as the page does")
            with self.server.app.turn:
                status, found = HTTPStatus.OK, ask(request)
        except (ValueError, RecursionError) as error:
            status, found = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        self._json(status, found)

    def _trusted(self) -> bool:
        """Another website that is open in the same browser may not ask: its address is not the page's."""
        own, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if self.server.is_own(own) and origin in (None, f"http://{own}", f"https://{own}"):
            return True
        words = "open the page by its own address; dulbe-peft serve --name NAME gives it a further name"
        self._json(HTTPStatus.FORBIDDEN, {"error": words})
        return False

    def _json(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        self._answer(status, json.dumps(content, ensure_ascii=False).encode(), "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        shutil.copyfileobj(io.BytesIO(body), self.wfile)  # in parts, each of which has the whole timeout

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def make_server(
    learner: ClassIncrementalLearner, host: str = "127.0.0.1", port: int = 7860, names: Iterable[str] = ()
) -> PageServer:
    """A server of the page; `serve_forever()` starts it, and port 0 takes a free one.

    It answers who opens the page by `host`, and by the `names` that others give it, such as a proxy. For 0.0.0.0 that
    is any IP address, or the machine's name.
    """
    return PageServer(learner, host, port, names)
