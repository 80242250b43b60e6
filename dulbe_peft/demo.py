"""The embedded demo: five tasks of two handwritten digits, offline, with a tiny CLIP that comes with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from peft import get_peft_model
from PIL import Image

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.backbone import load_clip
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.report import format_summary, plot_results, write_report
from dulbe_peft.streams.tasks import Task, class_incremental_tasks

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SUPPORT_RANK = 16
CLASSIFIERS = ("bridge", "prototype", "lda", "ranpac:features=1000")
SETTINGS: dict[str, Any] = {"epochs": 4, "prompt_template": "a photo of the digit {}."}


def demo_model_folder() -> Path:
    """Folder of the packaged tiny CLIP, pretrained on rendered glyphs and never on handwritten digits."""
    return Path(str(resources.files("dulbe_peft") / "assets" / "demo_clip"))


class DigitImages:
    """Images 8 x 8 of scikit-learn's handwritten digits as PIL images with a label 0 to 9."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self.pixels = pixels
        self.labels = labels.astype(np.int64)
        self.class_names = DIGITS

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        grey = (self.pixels[index] * (255 / 16)).round().astype(np.uint8)
        return {"image": Image.fromarray(grey).convert("RGB"), "label": int(self.labels[index])}


def digit_tasks(increment: int = 2) -> list[Task]:
    """The stream of the demo: three quarters of the 1,797 digits to learn from, the rest to test on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    return class_incremental_tasks(DigitImages(train_x, train_y), DigitImages(test_x, test_y), increment=increment)


def run_demo(output_dir: str | Path, seed: int = 0, progress: bool = True) -> dict[str, Any]:
    """Run the demo's stream, with training and without, and print one table of all classifiers.

    Args:
        output_dir: where everything goes; a stream that was begun there is resumed. The run without training has the
            folder `frozen` in it.
        seed: seed of the learner.
        progress: show progress bars.

    Returns:
        The results of `ClassIncrementalLearner.run` with training.
    """
    import torch

    torch.set_num_threads(1)  # a model this small only waits for a second thread
    output, args = Path(output_dir), LearnerArguments(**SETTINGS, seed=seed, device="cpu", progress=progress)
    torch.manual_seed(seed)
    clip, processor = load_clip(demo_model_folder())
    model = get_peft_model(clip, DualModeLoraConfig(support_rank=SUPPORT_RANK))
    tasks = digit_tasks()
    results = ClassIncrementalLearner(model, processor, args=args, classifiers=CLASSIFIERS).run(tasks, output)
    print("the same stream with nothing trained:")
    clip, processor = load_clip(demo_model_folder())
    frozen = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen", classifiers=CLASSIFIERS)
    rows = {f"frozen {name}": block for name, block in frozen.run(tasks, output / "frozen")["classifiers"].items()}
    together = results | {"classifiers": results["classifiers"] | rows}
    plot_results(together, output / "accuracy.png")
    print(format_summary(together))
    report = write_report([output, output / "frozen"], output / "report.html")
    print(f"written: {output / 'results.json'}, {output / 'accuracy.png'} and {report}, for a browser")
    return results
