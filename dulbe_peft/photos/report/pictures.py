"""What people look at in a finished run's folder: plots, and small pictures of test images."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm.auto import tqdm

from dulbe_peft.data.decoding import to_rgb
from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, ImageResult, read_predictions
from dulbe_peft.photos.report.html import jpeg_address
from dulbe_peft.photos.report.nearest import Neighbours, neighbours
from dulbe_peft.photos.report.plots import plot_matrix, plot_results
from dulbe_peft.photos.report.run_folder import PICTURES_FOLDER, PICTURES_INDEX
from dulbe_peft.utils.files import replacing, write_json
from dulbe_peft.utils.folders import commit_folder

EXAMPLES = 12  # mistakes
OF_A_CLASS, OF_ALL_CLASSES = 3, 300
SIDE = 160  # pixels; a page shows them at half the size and enlarges them on a click


def write_pictures(
    run: str | Path,
    tests: Sequence[Any],
    results: dict[str, Any],
    left_out: Sequence[str] = (),
    learner: ClassIncrementalLearner | None = None,
    trains: Sequence[Any] = (),
    task_names: Sequence[str] = (),
) -> None:
    """Write `accuracy.png`, `tasks.png` and `pictures/` into a run's folder, where its stream had test data.

    `tests` are the tasks' test data, `left_out` sentences about files that are no part of the data. With the `learner`
    the pictures say which test images it has learned, too; with `trains`, also which training image is nearest.
    `task_names` are what the report calls the tasks in place of their numbers.
    """
    output = Path(run)
    for name, plot in (("accuracy.png", plot_results), ("tasks.png", plot_matrix)) if "classifiers" in results else ():
        with replacing(output / name) as temporary:
            plot(results, temporary)
    if (output / PREDICTIONS_FILE).is_file():
        examples = choose_examples(read_predictions(output / PREDICTIONS_FILE))
        found = Neighbours() if learner is None else neighbours(learner, trains, tests)
        write_examples(output / PICTURES_FOLDER, examples, tests, left_out, found, task_names)


def choose_examples(rows: Sequence[ImageResult]) -> dict[str, list[ImageResult]]:
    """The surest mistakes of the first classifier, in that order, and a few of each class."""
    classes: dict[str, list[ImageResult]] = {}
    for row in rows:
        classes.setdefault(row.true, []).append(row)
    few = max(1, min(OF_A_CLASS, OF_ALL_CLASSES // max(len(classes), 1)))
    return {
        "mistakes": sorted((row for row in rows if not row.right), key=lambda row: -row.probability)[:EXAMPLES],
        "classes": [row for own in classes.values() for row in own[:: -(-len(own) // few)]],
    }


def write_examples(
    folder: Path,
    examples: Mapping[str, list[ImageResult]],
    tests: Sequence[Any],
    left_out: Sequence[str] = (),
    found: Neighbours | None = None,
    task_names: Sequence[str] = (),
) -> None:
    """Write small JPEG files and an index of what they show, without images that are gone or are no PIL images."""
    found = found or Neighbours()
    index: dict[str, Any] = {"left_out": list(left_out), "copies": [copy.model_dump() for copy in found.copies]}
    index["task_names"] = list(task_names)
    pictures: dict[str, Image.Image] = {}
    opened = [None if test is None else labelled_images(test) for test in tests]

    def kept(images: LabelledImages | None, row: int, file: str) -> bool:
        try:
            image = None if images is None else images[row]["image"]
        except (OSError, ValueError):  # deleted or damaged since it was tested
            return False
        if isinstance(image, Image.Image):
            pictures[file] = thumbnail(image)
        return file in pictures

    for kind, rows in examples.items():
        index[kind] = []
        for number, row in enumerate(rows, 1):
            file = f"{kind}-{number:02d}.jpg"
            if not kept(opened[row.task - 1], row.position, file):
                continue
            what = {"image": row.image, "class": row.true, "predicted": row.predicted}
            index[kind].append({"file": file, "probability": row.probability, **what})
            near = found.nearest.get((row.task, row.position)) if kind == "mistakes" else None
            if near is not None and kept(*near, f"nearest-{number:02d}.jpg"):
                images, place = near
                name = {"image": images.item_name(place), "class": images.class_names[images.labels[place]]}
                index[kind][-1]["nearest"] = {"file": f"nearest-{number:02d}.jpg", **name}

    def write(temporary: Path) -> None:
        for name, picture in pictures.items():
            picture.save(temporary / name, "JPEG", quality=80)
        write_json(temporary / PICTURES_INDEX, index)

    try:
        if pictures or left_out or found.copies:
            commit_folder(folder, "pictures", write)
    except FileExistsError as error:  # a folder of somebody's own; the run itself is finished and whole
        tqdm.write(f"no pictures of examples: {error}")


def as_address(picture: Image.Image) -> str:
    """A small picture as an address that holds it, for a page of one file."""
    packed = io.BytesIO()
    picture.save(packed, "JPEG", quality=80)
    return jpeg_address(packed.getvalue())


def thumbnail(image: Image.Image) -> Image.Image:
    """The image in RGB, at most 160 pixels wide and high; a tiny one is enlarged, so that its pixels can be seen."""
    picture = to_rgb(image)
    factor = SIDE // max(picture.size)
    if factor > 1:
        width, height = picture.size
        return picture.resize((width * factor, height * factor), Image.Resampling.NEAREST)
    picture = picture.copy()  # or the user's own image would shrink
    picture.thumbnail((SIDE, SIDE))
    return picture


def picture(images: LabelledImages, index: int) -> str:
    """An image as a small one that a page holds."""
    return as_address(thumbnail(images.image(index)))
