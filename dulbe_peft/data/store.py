"""Store the features of frozen encoders in one SQLite file, and find them again by the content of the image.

Beside the features, the store contains a picture of at most 160 pixels of each photograph. The key of a feature is
the image's content, the encoder's fingerprint, precision and backend, and the view; a checksum covers key and feature.
If the store cannot be used, one warning says so, and a temporary store replaces it until the process ends.
"""

import hashlib
import os
import shutil
import sqlite3
import sys
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dulbe_peft.data.decoding import READING
from dulbe_peft.data.glance import Glance

T = TypeVar("T")
VARIABLE = "DULBE_PEFT_STORE"  # environment variable that names another file than the default
PICTURES = "DULBE_PEFT_STORE_PICTURES"  # environment variable; with 0, the store contains no small pictures
APPLICATION, VERSION = 0x44754C42, 2  # application_id and user_version in the file's SQLite header
WAIT = 60.0  # seconds to wait for another process that writes
DAY = 24 * 60 * 60  # seconds
_QUERY_SIZE = 500  # images in one query
_TABLE = """CREATE TABLE features
    (way BLOB, content BLOB, embedding BLOB, checksum INTEGER, UNIQUE (way, content))"""
_USED = "CREATE TABLE used (content BLOB PRIMARY KEY, day INTEGER)"
_GLANCES = "CREATE TABLE IF NOT EXISTS glances (content BLOB PRIMARY KEY, record BLOB, checksum INTEGER)"
# Network file systems on which SQLite's locks do not reach other machines: with one of these mount options, or always.
_NO_LOCKS = {"nfs": ("nolock", "local_lock=all", "local_lock=posix"), "cifs": ("nobrl",), "smb3": ("nobrl",)}
_NEVER_LOCKS = ("fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.davfs", "davfs")


class EncoderKey(NamedTuple):
    """Key of features: with the same key, an image has the same features.

    `fingerprint` covers weights, preprocessing and versions.
    """

    fingerprint: str
    precision: str
    backend: str
    view: str = ""  # the augmentation, as JSON; "" for the image as it is

    @property
    def way(self) -> bytes:
        """The key as the file stores it, 16 bytes. The checksum of each row covers it."""
        return hashlib.sha256(repr(tuple(self)).encode()).digest()[:16]


def store_path() -> Path:
    """Return the file of the store: the one that `DULBE_PEFT_STORE` names, or else one in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(cache, "dulbe_peft", "features.sqlite")).absolute()


def open_store(use: bool) -> "FeatureStore":
    """Return the user's store, or a private temporary one if `use` is False."""
    return FeatureStore(store_path() if use else None)


class Pruned(NamedTuple):
    """How many features and pictures `FeatureStore.prune` removed, and by how many bytes the file became smaller.

    `why` says why it could not become smaller, or is empty.
    """

    features: int
    pictures: int
    bytes: int
    why: str = ""


class FeatureStore:
    """Features by content, in a file that several processes can read and write at once.

    Without a path, the store is private: a temporary file of this process. Every call opens the file anew, so threads,
    forks and the deletion of the file do no harm. A batch is written completely or not at all.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.private = path is None
        self.path = path or Path()
        self._had = dict[bytes, bool]()
        self._marked = set[bytes]()  # images whose use is recorded
        self.warned_of_damage = False  # one warning is enough, since new features replace damaged ones

    def get(self, key: EncoderKey, contents: Sequence[bytes | None]) -> dict[bytes, np.ndarray]:
        """Return content -> feature, (d,) in float32, for those images that the store has."""
        wanted = iter(dict.fromkeys(content for content in contents if content is not None))
        way = key.way

        def read(database: sqlite3.Connection) -> dict[bytes, np.ndarray]:
            rows = list[Any]()
            while part := list(islice(wanted, _QUERY_SIZE)):
                query = f"""SELECT content, embedding, checksum FROM features
                    WHERE way = ? AND content IN ({", ".join("?" * len(part))})"""
                rows += database.execute(query, [way, *part])
            intact = [row for row in rows if _is_intact(way, *row)]
            if len(intact) < len(rows) and not self.warned_of_damage:
                damaged = len(rows) - len(intact)
                _warn(f"{self.path} contains {damaged} damaged features; their images are encoded again")
                self.warned_of_damage = True
            return {content: np.frombuffer(embedding, dtype="<f4") for content, embedding, _ in intact}

        found: dict[bytes, np.ndarray] = self._with_database(read, {})
        with suppress(sqlite3.Error, OSError, ValueError):  # a file that can only be read is useful, too
            if new := found.keys() - self._marked:
                with self._opened() as database:
                    database.execute("BEGIN IMMEDIATE")
                    self._mark(database, new)
                    database.execute("COMMIT")
        return found

    def _mark(self, database: sqlite3.Connection, contents: Iterable[bytes]) -> None:
        """Record that the images are used today."""
        day, rows = _today(database), [*contents]
        newer = "ON CONFLICT (content) DO UPDATE SET day = excluded.day WHERE day < excluded.day"
        database.executemany(f"INSERT INTO used VALUES (?, ?) {newer}", [(content, day) for content in rows])
        self._marked.update(rows)

    def prune(self, days: int) -> Pruned:
        """Remove what is kept of images that no command has used in the last `days` days; 0 removes everything.

        Other processes may use the file meanwhile. They encode again what they miss. Raises an `OSError` if the file
        cannot be used.
        """
        if not self.path.is_file():
            return Pruned(0, 0, 0)
        before, why = self.path.stat().st_size, ""
        unused = "WHERE content NOT IN (SELECT content FROM used WHERE day > ?)"
        try:
            with self._opened() as database:
                database.execute("BEGIN IMMEDIATE")
                database.execute(_GLANCES)
                last = _today(database) - days - 1 if days else sys.maxsize
                features, pictures, _ = (
                    database.execute(f"DELETE FROM {table} {unused}", [last]).rowcount
                    for table in ("features", "glances", "used")
                )
                database.execute("COMMIT")
                try:
                    database.execute("VACUUM")
                except sqlite3.Error as error:
                    why = str(error)
        except (sqlite3.Error, ValueError) as error:
            raise OSError(f"the feature store {self.path} cannot be pruned: {error}") from error
        return Pruned(features, pictures, before - self.path.stat().st_size, why)

    def had(self, key: EncoderKey) -> bool:
        """Return whether the store had any features with this key when this was first asked."""
        query, way = "SELECT EXISTS (SELECT 1 FROM features WHERE way = ?)", key.way
        if way not in self._had:
            self._had[way] = self._with_database(lambda base: bool(base.execute(query, [way]).fetchone()[0]), False)
        return self._had[way]

    def put(self, key: EncoderKey, contents: Sequence[bytes | None], features: np.ndarray) -> None:
        """Store the features of images, (n, d), except those whose content is None."""
        way = key.way
        rows = [
            (way, content, embedding, zlib.crc32(way + content + embedding))
            for content, embedding in zip(contents, map(bytes, features.astype("<f4")), strict=True)
            if content is not None
        ]

        def write(database: sqlite3.Connection) -> None:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)", rows)
            self._mark(database, (content for _, content, *_ in rows))
            database.execute("COMMIT")

        self._with_database(write, None)

    def put_glances(self, glances: Mapping[bytes, Glance]) -> None:
        """Store what is kept of decoded images, by content, unless `PICTURES` of the environment is 0."""
        rows = [(content, packed, _glance_checksum(content, packed)) for content, packed in _packed(glances)]

        def write(database: sqlite3.Connection) -> None:
            database.execute("BEGIN IMMEDIATE")
            database.execute(_GLANCES)
            database.executemany("INSERT OR REPLACE INTO glances VALUES (?, ?, ?)", rows)
            self._mark(database, (content for content, *_ in rows))
            database.execute("COMMIT")

        if rows and os.environ.get(PICTURES) != "0":
            self._with_database(write, None)

    def glance(self, content: bytes) -> Glance | None:
        """Return what the store keeps of the image with this content, or None."""

        def read(database: sqlite3.Connection) -> Glance | None:
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'glances'").fetchone():
                return None  # the file is older
            query = "SELECT record, checksum FROM glances WHERE content = ?"
            record, checksum = database.execute(query, [content]).fetchone() or (b"", None)
            intact = isinstance(record, bytes) and checksum == _glance_checksum(content, record)
            return Glance.unpacked(record) if intact else None

        return self._with_database(read, None)

    def facts(self) -> tuple[int, int]:
        """Return the number of features and the size of the file in bytes."""
        if not self.path.exists():
            return 0, 0
        query = "SELECT count(*) FROM features"
        (count,) = self._with_database(lambda database: database.execute(query).fetchone(), (0,))
        return count, self.path.stat().st_size

    def _with_database(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Return what `work` returns for the open file. If the file cannot be used, replace it with a private one.

        Returns `otherwise` if the private file cannot be used either.
        """
        try:
            with self._opened() as database:
                return work(database)
        except (sqlite3.Error, OSError, ValueError) as error:
            if not self.private:
                reason = f"the feature store {self.path} is not used: {error}"
                _warn(f"{reason}; move it away, or name another file with {VARIABLE}")
                self.private, self.path = True, Path()
                return self._with_database(work, otherwise)
        return otherwise

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open the file, or create it. Raise a `ValueError` if it belongs to another program or release."""
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
                raise ValueError("the file belongs to another program")
            if (version := _number(database, "user_version")) != VERSION:
                raise ValueError(f"the file has version {version}, but this release reads version {VERSION}")
            database.text_factory = bytes  # a damaged row may hold text that is not UTF-8
            if self.private:
                database.execute("PRAGMA synchronous = OFF")  # nobody needs a temporary file after a crash
            yield database


def _glance_checksum(content: bytes, record: bytes) -> int:
    """Return a checksum that also differs if files are read in another way than today."""
    return zlib.crc32(READING.encode() + content + record)


def _packed(glances: Mapping[bytes, Glance]) -> Iterator[tuple[bytes, bytes]]:
    for content, glance in glances.items():
        yield content, glance.packed()


def _is_intact(way: bytes, content: bytes, embedding: Any, checksum: Any) -> bool:
    """Return whether a row is as it was written. SQLite accepts values of any type in any column."""
    return isinstance(embedding, bytes) and checksum == zlib.crc32(way + content + embedding)


def _make(database: sqlite3.Connection) -> None:
    """Create the table in an empty file, unless another process has just done so."""
    database.execute("PRAGMA page_size = 16384")  # several features fit into a page
    database.execute("BEGIN EXCLUSIVE")
    if _number(database, "application_id") == 0:
        database.execute(_TABLE)
        database.execute(f"PRAGMA application_id = {APPLICATION}")
        database.execute(f"PRAGMA user_version = {VERSION}")
    database.execute("COMMIT")


def _today(database: sqlite3.Connection) -> int:
    """Return the number of the day. In a file without the table `used`, make it: all images count as used today."""
    day = int(time.time() // DAY)
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'used'").fetchone():
        database.execute(_USED)
        database.execute(_GLANCES)
        every = "SELECT content FROM features UNION SELECT content FROM glances"
        database.execute(f"INSERT INTO used SELECT content, ? FROM ({every})", [day])
    return day


def _number(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


def _mounts() -> list[list[str]]:
    """Return device, folder, type and options of each mount, or nothing if the system does not list them."""
    try:
        return [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []


def _check_locks(folder: Path) -> None:
    """Raise a `ValueError` if the folder is known to be on a network disk whose locks do not reach other machines."""
    path = os.path.join(os.path.realpath(folder), "")
    containing = [row for row in _mounts() if path.startswith(os.path.join(row[1].replace("\\040", " "), ""))]
    kind, options = max(containing, key=lambda row: len(row[1]))[2:4] if containing else ("", "")
    unlocked = set(options.split(",")) & set(_NO_LOCKS.get("nfs" if kind.startswith("nfs") else kind, ()))
    if unlocked or kind in _NEVER_LOCKS:
        raise ValueError(f"it is on a network disk ({kind}) without locks between machines")


def _warn(text: str) -> None:
    print(f"dulbe-peft: {text}", file=sys.stderr)
