"""Images encoded side by side: workers encode what the feature store lacks, and this process writes it."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.store import EncoderKey, FeatureStore
from dulbe_peft.encoders.reading import UNSHOWN
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.utils.workers import OncePerProcess, jobs_at_once, side_by_side

SHARD = 2048  # images of a call at most
Encoded = tuple[EncoderKey, list[bytes | None], np.ndarray]


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

    Images and model must have the same paths there. What is done is kept, and the same call does the rest. What cannot
    be read is left out.
    """
    key, workers, contents = learner.encoder.key, jobs_at_once(jobs, address), images.contents()
    known = store.get(key, contents)
    lacking = {content: row for row, content in enumerate(contents) if content is not None and content not in known}
    rows = sorted(lacking.values())
    size = min(SHARD, max(64, len(rows) // (4 * workers)))
    shards = [_alone(images, images.indices[rows[start : start + size]]) for start in range(0, len(rows), size)]
    shown: dict[str, Any] = {"unit": " images", "delay": UNSHOWN, "disable": None if learner.args.progress else True}
    encode = partial(_encode, OncePerProcess(load))
    with tqdm(total=len(rows), desc=f"encode, {key.precision}", **shown) as bar:
        for made_by, found, features in side_by_side(encode, zip(shards), workers, engine, address):
            if made_by != key:
                raise ImportError("a worker has another processor, or other versions of torch or Pillow")
            store.put(key, found, features)
            bar.update(len(found))


def _encode(load: OncePerProcess[ClassIncrementalLearner], images: LabelledImages) -> Encoded:
    """What a worker does: the contents and features of a shard's images, None for what cannot be read."""
    learner = load()
    features, unreadable = learner.readable_embeds(images)
    contents = [None if index in unreadable else c for index, c in enumerate(images.contents())]
    return learner.encoder.key, contents, features.cpu().numpy()


def _alone(part: LabelledImages, positions: np.ndarray) -> LabelledImages:
    """The images at some positions of a part's source, without the others where it is a list: small to send."""
    images = copy.copy(part)
    images.indices, images.labels, images._contents = positions, part._own_labels[positions], {}
    if isinstance(part.source, list):
        images.source = [part.source[position] for position in positions]
        images.indices, images._own_labels = np.arange(len(positions)), images.labels
    return images
