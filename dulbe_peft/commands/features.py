"""`dulbe-peft features`: what a model sees of labelled images, in a folder for other programs and for further runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dulbe_peft.commands.options import command, learner_options, option
from dulbe_peft.commands.outputs import FOLDER, claim, overwrite_option, say_next

if TYPE_CHECKING:
    from dulbe_peft.learner import ClassIncrementalLearner


@command(kept="what is encoded is kept")
@learner_options(optional=True)
@option("--data", required=True, help="images: a folder of classes or of parquet files, or hf:NAME")
@option("--split", help="one split alone; '' for a folder of classes (all that run would learn and test)")
@option("--class-names", metavar="FILE", help="text file with the names of the classes, as for run")
@option("--skip-unreadable", is_flag=True, help="leave images out that cannot be read; decodes all first")
@option("--output", required=True, metavar="FOLDER", help="the folder to write, or to go on with")
@option("--prompt-template", metavar="TEXT", help="of the class names, for a pristine model")
@option("--scale", type=float, default=1.0, help="share of what was learned, in [0, 1] (1.0)")
@overwrite_option
def features(
    learner: str | None,
    load: Callable[..., ClassIncrementalLearner],
    data: str,
    split: str | None,
    class_names: str | None,
    skip_unreadable: bool,
    output: str,
    prompt_template: str | None,
    scale: float,
    overwrite: bool,
) -> int:
    """examples:
      dulbe-peft features out --data photos --output out-features
      dulbe-peft features --model openai/clip-vit-base-patch16 --data photos --output photo-features
      dulbe-peft run --model openai/clip-vit-base-patch16 --strategy frozen --data photo-features --output out

    The folder holds parquet files with the columns image, label and embedding, classes.parquet with
    the classes and the embeddings of their texts, and features.json with the model and its logit
    scale. All embeddings have length 1. The same command goes on where it was stopped, and encodes
    images that were added. With a model that stays as it is, run, learn and compare take the folder
    as --data.
    """
    if learner is not None and prompt_template is not None:
        raise ValueError("--prompt-template is for a pristine model: a learner has its own template")
    from dulbe_peft.data.inventory import counted, unreadable_lines
    from dulbe_peft.runs.encoding import write_features
    from dulbe_peft.runs.sources import open_source, open_split

    claim(("--output", output, FOLDER), reads=[learner], apart=[data], overwrite=overwrite)
    if split is None:
        given = {"data": data, "skip_unreadable": skip_unreadable, "class_names": class_names}
        train, test = open_source({**given, "train_split": "train", "test_split": "test"})
        parts = {"train": [train]} | ({} if test is None else {"test": [test]})
    else:
        parts = {split or "train": [open_split(data, split or None, class_names, skip_unreadable)]}
    loaded = load(**({} if prompt_template is None else {"prompt_template": prompt_template}))
    with loaded.scaled(scale):
        unreadable = write_features(Path(output), parts, loaded, load, scale)
    count = sum(len(part) for images in parts.values() for part in images) - len(unreadable)
    print(f"written: {output}, {counted(count, 'image')}, {loaded.encoder.embed_dim} numbers each", file=sys.stderr)
    if unreadable:
        print("\n".join(["left out, for they cannot be read:", *unreadable_lines(unreadable)]), file=sys.stderr)
    frozen = ("run", "--model", loaded.state.base_name[0], "--data", output, "--output", f"{output}-run")
    say_next(*(("evaluate", learner, "--data", data) if loaded.strategy.adapts else frozen), to=sys.stderr)
    return 2 if unreadable else 0
