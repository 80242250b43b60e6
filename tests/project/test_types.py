"""What type checkers find in a user's script: mypy in strict mode, and pyright where it is installed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, text_of

RIGHT = """
from pathlib import Path

import numpy as np
import torch
from dulbe_peft import (
    BridgeEnsembleHead,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    OccupationStatistics,
    PooledBridgeHead,
    allocate_modes,
    bidirectional_kl,
    collect_statistics,
    cross_modal_loss,
    export_lora,
    load_clip,
    probe_gradients,
    route_gradients,
    run_stream,
)
from dulbe_peft.classifiers import CLASSIFIERS, LdaClassifier, make_classifier
from dulbe_peft.sklearn import FeatureClassifier, ImageClassifier
from dulbe_peft.streams.digits import digit_tasks
from peft import get_peft_model
from PIL import Image


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return batch.sum(), len(batch)


def train(x: torch.Tensor, labels: torch.Tensor) -> None:
    clip, processor = load_clip("demo")
    config = DualModeLoraConfig(residual_rank=4, support_rank=16, target_modules=["k_proj"], text_rank=2)
    model = get_peft_model(clip, config)
    statistics = OccupationStatistics()
    probe = probe_gradients(model, [x], loss_of)
    model.begin_task(probe, statistics)
    modes = allocate_modes(probe, statistics)
    print([bases.shared.shape for bases in modes.values()], probe["layer"].shape, statistics.nbytes + 1)
    route_gradients(model, cross_modal_loss(x, x, labels, 100.0), bidirectional_kl(x, x))
    model.fold_task(share=0.25)
    collect_statistics(model, [x], loss_of, into=statistics)
    export_lora(model, "exported")
    for head in (BridgeEnsembleHead(8, num_depths=10), PooledBridgeHead(8, logit_scale=50.0)):
        head.add_classes(["cat", "dog"], x, labels, x)
        print(head(x).argmax(dim=1).tolist(), head.visual_prototypes.shape, head.reliability.shape)
    lda = make_classifier("lda:shrinkage=0.1", 8, 100.0)
    print(lda.probabilities(x).shape, LdaClassifier(8, shrinkage="oas").counts.tolist(), CLASSIFIERS["lda"].name)
    args = LearnerArguments(epochs=2, drift="none", update_share="auto", precision="bfloat16")
    learner = ClassIncrementalLearner(model, processor, args=args, strategy="dulbe", classifiers=("bridge", lda))
    tasks = digit_tasks(increment=5)
    learner.learn_task(tasks[0].train, groups=["june"])
    print(learner.estimate()["lda"].share + 1, learner.classifiers["lda"].doubt.upper(), learner.tasks[0][0].upper())
    run_stream(learner, tasks, "out")
    learner.save_pretrained("learner")
    again: ClassIncrementalLearner = ClassIncrementalLearner.from_pretrained("learner")
    estimator: FeatureClassifier = FeatureClassifier("bayes").fit(np.zeros((2, 2)), np.zeros(2))
    photographs: ImageClassifier = ImageClassifier("demo").partial_fit(["a.jpg"], ["cat"])
    print(again, estimator, photographs)


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

import numpy as np
import torch
from dulbe_peft import (
    BridgeEnsembleHead,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    DualModeTrainer,
    LearnerArguments,
    OccupationStatistics,
    PooledBridgeHead,
    allocate_modes,
    bidirectional_kl,
    collect_statistics,
    cross_modal_loss,
    load_clip,
    paper_arguments,
    probe_gradients,
    route_gradients,
    run_stream,
    slerp,
)
from dulbe_peft.classifiers import CLASSIFIERS, LdaClassifier, make_classifier
from dulbe_peft.sklearn import FeatureClassifier, ImageClassifier
from dulbe_peft.streams.digits import digit_tasks
from peft import get_peft_model
from PIL import Image


def loss_alone(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return batch.sum()


clip, processor = load_clip("demo")
model = get_peft_model(clip, DualModeLoraConfig())
x, statistics, tasks = torch.zeros(2, 8), OccupationStatistics(), digit_tasks()
head, lda = BridgeEnsembleHead(8), LdaClassifier(8)


def wrong(learner: ClassIncrementalLearner, image: Image.Image, images: list[Image.Image], photos: Path) -> None:
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
    LearnerArguments(drift="maybe")
    LearnerArguments(update_share=None)
    ClassIncrementalLearner(model, processor, classifier="lda")
    ClassIncrementalLearner(model, processor, args={"epochs": 2})
    learner.save_pretrained(5)
    learner.estimate()["bayes"].shares
    learner.train_task()
    load_clip(5)
    get_peft_model(clip, "dual_mode")
    DualModeLoraConfig(shared_rank="1")
    DualModeLoraConfig(r=8)
    DualModeLoraConfig(lora_dropout=0.1)
    DualModeLoraConfig(target_modules=5)
    probe_gradients(model, [x], loss_alone)
    allocate_modes({"layer": x}, statistics, rank=8)
    allocate_modes({"layer": x}, statistics)["layer"].shared_capture.shape
    route_gradients(model, 0.5)
    route_gradients(model, x, x, structure_weights=0.5)
    collect_statistics(model, [x], loss_alone)
    cross_modal_loss(x, x, x, "100")
    bidirectional_kl(x, x, temperature=5.0)
    BridgeEnsembleHead(64, bta=1.0)
    BridgeEnsembleHead(64, depths="0.5")
    PooledBridgeHead(64, logit_scale="100")
    LdaClassifier(64, shrinkge=0.1)
    LdaClassifier(64, shrinkage="0.1")
    make_classifier("lda", "64", 100.0)
    CLASSIFIERS["lda"].nme
    head.add_classes(["owl"], x, x, text=x)
    head(x).upper()
    head.reliability.upper()
    head.visual_prototypes.upper()
    lda(x).upper()
    lda.counts.upper()
    slerp(x, x)
    run_stream(learner, tasks, 5)
    run_stream(learner, tasks, "out").upper()
    DualModeTrainer(model, {"epochs": 1})
    DualModeTrainer(model, paper_arguments("out")).learner.upper()
    paper_arguments(5)
    FeatureClassifier(5)
    FeatureClassifier().fit(np.zeros((2, 2)))
    ImageClassifier("demo", prompt="a photo of a {}.")
"""


STRICT = """
[[tool.mypy.overrides]]
module = ["right", "wrong"]
check_untyped_defs = true
disallow_any_generics = true
disallow_incomplete_defs = true
disallow_subclassing_any = true
disallow_untyped_calls = true
disallow_untyped_decorators = true
extra_checks = true
strict_equality = true
warn_return_any = true
"""


def errors_of_mypy(folder):
    """Return the files and lines in which mypy finds errors, with the flags of `--strict` for them alone.

    All other modules have the settings of `mypy dulbe_peft`, so that what it has read is not read again. If another
    mypy is just writing it, a cache of its own does.
    """
    (folder / "mypy.toml").write_text(text_of("pyproject.toml") + STRICT, encoding="utf-8")
    files = [str(folder / "right.py"), str(folder / "wrong.py")]
    for cache in (ROOT / ".mypy_cache", folder / "cache"):
        command = [sys.executable, "-m", "mypy", f"--config-file={folder / 'mypy.toml'}", f"--cache-dir={cache}"]
        done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
        if done.returncode in (0, 1):
            break
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    found = re.findall(r"^\S*?(\w+\.py):(\d+): error: ", done.stdout, flags=re.MULTILINE)
    return {(file, int(number)) for file, number in found}, done.stdout


def errors_of_pyright(folder):
    """Return the files and lines in which pyright finds errors."""
    command = [shutil.which("pyright"), "--outputjson", "--pythonpath", sys.executable, "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found}, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("errors_of", [errors_of_mypy, errors_of_pyright], ids=["mypy", "pyright"])
def test_type_checker_finds_each_planted_error_and_no_other(tmp_path, errors_of):
    if errors_of is errors_of_mypy:
        pytest.importorskip("mypy")
    elif shutil.which("pyright") is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "right.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    lines = WRONG.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("def wrong"))) + 2
    found, said = errors_of(tmp_path)
    assert found == {("wrong.py", number) for number in range(first, len(lines) + 1)}, said
