"""A folder of image features: parquet files that any program reads, and what says which model made them.

    features.json            the model, the classes, tau
    classes.parquet          class, embedding of its text where the model reads texts
    train-00000.parquet ...  image, label, embedding, content; whole or not there

Data sets carry such features beside their images, or in place of them. A frozen model then encodes no image.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dulbe_peft.data.images import LabelledImages
from dulbe_peft.utils.files import replacing
from dulbe_peft.utils.records import Record, read_record, write_record

FEATURES_FILE = "features.json"
CLASSES_FILE = "classes.parquet"
_SHARD = re.compile(r"(.+)-(\d{5})\.parquet")


class ModelKey(Record):
    """What makes two features of an image the same: digests of the weights and of the image processor, and so on."""

    weights: str
    image_processor: str
    precision: str
    scale: float = 1.0


class FeatureFile(Record):
    """`features.json`; `labels` of the shards index `class_names`, to which new classes are appended."""

    format: Literal["dulbe_peft features 1"] = "dulbe_peft features 1"
    model: str
    key: ModelKey
    width: int
    logit_scale: float
    class_names: list[str]


@dataclass(frozen=True, eq=False)
class Features:
    """Features of the images of a source: `rows`, (n, d), float32, and the row of each position in the source."""

    rows: np.ndarray
    row_of: Mapping[int, int]
    key: ModelKey

    def of(self, images: LabelledImages) -> np.ndarray:
        """The features of some of the source's images, (n, d)."""
        return self.rows[[self.row_of[int(position)] for position in images.indices]]


def is_feature_folder(path: Path) -> bool:
    """Whether `write_shard` has written here."""
    return (path / FEATURES_FILE).is_file()


def feature_splits(folder: Path) -> list[str]:
    """The splits that a folder of features has, in the order of their files."""
    return list(dict.fromkeys(split for split, _ in _shards(folder)))


def load_features(folder: Path, split: str | None) -> LabelledImages:
    """The features of a split as a data set, in which a feature stands in the place of its image."""
    facts, table = read_record(folder / FEATURES_FILE, FeatureFile), read_shards(folder, split or "train")
    if not len(table["image"]):
        raise FileNotFoundError(f"{folder} has no split {split!r}; its splits are {feature_splits(folder)}")
    labels = table["label"]
    if labels.min() < 0 or labels.max() >= len(facts.class_names):
        raise ValueError(f"{folder} has a label outside of its {len(facts.class_names)} classes")
    source = _Rows(folder, table["image"], labels, table["embedding"])
    images = LabelledImages(source, labels, facts.class_names)
    images.features = Features(table["embedding"], range(len(labels)), facts.key)  # type: ignore[arg-type]
    return images


@dataclass(frozen=True, eq=False)
class _Rows:
    folder: Path
    names: Sequence[str]
    labels: np.ndarray
    embeddings: np.ndarray

    def __getitem__(self, position: int) -> tuple[np.ndarray, int]:
        return self.embeddings[position], int(self.labels[position])

    def item_name(self, position: int) -> str:
        return f"{self.folder}[{self.names[position]}]"

    def content_id(self, position: int) -> str:
        return self.names[position]


def write_shard(
    folder: Path, split: str, number: int, images: Sequence[str], labels: Any, embeddings: Any, content: Sequence[str]
) -> None:
    """Write one parquet file: a row for each image with its name, label, features and what tells its content."""
    pa, parquet = _pyarrow()
    width = embeddings.shape[1]
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(embeddings).reshape(-1)), width)
    columns = {"image": pa.array(images, pa.string()), "label": pa.array(labels, pa.int64()), "embedding": rows}
    with replacing(folder / f"{split}-{number:05d}.parquet") as temporary:
        parquet.write_table(pa.table(columns | {"content": pa.array(content, pa.string())}), temporary)


def write_classes(folder: Path, facts: FeatureFile, texts: np.ndarray | None) -> None:
    """Write what is known of the model and the classes, with the embeddings of their texts, (C, d)."""
    pa, parquet = _pyarrow()
    columns = {"class": facts.class_names} | ({} if texts is None else {"embedding": list(texts)})
    with replacing(folder / CLASSES_FILE) as temporary:
        parquet.write_table(pa.table(columns), temporary)
    write_record(folder / FEATURES_FILE, facts)


def read_shards(folder: Path, split: str, embeddings: bool = True) -> dict[str, Any]:
    """The columns of a split's shards: `image` and `content`, lists; `label`, (n,); `embedding`, (n, d)."""
    pa, parquet = _pyarrow()
    columns = ["image", "label", "content"] + ["embedding"] * embeddings
    found: dict[str, Any] = {"image": [], "content": [], "label": [np.zeros(0, np.int64)], "embedding": []}
    for own, path in _shards(folder):
        if own != split:
            continue
        try:
            table = parquet.read_table(path, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged or foreign: {error}; remove it to encode its images again") from error
        for name in ("image", "content"):
            found[name] += table[name].to_pylist()
        found["label"].append(table["label"].to_numpy())
        if embeddings:
            flat = table["embedding"].combine_chunks().flatten().to_numpy()
            found["embedding"].append(flat.reshape(table.num_rows, -1).astype(np.float32, copy=False))
    found["label"] = np.concatenate(found["label"])
    found["embedding"] = np.concatenate(found["embedding"]) if found["embedding"] else np.zeros((0, 0), np.float32)
    if not np.isfinite(found["embedding"]).all():
        raise ValueError(f"{folder} holds NaN or infinity among the embeddings of {split!r}")
    return found


def next_shard(folder: Path, split: str) -> int:
    """The number of the first shard that a split does not have yet."""
    return 1 + max((int(_SHARD.fullmatch(path.name)[2]) for own, path in _shards(folder) if own == split), default=-1)  # type: ignore[index]


def _shards(folder: Path) -> list[tuple[str, Path]]:
    found = [(_SHARD.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
    return [(match[1], path) for match, path in found if match]


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError('features need the package pyarrow: pip install "dulbe_peft[datasets]"') from error
