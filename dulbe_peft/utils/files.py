"""Files that are whole or not there, on the disk when a call returns, readable by whom the umask allows.

Tensor files are safetensors only, and finite. Cells of CSV files are texts to a spreadsheet, never formulas.
"""

import csv
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

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what a spreadsheet may take for the beginning of a formula
TEMPORARY_MARK = ".dulbe-tmp-"  # in the name of every temporary folder: only what has it may be cleared away


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` while the block runs, in which its successor is written."""
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}{TEMPORARY_MARK}", dir=path.parent))
    try:
        yield folder
    finally:
        remove_temporary(folder)


def remove_temporary(folder: Path) -> None:
    """Remove a temporary folder, with a second try where the first one fails: nobody looks for it later."""
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)


def paths_below(folder: Path) -> list[Path]:
    """Every file and folder at any depth, sorted; raises where one cannot be listed, which `Path.rglob` leaves out."""

    def fail(error: OSError) -> None:
        raise error

    found = os.walk(folder, onerror=fail)
    return sorted(Path(here, name) for here, folders, files in found for name in (*folders, *files))


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, its keys in their order, whole or not at all."""
    with replacing(path) as temporary:
        from pydantic_core import from_json, to_json  # json indents in Python, a hundred times slower

        text = json.dumps(content, ensure_ascii=False)
        temporary.write_bytes(to_json(from_json(text), indent=2) + b"\n")


def read_lines(path: str | Path) -> list[str]:
    """The lines of somebody's text file in UTF-8 that are not blank, without the mark that some editors put first."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def read_json(path: str | Path) -> Any:
    """What a JSON file holds; a ValueError names the file where it is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(damage(path, error)) from error


def damage(path: str | Path, error: Exception) -> str:
    """What is said of a file that does not hold what it should: the path and the reason, each once."""
    text = str(error)
    return text if text.startswith(f"{path} ") else f"{path} is damaged: {type(error).__name__}: {text}"


def write_csv(path: str | Path, header: Sequence[str], rows: Iterable[Sequence[Any]], errors: str = "strict") -> None:
    """Write a table, whole or not at all; a text that a spreadsheet would take for a formula gets an apostrophe."""
    with output_file(path, errors) as file:
        write_rows(file, header, rows)


def write_rows(file: IO[str], header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table into an open text file, as `write_csv` does."""

    def write(line: str) -> None:  # a writer that ends its lines in \n itself would not quote a cell with an \r
        file.write(line.removesuffix("\r\n") + "\n")

    lines: Any = SimpleNamespace(write=write)
    csv.writer(lines).writerows(map(_guarded, row) for row in chain([header], rows))


def read_csv(path: Path) -> list[list[str]]:
    """The rows of a table such as `write_csv` writes, the header first, without the apostrophes that it added."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            return [list(map(unguarded, row)) for row in csv.reader(file)]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no CSV file in UTF-8: {error}") from error


def _guarded(cell: Any) -> Any:
    # A text that has apostrophes of its own before the sign gets one more, so that reading takes exactly one away.
    return f"'{cell}" if isinstance(cell, str) and cell.lstrip("'").startswith(_FORMULA) else cell


def unguarded(cell: str) -> str:
    """A cell without the apostrophe that `write_csv` adds."""
    return cell[1:] if cell.startswith("'") and cell != _guarded(cell) else cell


def is_standard_output(path: str | Path) -> bool:
    """Whether standard output goes there anyway: "-", /dev/stdout, or the file to which a shell sends it."""
    with suppress(OSError, ValueError, AttributeError):  # there is no such file, or a program replaced standard output
        return str(path) == "-" or os.path.samestat(os.stat(path), os.fstat(sys.stdout.fileno()))
    return False


def is_stream(path: str | Path) -> bool:
    """Whether what is written there is gone: standard output, a pipe or a device. It is never replaced."""
    return is_standard_output(path) or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


@contextmanager
def output_file(path: str | Path, errors: str = "surrogateescape") -> Iterator[IO[str]]:
    """A text file that somebody named: whole or not there, where a link leads; a stream is written to."""
    if is_standard_output(path):
        yield sys.stdout
        return
    named = path if is_stream(path) else Path(path).resolve()
    with replacing(named) as place, open(place, "w", newline="", encoding="utf-8", errors=errors) as file:
        yield file


def step_aside(path: Path) -> None:
    """Give what stands at a path the name NAME.old, or NAME.old1 and so on, and say so."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in count())
    aside = path.rename(next(name for name in names if not os.path.lexists(name)))
    print(f"what was in {path} is now in {aside}", file=sys.stderr)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, with the mode the umask gives."""
    path = Path(path)
    with write_errors(path):
        if path.exists() and not path.is_file():  # a pipe or a device
            yield path
            return
        # The longest name leaves no room for a mark.
        with temporary_folder(path.with_name(path.name[:50])) as folder:
            temporary = folder / path.name
            temporary.touch()
            mode = temporary.stat().st_mode
            yield temporary
            # safetensors writes files that only their owner can read.
            os.chmod(temporary, mode)
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn what goes wrong while something is written into an OSError that names `path`, as a full disk's does not."""
    try:
        yield
    except UnicodeEncodeError as error:  # of a file's name that is not UTF-8
        raise ValueError(f"{path} cannot be written: {error.object[-200:]!r} is not UTF-8; rename it") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        # Tokenizers raise a bare Exception over a full disk. Our own FileExistsError names its file.
        if type(error) not in (Exception, SafetensorError, OSError):
            raise
        raise OSError(f"{path} cannot be written: {error}") from error


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
