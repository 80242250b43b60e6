"""Write plots, and small pictures of test images, into the folder of a finished run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm.auto import tqdm

from dulbe_peft.data.decoding import to_rgb
from dulbe_peft.data.glance import as_jpeg, thumbnail
from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, ImageResult, read_predictions
from dulbe_peft.metrics.results import Results
from dulbe_peft.photos.report.html import jpeg_address
from dulbe_peft.photos.report.nearest import Neighbours, find_neighbours
from dulbe_peft.photos.report.plots import plot_matrix, plot_results
from dulbe_peft.photos.report.run_folder import PICTURES_FOLDER, PICTURES_INDEX
from dulbe_peft.utils.files import replacing, write_json
from dulbe_peft.utils.folders import commit_folder

EXAMPLES = 12  # pictures of mistakes
OF_A_CLASS, OF_ALL_CLASSES = 3, 300  # pictures of test images at most
VIEWS = 3  # further photographs of an item beside a mistake


def write_pictures(
    run: str | Path,
    tests: Sequence[object],
    results: Results | Mapping[str, object],
    left_out: Sequence[str] = (),
    learner: ClassIncrementalLearner | None = None,
    trains: Sequence[object] = (),
    task_names: Sequence[str] = (),
) -> None:
    """Write `accuracy.png`, `tasks.png` and `pictures/` into a run's folder, if its stream had test data.

    Args:
        run: The folder of the run.
        tests: The test data of each task.
        results: What `run_stream` returned, or a record of it.
        left_out: Sentences about files that are not part of the data.
        learner: The learner, to mark test images that it has also learned.
        trains: The training data, to show the training image nearest to each mistake.
        task_names: Names that the report uses for the tasks instead of their numbers.
    """
    output, results = Path(run), Results.of(results)
    for name, plot in (("accuracy.png", plot_results), ("tasks.png", plot_matrix)) if results.classifiers else ():
        with replacing(output / name) as temporary:
            plot(results, temporary)
    if (output / PREDICTIONS_FILE).is_file():
        rows = read_predictions(output / PREDICTIONS_FILE)
        nearest = Neighbours() if learner is None else find_neighbours(learner, trains, tests)
        write_examples(output / PICTURES_FOLDER, choose_examples(rows), tests, left_out, nearest, task_names, rows)


def choose_examples(rows: Sequence[ImageResult]) -> dict[str, list[ImageResult]]:
    """Choose mistakes of the first classifier, most confident first, one of an item, and a few images of a class."""
    mistakes: dict[object, ImageResult] = {}
    for row in sorted((row for row in rows if not row.right), key=lambda row: -row.probability):
        mistakes.setdefault(_item(row), row)
    classes: dict[str, list[ImageResult]] = {}
    for row in rows:
        classes.setdefault(row.true, []).append(row)
    few = max(1, min(OF_A_CLASS, OF_ALL_CLASSES // max(len(classes), 1)))
    return {
        "mistakes": [*mistakes.values()][:EXAMPLES],
        "classes": [row for members in classes.values() for row in members[:: -(-len(members) // few)]],
    }


def _item(row: ImageResult) -> object:
    """Return what photographs of the same item, with the same label, have in common."""
    return (row.group, row.true) if row.group else (row.task, row.position)


def write_examples(
    folder: Path,
    examples: Mapping[str, list[ImageResult]],
    tests: Sequence[object],
    left_out: Sequence[str] = (),
    neighbours: Neighbours | None = None,
    task_names: Sequence[str] = (),
    predictions: Sequence[ImageResult] = (),
) -> None:
    """Write small JPEG files and an index that describes them; skip images that are missing or not PIL images.

    A mistake is shown with other photographs of its item among the `predictions`.
    """
    neighbours = neighbours or Neighbours()
    items: dict[object, list[ImageResult]] = {}
    for row in predictions if any(row.group for row in predictions) else ():
        items.setdefault(_item(row), []).append(row)
    index: dict[str, Any] = {
        "left_out": [*map(_escaped, left_out)],
        "copies": [copy.model_dump() for copy in neighbours.copies],
    }
    index["task_names"] = list(task_names)
    pictures: dict[str, bytes] = {}
    opened = [None if test is None else labelled_images(test) for test in tests]

    def keep(images: LabelledImages | None, row: int, file: str) -> bool:
        """Keep a small copy of an image as `file`; return whether this was possible."""
        try:
            small = None if images is None else small_jpeg(images, row)
        except (OSError, ValueError):  # deleted or damaged since it was tested
            return False
        if small is not None:
            pictures[file] = small
        return file in pictures

    for kind, rows in examples.items():
        index[kind] = []
        for number, row in enumerate(rows, 1):
            file = f"{kind}-{number:02d}.jpg"
            if not keep(opened[row.task - 1], row.position, file):
                continue
            shown = {"image": _escaped(row.image), "class": row.true, "predicted": row.predicted}
            index[kind].append({"file": file, "probability": row.probability, **shown})
            if kind != "mistakes":
                continue
            near, same = neighbours.nearest.get((row.task, row.position)), items.get(_item(row), [row])
            others = [other for other in same if other is not row][:VIEWS]
            views = [
                {"file": shown_as, "image": _escaped(other.image), "class": other.true}
                for place, other in enumerate(others, 1)
                if keep(opened[other.task - 1], other.position, shown_as := f"view-{number:02d}-{place}.jpg")
            ]
            mistaken = sum(not other.right for other in same)
            index[kind][-1] |= {"views": views, "photographs": len(same), "mistaken": mistaken}
            if near is not None and keep(*near, f"nearest-{number:02d}.jpg"):
                images, place = near
                name = {"image": _escaped(images.item_name(place)), "class": images.class_names[images.labels[place]]}
                index[kind][-1]["nearest"] = {"file": f"nearest-{number:02d}.jpg", **name}

    def write(temporary: Path) -> None:
        for name, picture in pictures.items():
            (temporary / name).write_bytes(picture)
        write_json(temporary / PICTURES_INDEX, index)

    try:
        if pictures or left_out or neighbours.copies:
            commit_folder(folder, "pictures", write)
    except FileExistsError as error:  # the user's own folder; the run itself is complete
        tqdm.write(f"no pictures of examples: {error}")


def _escaped(text: str) -> str:
    """Escape what is not UTF-8 in a path, because JSON cannot hold it."""
    return text.encode("utf-8", "backslashreplace").decode()


def small_jpeg(images: LabelledImages, index: int) -> bytes | None:
    """Return a JPEG at most 160 pixels wide and high of an image, or None if it is neither a file nor a PIL image."""
    if images.stored:
        return images.glance(index).picture
    image = images.image(index)
    return as_jpeg(thumbnail(to_rgb(image))) if isinstance(image, Image.Image) else None


def picture(images: LabelledImages, index: int) -> str:
    """Return a data URL with a small copy of an image, for a self-contained page."""
    small = small_jpeg(images, index)
    if small is None:
        raise TypeError(f"image {index} ({images.item_name(index)}) is not a picture")
    return jpeg_address(small)
