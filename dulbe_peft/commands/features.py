"""`dulbe-peft features`: what a model sees of labelled images, in a file for classifiers of one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.commands.options import command, labelled_options, learner_options, option
from dulbe_peft.commands.outputs import check_outputs

if TYPE_CHECKING:
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner

EXAMPLE = """examples:
  dulbe-peft features out --data photos --split train --output train.npz
  dulbe-peft features --model openai/clip-vit-base-patch16 --data photos --output test.npz

The file holds, for n images of C classes: features (n, d), labels (n,), class_names (C,),
image_names (n,), and text_embeds (C, d) where the model has a text tower. Features and text
embeddings have length 1. Read it with numpy.load.
"""


@command(EXAMPLE)
@learner_options(optional=True)
@labelled_options
@option("--output", required=True, metavar="FILE", help="the .npz file to write")
@option("--prompt-template", metavar="TEXT", help="of the class names, for a pristine model")
@option("--scale", type=float, default=1.0, help="share of what was learned, in [0, 1] (1.0)")
def features(
    learner: str | None,
    load: Callable[..., ClassIncrementalLearner],
    data: str,
    open_images: Callable[[], LabelledImages],
    output: str,
    prompt_template: str | None,
    scale: float,
) -> int:
    if output == "-":
        raise ValueError("--output is '-', expected the path of an .npz file")
    check_outputs(("--output", output, ".npz"), inputs=[data])
    if learner is not None and prompt_template is not None:
        raise ValueError("--prompt-template is for a pristine model: a learner has its own template")
    import numpy as np

    from dulbe_peft.data.inventory import counted
    from dulbe_peft.encoders.loading import has_text
    from dulbe_peft.utils.files import replacing

    images = open_images()
    template = {} if prompt_template is None else {"prompt_template": prompt_template}
    loaded = load(**template)
    with loaded.scaled(scale):
        arrays: dict[str, Any] = {"features": loaded.image_embeds(images).cpu().numpy()}
        if has_text(loaded.clip):
            arrays["text_embeds"] = loaded.text_embeds(images.class_names).cpu().numpy()
    arrays |= {"labels": images.labels, "class_names": np.array(images.class_names)}
    arrays["image_names"] = np.array([images.item_name(index) for index in range(len(images))])
    with replacing(Path(output).resolve()) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)
    count, width = arrays["features"].shape
    what = f"{counted(count, 'image')} of {counted(len(images.class_names), 'class')}, {width} numbers each"
    print(f"written: {output}, {what}", file=sys.stderr)
    return 0
