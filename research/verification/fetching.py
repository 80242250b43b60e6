"""What checks need from the network: its sizes before it comes, and that it is what it was.

A file is known by its SHA-256 and a repository by its commit. One that nobody has noted yet is taken at the first run,
noted in the results and shown; from then on another one is refused.
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
# Of a model's repository; another form of the weights is left where it is.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SIDE_FILES = ("*.json", "*.txt", "*.model")
_WAIT = 60.0  # seconds for a server that says nothing


def on_hub(model: str) -> bool:
    """Whether a model's name is that of a repository on the Hub: OWNER/NAME, and no folder here."""
    return "/" in model and is_repo_id(model)


@dataclass
class Fetcher:
    """Files, kept in `folder`, and repositories; `known` has the SHA-256 and the commit that each had at first."""

    folder: Path
    known: dict[str, str] = field(default_factory=dict)

    def file(self, url: str, sha256: str | None) -> Path:
        """A file of the web, downloaded once; a `ValueError` where it is not the one of the check."""
        place = self.place(url)
        if place.is_file():
            self.check(url, place, sha256)
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as temporary:
            _download(url, temporary)
            self.check(url, temporary, sha256)
        return place

    def place(self, url: str) -> Path:
        """Where a file of the web is kept."""
        return self.folder / hashlib.sha256(url.encode()).hexdigest()[:16] / (url.rpartition("/")[2] or "file")

    def check(self, name: str, path: Path, sha256: str | None) -> None:
        """Raise a `ValueError` unless a file begins with the hash that is known of it; note one that is new."""
        found = file_sha256(path)
        expected = sha256 or self.known.get(name)
        if expected and not found.startswith(expected):
            raise ValueError(f"{name} has the SHA-256 {found[:16]}..., expected {expected[:16]}...")
        self.known.setdefault(name, found)

    def unpacked(self, url: str, sha256: str | None, inside: str = "") -> Path:
        """The folder with what an archive of the web holds; with `inside`, with what an archive in it holds."""
        archive = self.file(url, sha256)
        folder = unpack(archive, archive.with_name(f"{archive.name}.d"))
        return unpack(folder / inside, archive.with_name(f"{archive.name}.inside.d")) if inside else folder

    def revision(self, repo_id: str, kind: str, wanted: str | None) -> str:
        """The commit of a repository on the Hub; a commit may be named by how it begins."""
        from huggingface_hub import HfApi, constants

        name = f"{HUB if kind == 'dataset' else ''}{repo_id}"
        pinned = wanted or self.known.get(name)
        if constants.HF_HUB_OFFLINE:
            return pinned or "main"
        with reached():
            found = str(HfApi().repo_info(repo_id, repo_type=kind, revision=pinned).sha)
        if pinned and len(pinned) >= 7 and set(pinned) <= set("0123456789abcdef") and not found.startswith(pinned):
            raise ValueError(f"{name} is at commit {found[:12]}, expected {pinned[:12]}")
        self.known.setdefault(name, found)
        return found

    def hub_files(self, repo_id: str, pattern: str, revision: str) -> list[Path]:
        """The files of a data set on the Hub whose names match a pattern, downloaded."""
        from huggingface_hub import snapshot_download

        asked: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "allow_patterns": pattern}
        with reached():
            folder = Path(snapshot_download(repo_id, **asked))
        found = sorted(
            path for path in folder.rglob("*") if fnmatch.fnmatch(path.relative_to(folder).as_posix(), pattern)
        )
        if not found:
            raise FileNotFoundError(f"hf:{repo_id} holds no file like {pattern!r} at commit {revision[:12]}")
        return found

    def size(self, url: str) -> int | None:
        """How many bytes of a file of the web are still to be downloaded; None where the server does not say."""
        if self.place(url).is_file():
            return 0
        try:
            with _open(url, "HEAD") as answer:
                return int(answer.headers["Content-Length"]) if answer.headers["Content-Length"] else None
        except OSError:
            return None

    def hub_size(self, repo_id: str, kind: str, patterns: Iterable[str], revision: str | None) -> int | None:
        """As `size`, of the files of a repository on the Hub that match a pattern; a model has one file of weights."""
        from huggingface_hub import HfApi, constants, try_to_load_from_cache

        if constants.HF_HUB_OFFLINE or not is_repo_id(repo_id):
            return 0
        try:
            with reached():
                found: Any = HfApi().repo_info(repo_id, repo_type=kind, revision=revision, files_metadata=True)
        except (OSError, ValueError):
            return None
        sizes = {entry.rfilename: entry.size or 0 for entry in found.siblings or []}
        if kind == "model":
            patterns = [*_SIDE_FILES, *[name for name in WEIGHTS if name in sizes][:1]]
        wanted = [name for name in sizes if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        cached: dict[str, Any] = {"repo_type": kind, "revision": found.sha}
        absent = [name for name in wanted if not isinstance(try_to_load_from_cache(repo_id, name, **cached), str)]
        return sum(sizes[name] for name in absent)


def _open(url: str, method: str = "GET") -> Any:
    if not url.startswith(WEB):
        raise ValueError(f"{url!r} is no address that begins with http:// or https://")
    request = urllib.request.Request(url, headers={"User-Agent": "python -m research verify"}, method=method)
    return urllib.request.urlopen(request, timeout=_WAIT)


def _download(url: str, path: Path) -> None:
    """Write what is at an address into a file; a `ConnectionError` where it does not come, or not the whole of it."""
    try:
        with _open(url) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
            came, said = file.tell(), answer.headers["Content-Length"]
    except urllib.error.URLError as error:
        code = f"{error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise ConnectionError(f"{url} cannot be downloaded: {code}{error.reason}") from error
    except (HTTPException, TimeoutError, ConnectionError) as error:
        raise ConnectionError(f"{url} was cut off: {error}; the same command tries again") from error
    if said is not None and came != int(said):
        raise ConnectionError(f"{url} was cut off: {came} of {said} bytes came; the same command tries again")


def unpack(archive: Path, folder: Path) -> Path:
    """The content of a tar or zip file in a folder, whole or not there."""
    if folder.is_dir():
        return folder
    try:
        with temporary_folder(folder) as temporary:
            if tarfile.is_tarfile(archive):
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
            elif zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as zipped:  # of which nothing leaves the folder either
                    zipped.extractall(temporary)
            else:
                raise ValueError(f"{archive} is neither a tar nor a zip file")
            shutil.move(temporary, folder)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
    return folder
