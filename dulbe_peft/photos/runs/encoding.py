"""Encode images in parallel: workers encode the images that the feature store lacks, and this process stores them."""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
from tqdm.auto import tqdm

from dulbe_peft.data.images import LabelledImages, PixelMemory
from dulbe_peft.data.store import EncoderKey, FeatureStore
from dulbe_peft.encoders.pixels import UNSHOWN
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.utils.workers import OncePerProcess, number_of_jobs, side_by_side

SHARD = 2048  # largest number of images that a worker encodes in one call
Encoded = tuple[EncoderKey, list[bytes | None], np.ndarray]  # the encoder, the images' contents, their features


def fill_store(
    store: FeatureStore,
    images: LabelledImages,
    learner: ClassIncrementalLearner,
    load: Callable[[], ClassIncrementalLearner],
    engine: str,
    jobs: int | None = None,
    address: str | None = None,
) -> None:
    """Encode the images that a store lacks; `load` makes the learner in each worker.

    Images and model must have the same paths on the workers. Finished shards are stored, so that calling this function
    again continues after an interruption. Unreadable images are left out.
    """
    key, workers, contents = learner.encoder.key, number_of_jobs(jobs, address), images.contents()
    stored = store.get(key, contents)
    missing = {content: row for row, content in enumerate(contents) if content is not None and content not in stored}
    rows = sorted(missing.values())
    size = min(SHARD, max(64, len(rows) // (4 * workers)))
    shards = [_subset(images, images.indices[rows[start : start + size]]) for start in range(0, len(rows), size)]
    hidden = None if learner.args.progress else True  # None shows the bar only in a terminal
    encode = partial(_encode, OncePerProcess(load))
    title = f"encode, {key.precision}"
    with tqdm(total=len(rows), desc=title, unit=" images", delay=UNSHOWN, disable=hidden) as bar:
        for worker_key, contents, features in side_by_side(encode, zip(shards), workers, engine, address):
            if worker_key != key:
                raise ImportError("a worker has a different processor, or different versions of torch or Pillow")
            store.put(key, contents, features)
            bar.update(len(contents))


def _encode(load: OncePerProcess[ClassIncrementalLearner], images: LabelledImages) -> Encoded:
    """Encode a shard in a worker. The content of an unreadable image is returned as None."""
    learner = load()
    features, unreadable = learner.readable_embeds(images)
    contents = [None if index in unreadable else c for index, c in enumerate(images.contents())]
    return learner.encoder.key, contents, features.cpu().numpy()


def _subset(part: LabelledImages, positions: np.ndarray) -> LabelledImages:
    """Return the images at `positions` of the source. A list is cut down to them, so that less is sent to workers."""
    images = copy.copy(part)
    images.indices, images.labels, images._contents = positions, part._own_labels[positions], {}
    images.groups, images.columns, images.pixels = None, {}, PixelMemory()
    if isinstance(part.source, list):
        images.source = [part.source[position] for position in positions]
        images.indices, images._own_labels = np.arange(len(positions)), images.labels
    return images
