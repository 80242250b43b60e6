"""Find the files that the paths of a table mean, as people and programs write them."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import unquote

from dulbe_peft.data.columns import Table
from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.folders import folder_content
from dulbe_peft.data.names import normalized
from dulbe_peft.utils.terminal import counted


def paths_of(table: Table) -> list[str]:
    """Return the table's paths with slashes, and for a missing file the path of the only file that it can mean."""
    root, written = table.path.parent, [table.path_of(index) for index in range(len(table.rows))]
    paths = [_as_path(str(root), path) for path in written]
    for index, path in enumerate(paths):
        if "://" in path:
            raise ValueError(f"{table.at(index)} of {table.path} has a URL, {path:.100}: download the images first")
    decoded = [(a, b) for a, b in zip(written, paths, strict=True) if a.replace("\\", "/") != b]
    if decoded:
        example = "{:.100} as {}".format(*decoded[0])
        table.notes.append(f"{table.path}: {counted(len(decoded), 'path')} decoded, such as {example}")
    missing = list(dict.fromkeys(path for path in paths if not os.path.lexists(os.path.join(root, path))))
    if not missing:
        return paths
    resolved = _files_meant(missing, folder_content(root)[0], len(missing) > len(set(paths)) / 2)
    if table.folder and not resolved and len(missing) == len(set(paths)):
        raise ValueError(
            f"{table.path} has no path of a file in {table.folder!r} and {table.paths!r}, such as {paths[0]:.100}: "
            f"move the table to the photographs, or rename {table.folder!r} if it has no folders"
        )
    for how in dict.fromkeys(how for _, how in resolved.values()):
        pairs = [(path, file) for path, (file, other) in resolved.items() if other == how]
        path, file = min(pairs)
        table.notes.append(
            f"{table.path}: {counted(len(pairs), 'path')} matched to files {how}, such as {path} to {file}"
        )
    return [resolved[path][0] if path in resolved else path for path in paths]


def _as_path(root: str, written: str) -> str:
    """Return the path of a file, which programs may write as a URL, with %20 for a blank, or as Label Studio does.

    The path as it is written comes first, then with or without an apostrophe at its beginning: a person may write one
    for a spreadsheet, and reading a table removes one that stands before the sign of a formula. If there is no file
    for any way of decoding it, the last way is returned.
    """
    for path in (written, f"'{written}", written.removeprefix("'")):
        if os.path.lexists(os.path.join(root, path)):
            return path
    slashes = written.replace("\\", "/")
    local = re.sub(r"^file:/+(?=[A-Za-z]:/)|^file:/*(?=/)", "", slashes, flags=re.IGNORECASE)
    local = re.sub(r"^.*/local-files/\?d=|^.*/data/upload/\d+/(?:[0-9a-f]{8}-)?", "", local)
    ways = [way for way in dict.fromkeys((slashes, unquote(slashes), local, unquote(local))) if way != written]
    return next(
        (path for path in ways if os.path.lexists(os.path.join(root, path))),
        local if local == slashes else unquote(local),
    )


def _files_meant(missing: list[str], files: Sequence[str], most: bool) -> dict[str, tuple[str, str]]:
    """Return for each path the only file that it can mean, and how they match; a path without such a file is absent.

    A path is the end of a file's path, perhaps without the suffix: as it is written, then by Unicode's composed form,
    then without regard to case, then without leading zeros. If `most` paths of a table are missing, they may come from
    another machine: then their common beginning does not count.
    """
    ways: list[tuple[str, Callable[[str], str]]] = [
        ("elsewhere", str),
        ("by another encoding of accents", normalized),
        ("in another case", lambda path: normalized(path).casefold()),
        ("without leading zeros", lambda path: re.sub(r"(?<!\d)0+(?=\d)", "", normalized(path).casefold())),
    ]
    depth = 0  # number of parts at the beginning that all paths have in common
    with suppress(ValueError):  # absolute and relative paths have nothing in common
        common = os.path.commonpath([os.path.dirname(path) for path in missing]) if most else ""
        depth = len(common.split("/")) if common else 0
    meant: dict[str, tuple[str, str]] = {}
    for start in range(depth + 1):
        for how, spelled in ways:
            by_name: dict[str, list[str]] = {}
            for file in files:
                for name in {file, os.path.splitext(file)[0]}:
                    by_name.setdefault(spelled(os.path.basename(name)), []).append(file)
            for path in [path for path in missing if path not in meant]:
                end = "/".join(path.split("/")[start:])
                stem = spelled(f"/{os.path.splitext(end)[0] if end.lower().endswith(image_suffixes()) else end}")
                alike = by_name.get(spelled(os.path.basename(end)), [])
                matches = [file for file in alike if spelled(f"/{file}").rpartition(".")[0].endswith(stem)]
                if len(matches) == 1:
                    meant[path] = matches[0], how if start == 0 else "by the end of the path"
    return meant
