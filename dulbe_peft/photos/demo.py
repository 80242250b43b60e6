"""Run the demo on handwritten digits, offline, with a tiny CLIP that is part of the package."""

from pathlib import Path
from typing import Any

from peft import get_peft_model

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.loading import load_clip
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.metrics.results import Results
from dulbe_peft.photos.report import format_summary, plot_results, write_report
from dulbe_peft.photos.report.pictures import write_pictures
from dulbe_peft.streams.digits import digit_tasks
from dulbe_peft.streams.run import run_stream

MONTHS = ("January", "February", "March")
CLASSIFIERS = ("bridge", "bayes", "prototype", "lda", "ranpac:features=1000")
SETTINGS: dict[str, Any] = {"epochs": 4, "prompt_template": "a photo of the digit {}."}


def run_demo(output_dir: str | Path) -> Results:
    """Learn digits in three months, without training and without revisiting a month; return the results.

    Each month brings new classes, and the model is tested on all classes so far. The report is `report.html`.
    """
    output, args = Path(output_dir), LearnerArguments(**SETTINGS, device="cpu")
    learner = ClassIncrementalLearner(*_clip(), args=args, strategy="frozen")
    learner.use_store(FeatureStore())
    tasks = digit_tasks(increment=3, initial_increment=4)
    results = run_stream(learner, tasks, output)
    trains, tests = [task.train for task in tasks], [task.test for task in tasks]
    write_pictures(output, tests, results, learner=learner, trains=trains, task_names=MONTHS)
    matrix = next(iter(results.classifiers.values())).matrix
    for month, task, row in zip(MONTHS, tasks, matrix, strict=True):
        old = f"; of {MONTHS[0]}'s classes, {percent(row[0])} %" if len(row) > 1 else ""
        print(f"{month} brought {', '.join(task.class_names)}: {percent(row[-1])} % are classified correctly{old}")
    print(f"written: {write_report(output, output / 'report.html')}, for a browser")
    return results


def compare_demo(output_dir: str | Path) -> Results:
    """Learn the digits in five tasks with and without training, print one table, and return the trained results."""
    output, tasks = Path(output_dir), digit_tasks()
    args = LearnerArguments(**SETTINGS, device="cpu", precision="float32")  # "auto" differs without training
    clip, processor = _clip()
    model = get_peft_model(clip, DualModeLoraConfig(support_rank=16))
    learner = ClassIncrementalLearner(model, processor, args=args, classifiers=CLASSIFIERS)
    trained = run_stream(learner, tasks, output)
    print("the same stream with nothing trained:")
    learner = ClassIncrementalLearner(*_clip(), args=args, strategy="frozen", classifiers=CLASSIFIERS)
    frozen = run_stream(learner, tasks, output / "frozen")
    for folder, results in ((output, trained), (output / "frozen", frozen)):
        write_pictures(folder, [task.test for task in tasks], results)
    rows = {f"frozen {name}": measures for name, measures in frozen.classifiers.items()}
    together = trained.model_copy(update={"classifiers": trained.classifiers | rows})
    plot_results(together, output / "accuracy.png")
    print(format_summary(together))
    report = write_report([output, output / "frozen"], output / "report.html")
    print(f"written: {output / 'results.json'}, {output / 'accuracy.png'} and {report}, for a browser")
    return trained


def _clip() -> tuple[Any, Any]:
    """Return the tiny CLIP and its processor."""
    import torch

    torch.set_num_threads(1)  # a model this small only waits for a second thread
    torch.manual_seed(0)
    return load_clip(demo_model_folder())
