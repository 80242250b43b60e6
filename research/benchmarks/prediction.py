"""Compare `learner.predictions` on JPEG photographs with the zero-shot pipeline of transformers.

Both use the same model, files, class names and cores. The learner is frozen and has the text classifier, so both must
give the same answers, which is checked. The pipeline is run as in its documentation and also with batches. The learner
reads files in worker processes, as the command `predict` does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import CLIPImageProcessorPil, pipeline

from dulbe_peft import ClassIncrementalLearner, LearnerArguments
from research.benchmarks import common, models

PROMPT = "a photo of a {}."
SIZE = (640, 480)


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3)
    options.add_argument("--photographs", type=int, default=1000)
    options.add_argument("--classes", type=int, default=20)
    options.add_argument("--batch", type=int, default=64)
    options.set_defaults(threads=os.cpu_count())
    values = common.parse(options, argv)
    if values.quick:
        values.photographs, values.classes = 4, 2
    clip, processor = models.clip(values.model, "sdpa")
    if values.model in models.SIZES:  # these have the demo's processor, which is for images of another size
        side = clip.config.vision_config.image_size
        processor.image_processor = CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )
    with tempfile.TemporaryDirectory() as folder:
        files = common.photographs(Path(folder), values.photographs, SIZE)
        names = [f"thing {number}" for number in range(values.classes)]
        workers = 0 if values.quick else min(8, os.cpu_count() or 1)
        sides = {
            "learner": ours(clip, processor, names, files, values.batch, workers),
            "pipeline": stock(clip, processor, names, files, 1),
            "pipeline with batches": stock(clip, processor, names, files, values.batch),
        }
        answers = [side() for side in sides.values()]
        if not answers[0] == answers[1] == answers[2]:
            raise AssertionError("the learner and the pipeline give different answers")
        times = common.compare(sides, values.repeats, warmup=0)
    where = f"{common.model_name(values.model)}, {values.photographs} photographs, {values.classes} classes"
    rows = [
        common.row(f"predict / zero-shot pipeline, {where}", times, "learner", "pipeline", 0.5),
        common.row(f"predict / zero-shot pipeline in batches, {where}", times, "learner", "pipeline with batches"),
    ]
    for row in rows:
        del row["ratio"]["cpu"]  # CPU time would not include the worker processes that read files
    common.write("prediction", values, argv, rows)


def ours(
    clip: Any, processor: Any, names: list[str], files: list[str], batch: int, workers: int
) -> Callable[[], list[str]]:
    args = LearnerArguments(
        device="cpu", progress=False, prompt_template=PROMPT, eval_batch_size=batch, num_workers=workers
    )
    learner = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen", classifiers="text")
    images = [(Image.new("RGB", (8, 8), (number, 0, 0)), number) for number in range(len(names))]
    learner.learn_task(images, names)
    return lambda: [row.classes[0] for row in learner.predictions(files)]


def stock(clip: Any, processor: Any, names: list[str], files: list[str], batch: int) -> Callable[[], list[str]]:
    classify: Any = pipeline(
        "zero-shot-image-classification",
        model=clip,
        tokenizer=processor.tokenizer,
        image_processor=processor.image_processor,
        device="cpu",
    )
    settings = {"candidate_labels": names, "hypothesis_template": PROMPT, "batch_size": batch}
    return lambda: [answer[0]["label"] for answer in classify(files, **settings)]


if __name__ == "__main__":
    main()
