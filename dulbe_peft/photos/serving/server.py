"""Serve the page. Each connection has its own thread, so that a slow client does not delay the others."""

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
from dulbe_peft.photos.serving.gallery import file_of, small
from dulbe_peft.photos.serving.labelling import Labelling, jpeg
from dulbe_peft.utils.files import full_disk
from dulbe_peft.utils.folders import CheckpointError
from dulbe_peft.utils.tensors import give_back_memory

PAGE = Path(__file__).parents[1] / "assets" / "serve" / "page.html"
REQUESTS = {  # methods of `App`
    *("/predict", "/teach", "/undo", "/label", "/skip", "/none", "/look", "/correct", "/rename", "/forget"),
}
LOCAL = {"127.0.0.1", "localhost", "::1"}
# The page may run its own script and show pictures from the server and from files. No other page may frame it.
POLICY = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageServer(ThreadingHTTPServer):
    """An HTTP server for the page of one learner. It refuses requests that do not use one of its own names."""

    request_queue_size = 128

    def __init__(self, app: App, host: str, port: int, names: Iterable[str]) -> None:
        if not host:  # would listen on the whole network
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
        """Return whether a request's `Host` is one of our names. Another website could let its own name point here."""
        with suppress(ValueError):
            parts = urlsplit(f"//{address}")
            name = parts.hostname or ""
            if parts.netloc == address and "@" not in address:
                return name in self.names or (self.address.is_unspecified and ip_address(name) is not None)
        return False

    def handle_error(self, request: Any, client_address: object) -> None:
        """Print nothing if the client has closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class PageHandler(BaseHTTPRequestHandler):
    """Answer the requests of one connection."""

    timeout = 60  # seconds after which a silent connection is closed
    server: PageServer

    def do_GET(self) -> None:
        """Send the page, the facts, the learner as a zip archive, the labels, or a photograph of the folder."""
        app = self.server.app
        if self.path == "/":
            self._answer(HTTPStatus.OK, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/facts":
            self._work(lambda _: app.facts(), b"{}")
        elif self.path == "/learner.zip":
            self._file(app.download, "application/zip")
        elif self.path == "/labels.csv" and app.labelling:
            self._file(app.table.content, "text/csv; charset=utf-8")
        elif (match := re.fullmatch(r"/(photo|small)/(\d{1,9}|[0-9a-f]{64})", self.path)) and app.labelling:
            self._photograph(app.labelling, match[1] == "small", match[2])
        else:
            self._json(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})

    def _photograph(self, work: Labelling, is_small: bool, name: str) -> None:
        """Send a photograph by its number in the folder, or by its SHA-256."""
        try:
            file = file_of(work, bytes.fromhex(name)) if len(name) == 64 else work.images.given(int(name))
            self._answer(HTTPStatus.OK, small(file) if is_small else jpeg(file), "image/jpeg")
        except (ValueError, IndexError) as error:
            self._json(HTTPStatus.NOT_FOUND, {"error": f"photograph {name} cannot be shown: {error}"})
        give_back_memory()

    def do_POST(self) -> None:
        """Answer a request of the page, which is JSON."""
        length = self.headers.get("Content-Length", "")
        if self.path not in REQUESTS or self.headers.get_content_type() != "application/json":
            self._json(
                HTTPStatus.BAD_REQUEST, {"error": f"expected JSON, sent to one of {', '.join(sorted(REQUESTS))}"}
            )
        elif not re.fullmatch(r"[0-9]{1,15}", length) or int(length) > MOST_BYTES:
            self.close_connection = True
            self._json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"send at most {MOST_BYTES >> 20} MiB"})
        else:
            self._work(getattr(self.server.app, self.path[1:]), self.rfile.read(int(length)))

    def _file(self, make: Callable[[], bytes], kind: str) -> None:
        """Send a file that is made while no other request changes the learner or the labels."""
        try:
            with self.server.app.lock:
                made = make()
        except (ValueError, OSError, CheckpointError) as error:
            return self._json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{self.path} cannot be made: {error}"})
        self._answer(HTTPStatus.OK, made, kind)

    def _work(self, ask: Callable[[dict[str, object]], dict[str, object]], body: bytes) -> None:
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("the request must be a JSON object")
            if request.pop("server", self.server.app.begun) != self.server.app.begun:
                raise ValueError("the server was started again since this page was loaded: reload the page")
            with self.server.app.lock:
                status, answer = HTTPStatus.OK, ask(request)
        except (ValueError, RecursionError) as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except (OSError, CheckpointError) as error:
            why = full_disk(error) or error
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"nothing was changed: {why}"}
        give_back_memory()
        self._json(status, answer)

    def parse_request(self) -> bool:
        """Refuse requests of other websites that are open in the same browser, except for links to the page.

        A browser sends no `Origin` when it loads a picture or a file, but tells in `Sec-Fetch-Site` where the request
        comes from: "none" is an address that was typed, "same-site" another port of this machine.
        """
        if not super().parse_request():
            return False
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        inside = self.path == "/" or self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        if inside and self.server.is_own(host) and origin in (None, f"http://{host}", f"https://{host}"):
            return True
        words = "open the page by its own address, or give it another name with dulbe-peft serve --name NAME"
        self._json(HTTPStatus.FORBIDDEN, {"error": words})
        return False

    def _json(self, status: HTTPStatus, content: dict[str, object]) -> None:
        self._answer(status, json.dumps(content).encode(), "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")  # for browsers without Sec-Fetch-Site
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        shutil.copyfileobj(io.BytesIO(body), self.wfile)  # in parts, because the timeout applies to each part

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""


def make_server(
    learner: ClassIncrementalLearner,
    host: str = "127.0.0.1",
    port: int = 7860,
    names: Iterable[str] = (),
    **given: Any,
) -> PageServer:
    """Return a server of the page, which `serve_forever()` starts.

    Args:
        learner: The learner to try and to teach.
        host: The address to listen on; "0.0.0.0" listens on the whole network.
        port: The port; 0 chooses a free one.
        names: Further names under which the page is opened, such as that of a proxy. Requests under other names than
            these and `host` are refused; with "0.0.0.0", any IP address and the machine's name are accepted.
        given: `output`, a folder in which the learner is saved after each change; `photographs`, a folder of
            photographs for the page to ask about, the most useful first; `group` and `group_seconds`, how these form
            groups, see `splits.grouped`, of which one is shown before further ones; and `only` and `sum_up`, as for
            `ClassIncrementalLearner.predict`. Proposals for labels are among `only`, too, and are never groups.

    Raises:
        ValueError: If `host` is empty, or no photograph is left to label.
        OSError: If the address cannot be used.
    """
    return PageServer(App(learner, **given), host, port, names)
