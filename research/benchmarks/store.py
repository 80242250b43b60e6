"""Measure the feature store: how often commands encode an image, the cost of a second run, and a million rows.

The commands are `run` on photographs, the same `run` again, and `learn` with a fifth as many new photographs. The
benchmark counts the images that are encoded. The commands run in this process, so CPU seconds do not include imports.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.data.store import VARIABLE, EncoderKey, FeatureStore
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.photos.commands.main import main as dulbe_peft
from research.benchmarks import common, models
from research.benchmarks.prediction import SIZE

CLASSES = 20


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=1)
    options.add_argument("--photographs", type=int, default=1000)
    options.add_argument("--rows", type=int, default=1_000_000)
    values = common.parse(options, argv)
    if values.quick:
        values.photographs, values.rows = 200, 300
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = str(Path(folder, "features.sqlite"))
        rows = _commands(values, Path(folder))
        rows += _million(values.rows, Path(folder, "million.sqlite"))
        common.write("store", values, argv, rows)


def _commands(values: Any, folder: Path) -> list[dict[str, Any]]:
    """Return the rows about `run`, a second `run`, and `learn`."""
    clip, processor = models.clip(values.model, "eager")
    clip.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    count, more = values.photographs, values.photographs // 5
    files = common.photographs(_made(folder / "files"), count + more, SIZE)
    for number, file in enumerate(files):
        month, split = (
            ("june", "test" if number // CLASSES % 5 == 4 else "train") if number < count else ("july", "train")
        )
        place = _made(folder / month / split / f"thing {number % CLASSES}")
        os.link(file, place / Path(file).name)
    counts, read = Counter[bytes](), PixelDataset.__getitem__

    def counted(self: PixelDataset, index: int) -> Any:
        item = read(self, index)
        counts[item[3]] += 1
        return item

    run = [
        "run",
        "--model",
        folder / "model",
        "--data",
        folder / "june",
        "--device",
        "cpu",
        "--no-progress",
        "--output",
    ]
    learn = ["learn", folder / "one", "--data", folder / "july", "--device", "cpu", "--no-progress", "--output"]
    seconds = {}
    PixelDataset.__getitem__ = counted  # type: ignore[method-assign]
    try:
        for name, words in {"run": [*run, "one"], "again": [*run, "two"], "learn": [*learn, "three"]}.items():
            words[-1] = folder / str(words[-1])
            started = time.process_time()
            with redirect_stdout(StringIO()):
                assert dulbe_peft([str(word) for word in words]) == 0
            seconds[name] = time.process_time() - started
    finally:
        PixelDataset.__getitem__ = read  # type: ignore[method-assign]
    where = f"{common.model_name(values.model)}, {count} photographs"
    times = max(counts.values())
    return [
        common.value_row(f"images encoded by run, run again and learn with {more}, {where}", len(counts), "images"),
        common.value_row("how often the most frequent of them was", times, "times", "1"),
        common.value_row("first run", common.rounded(seconds["run"]), "CPU seconds"),
        common.value_row("second run / first run", common.rounded(seconds["again"] / seconds["run"]), "CPU", "0.1"),
        common.value_row(f"learn with {more} new ones", common.rounded(seconds["learn"]), "CPU seconds"),
    ]


def _million(rows: int, path: Path) -> list[dict[str, Any]]:
    """Return the rows about a large store."""
    store, key = FeatureStore(path), EncoderKey("encoder", "float32", "torch")
    random, width, chosen = np.random.default_rng(0), 512, list[bytes]()
    for start in range(0, rows, 10_000):
        contents = [random.bytes(32) for _ in range(min(10_000, rows - start))]
        store.put(key, contents, random.normal(size=(len(contents), width)).astype(np.float32))
        chosen += contents[:: max(1, rows // 10_000)]
    chosen = chosen[:10_000]
    started = time.perf_counter()
    assert len(store.get(key, chosen)) == len(chosen)
    seconds = time.perf_counter() - started
    count, size = store.facts()
    return [
        common.value_row(
            f"look-up of {len(chosen)} of {count} features of width {width}", common.rounded(seconds), "s", "1"
        ),
        common.value_row(f"a row of a store of {count}, width {width}", common.rounded(size / count), "bytes"),
    ]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
