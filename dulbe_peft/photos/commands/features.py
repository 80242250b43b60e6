"""examples:
  dulbe-peft features --model openai/clip-vit-base-patch16 --data photos --engine local --jobs 8
  dulbe-peft features --model openai/clip-vit-base-patch16 --data photos --output photos.parquet
  dulbe-peft run --model openai/clip-vit-base-patch16 --data photos.parquet --output out

A model that is not trained encodes each image once: all commands find the features in the store by the
image's content. --prune 0 removes all that it keeps. The table of --output, whose embeddings have length
1, is for other programs and for --data. Features of a trained learner are only written to it.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import click

from dulbe_peft.photos.commands.advice import print_next_command
from dulbe_peft.photos.commands.flags import DATA, LABELS, OVERWRITE, File
from dulbe_peft.photos.commands.options import Load, Option, command, data_settings, learner_options
from dulbe_peft.photos.commands.paths import claim
from dulbe_peft.photos.data.source import READ, SPLITS, DataSource
from dulbe_peft.utils.settings import AtLeastOne, setting
from dulbe_peft.utils.terminal import counted


def prune(ctx: click.Context, _: click.Parameter, days: int | None) -> None:
    """Remove what is old from the feature store, say what was removed, and exit."""
    if days is None or ctx.resilient_parsing:
        return
    words = ctx.meta["words"]
    if len(words) > (2 if "--prune" in words else 1):
        raise ValueError("--prune DAYS stands alone, and encodes nothing: give the other flags in a second command")
    from dulbe_peft.data.store import FeatureStore, store_path

    store = FeatureStore(store_path())
    gone = store.prune(days)
    shrunk = f"{gone.bytes / 1e6:.1f} MB freed" if not gone.why else f"the file could not be made smaller: {gone.why}"
    what = f"{counted(gone.features, 'feature')} and {counted(gone.pictures, 'picture')} removed"
    print(f"{store.path}: {what}, {shrunk}", file=sys.stderr)
    ctx.exit()


PRUNE = Option(
    ["--prune"],
    type=click.IntRange(0, 1_000_000),
    metavar="DAYS",
    is_eager=True,
    expose_value=False,
    callback=prune,
    help="clear the store of what is unused for DAYS days",
)


@command(
    kept="encoded features are kept in the feature store",
    settings=[PRUNE, *data_settings(*SPLITS, rare=SPLITS)],
)
@learner_options(optional=True)
def features(
    learner: str | None,
    load: Load,
    data: str | None = DATA,
    labels: str | None = LABELS,
    split: str | None = setting(None, "one split; '' for a folder without splits (default: all that run would use)"),
    output: File | None = setting(None, "write a parquet table of labels and embeddings"),
    engine: Literal["local", "dask", "ray"] | None = setting(None, "encode in several processes, or with Dask or Ray"),
    jobs: AtLeastOne | None = setting(None, "workers of --engine (default: one per core)"),
    address: str | None = setting(None, "address of a running Dask or Ray cluster (default: start workers here)"),
    overwrite: bool = OVERWRITE,
    **reading: object,
) -> None:
    if engine is None and (jobs or address):
        raise ValueError("--jobs and --address need --engine: give --engine, or omit them")
    claim(("--output", output, ".parquet"), overwrite=overwrite)
    from dulbe_peft.data.feature_tables import EncoderNote, write_features
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.photos.runs.encoding import fill_store
    from dulbe_peft.photos.runs.setup import data_or_labels, open_images, open_source, unreadable_finder

    data = data_or_labels(data, labels)
    source, loaded = DataSource.of({"data": data, **reading}), load()
    store = loaded.encoder.store
    if loaded.encoder.adapted and (engine or output is None):
        raise ValueError("the features of a trained learner are not stored: write them to a table with --output")

    def look(images: LabelledImages) -> Mapping[int, str]:
        if engine is not None and store is not None:
            # Workers use the precision that was chosen here, whatever their hardware would choose.
            load_in_worker = partial(load, num_workers=0, progress=False, precision=loaded.encoder.args.precision)
            fill_store(store, images, loaded, load_in_worker, engine, jobs, address)
        return unreadable_finder(loaded)(images)

    if split is None:
        opened = open_source(source, look)
        parts = {"train": opened.train} | ({} if opened.test is None else {"test": opened.test})
    else:
        parts = {split or "train": open_images(source, split, look)}
    if any(images.features is not None for images in parts.values()):  # they may come from another model
        raise ValueError(f"{data!r} is already a table of features: give the images")
    count = sum(map(len, parts.values()))
    if output is not None:
        model, revision = loaded.state.base_name
        note = EncoderNote(model or type(loaded.clip).__name__, revision, loaded.encoder.facts)
        write_features(Path(output).resolve(), parts, lambda part: loaded.image_embeds(part).cpu().numpy(), note)
    where = "" if store is None or loaded.encoder.adapted else f"; the store is {store.path}"
    print(f"{counted(count, 'image')} with {loaded.encoder.embed_dim} features each{where}", file=sys.stderr)
    if loaded.encoder.adapted:
        print_next_command("evaluate", learner, data=data, labels=None, split=split or None, to=sys.stderr)
    else:
        table, name = output or data, f"{Path(output or data).stem}-run"
        flags: dict[str, object] = {"labels": None, "output": name}
        if output is not None:  # the table has the labels, with their new names, and the groups
            grouped = any(images.groups is not None for images in parts.values())
            flags |= dict.fromkeys((*READ, *SPLITS)) | {"group": "group" if grouped else None}
        print_next_command("run", model=loaded.state.base_name[0], data=table, **flags, to=sys.stderr)
