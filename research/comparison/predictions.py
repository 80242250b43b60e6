"""Read what each row of a comparison predicted for each test image, as a pandas DataFrame."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, read_predictions
from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.files import replacing
from research.comparison.cells import read_answers, read_cell
from research.comparison.comparison_file import read_comparison
from research.comparison.plan import Cell, Row
from research.comparison.summary import read_row

if TYPE_CHECKING:
    import pandas

# Columns of names. Each is a categorical, because a table can have millions of rows.
_NAMES = ("stream", "method", "classifier", "drift", "image", "class", "predicted")


def comparison_predictions(folder: str | os.PathLike[str]) -> "pandas.DataFrame":
    """Return a row for each test image, after each task, of each seed and row of a comparison.

    Columns: `stream`, `method`, `classifier`, `drift`, `seed`; `task`, the number of the task, from 1, after which the
    image was classified; `image`, its name; `image_task`, the task to which it belongs; `class` and `predicted`; and
    `probability`, of the predicted class. Runs that are not finished are missing.

    Raises:
        ImportError: pandas is not installed.
        FileNotFoundError: The folder holds no comparison.

    Example:
        >>> table = comparison_predictions("family")  # doctest: +SKIP
        >>> last = table[table.task == table.image_task.max()]  # doctest: +SKIP
        >>> (last["class"] == last.predicted).groupby(last.method).mean()  # doctest: +SKIP
    """
    with installed("a table of predictions", "datasets"):
        import pandas

    output, comparison = Path(folder), read_comparison(Path(folder))
    chosen = {(entry.stream, entry.row): entry.chosen for entry in comparison.entries}
    codes: dict[str, dict[str, int]] = {name: {} for name in _NAMES}
    blocks: list[dict[str, np.ndarray]] = []
    for cell, rows in comparison.scope.cells(chosen):
        for row in rows:
            for block in _blocks(output / cell.folder, row, cell):
                size = len(block["task"])
                for name, known in codes.items():
                    values = block[name] if isinstance(block[name], list) else [block[name]] * size
                    block[name] = np.array([known.setdefault(value, len(known)) for value in values], np.int32)
                blocks.append(block)
    columns = [*_NAMES[:4], "seed", "task", "image", "image_task", "class", "predicted", "probability"]
    joined: dict[str, Any] = {name: np.concatenate([block[name] for block in blocks] or [[]]) for name in columns}
    for name, known in codes.items():
        joined[name] = pandas.Categorical.from_codes(joined[name].astype(np.int32), list(known))
    return pandas.DataFrame(joined)


def _blocks(folder: Path, row: Row, cell: Cell) -> Iterator[dict[str, Any]]:
    """Yield the columns of a row of a cell after each task; a name stands for a column of equal names."""
    if read_row(folder, row, cell) is None:
        return
    done = read_cell(folder)
    assert done is not None
    answers, facts = read_answers(folder, row, done)
    images = read_predictions(folder / PREDICTIONS_FILE)
    names = facts.class_names
    if [image.true for image in images] != [names[label] for label in answers[-1].truth.tolist()]:
        raise ValueError(f"{folder / PREDICTIONS_FILE} does not list the test images of this run; remove {folder}")
    for number, answer in enumerate(answers, 1):
        size = len(answer.truth)
        yield {
            "stream": cell.stream,
            "method": row.method,
            "classifier": row.classifier,
            "drift": row.drift,
            "seed": np.full(size, cell.seed),
            "task": np.full(size, number),
            "image": [image.image for image in images[:size]],
            "image_task": answer.task.numpy(),
            "class": [names[label] for label in answer.truth.tolist()],
            "predicted": [names[label] for label in answer.predicted.tolist()],
            "probability": answer.probability.numpy(),
        }


def write_predictions(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write the table of `comparison_predictions` as a parquet file."""
    table = comparison_predictions(folder)
    with installed("--predictions", "datasets"), replacing(Path(path)) as temporary:
        table.to_parquet(temporary, index=False)
