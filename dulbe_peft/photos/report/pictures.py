"""Write plots, and small pictures of test images, into the folder of a finished run.

Test images that the learner has also learned are found, and the training image nearest to each mistake.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm.auto import tqdm

from dulbe_peft.data.decoding import to_rgb
from dulbe_peft.data.glance import as_jpeg, thumbnail
from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, ImageResult, read_predictions
from dulbe_peft.metrics.results import Results
from dulbe_peft.photos.data.inventory import ALIKE
from dulbe_peft.photos.data.looking import NEAR, picture_of
from dulbe_peft.photos.report.html import jpeg_address
from dulbe_peft.photos.report.plots import plot_matrix, plot_results
from dulbe_peft.photos.report.run_folder import PICTURES_FOLDER, PICTURES_INDEX, Copy
from dulbe_peft.photos.report.shares import divided, item_of
from dulbe_peft.utils.files import replacing, write_json
from dulbe_peft.utils.folders import commit_folder
from dulbe_peft.utils.processes import world

EXAMPLES = 12  # pictures of mistakes
OF_A_CLASS, OF_ALL_CLASSES = 3, 300  # pictures of test images at most
VIEWS = 3  # further photographs of an item beside a mistake
_MOST = 100_000  # training images whose features are held in memory at once
_ALIKE = 0.9  # cosine similarity above which the pixels of two images are compared


@dataclass
class Neighbours:
    """Test images that were also learned, and the training image nearest to each test image, as data and index.

    The key of a test image is the number of its task, from 1, and its position in it.
    """

    copies: list[Copy] = field(default_factory=list)
    nearest: dict[tuple[int, int], tuple[LabelledImages, int]] = field(default_factory=dict)


def find_neighbours(learner: ClassIncrementalLearner, trains: Sequence[object], tests: Sequence[object]) -> Neighbours:
    """Compare the test images of all tasks with the images that were learned.

    Identical files are found among all images that were ever learned. Near copies and nearest neighbours are found
    only among `trains`, and only if the model was not trained, because they need the features in the store.
    """
    result, learned, encoder = Neighbours(), learner.state.known.class_of(), learner.encoder
    parts = [labelled_images(train) for train in trains]
    train = [(part, index) for part in parts for index in range(len(part))]

    def embeds(images: LabelledImages) -> torch.Tensor:
        return encoder.dataset_embeds(encoder.images(images))

    features = None
    # With several processes, only one of them writes pictures, and it cannot encode images without the others.
    if not encoder.adapted and encoder.store is not None and 0 < len(train) <= _MOST and world()[1] == 1:
        features = torch.cat([embeds(part) for part in parts])
    for number, test in enumerate(tests, 1):
        if test is None:
            continue
        images = labelled_images(test)
        near = [(0.0, 0)] * len(images)  # cosine similarity and index of the nearest training image
        if features is not None:
            best = [(part @ features.T).max(dim=1) for part in embeds(images).split(1024)]
            near = [pair for top in best for pair in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
            result.nearest |= {(number, position): train[where] for position, (_, where) in enumerate(near)}
        for position, (content, (cosine, where)) in enumerate(zip(images.contents(), near, strict=True)):
            if content is not None and content in learned:
                result.copies.append(Copy(task=number, position=position, how=ALIKE[0], of=learned[content]))
            elif cosine > _ALIKE and picture_of(images, position).grey @ picture_of(*train[where]).grey > NEAR:
                of, row = train[where]
                copy = Copy(task=number, position=position, how=ALIKE[2], of=of.class_names[of.labels[row]])
                result.copies.append(copy)
    return result


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
    classes = divided(rows, lambda row: row.true)
    few = max(1, min(OF_A_CLASS, OF_ALL_CLASSES // max(len(classes), 1)))
    return {
        "mistakes": [*mistakes.values()][:EXAMPLES],
        "classes": [row for members in classes.values() for row in members[:: -(-len(members) // few)]],
    }


def _item(row: ImageResult) -> object:
    """Return what photographs of the same item, with the same label, have in common."""
    return item_of(row), row.true


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
    items = divided(predictions, _item)
    copies = [copy.model_dump() for copy in neighbours.copies]
    index: dict[str, Any] = {"left_out": [*map(_escaped, left_out)], "copies": copies, "task_names": [*task_names]}
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
