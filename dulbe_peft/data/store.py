"""The feature store: what a frozen encoder gave for an image, kept in one SQLite file and found again by content.

It holds features and no photograph. A feature is known by the image's content, the encoder's fingerprint, precision
and backend, and the view; a checksum covers all of it. A store that cannot be used is one warning: the work then goes
on with a private one, which ends with the process.
"""

import hashlib
import os
import shutil
import sqlite3
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
VARIABLE = "DULBE_PEFT_STORE"  # of the environment: another file than the usual one
APPLICATION, VERSION = 0x44754C42, 2  # what SQLite's header says of our files
WAIT = 60.0  # seconds for other processes that write
_AT_ONCE = 500  # images of a query
_TABLE = """CREATE TABLE features
    (way BLOB, content BLOB, embedding BLOB, checksum INTEGER, UNIQUE (way, content))"""
# File systems on which SQLite's locks reach no other machine; by an option of the mount, or always.
_NO_LOCKS = {"nfs": ("nolock", "local_lock=all", "local_lock=posix"), "cifs": ("nobrl",), "smb3": ("nobrl",)}
_NEVER_LOCKS = ("fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.davfs", "davfs")


class EncoderKey(NamedTuple):
    """What makes two features of an image the same; `fingerprint` covers weights, preprocessing and versions."""

    fingerprint: str
    precision: str
    backend: str
    view: str = ""  # of the image as it is

    @property
    def way(self) -> bytes:
        """What names it in the file; each row's checksum covers it."""
        return hashlib.sha256(repr(tuple(self)).encode()).digest()[:16]


def store_path() -> Path:
    """The file of the store: what `DULBE_PEFT_STORE` names, or else one in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(cache, "dulbe_peft", "features.sqlite")).absolute()


def open_store(use: bool) -> "FeatureStore":
    """The user's store, or without `use` a private one."""
    return FeatureStore(store_path() if use else None)


class FeatureStore:
    """Features by content, in a file that several processes read and write at once; without a path, a private one.

    Every call opens the file for itself, so threads, forked processes and a file that is deleted meanwhile do no harm.
    A batch is written whole or not at all.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.private = path is None
        self.path = path or Path()
        self.said_damage = False  # once is enough: what is encoded again takes the place of a damaged row

    def get(self, key: EncoderKey, contents: Sequence[bytes | None]) -> dict[bytes, np.ndarray]:
        """Content -> feature, (d,), float32, of those images that are known."""
        wanted = iter(dict.fromkeys(content for content in contents if content is not None))
        way = key.way

        def read(database: sqlite3.Connection) -> dict[bytes, np.ndarray]:
            found = list[Any]()
            while part := list(islice(wanted, _AT_ONCE)):
                query = f"""SELECT content, embedding, checksum FROM features
                    WHERE way = ? AND content IN ({", ".join("?" * len(part))})"""
                found += database.execute(query, [way, *part])
            whole = [row for row in found if _is_whole(way, *row)]
            if len(whole) < len(found) and not self.said_damage:
                _warn(f"{self.path} holds {len(found) - len(whole)} damaged features, which are encoded again")
                self.said_damage = True
            return {content: np.frombuffer(embedding, dtype="<f4") for content, embedding, _ in whole}

        return self._used(read, {})

    def put(self, key: EncoderKey, contents: Sequence[bytes | None], features: np.ndarray) -> None:
        """Keep the features, (n, d), of images; None among the contents is left out."""
        way = key.way
        rows = [
            (way, content, embedding, zlib.crc32(way + content + embedding))
            for content, embedding in zip(contents, map(bytes, features.astype("<f4")), strict=True)
            if content is not None
        ]

        def write(database: sqlite3.Connection) -> None:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)", rows)
            database.execute("COMMIT")

        self._used(write, None)

    def facts(self) -> tuple[int, int]:
        """How many features there are, and the bytes of the file."""
        if not self.path.exists():
            return 0, 0
        (count,) = self._used(lambda database: database.execute("SELECT count(*) FROM features").fetchone(), (0,))
        return count, self.path.stat().st_size

    def _used(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """What some work with the open file gives; where the file is of no use, a private one takes its place."""
        try:
            with self._opened() as database:
                return work(database)
        except (sqlite3.Error, OSError, ValueError) as error:
            if not self.private:
                reason = f"the feature store {self.path} is not used: {error}"
                _warn(f"{reason}; move it away, or name another file with {VARIABLE}")
                self.private, self.path = True, Path()
                return self._used(work, otherwise)
        return otherwise  # not even a temporary file can be written: images are encoded again

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The open file, made where it is not there; a `ValueError` where it is another program's or release's."""
        if self.private and not self.path.name:
            self.path = Path(tempfile.mkdtemp(prefix="dulbe_peft-"), "features.sqlite")
            weakref.finalize(self, shutil.rmtree, self.path.parent, ignore_errors=True)
        elif not self.private:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _check_locks(self.path.parent)
        with closing(sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)) as database:
            if _number(database, "application_id") == _number(database, "schema_version") == 0:
                _make(database)
            if _number(database, "application_id") != APPLICATION:
                raise ValueError("it is another program's file")
            if (version := _number(database, "user_version")) != VERSION:
                raise ValueError(f"it has the version {version}, this release knows {VERSION}")
            database.text_factory = bytes  # of a damaged row, whose text need not be UTF-8
            if self.private:
                database.execute("PRAGMA synchronous = OFF")  # it does not outlive the machine
            yield database


def _is_whole(way: bytes, content: bytes, embedding: Any, checksum: Any) -> bool:
    """Whether a row is as it was written; SQLite keeps a value of any type in any column."""
    return isinstance(embedding, bytes) and checksum == zlib.crc32(way + content + embedding)


def _make(database: sqlite3.Connection) -> None:
    """Write the tables into an empty file, unless another process has done so meanwhile."""
    database.execute("PRAGMA page_size = 16384")  # several features fit into a page
    database.execute("BEGIN EXCLUSIVE")
    if _number(database, "application_id") == 0:
        database.execute(_TABLE)
        database.execute(f"PRAGMA application_id = {APPLICATION}")
        database.execute(f"PRAGMA user_version = {VERSION}")
    database.execute("COMMIT")


def _number(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


def _mounts() -> list[list[str]]:
    """Device, place, kind and options of each mount; none where the system does not say."""
    try:
        return [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []


def _check_locks(folder: Path) -> None:
    """Raise a `ValueError` on a network disk whose locks reach no other machine, as far as the system tells."""
    here = os.path.join(os.path.realpath(folder), "")
    own = [row for row in _mounts() if here.startswith(os.path.join(row[1].replace("\\040", " "), ""))]
    kind, options = max(own, key=lambda row: len(row[1]))[2:4] if own else ("", "")
    weak = set(options.split(",")) & set(_NO_LOCKS.get("nfs" if kind.startswith("nfs") else kind, ()))
    if weak or kind in _NEVER_LOCKS:
        raise ValueError(f"it lies on a network disk ({kind}) without locks between machines")


def _warn(text: str) -> None:
    print(f"dulbe-peft: {text}", file=sys.stderr)
