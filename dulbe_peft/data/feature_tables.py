"""Feature tables as a data source: parquet files with the columns `embedding` and `label`, written by any program.

The columns `split` and `content` are optional. Tables written by this package also record their encoder.
"""

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.data.images import LabelledImages, Splits
from dulbe_peft.data.names import check_class_names, normalized
from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.files import replacing

COLUMNS = ("content", "path", "split", "label", "embedding")
_NOTE = b"dulbe_peft"  # key of the schema's metadata whose value is an `EncoderNote` as JSON
AT_ONCE = 2048  # number of images whose features are in memory while a table is written
_UNIT = 1e-3  # embeddings whose length is this close to 1 are not normalised again
Schemas = dict[str, Any]  # schemas of parquet files by path


@dataclass(frozen=True)
class EncoderNote:
    """The encoder that made a feature table, as the table records it."""

    model: str
    revision: str | None
    facts: dict[str, str]


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Unit features `rows`, (n, d), float32, that take the place of images; `note` is their encoder, or None."""

    name: str
    rows: np.ndarray
    labels: np.ndarray
    paths: Sequence[str | None]
    note: EncoderNote | None

    def __getitem__(self, position: int) -> tuple[np.ndarray, int]:
        return self.rows[position], int(self.labels[position])

    def item_name(self, position: int) -> str:
        return str(self.paths[position] or f"{self.name}[{position}]")

    def of(self, images: LabelledImages) -> np.ndarray:
        """Return the features of `images`, a part of this source, (n, d)."""
        return self.rows[images.indices]

    def check(self, width: int, facts: Mapping[str, str]) -> None:
        """Raise a `ValueError` if an encoder with this width and these facts cannot have made the features."""
        if self.rows.shape[1] != width:
            raise ValueError(f"{self.name} has embeddings of width {self.rows.shape[1]}, the model's have {width}")
        if self.note is None:
            return
        noted = self.note.facts
        wrong = [name for name in {**facts, **noted} if noted.get(name) != facts.get(name)]
        if wrong == ["jpeg_side"] and not {*wrong} <= noted.keys() & facts.keys():
            made, read = ("smaller", "whole") if "jpeg_side" in noted else ("whole", "smaller")
            how = "with" if read == "whole" else "without"
            raise ValueError(
                f"{self.name} was made from JPEG files decoded {made}, and this learner reads them {read}: make it "
                f"again by dulbe-peft features {how} --whole-images (whole_images in Python)"
            )
        if wrong:
            made = f"{self.name} was made by {self.note.model!r}"
            raise ValueError(f"{made}, not by this model as it is: {', '.join(wrong)} differ")


def encoder_note(path: Path) -> EncoderNote | None:
    """Return the encoder that a feature table records, or None."""
    notes = {(schema.metadata or {}).get(_NOTE, b"null") for schema in _schemas(path).values()}
    if len(notes) > 1:
        raise ValueError(f"{path} has files of several encoders: keep the files of each encoder in a separate folder")
    note = json.loads(next(iter(notes), b"null"))
    return None if note is None else EncoderNote(**note["encoder"])


def feature_splits(path: Path) -> Splits:
    """Return the splits of a feature table, "train" if it has no split column; empty if `path` is not such a table."""
    schemas = _schemas(path)
    if not any("split" in schema.names for schema in schemas.values()):
        return {"train": partial(_load, path, schemas)} if schemas else {}
    names = _read("read_table", list(schemas), columns=["split"], partitioning=None)["split"].unique().to_pylist()
    if None in names:
        raise ValueError(f"{path} has rows without a split")
    return {str(name): partial(_load, path, schemas, [("split", "==", name)]) for name in names}


def _schemas(path: Path) -> Schemas:
    """Return the parquet files of a feature table with their schemas; empty if `path` is not such a table."""
    files = sorted(path.glob("[!._]*.parquet")) if path.is_dir() else [path]
    files = [file for file in files if file.is_file()]
    readable = [file for file in files if _has_parquet_header(file)]
    first = _read("read_schema", readable[0]) if readable else None
    if first is None or not {"embedding", "label"} <= {*first.names} or "image" in first.names:
        return {}
    if len(readable) < len(files):
        raise ValueError(f"{next(file for file in files if file not in readable)} is damaged or not a parquet file")
    schemas = [_read("read_schema", file) for file in files]
    for file, schema in zip(files, schemas, strict=True):
        if {*schema.names} != {*first.names}:
            raise ValueError(f"{file} has the columns {schema.names}, but {files[0]} has {first.names}: use the same")
        for name in ("label", "embedding"):
            kind, expected = schema.field(name).type, first.field(name).type
            if kind != expected:
                raise ValueError(f"{name} has the type {kind} in {file} and {expected} in {files[0]}: use one type")
    return dict(zip(map(os.fspath, files), schemas, strict=True))


def _has_parquet_header(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"PAR1"


def _load(path: Path, schemas: Schemas, filters: object = None) -> LabelledImages:
    columns = [name for name in COLUMNS if name in next(iter(schemas.values())).names]
    table = _read("read_table", list(schemas), columns=columns, filters=filters, partitioning=None)

    def column(name: str) -> list[Any]:
        return list(table[name].to_pylist()) if name in columns else [None] * len(table)

    labels, names = _labels(path, schemas, column("label"))
    rows = _unit_rows(path, table["embedding"])
    source = FeatureTable(str(path), rows, labels, column("path"), encoder_note(path))
    images = LabelledImages(source, labels, names)
    images.features = source
    others = [name for name in next(iter(schemas.values())).names if name not in ("embedding", "label")]
    images.columns = {name: partial(_column, schemas, filters, name) for name in others}
    for index, (value, row) in enumerate(zip(column("content"), rows, strict=True)):
        images.record_content(index, _content(path, value, row))
    return images


def _column(schemas: Schemas, filters: object, name: str) -> list[Any]:
    return list(
        _read("read_table", list(schemas), columns=[name], filters=filters, partitioning=None)[name].to_pylist()
    )


def _content(path: Path, value: object, row: np.ndarray) -> bytes:
    """Return the content that a table gives in hexadecimal digits; without one, the SHA-256 of the feature."""
    if not value:
        return hashlib.sha256(row.tobytes()).digest()
    if not isinstance(value, str) or not re.fullmatch("[0-9a-fA-F]{64}", value):
        raise ValueError(f"{path} has the content {value!r:.80}: expected a SHA-256 in 64 hexadecimal digits")
    return bytes.fromhex(value)


def write_features(
    path: Path,
    parts: Mapping[str, LabelledImages],
    encode: Callable[[LabelledImages], np.ndarray],
    note: EncoderNote,
) -> None:
    """Write a feature table atomically.

    `parts` maps the names of splits to images, and `encode` returns the features of images, (n, d).
    """
    pa, parquet = _pyarrow()
    metadata = {_NOTE: json.dumps({"encoder": vars(note)}).encode()}
    writer = None
    with replacing(path) as temporary:
        for split, start in [(name, start) for name in parts for start in range(0, len(parts[name]), AT_ONCE)]:
            images = parts[split].at(slice(start, start + AT_ONCE))
            features = encode(images)
            flat = pa.array(np.ascontiguousarray(features, dtype=np.float32).reshape(-1))
            columns = {
                "content": pa.array([(content or b"").hex() for content in images.contents()]),
                "path": pa.array([images.item_name(index) for index in range(len(images))]),
                "split": pa.array([split] * len(images), pa.string()),
                "label": pa.array([images.class_names[label] for label in images.labels], pa.string()),
                "embedding": pa.FixedSizeListArray.from_arrays(flat, features.shape[1]),
            }
            if images.groups is not None:
                columns["group"] = pa.array(list(map(str, images.groups)), pa.string())
            table = pa.table(columns).replace_schema_metadata(metadata)
            writer = writer or parquet.ParquetWriter(temporary, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()


def _labels(path: Path, schemas: Schemas, values: list[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels, (n,), and class names.

    Labels that are texts become class names in sorted order. For whole numbers, the names are those in the file's
    metadata, or the numbers themselves.
    """
    if all(isinstance(value, str) for value in values):
        names = check_class_names(sorted(set(map(normalized, values))))
        place = {name: label for label, name in enumerate(names)}
        labels = [place[normalized(value)] for value in values]
        return np.array(labels, dtype=np.int64), names
    if not all(type(value) is int and value >= 0 for value in values):
        kind = str if isinstance(values[0], str) else int
        wrong = next(value for value in values if type(value) is not kind or (type(value) is int and value < 0))
        raise ValueError(f"{path} has the label {wrong!r}: labels must be all texts or all whole numbers from 0 on")
    hints = [json.loads((schema.metadata or {}).get(b"huggingface", b"{}")) for schema in schemas.values()]
    named, *others = (hint.get("info", {}).get("features", {}).get("label", {}).get("names") for hint in hints)
    if any(other != named for other in others):
        raise ValueError(f"the files of {path} give their classes different names: use the same names in all files")
    names = check_class_names(named or [str(value) for value in range(max(values) + 1)])
    if max(values) >= len(names):
        raise ValueError(f"{path} has the label {max(values)} but names for only {len(names)} classes")
    return np.array(values, dtype=np.int64), names


def _unit_rows(path: Path, column: Any) -> np.ndarray:
    """Return the embeddings as unit rows, (n, d), float32; raises a `ValueError` that names the first invalid row."""
    rows: np.ndarray | None = None
    done = 0
    for chunk in filter(len, column.chunks):
        array = getattr(chunk, "storage", chunk)  # Ray writes an extension type whose storage is the list
        widths = importlib.import_module("pyarrow.compute").list_value_length(array).unique().to_pylist()
        rows = np.empty((len(column), widths[0] or 0), dtype=np.float32) if rows is None else rows
        if widths != [rows.shape[1]]:
            raise ValueError(f"{path} has embeddings of different widths, or rows without an embedding")
        part = np.asarray(array.flatten(), dtype=np.float32).reshape(len(array), -1)
        lengths = np.linalg.norm(part, axis=1, keepdims=True)
        bad = ~np.isfinite(lengths[:, 0]) | (lengths[:, 0] == 0)
        if bad.any():
            raise ValueError(f"the embedding of row {done + int(bad.argmax())} of {path} is zero, NaN or infinite")
        rows[done : done + len(part)] = np.where(abs(lengths - 1) <= _UNIT, part, part / lengths)
        done += len(part)
    assert rows is not None
    return rows


def _read(function: str, files: object, **options: object) -> Any:
    """Call a function of `pyarrow.parquet` on one file or several."""
    pa, parquet = _pyarrow()
    try:
        return getattr(parquet, function)(files, **options)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{files} is damaged or not a parquet file: {error}") from error


def _pyarrow() -> tuple[Any, Any]:
    with installed("a table of features"):
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
