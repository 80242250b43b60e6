"""What people look at in a finished run's folder: plots, and pictures of examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm.auto import tqdm

from dulbe_peft.data.decoding import to_rgb
from dulbe_peft.data.images import labelled_images
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, ImageResult, read_predictions
from dulbe_peft.report.plots import plot_matrix, plot_results
from dulbe_peft.report.run_folder import PICTURES_FOLDER, PICTURES_INDEX
from dulbe_peft.utils.files import replacing, write_json
from dulbe_peft.utils.folders import commit_folder

ACCURACY_PLOT = "accuracy.png"
MATRIX_PLOT = "tasks.png"
EXAMPLES = 12  # of each kind
SIDE = 96  # pixels


def write_pictures(run: str | Path, tests: Sequence[Any], results: dict[str, Any]) -> None:
    """Write `accuracy.png`, `tasks.png` and `pictures/` into a run's folder, where its stream had test data.

    `tests` are the test data of every task, or None; `results` is what `ClassIncrementalLearner.run` returned.
    """
    output = Path(run)
    if "classifiers" in results:
        with replacing(output / ACCURACY_PLOT) as temporary:
            plot_results(results, temporary)
        with replacing(output / MATRIX_PLOT) as temporary:
            plot_matrix(results, temporary)
    if (output / PREDICTIONS_FILE).is_file():
        _write_examples(output / PICTURES_FOLDER, choose_examples(read_predictions(output / PREDICTIONS_FILE)), tests)


def choose_examples(rows: Sequence[ImageResult]) -> dict[str, list[ImageResult]]:
    """The most confident mistakes and the least confident hits of the first classifier, each in that order."""
    mistakes = sorted((row for row in rows if not row.right), key=lambda row: -row.probability)
    hits = sorted((row for row in rows if row.right), key=lambda row: row.probability)
    return {"mistakes": mistakes[:EXAMPLES], "hits": hits[:EXAMPLES]}


def _write_examples(folder: Path, examples: dict[str, list[ImageResult]], tests: Sequence[Any]) -> None:
    """Small JPEG files and an index of what they show; nothing where the images are gone, or are no PIL images."""
    index: dict[str, list[dict[str, Any]]] = {}
    pictures: dict[str, Image.Image] = {}
    for kind, rows in examples.items():
        index[kind] = []
        for number, row in enumerate(rows, 1):
            if tests[row.task - 1] is None:  # it was there when the task was tested
                return
            image = labelled_images(tests[row.task - 1])[row.position]["image"]
            if not isinstance(image, Image.Image):
                return
            file = f"{kind}-{number:02d}.jpg"
            pictures[file] = thumbnail(image)
            what = {"image": row.image, "class": row.true, "predicted": row.predicted, "probability": row.probability}
            index[kind].append({"file": file, **what})

    def write(temporary: Path) -> None:
        for name, picture in pictures.items():
            picture.save(temporary / name, "JPEG", quality=85)
        write_json(temporary / PICTURES_INDEX, index)

    try:
        commit_folder(folder, "pictures", write)
    except FileExistsError as error:  # a folder of somebody's own; the run itself is finished and whole
        tqdm.write(f"no pictures of examples: {error}")


def thumbnail(image: Image.Image) -> Image.Image:
    """The image in RGB, at most 96 pixels wide and high; a tiny one is enlarged, so that its pixels can be seen."""
    picture = to_rgb(image)
    factor = SIDE // max(picture.size)
    if factor > 1:
        width, height = picture.size
        return picture.resize((width * factor, height * factor), Image.Resampling.NEAREST)
    picture.thumbnail((SIDE, SIDE))
    return picture
