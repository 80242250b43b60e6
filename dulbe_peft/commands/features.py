"""`dulbe-peft features`: what a model sees of labelled images, in a file for classifiers of one's own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dulbe_peft.commands.data import add_labelled, load_labelled
from dulbe_peft.commands.loading import add_learner, load_learner
from dulbe_peft.commands.outputs import check_outputs
from dulbe_peft.commands.parser import Parser

EXAMPLE = """examples:
  dulbe-peft features out --data photos --split train --output train.npz
  dulbe-peft features --model openai/clip-vit-base-patch16 --data photos --output test.npz

The file holds, for n images of C classes: features (n, d), labels (n,), class_names (C,),
image_names (n,), and text_embeds (C, d) where the model has a text tower. Features and text
embeddings have length 1. Read it with numpy.load.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser: Parser = commands.add_parser("features", help="write the features of images to a file", epilog=EXAMPLE)
    add_learner(parser, optional=True)
    add_labelled(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="the .npz file to write")
    parser.add_argument("--prompt-template", metavar="TEXT", help="of the class names, for a pristine model")
    parser.add_argument("--scale", type=float, default=1.0, help="share of what was learned, in [0, 1] (%(default)s)")
    parser.set_defaults(call=features)


def features(arguments: argparse.Namespace) -> int:
    """Write the file."""
    if arguments.output == "-":
        raise ValueError("--output is '-', expected the path of an .npz file")
    check_outputs(("--output", arguments.output, ".npz"), inputs=[arguments.data])
    if arguments.learner is not None and arguments.prompt_template is not None:
        raise ValueError("--prompt-template is for a pristine model: a learner has its own template")
    import numpy as np

    from dulbe_peft.data.inventory import counted
    from dulbe_peft.utils.files import replacing

    data = load_labelled(arguments)
    template = {} if arguments.prompt_template is None else {"prompt_template": arguments.prompt_template}
    arrays = feature_arrays(load_learner(arguments, **template), data, arguments.scale)
    with replacing(Path(arguments.output).resolve()) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)
    images, width = arrays["features"].shape
    classes = counted(len(arrays["class_names"]), "class")
    print(
        f"written: {arguments.output}, {counted(images, 'image')} of {classes}, {width} numbers each", file=sys.stderr
    )
    return 0


def feature_arrays(learner: Any, data: Any, scale: float = 1.0) -> dict[str, Any]:
    """What the file holds, as arrays of numpy.

    Args:
        learner: a `ClassIncrementalLearner`.
        data: labelled images that carry class names.
        scale: share of what was learned, in [0, 1].
    """
    import numpy as np

    from dulbe_peft.data.images import named_images
    from dulbe_peft.encoders.loading import has_text

    data = named_images(data)
    with learner.scaled(scale):
        arrays = {"features": learner.image_embeds(data).cpu().numpy()}
        if has_text(learner.clip):
            arrays["text_embeds"] = learner.text_embeds(data.class_names).detach().cpu().numpy()
    images = [data.item_name(index) for index in range(len(data))]
    return arrays | {
        "labels": data.labels,
        "class_names": np.array(data.class_names),
        "image_names": np.array(images),
    }
