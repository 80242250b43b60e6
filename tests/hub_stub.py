"""A stub of the Hub on 127.0.0.1: the part of its HTTP API that the client needs here, with repositories in memory.

A commit holds a full copy of a repository's files. Every file is uploaded as a regular one (base64 in the request).
"""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import unquote, urlsplit

import huggingface_hub
import transformers

OWNER = "someone"


class Hub:
    """The content of the stub, and a record of the requests. Data sets are repositories, like models.

    Attributes:
        repos: id -> {"branches": name -> commit, "commits": commit -> {path: bytes}}.
        asked: the requests so far, (method, path).
        web: further files, address -> bytes.
        cut: addresses of files whose download ends in the middle.
    """

    def __init__(self, url):
        self.url = url
        self.repos = {}
        self.asked = []
        self.web = {}
        self.cut = set()
        self.lock = Lock()

    def files(self, repo_id, revision="main"):
        repo = self.repos[repo_id]
        return repo["commits"][repo["branches"].get(revision, revision)]

    def commit(self, repo_id, files, revision="main"):
        """Replace the whole content of a branch by `files`, and return the hash of the commit."""
        repo = self.repos.setdefault(repo_id, {"branches": {}, "commits": {}})
        text = f"{repo_id} {revision} {len(repo['commits'])}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        repo["commits"][oid] = dict(files)
        repo["branches"][revision] = oid
        return oid


class _Error(Exception):
    def __init__(self, status, code, message, **fields):
        super().__init__(message)
        self.status, self.code, self.fields = status, code, fields


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the content waits 40 ms for the client to confirm the headers
    hub: Hub

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer()

    do_HEAD = do_POST = do_GET

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {}
        with self.hub.lock:
            self.hub.asked.append((self.command, path))
            try:
                status, content, headers = 200, *self._route(path, body)
            except _Error as error:
                status, content = error.status, json.dumps({"error": str(error), **error.fields}).encode()
                headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if path in self.hub.cut:
            content, self.close_connection = content[: len(content) // 2], True
        if self.command != "HEAD":
            self.wfile.write(content)

    def _route(self, path, body):
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return b'{"errors": [], "warnings": []}', {}
        if path in self.hub.web:
            return self.hub.web[path], {"Content-Type": "application/octet-stream"}
        path = path.replace("/api/datasets/", "/api/models/").replace("/datasets/", "/", 1)
        if "/resolve/" in path:
            return self._resolve(path)
        parts = path.removeprefix("/api/models/").split("/")
        if not path.startswith("/api/models/") or len(parts) < 2:
            raise _Error(404, "NotImplemented", f"the stub does not know {self.command} {path}")
        repo_id, action, rest = "/".join(parts[:2]), (parts[2:] or ["revision"])[0], "/".join(parts[3:])
        self._repo(repo_id)
        return getattr(self, f"_{action}")(repo_id, rest, body), {}

    def _repo(self, repo_id):
        if repo_id not in self.hub.repos:
            raise _Error(404, "RepoNotFound", f"Repository {repo_id} not found")
        return self.hub.repos[repo_id]

    def _find(self, repo_id, revision):
        repo = self._repo(repo_id)
        oid = repo["branches"].get(revision, revision)
        if oid not in repo["commits"]:
            raise _Error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid, repo["commits"][oid]

    def _create(self, request):
        repo_id = f"{request['organization'] or OWNER}/{request['name']}"
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repos:
            raise _Error(409, "Conflict", "You already created this model repo", url=url)
        self.hub.commit(repo_id, {".gitattributes": b""})
        return json.dumps({"url": url}).encode(), {}

    def _revision(self, repo_id, revision, body):
        oid, files = self._find(repo_id, revision or "main")
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        return json.dumps({"id": repo_id, "modelId": repo_id, "sha": oid, "siblings": siblings}).encode()

    def _tree(self, repo_id, revision, body):
        revision, _, folder = revision.partition("/")
        _, files = self._find(repo_id, revision)
        if folder and not any(name.startswith(f"{folder}/") for name in files):
            raise _Error(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        entries = [{"type": "file", "path": n, "size": len(files[n]), "oid": _etag(files[n])} for n in sorted(files)]
        return json.dumps(entries).encode()

    def _branch(self, repo_id, branch, body):
        repo = self._repo(repo_id)
        if branch in repo["branches"]:
            raise _Error(409, "Conflict", f"Reference already exists: {branch}")
        repo["branches"][branch] = repo["branches"]["main"]
        return b"{}"

    def _preupload(self, repo_id, revision, body):
        self._find(repo_id, revision)
        requested = json.loads(body)["files"]
        files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in requested]
        return json.dumps({"files": files}).encode()

    def _commit(self, repo_id, revision, body):
        _, files = self._find(repo_id, revision)
        files = dict(files)
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.hub.commit(repo_id, files, revision)
        url = f"{self.hub.url}/{repo_id}/commit/{oid}"
        return json.dumps({"success": True, "commitOid": oid, "commitUrl": url}).encode()

    def _resolve(self, path):
        repo_id, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        oid, files = self._find(repo_id, revision)
        if name not in files:
            raise _Error(404, "EntryNotFound", f"Entry {name} not found in {repo_id} at {oid}")
        headers = {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": oid, "Content-Type": "application/octet-stream"}
        return files[name], headers


def _etag(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def on_this_process(monkeypatch, folder):
    """Let this process's Hub client talk to a new, empty stub, with an empty cache in `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    constants = {"HF_HUB_OFFLINE": False, "ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder / "cache")}
    for name, value in {**constants, "HUGGINGFACE_CO_URL_TEMPLATE": template}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
    # transformers keeps a client with the address it was created for. Older releases have no such client.
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
