"""examples:
  dulbe-peft features --model openai/clip-vit-base-patch16 --data photos --engine local --jobs 8
  dulbe-peft features --model openai/clip-vit-base-patch16 --data photos --output photos.parquet
  dulbe-peft run --model openai/clip-vit-base-patch16 --data photos.parquet --output out

A model that stays as it is encodes an image once: run, learn, evaluate and others find the features
in the store by the image's content. The table is for other programs, and a data set by itself. Its
embeddings have length 1. A learner that trains has features of its own: they are written and not
stored.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from dulbe_peft.photos.commands.named import claim, say_next
from dulbe_peft.photos.commands.options import (
    CLASS_NAMES,
    DATA,
    OVERWRITE,
    STRICT,
    File,
    Load,
    command,
    learner_options,
)
from dulbe_peft.utils.settings import AtLeastOne, setting
from dulbe_peft.utils.terminal import counted


@command(kept="what is encoded is kept in the feature store")
@learner_options(optional=True)
def features(
    learner: str | None,
    load: Load,
    data: str = DATA,
    split: str | None = setting(None, "one split alone; '' for a folder of classes (all that run would use)"),
    class_names: str | None = CLASS_NAMES,
    strict: bool = STRICT,
    output: File | None = setting(None, "write a table: content, path, split, label, embedding"),
    engine: Literal["local", "dask", "ray"] | None = setting(None, "encode in several processes, or with Dask or Ray"),
    jobs: AtLeastOne | None = setting(None, "workers of --engine, at most one a core of this machine (so many)"),
    address: str | None = setting(None, "of a running cluster of Dask or Ray; else workers start on this machine"),
    overwrite: bool = OVERWRITE,
) -> None:
    if engine is None and (jobs or address):
        raise ValueError("--jobs and --address are of --engine: give all of them, or none")
    claim(("--output", output, ".parquet"), reads=[data, learner], overwrite=overwrite)
    from dulbe_peft.data.features import EncoderNote, write_features
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.photos.runs.encoding import fill_store
    from dulbe_peft.photos.runs.setup import look_by
    from dulbe_peft.photos.runs.sources import open_images, open_source

    loaded = load()
    store = loaded.encoder.store
    if loaded.encoder.adapted and (engine or output is None):
        raise ValueError("a learner that trains has features of its own, which are not stored: --output writes them")

    def look(images: LabelledImages) -> Mapping[int, str]:
        if engine is not None and store is not None:
            again = partial(load, num_workers=0, progress=False)
            fill_store(store, images, loaded, again, engine, jobs, address)
        return look_by(loaded)(images)

    if split is None:
        named = {"train_split": "train", "test_split": "test"}
        train, test = open_source({"data": data, "strict": strict, "class_names": class_names} | named, look=look)
        parts = {"train": train} | ({} if test is None else {"test": test})
    else:
        parts = {split or "train": open_images(data, split, class_names, strict, look)}
    if any(images.features is not None for images in parts.values()):  # whose model is not known to be this one
        raise ValueError(f"{data!r} is a table of features already: give the images")
    count = sum(map(len, parts.values()))
    if output is not None:
        model, revision = loaded.state.base_name
        note = EncoderNote(model or type(loaded.clip).__name__, revision, loaded.encoder.facts)
        write_features(Path(output).resolve(), parts, lambda part: loaded.image_embeds(part).cpu().numpy(), note)
    where = "" if store is None or loaded.encoder.adapted else f"; the store is {store.path}"
    print(f"{counted(count, 'image')}, {loaded.encoder.embed_dim} numbers each{where}", file=sys.stderr)
    if loaded.encoder.adapted:
        say_next("evaluate", learner, data=data, to=sys.stderr)
    else:
        table, name = output or data, f"{Path(output or data).stem}-run"
        say_next("run", model=loaded.state.base_name[0], data=table, output=name, to=sys.stderr)
