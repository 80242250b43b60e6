"""Images encoded in shards, on this machine or on an engine: what was written stays, and is never done twice."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dulbe_peft.data import features as stored
from dulbe_peft.data.features import FEATURES_FILE, FeatureFile, Features
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.inventory import unreadable_lines
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.runs.settings import StreamArguments
from dulbe_peft.utils.engines import OncePerProcess, default_jobs, on_engine
from dulbe_peft.utils.folders import clear_leftovers, exclusive
from dulbe_peft.utils.records import read_record

LOCK_FILE = ".dulbe_peft.lock"
EMBEDDINGS = "embeddings"  # folder of a run whose images an engine encoded
SHARD = 2048  # images of a file
ATTEMPTS = 3  # at the shards that are missing, where a worker dies


def write_features(
    folder: Path,
    parts: Mapping[str, Sequence[LabelledImages]],
    learner: ClassIncrementalLearner,
    load: Callable[[], ClassIncrementalLearner],
    scale: float = 1.0,
    engine: str | None = None,
    jobs: int | None = None,
    address: str | None = None,
) -> list[tuple[str, str]]:
    """Encode the images that a folder of features lacks; returns the unreadable ones, which are left out.

    `parts` has, for each split, data sets of one source. With an engine, `load` makes the learner in each worker;
    images, model and folder must have the same paths there. A worker that dies loses the shard that it was at, which
    is done again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / LOCK_FILE, f"the folder {str(folder)!r}"):
        clear_leftovers(folder, r".*\.(?:parquet|json)")
        facts = _facts(folder, parts, learner, scale)
        workers = jobs or default_jobs()
        size = SHARD if engine is None else min(SHARD, max(64, _count(parts) // (4 * workers)))
        batch = learner.args.eval_batch_size
        shards = [shard for split in parts for shard in _missing(folder, split, parts[split], facts, size, batch)]
        unreadable: list[tuple[str, str]] = []
        hidden = None if learner.args.progress else True
        with tqdm(total=sum(len(shard.names) for shard in shards), desc="encode", unit="image", disable=hidden) as bar:
            if engine is None:
                for shard in shards:
                    unreadable += _encode(lambda: learner, folder, shard)
                    bar.update(len(shard.names))
            else:
                once = OncePerProcess(load)
                unreadable += _on_engine(partial(_encode, once, folder), shards, bar, engine, workers, address)
    return unreadable


def attach_features(folder: Path, parts: Mapping[str, Sequence[LabelledImages]]) -> None:
    """Let data sets carry the features that a folder has of all their images, so that no image is encoded again."""
    key = read_record(folder / FEATURES_FILE, FeatureFile).key
    for split, images in parts.items():
        table = stored.read_shards(folder, split)
        place = {content: row for row, content in enumerate(table["content"])}
        for part in images:
            rows = {int(part.indices[index]): place[part.content_id(index)] for index in range(len(part))}
            part.features = Features(table["embedding"], rows, key)


def encode_stream(
    stream: StreamArguments,
    parts: Mapping[str, Sequence[LabelledImages]],
    learner: ClassIncrementalLearner,
    load: Callable[[], ClassIncrementalLearner],
) -> None:
    """Encode all images of a run on the engine that its settings name; the data sets carry their features then."""
    if learner.strategy.adapts:
        raise ValueError(f"--engine is for strategies that train nothing, not for {learner.strategy.name!r}")
    folder = Path(stream.output) / EMBEDDINGS
    unreadable = write_features(folder, parts, learner, load, 1.0, stream.engine, stream.jobs, stream.address)
    if unreadable:
        raise ValueError("\n".join(["images cannot be read:", *unreadable_lines(unreadable)]))
    attach_features(folder, parts)


def _count(parts: Mapping[str, Sequence[LabelledImages]]) -> int:
    return sum(len(part) for images in parts.values() for part in images)


def _facts(
    folder: Path, parts: Mapping[str, Sequence[LabelledImages]], learner: ClassIncrementalLearner, scale: float
) -> FeatureFile:
    """What is known of the folder's model and classes, after a check of what stands there; new classes go last."""
    key = learner.encoder.key.model_copy(update={"scale": scale})
    known: list[str] = []
    if stored.is_feature_folder(folder):
        before = read_record(folder / FEATURES_FILE, FeatureFile)
        if before.key != key:
            raise ValueError(f"{folder} has features of another model, {before.model!r}: choose another folder")
        known = before.class_names
    elif any(path.name != LOCK_FILE for path in folder.iterdir()):
        raise FileExistsError(f"{folder} holds something that is no folder of features: choose another folder")
    names = list(
        dict.fromkeys([*known, *(n for images in parts.values() for part in images for n in part.class_names)])
    )
    facts = FeatureFile(
        model=learner.state.base_name[0] or type(learner.clip).__name__,
        key=key,
        width=learner.encoder.embed_dim,
        logit_scale=learner.logit_scale,
        class_names=names,
    )
    if names != known:
        texts = learner.text_embeds(names).cpu().numpy() if has_text(learner.clip) else None
        stored.write_classes(folder, facts, texts)
    return facts


@dataclass
class Shard:
    """A file to write: its images, in pieces that are encoded for themselves, and what its rows say of each."""

    split: str
    number: int
    pieces: list[LabelledImages] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)


def _missing(
    folder: Path, split: str, parts: Sequence[LabelledImages], facts: FeatureFile, size: int, batch: int
) -> list[Shard]:
    """The shards that a split lacks, of about `size` images.

    A piece ends where a batch of `batch` images of its part ends. So the images are in the batches that they would be
    in without shards, and their features are the same bit by bit.
    """
    there = set(stored.read_shards(folder, split, embeddings=False)["content"])
    label_of = {name: label for label, name in enumerate(facts.class_names)}
    shards: list[Shard] = []
    first, block = stored.next_shard(folder, split), max(1, size // batch) * batch
    for part in parts:
        missing = [index for index in range(len(part)) if part.content_id(index) not in there]
        for _, group in groupby(missing, lambda index: index // block):
            rows = list(group)
            if not shards or len(shards[-1].names) >= size:
                shards.append(Shard(split, first + len(shards)))
            shard = shards[-1]
            shard.pieces.append(_alone(part, part.indices[rows]))
            shard.names += [part.relative_name(index) for index in rows]
            shard.labels += [label_of[part.class_names[label]] for label in part.labels[rows]]
            shard.contents += [part.content_id(index) for index in rows]
    return shards


def _alone(part: LabelledImages, positions: np.ndarray) -> LabelledImages:
    """The images at some positions of a part's source, without the others where it is a list: small to send."""
    images = copy.copy(part)
    images.indices, images.labels = positions, part._own_labels[positions]
    if isinstance(part.source, list):
        images.source = [part.source[position] for position in positions]
        images.indices, images._own_labels = np.arange(len(positions)), images.labels
    return images


def _encode(load: Callable[[], ClassIncrementalLearner], folder: Path, shard: Shard) -> list[tuple[str, str]]:
    """Encode and write one shard; returns its unreadable images with the reasons."""
    learner, problems = load(), list[tuple[str, str]]()
    features, kept, start = [], list[int](), 0
    for images in shard.pieces:
        found, unreadable = learner.readable_embeds(images)
        problems += [(images.item_name(index), reason) for index, reason in unreadable.items()]
        read = [index for index in range(len(images)) if index not in unreadable]
        features.append(found.cpu().numpy()[read])
        kept += [start + index for index in read]
        start += len(images)
    columns: list[list[Any]] = [
        [column[index] for index in kept] for column in (shard.names, shard.labels, shard.contents)
    ]
    if kept:
        rows = np.concatenate(features)
        stored.write_shard(folder, shard.split, shard.number, columns[0], columns[1], rows, columns[2])
    return problems


def _on_engine(
    encode: Callable[..., list[tuple[str, str]]],
    shards: Sequence[Shard],
    bar: Any,
    engine: str,
    jobs: int,
    address: str | None,
) -> list[tuple[str, str]]:
    """Encode shards on an engine; those of a worker that died are tried again."""
    found: dict[int, list[tuple[str, str]]] = {}
    for attempt in range(1, ATTEMPTS + 1):
        left = [number for number in range(len(shards)) if number not in found]
        if not left:
            break
        try:
            for place, unreadable in on_engine(encode, [(shards[number],) for number in left], jobs, engine, address):
                found[left[place]] = unreadable
                bar.update(len(shards[left[place]].names))
        except Exception as error:  # each engine has its own for a worker that is gone
            if attempt == ATTEMPTS or isinstance(error, ImportError):
                raise
            print(f"the engine stopped ({type(error).__name__}: {error}): missing shards again", file=sys.stderr)
    return [row for number in sorted(found) for row in found[number]]
