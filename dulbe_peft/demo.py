"""The embedded demo: five tasks of two handwritten digits, offline, with a tiny CLIP that comes with the package."""

from pathlib import Path
from typing import Any

from peft import get_peft_model

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.readers import DIGITS, DigitImages, load_digit_images
from dulbe_peft.encoders.loading import load_clip
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.report import format_summary, plot_results, write_report
from dulbe_peft.report.pictures import write_pictures
from dulbe_peft.streams.tasks import Task, class_incremental_tasks

__all__ = ["CLASSIFIERS", "DIGITS", "SETTINGS", "DigitImages", "demo_model_folder", "digit_tasks", "run_demo"]
SUPPORT_RANK = 16
CLASSIFIERS = ("bridge", "bayes", "prototype", "lda", "ranpac:features=1000")
SETTINGS: dict[str, Any] = {"epochs": 4, "prompt_template": "a photo of the digit {}."}


def digit_tasks(increment: int = 2) -> list[Task]:
    """The stream of the demo: three quarters of the 1,797 digits to learn from, the rest to test on."""
    return class_incremental_tasks(load_digit_images("train"), load_digit_images("test"), increment=increment)


def run_demo(output_dir: str | Path, seed: int = 0) -> dict[str, Any]:
    """Run the demo's stream with training and without, and print one table; returns the results with training."""
    import torch

    torch.set_num_threads(1)  # a model this small only waits for a second thread
    output, args = Path(output_dir), LearnerArguments(**SETTINGS, seed=seed, device="cpu")
    torch.manual_seed(seed)
    clip, processor = load_clip(demo_model_folder())
    model = get_peft_model(clip, DualModeLoraConfig(support_rank=SUPPORT_RANK))
    tasks = digit_tasks()
    results = ClassIncrementalLearner(model, processor, args=args, classifiers=CLASSIFIERS).run(tasks, output)
    tests = [task.test for task in tasks]
    write_pictures(output, tests, results)
    print("the same stream with nothing trained:")
    clip, processor = load_clip(demo_model_folder())
    frozen = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen", classifiers=CLASSIFIERS)
    beside = frozen.run(tasks, output / "frozen")
    write_pictures(output / "frozen", tests, beside)
    rows = {f"frozen {name}": block for name, block in beside["classifiers"].items()}
    together = results | {"classifiers": results["classifiers"] | rows}
    plot_results(together, output / "accuracy.png")
    print(format_summary(together))
    report = write_report([output, output / "frozen"], output / "report.html")
    print(f"written: {output / 'results.json'}, {output / 'accuracy.png'} and {report}, for a browser")
    return results
