"""The server of the page, with a thread for each connection: what one is slow to send or read, no other waits for."""

import io
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.photos.serving.app import MOST_BYTES, App
from dulbe_peft.photos.serving.labelling import jpeg
from dulbe_peft.utils.folders import CheckpointError

PAGE = Path(__file__).parents[1] / "assets" / "serve" / "page.html"
ASKED = {"/predict", "/teach", "/undo", "/label", "/skip", "/none"}  # methods of the app
LOCAL = {"127.0.0.1", "localhost", "::1"}
# The page runs its own script and shows pictures that it was given; no other page may frame it.
POLICY = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageServer(ThreadingHTTPServer):
    """Serves the page for one learner, to those who open it by a name or an address of its own."""

    request_queue_size = 128

    def __init__(self, app: App, host: str, port: int, names: Iterable[str]) -> None:
        if not host:  # which would be the whole network
            raise ValueError("the host is '', expected the address to listen on, such as 127.0.0.1")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), PageHandler)
        self.app, self.address = app, ip_address(str(self.server_address[0]))
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
        """The page, the facts, the learner in a zip archive, what was labelled, or a photograph of the folder."""
        app = self.server.app
        if self.path == "/":
            self._answer(HTTPStatus.OK, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/facts":
            self._work(lambda _: app.facts(), b"{}")
        elif self.path == "/learner.zip":
            self._file(app.download, "application/zip")
        elif self.path == "/labels.csv" and app.labelling:
            self._file(app.labelling.table, "text/csv; charset=utf-8")
        elif (found := re.fullmatch(r"/photo/(\d{1,9})", self.path)) and app.labelling:
            try:
                self._answer(HTTPStatus.OK, jpeg(app.labelling.images.given(int(found[1]))), "image/jpeg")
            except (ValueError, IndexError) as error:
                self._json(HTTPStatus.NOT_FOUND, {"error": f"photograph {found[1]} cannot be shown: {error}"})
        else:
            self._json(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})

    def do_POST(self) -> None:
        """What the page asks for, as JSON."""
        length = self.headers.get("Content-Length", "")
        if self.path not in ASKED or self.headers.get_content_type() != "application/json":
            self._json(HTTPStatus.BAD_REQUEST, {"error": "ask as the page does"})
        elif not length.isascii() or not length.isdigit() or int(length) > MOST_BYTES:
            self.close_connection = True
            self._json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"send at most {MOST_BYTES >> 20} MiB"})
        else:
            self._work(getattr(self.server.app, self.path[1:]), self.rfile.read(int(length)))

    def _file(self, make: Callable[[], bytes], kind: str) -> None:
        """Answer with a file that is made while nothing changes the learner or the labels."""
        try:
            with self.server.app.turn:
                made = make()
        except (ValueError, OSError, CheckpointError) as error:
            return self._json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{self.path} cannot be made: {error}"})
        self._answer(HTTPStatus.OK, made, kind)

    def _work(self, ask: Callable[[dict[str, Any]], dict[str, Any]], body: bytes) -> None:
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("ask as the page does")
            with self.server.app.turn:
                status, found = HTTPStatus.OK, ask(request)
        except (ValueError, RecursionError) as error:
            status, found = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except (OSError, CheckpointError) as error:
            status, found = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"nothing was changed: {error}"}
        self._json(status, found)

    def parse_request(self) -> bool:
        """Another website that is open in the same browser may not ask: its address is not the page's.

        It may link to the page. A browser names no origin where a picture or a file is loaded, and says where the
        request comes from in `Sec-Fetch-Site`: "none" is an address that somebody typed, "same-site" another port.
        """
        if not super().parse_request():
            return False
        own, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        inside = self.path == "/" or self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        if inside and self.server.is_own(own) and origin in (None, f"http://{own}", f"https://{own}"):
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
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")  # for browsers that do not say where from
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        shutil.copyfileobj(io.BytesIO(body), self.wfile)  # in parts, each of which has the whole timeout

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def make_server(
    learner: ClassIncrementalLearner,
    host: str = "127.0.0.1",
    port: int = 7860,
    names: Iterable[str] = (),
    output: str | Path | None = None,
    photographs: str | Path | None = None,
) -> PageServer:
    """A server of the page; `serve_forever()` starts it, and port 0 takes a free one.

    It answers who opens the page by `host`, and by the `names` that others give it, such as a proxy. For 0.0.0.0 that
    is any IP address, or the machine's name. After each change the learner is saved in the folder `output`, if any.
    With a folder of `photographs` the page asks what they are, the most useful ones first.
    """
    return PageServer(App(learner, output, photographs), host, port, names)
