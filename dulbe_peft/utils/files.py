"""Files that are either complete or absent, flushed to disk when a call returns, and with the umask's mode.

A spreadsheet reads the cells of the CSV files as text, never as formulas.
"""

import csv
import errno
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from safetensors import SafetensorError

from dulbe_peft.utils.terminal import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # characters with which a formula may begin in a spreadsheet
TEMPORARY_MARK = ".dulbe-tmp-"  # part of the name of every temporary folder; nothing else may be cleaned up


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Create a folder next to `path`, in which its successor is written, and remove it when the block ends."""
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}{TEMPORARY_MARK}", dir=path.parent))
    try:
        yield folder
    finally:
        remove_temporary(folder)


def remove_temporary(folder: Path) -> None:
    """Remove a temporary folder. If that fails, try once more, because nobody removes it later."""
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)


def paths_below(folder: Path) -> list[Path]:
    """Return every file and folder at any depth, sorted. Unlike `Path.rglob`, do not skip unreadable folders."""

    def fail(error: OSError) -> None:
        raise error

    walk = os.walk(folder, onerror=fail)
    return sorted(Path(here, name) for here, folders, files in walk for name in (*folders, *files))


def write_json(path: Path, content: object) -> None:
    """Write `content` as JSON, with its keys in their order, completely or not at all."""
    with replacing(path) as temporary:
        from pydantic_core import from_json, to_json  # a hundred times faster than json, which indents in Python

        text = json.dumps(content, ensure_ascii=False)
        temporary.write_bytes(to_json(from_json(text), indent=2) + b"\n")


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a user's UTF-8 text file that are not blank. A byte order mark is ignored."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file. If it is not valid JSON, a ValueError names the file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(damage(path, error)) from error


def damage(path: str | Path, error: Exception) -> str:
    """Return the error message for a file with invalid content: its path, which is not repeated, and the reason."""
    text = str(error)
    return text if text.startswith(f"{path} ") else f"{path} is damaged: {type(error).__name__}: {text}"


def plain_reason(error: Exception) -> str:
    """Return the message of an error, but not torch's advice to load a pickle that may run any program."""
    text = str(error)
    if "weights_only" in text or "Weights only load failed" in text:
        return "it holds Python objects and not only tensors, and opening it could run any program"
    return text


def full_disk(error: BaseException) -> str:
    """Return a sentence if an error says that the disk is full, otherwise ""."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    where = f"{error.filename} cannot be written" if error.filename else "nothing more can be written"
    return f"the disk is full, so {where}: make room, and repeat the command"


def write_csv(path: str | Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table completely or not at all. A text that looks like a formula to a spreadsheet gets an apostrophe.

    A terminal gets the characters that would control it in escaped form. A file with other characters than ASCII
    begins with a byte order mark, without which Excel would take it for another encoding.
    """
    if is_standard_output(path) and sys.stdout.isatty():
        rows = [[printable(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    rows = list(rows)
    plain = all(cell.isascii() for row in chain([header], rows) for cell in row if isinstance(cell, str))
    with output_file(path) as file:
        file.write("" if plain or is_stream(path) else "\ufeff")
        write_rows(file, header, rows)


def write_rows(file: IO[str], header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table into an open text file, as `write_csv` does."""

    def write(line: str) -> None:  # with lineterminator="\n", csv.writer would not quote a cell that contains \r
        file.write(line.removesuffix("\r\n") + "\n")

    lines: Any = SimpleNamespace(write=write)
    csv.writer(lines).writerows(map(_guarded, row) for row in chain([header], rows))


def read_csv(path: Path) -> list[list[str]]:
    """Return the rows of a table that `write_csv` wrote, header first, without the apostrophes that it added."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        text = file.read()
    try:
        if "\0" in text:  # as in UTF-16
            raise csv.Error("it contains a zero byte")
        return [list(map(unguarded, row)) for row in csv.reader(io.StringIO(text, newline=""))]
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error


def _guarded(cell: object) -> object:
    # A text that already has apostrophes before the sign gets one more, because reading removes exactly one.
    return f"'{cell}" if isinstance(cell, str) and cell.lstrip("'").startswith(_FORMULA) else cell


def unguarded(cell: str) -> str:
    """Return the cell without the apostrophe that `write_csv` added, if any."""
    return cell[1:] if cell.startswith("'") and cell != _guarded(cell) else cell


def is_standard_output(path: str | Path) -> bool:
    """Return whether `path` is standard output: "-", /dev/stdout, or the file to which a shell redirects it."""
    with suppress(OSError, ValueError, AttributeError):  # the file does not exist, or sys.stdout was replaced
        return str(path) == "-" or os.path.samestat(os.stat(path), os.fstat(sys.stdout.fileno()))
    return False


def is_stream(path: str | Path) -> bool:
    """Return whether `path` is standard output, a pipe or a device, which is written to but never replaced."""
    return is_standard_output(path) or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


@contextmanager
def output_file(path: str | Path, errors: str = "surrogateescape") -> Iterator[IO[str]]:
    """Open an output file that the user named: a stream is written to, any other file is complete or absent.

    Links are followed.
    """
    if is_standard_output(path):
        yield sys.stdout
        return
    named = path if is_stream(path) else Path(path).resolve()
    with replacing(named) as place, open(place, "w", newline="", encoding="utf-8", errors=errors) as file:
        yield file


def below(path: str, folder: str) -> str | None:
    """Return a path as seen from a folder, or None if it does not lie in it. Links are not followed."""
    inside = os.path.relpath(path, folder)
    return None if inside == os.pardir or inside.startswith(os.pardir + os.sep) else inside


def rename_to_old(path: Path) -> Path:
    """Rename an existing file or folder to NAME.old, or NAME.old1 and so on, print a message, and return the name."""
    old = path.rename(_old_name(path))
    print(f"renamed the existing {path} to {old}", file=sys.stderr)
    return old


def keep_as_old(path: Path) -> None:
    """Give an existing file the second name NAME.old, or NAME.old1 and so on, and print a message about it.

    The file keeps its first name until it is replaced, so it can still be read.
    """
    old = _old_name(path)
    try:
        os.link(path, old)
    except OSError:  # the file system has no hard links
        shutil.copy2(path, old)
    print(f"kept the existing {path} as {old}", file=sys.stderr)


def _old_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in count())
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path`, with the umask's mode, if the block ends without an error."""
    path = Path(path)
    with write_errors(path):
        if path.exists() and not path.is_file():  # a pipe or a device
            yield path
            return
        # A name of the maximum length would leave no room for the mark.
        with temporary_folder(path.with_name(path.name[:50])) as folder:
            temporary = folder / path.name
            temporary.touch()
            mode = temporary.stat().st_mode
            yield temporary
            # safetensors creates files that only their owner can read.
            os.chmod(temporary, mode)
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn errors while writing into an OSError that names `path`, because the error for a full disk does not."""
    try:
        yield
    except UnicodeEncodeError as error:  # the name of a file is not UTF-8
        raise ValueError(f"{path} cannot be written: {error.object[-200:]!r} is not UTF-8; rename it") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        # Tokenizers raise a bare Exception if the disk is full. This library's FileExistsError already names its file.
        if type(error) not in (Exception, SafetensorError, OSError):
            raise
        raise OSError(f"{path} cannot be written: {error}") from error


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of entries of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
