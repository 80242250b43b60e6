"""Test that no setting of a data source is accepted and does nothing, for every kind of data."""

import csv
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dulbe_peft.photos.data.source import DataSource

# A value for each field that differs from its default and fits some kind of data.
VALUES = {
    "train_split": "first",
    "test_split": "second",
    "test_fraction": 0.3,
    "test_data": "{tests}",
    "strict": True,
    "class_names": "{names}",
    "vocabulary": "{vocabulary}",
    "image_column": "picture",
    "label_column": "species",
    "path_column": "photo",
    "leave_out": ["b"],
    "one_label": True,
    "machine_labels": True,
    "validation_fraction": 0.3,
    "images_per_class": 2,
    "test_images_per_class": 1,
    "draw_seed": 3,
    "group": "place",
    "group_seconds": 60.0,
}
KINDS = ("folder", "splits", "table", "metadata", "exiftool", "camtrap", "parquet", "features")
# Settings that find nothing to do in the data of these tests, whose images are all readable and whose cells are plain.
NOTHING_TO_DO = {(kind, "strict") for kind in KINDS} | {(kind, "one_label") for kind in ("table", "metadata")}
NOTHING_TO_DO |= {("camtrap", "machine_labels")}  # each file was identified by a person


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write the same photographs of two classes in every kind of data; return kind -> path, and other files."""
    root = tmp_path_factory.mktemp("kinds")
    rows = []
    for number in range(16):
        label, place, time = "ab"[number % 2], f"p{number % 4}", f"2024-05-01T10:{number:02}:00Z"
        pixels = np.random.default_rng(number).integers(0, 255, (9, 9, 3), dtype=np.uint8)
        for file in (root / "folder" / label, root / "splits" / "train" / label, root / "camtrap", root / "metadata"):
            file.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file / f"{number}.png")
        rows.append([f"folder/{label}/{number}.png", f"{number}.png", label, place, time])
    write(root / "table.csv", ["path", "label", "place"], ([row[0], row[2], row[3]] for row in rows))
    write(root / "metadata" / "metadata.csv", ["file_name", "label", "place"], (row[1:4] for row in rows))
    write(root / "exiftool.csv", ["SourceFile", "Subject"], ([row[0], row[2]] for row in rows))
    (root / "vocabulary.txt").write_text("a\nb\n")
    (root / "names.txt").write_text("a\tant\nb\tbee\n")
    media = [[row[1], row[3], row[4], row[1]] for row in rows]
    write(root / "camtrap" / "media.csv", ["mediaID", "deploymentID", "timestamp", "filePath"], media)
    seen = ([row[1], "animal", row[2], "human"] for row in rows)
    header = ["mediaID", "observationType", "scientificName", "classificationMethod"]
    write(root / "camtrap" / "observations.csv", header, seen)
    pandas = pytest.importorskip("pandas")
    (root / "parquet").mkdir()
    pictures = [{"bytes": (root / row[0]).read_bytes(), "path": None} for row in rows]
    import datasets

    columns = {"image": pictures, "label": [row[2] for row in rows], "place": [row[3] for row in rows]}
    kinds = {"image": datasets.Image(), "label": datasets.Value("string"), "place": datasets.Value("string")}
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).to_parquet(
        root / "parquet" / "train.parquet"
    )
    embeddings = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    table = {"embedding": [*embeddings], "label": [row[2] for row in rows], "place": [row[3] for row in rows]}
    pandas.DataFrame(table).to_parquet(root / "features.parquet")
    suffixes = {"table": ".csv", "exiftool": ".csv", "features": ".parquet"}
    paths = {kind: str(root / f"{kind}{suffixes.get(kind, '')}") for kind in KINDS}
    others = {"tests": root / "folder", "names": root / "names.txt", "vocabulary": root / "vocabulary.txt"}
    return paths, {name: str(path) for name, path in others.items()}


def write(path: Path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def result(source):
    """Return all that a source gives: contents, class names and groups of its images, and notes."""
    opened = source.open()
    parts = [part for part in (opened.train, opened.test) if part is not None]
    each = [
        (
            part.contents(),
            part.labels.tolist(),
            part.class_names,
            None if part.groups is None else part.groups.tolist(),
        )
        for part in parts
    ]
    return each, opened.inventory.notes


def test_every_field_has_a_value():
    assert VALUES.keys() == {field.name for field in fields(DataSource)} - {"data"}


@pytest.mark.plain("folder", "table", "camtrap", "features")
@pytest.mark.parametrize("kind", KINDS)
def test_each_setting_acts_or_is_refused(data, kind):
    paths, others = data
    base = {"data": paths[kind]} | ({"vocabulary": others["vocabulary"]} if kind == "exiftool" else {})
    plain, silent = result(DataSource(**base)), set()
    for name, value in VALUES.items():
        if name in base:
            continue
        given = value.format(**others) if isinstance(value, str) else value
        try:
            same = json.dumps(plain, default=str) == json.dumps(
                result(DataSource(**base, **{name: given})), default=str
            )
        except (ValueError, OSError) as error:
            spelt = name in str(error) or name.replace("_", "-") in str(error) or str(given)[:40] in str(error)
            assert spelt or name.split("_")[0] in str(error), f"{name}: {error}"
            continue
        if same:
            silent.add((kind, name))
    assert silent == {pair for pair in NOTHING_TO_DO if pair[0] == kind}
