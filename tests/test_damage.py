"""Damaged files of every kind that is read: refused by an error that names the file, or usable; never a long wait.

The plain suite damages some files of each kind. `DULBE_PEFT_DAMAGES=10000` damages so many in all.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damages import damaged
from lives import images_of, learned, stream, tiny_base, tiny_learner
from PIL import Image, features

from dulbe_peft import BridgeEnsembleHead, CheckpointError, ClassIncrementalLearner, ImageFolder, OccupationStatistics
from dulbe_peft.commands.main import main
from dulbe_peft.data.decoding import image_problem
from dulbe_peft.report import write_report
from dulbe_peft.utils.folders import MANIFEST, json_sha256, read_manifest

DAMAGES = int(os.environ.get("DULBE_PEFT_DAMAGES", "0"))
REFUSED = (ValueError, TypeError, OSError, CheckpointError)
PROBES = [image for image, _ in images_of(0, 1, seed=99)]
MACHINE = {"device": "cpu", "progress": False}
SECONDS, BYTES = 60, 2**30  # what one file may take


@dataclass
class Kind:
    """Files of a kind, the folder that they lie in, and what reads it and uses what it read."""

    root: Path
    files: list[str]
    read: Callable[[Path, Path], object]
    seals: bool = False  # whether a manifest above the file is made to fit it

    def cases(self, count: int, chance: random.Random) -> Iterator[tuple[str, bytes]]:
        for _ in range(count):
            name = chance.choice(self.files)
            yield name, damaged((self.root / name).read_bytes(), chance)


def seal(folder: Path, name: str) -> None:
    """Make the manifest fit a changed file, as somebody does who forges one."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    content = (folder / name).read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": json_sha256(manifest)}))


def load(folder: Path, _: Path) -> None:
    learner = ClassIncrementalLearner.from_pretrained(folder, copy.deepcopy(tiny_base()[0]), machine=MACHINE)
    if learner.tasks:
        for row in learner.predict(PROBES, top_k=1, return_scores=True):
            assert 0 <= row[0][1] <= 1
    if not learner.state.incomplete and "a1" not in learner.class_names and learner.tasks:
        learner.learn_task(images_of(0, 0, seed=1), ["a1"])


def go_on(folder: Path, _: Path) -> None:
    tiny_learner("frozen", ("bridge",)).run(stream(2), folder)


def report(folder: Path, _: Path) -> None:
    write_report([folder], folder / "report.html")


def head(folder: Path, _: Path) -> None:
    made = BridgeEnsembleHead.from_pretrained(folder)
    assert torch.isfinite(made(torch.ones(1, made.embed_dim))).all()


def statistics(_: Path, file: Path) -> None:
    assert all(torch.isfinite(matrix).all() for matrix in OccupationStatistics.load(file).values())


def image(folder: Path, file: Path) -> None:
    image_problem(str(file))
    photos = ImageFolder(folder)
    place = [path.name for path in sorted((folder / "a").iterdir())].index(file.name)
    assert photos[place]["image"].mode == "RGB"


def command(folder: Path, _: Path) -> None:
    code = main(["run", "--config", str(folder / "run.yaml"), "--dry-run"])
    if code:
        raise ValueError(str(folder))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory, digit_folders) -> dict[str, Kind]:
    root = tmp_path_factory.mktemp("whole")
    learner = learned(tiny_learner(classifiers=("bridge", "lda", "ridge")), 1)
    learner.save_pretrained(root / "learner")
    (root / "alone").mkdir()
    learner.memory.save(root / "alone" / "S.safetensors")
    learner.head.save_pretrained(root / "head")
    for name in ("run", "told"):
        tiny_learner("frozen", ("bridge",)).run(stream(1), root / name, source={"data": "x"})
    saved = [path.relative_to(root / "learner").as_posix() for path in (root / "learner").rglob("*") if path.is_file()]
    (root / "images" / "a").mkdir(parents=True)
    chance = np.random.default_rng(0)
    pixels = Image.fromarray(chance.integers(0, 255, (24, 20, 3), dtype=np.uint8))
    kinds = ["JPEG", "PNG", "BMP", "GIF", "TIFF"] + [k for k in ("WEBP", "AVIF") if features.check(k.lower())]
    for kind in kinds:
        pixels.save(root / "images" / "a" / f"x.{kind.lower()}", kind)
    (root / "settings").mkdir()
    (root / "settings" / "order.txt").write_text("one\nzero\n")
    (root / "settings" / "run.yaml").write_text(
        f"model: {root / 'none'}\ndata: {digit_folders(2, 2, 1)}\noutput: {root / 'x'}\nincrement: 1\nepochs: 2\n"
        f"class_order: {root / 'settings' / 'order.txt'}\ntarget_modules: [fc1, fc2]\nlearning_rate: 1.0e-3\n"
    )
    task = "task-001"
    return {
        "learner": Kind(root / "learner", [name for name in saved if name != MANIFEST], load, seals=True),
        "manifest": Kind(root / "learner", [MANIFEST], lambda folder, _: read_manifest(folder)),
        "statistics": Kind(root / "alone", ["S.safetensors"], statistics),
        "head": Kind(root / "head", ["head.safetensors", "head_config.json"], head),
        "run": Kind(
            root / "run",
            [f"{task}/{name}" for name in ("progress.json", "data.json", "learner.json", "head_config.json", MANIFEST)]
            + ["results.json", "timings.json", "sources.json"],
            go_on,
            seals=True,
        ),
        "report": Kind(
            root / "told",
            [f"{task}/{name}" for name in ("progress.json", "predictions.csv", "learner.json", MANIFEST)]
            + ["results.json", "timings.json"],
            report,
            seals=True,
        ),
        "image": Kind(root / "images", [f"a/{path.name}" for path in (root / "images" / "a").iterdir()], image),
        "settings": Kind(root / "settings", ["run.yaml", "order.txt"], command),
    }


# How many files of each kind in a thousand: the slower to read, the fewer.
SHARES = {
    "learner": 160, "manifest": 100, "statistics": 80, "head": 100, "run": 60, "report": 80, "image": 380,
    "settings": 40,
}  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """A block that may not hang."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"it takes more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_refused_by_name_or_usable(kinds, name, tmp_path, capsys):
    kind, folder, wrong = kinds[name], tmp_path / "copy", []
    chance = random.Random(name if not DAMAGES else f"{name} {DAMAGES}")
    shutil.copytree(kind.root, folder)
    kind.read(folder, folder / kind.files[0]) if name != "settings" else None
    count = max(5, (DAMAGES or 120) * SHARES[name] // 1000)
    for number, (file, content) in enumerate(kind.cases(count, chance)):
        shutil.rmtree(folder)
        shutil.copytree(kind.root, folder)
        (folder / file).write_bytes(content)
        if kind.seals and Path(file).name != MANIFEST and "/" in file + "/":
            inner = folder / Path(file).parts[0] if (folder / Path(file).parts[0] / MANIFEST).is_file() else folder
            if (inner / MANIFEST).is_file():
                seal(inner, (folder / file).relative_to(inner).as_posix())
        before = peak()
        try:
            with bounded():
                kind.read(folder, folder / file)
        except REFUSED as error:
            # Weights may be finite, and so large that what follows from them is not; a tokenizer may fail over
            # some texts alone. Both show when they are used.
            used = re.search(r"\bnan\b|infinity|the tokenizer cannot read", str(error), re.IGNORECASE)
            if not used and not any(part in str(error) for part in (str(folder), Path(file).name)):
                wrong.append((number, file, "names no file", repr(error)[:300]))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong.append((number, file, repr(error)[:300]))
        said = capsys.readouterr().err
        if "Traceback" in said:
            wrong.append((number, file, said[-300:]))
        if peak() - before > BYTES:
            wrong.append((number, file, f"{peak() - before} bytes"))
    assert not wrong


def test_a_tokenizer_that_fails_over_some_texts_says_over_which(kinds, tmp_path):
    folder = shutil.copytree(kinds["learner"].root, tmp_path / "learner")
    config = folder / "processor" / "tokenizer_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"unk_token": "no such word"}))
    seal(folder, "processor/tokenizer_config.json")
    learner = ClassIncrementalLearner.from_pretrained(folder, copy.deepcopy(tiny_base()[0]), machine=MACHINE)
    with pytest.raises(ValueError, match=r"the tokenizer cannot read one of the prompts .*\u2603"):
        learner.text_embeds(["\u2603"])
