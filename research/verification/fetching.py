"""Download the files of checks: show their sizes first, and refuse files that have changed.

A file is identified by its SHA-256, and a repository by its commit. If a check does not give them, those of the first
run are recorded in the results and printed; later runs refuse anything else.
"""

import fnmatch
import hashlib
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from dulbe_peft.utils.files import replacing, temporary_folder
from dulbe_peft.utils.folders import file_sha256
from dulbe_peft.utils.hub import is_repo_id, reached

HUB = "hf:"
WEB = ("http://", "https://")
# The files of weights in a model's repository, in the order of preference; only one of them is downloaded.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SIDE_FILES = ("*.json", "*.txt", "*.model")
_WAIT = 60.0  # seconds after which a silent server is given up


def on_hub(model: str) -> bool:
    """Return whether a model is a repository on the Hub, OWNER/NAME, rather than a local folder."""
    return "/" in model and is_repo_id(model)


@dataclass
class Fetcher:
    """Download files into `folder`, and repositories into the Hub's cache.

    `known` maps a file to the SHA-256, and a repository to the commit, that it had when it was first downloaded.
    """

    folder: Path
    known: dict[str, str] = field(default_factory=dict)

    def file(self, url: str, sha256: str | None) -> Path:
        """Return the path of a file from the web, downloaded once; raise a ValueError if its hash is wrong."""
        path = self.path(url)
        if path.is_file():
            self.check(url, path, sha256)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            _download(url, temporary)
            self.check(url, temporary, sha256)
        return path

    def path(self, url: str) -> Path:
        """Return the path at which a file from the web is kept."""
        return self.folder / hashlib.sha256(url.encode()).hexdigest()[:16] / (url.rpartition("/")[2] or "file")

    def check(self, name: str, path: Path, sha256: str | None) -> None:
        """Raise a ValueError if a file does not have the expected hash; record the hash of a new file."""
        actual = file_sha256(path)
        expected = sha256 or self.known.get(name)
        if expected and not actual.startswith(expected):
            raise ValueError(f"{name} has the SHA-256 {actual[:16]}..., expected {expected[:16]}...")
        self.known.setdefault(name, actual)

    def unpacked(self, url: str, sha256: str | None, inside: str = "") -> Path:
        """Return the folder of an unpacked archive from the web, or of the archive `inside` it if that is given."""
        archive = self.file(url, sha256)
        folder = unpack(archive, archive.with_name(f"{archive.name}.d"))
        return unpack(folder / inside, archive.with_name(f"{archive.name}.inside.d")) if inside else folder

    def revision(self, repo_id: str, kind: str, wanted: str | None) -> str:
        """Return the commit of a repository on the Hub; `wanted` may be the beginning of a commit."""
        from huggingface_hub import HfApi, constants

        name = f"{HUB if kind == 'dataset' else ''}{repo_id}"
        pinned = wanted or self.known.get(name)
        if constants.HF_HUB_OFFLINE:
            return pinned or "main"
        with reached():
            commit = str(HfApi().repo_info(repo_id, repo_type=kind, revision=pinned).sha)
        if pinned and len(pinned) >= 7 and set(pinned) <= set("0123456789abcdef") and not commit.startswith(pinned):
            raise ValueError(f"{name} is at commit {commit[:12]}, expected {pinned[:12]}")
        self.known.setdefault(name, commit)
        return commit

    def hub_files(self, repo_id: str, pattern: str, revision: str) -> list[Path]:
        """Download the files of a data set on the Hub whose names match a pattern, and return their paths."""
        from huggingface_hub import snapshot_download

        options: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "allow_patterns": pattern}
        with reached():
            folder = Path(snapshot_download(repo_id, **options))
        paths = sorted(
            path for path in folder.rglob("*") if fnmatch.fnmatch(path.relative_to(folder).as_posix(), pattern)
        )
        if not paths:
            raise FileNotFoundError(f"hf:{repo_id} has no file that matches {pattern!r} at commit {revision[:12]}")
        return paths

    def size(self, url: str) -> int | None:
        """Return how many bytes of a file are still to be downloaded, or None if the server does not tell."""
        if self.path(url).is_file():
            return 0
        try:
            with _open(url, "HEAD") as answer:
                return int(answer.headers["Content-Length"]) if answer.headers["Content-Length"] else None
        except OSError:
            return None

    def hub_size(self, repo_id: str, kind: str, patterns: Iterable[str], revision: str | None) -> int | None:
        """Return how many bytes of the matching files of a repository are still to be downloaded, or None if unknown.

        For a model, the patterns are ignored: its configuration and one file of weights are counted.
        """
        from huggingface_hub import HfApi, constants, try_to_load_from_cache

        if constants.HF_HUB_OFFLINE or not is_repo_id(repo_id):
            return 0
        try:
            with reached():
                info: Any = HfApi().repo_info(repo_id, repo_type=kind, revision=revision, files_metadata=True)
        except (OSError, ValueError):
            return None
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
        if kind == "model":
            patterns = [*_SIDE_FILES, *[name for name in WEIGHTS if name in sizes][:1]]
        wanted = [name for name in sizes if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        cached: dict[str, Any] = {"repo_type": kind, "revision": info.sha}
        absent = [name for name in wanted if not isinstance(try_to_load_from_cache(repo_id, name, **cached), str)]
        return sum(sizes[name] for name in absent)


def _open(url: str, method: str = "GET") -> Any:
    if not url.startswith(WEB):
        raise ValueError(f"{url!r} is not a URL that begins with http:// or https://")
    request = urllib.request.Request(url, headers={"User-Agent": "python -m research verify"}, method=method)
    return urllib.request.urlopen(request, timeout=_WAIT)


def _download(url: str, path: Path) -> None:
    """Download a URL into a file; raise a ConnectionError if that fails or the file is incomplete."""
    try:
        with _open(url) as response, path.open("wb") as file:
            shutil.copyfileobj(response, file)
            received, length = file.tell(), response.headers["Content-Length"]
    except urllib.error.URLError as error:
        code = f"{error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise ConnectionError(f"{url} cannot be downloaded: {code}{error.reason}") from error
    except (HTTPException, TimeoutError, ConnectionError) as error:
        raise ConnectionError(f"{url} was cut off: {error}; repeat the command to try again") from error
    if length is not None and received != int(length):
        raise ConnectionError(
            f"{url} was cut off: received {received} of {length} bytes; repeat the command to try again"
        )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a tar or zip file, and return its folder, which appears only when it is complete."""
    if folder.is_dir():
        return folder
    try:
        with temporary_folder(folder) as temporary:
            if tarfile.is_tarfile(archive):
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
            elif zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as zipped:  # extractall writes nothing outside the folder
                    zipped.extractall(temporary)
            else:
                raise ValueError(f"{archive} is neither a tar nor a zip file")
            shutil.move(temporary, folder)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
    return folder
