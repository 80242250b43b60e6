"""What a type checker finds in a user's script: mypy in strict mode, on the installed package."""

import re
import subprocess
import sys

import pytest

RIGHT = """
from pathlib import Path

import torch
from dulbe_peft import ClassIncrementalLearner
from PIL import Image


def use(learner: ClassIncrementalLearner, image: Image.Image, images: list[Image.Image], photos: Path) -> None:
    name: str = learner.predict(image)
    names: list[str] = learner.predict(images)
    print(name.upper(), [one.upper() for one in names])
    label, probability = learner.predict(image, return_scores=True)
    print(label.upper(), probability + 1)
    best: list[list[str]] = learner.predict(images, top_k=2)
    scored: list[tuple[str, float]] = learner.predict(image, top_k=2, return_scores=True)
    answer, novelty = learner.predict(image, return_novelty=True)
    print(answer.upper(), novelty + 1, best, scored)
    answers, novelties = learner.predict(images, top_k=2, return_novelty=True)
    print(answers[0][0].upper(), novelties[0] + 1)
    perhaps = learner.predict(image, reject=0.05)
    print("none of these" if perhaps is None else perhaps.upper())
    sets: list[list[str]] = learner.predict(images, coverage=0.9, only=names)
    either = learner.predict(photos)
    listed: list[str] = [either] if isinstance(either, str) else either
    tensors = learner.predict(torch.zeros(2, 3, 8, 8), return_scores=True)
    plain: str = learner.predict(image, top_k=None, return_scores=False)
    print(sets, listed, tensors, plain)
    figures = learner.evaluate(images, ["a"])
    accuracy: float = figures["accuracy"]
    print(accuracy, figures["classifiers"]["bayes"] + 1, figures.get("text_accuracy", 0.0) + 1)
"""
WRONG = """
from pathlib import Path

from dulbe_peft import BridgeEnsembleHead, ClassIncrementalLearner, LearnerArguments
from PIL import Image


def use(learner: ClassIncrementalLearner, image: Image.Image, images: list[Image.Image], photos: Path) -> None:
    number: int = learner.predict(image)
    name: str = learner.predict(images)
    learner.predict(image).append("cat")
    first: str = learner.predict(image, top_k=2)
    label: str = learner.predict(image, return_scores=True)
    scored: list[tuple[str, str]] = learner.predict(images, return_scores=True)
    best: list[str] = learner.predict(images, top_k=2, return_scores=True)
    answer: str = learner.predict(image, return_novelty=True)
    answers, novelties = learner.predict(images, return_novelty=True); novelties.upper()
    learner.predict(image, reject=0.05).upper()
    learner.predict(image, coverage=0.9).upper()
    learner.predict(photos).upper()
    learner.predict(image, top=2)
    learner.predict(image, top_k="2")
    learner.evaluate(images)["acuracy"]
    learner.evaluate(images)["accuracy"].upper()
    learner.evaluate(images)["text_accuracy"].upper()
    learner.evaluate(images)["classifiers"]["bayes"].upper()
    LearnerArguments(epochs="ten")
    BridgeEnsembleHead(64, bta=1.0)
"""


def errors_of(tmp_path, script):
    """Return the lines of a script in which `mypy --strict` finds errors."""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-dulbe_peft.*]\nfollow_imports = silent\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=mypy.ini",
        f"--cache-dir={tmp_path.parent}/cache",
        "script.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^script\.py:(\d+): error: (.*)", done.stdout, flags=re.MULTILINE)
    return {int(number): message for number, message in found}


@pytest.mark.slow
def test_type_checker_finds_each_planted_error_and_no_other(tmp_path):
    pytest.importorskip("mypy")
    assert errors_of(tmp_path, RIGHT) == {}
    lines = WRONG.splitlines()
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("def ")) + 1
    assert set(errors_of(tmp_path, WRONG)) == set(range(first, len(lines) + 1))
