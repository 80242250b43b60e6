"""Write what this version saves, for a test that later versions load it: `python tests/write_saved.py FOLDER`.

The folder then holds a trained learner, a frozen one with several classifiers, a run, a bridge ensemble alone, and
`answers.json`, what each of the learners answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import get_peft_model
from sklearn.datasets import load_digits

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
)
from dulbe_peft.demo import DigitImages, demo_model_folder

ARGS = LearnerArguments(epochs=1, batch_size=8, device="cpu", progress=False, prompt_template="the digit {}.")


def digits(start: int, stop: int) -> DigitImages:
    """Some handwritten digits of each class."""
    data = load_digits()
    rows = [row for label in range(10) for row in (data.target == label).nonzero()[0][start:stop]]
    return DigitImages(data.images[rows], data.target[rows])


def learner_of(strategy: str, *classifiers: str) -> ClassIncrementalLearner:
    model, processor = load_clip(demo_model_folder())
    model.name_or_path = model.config._name_or_path = "someone/demo-clip"  # no path of this machine
    if strategy != "frozen":
        torch.manual_seed(0)
        model = get_peft_model(model, DualModeLoraConfig(residual_rank=2, support_rank=8, target_modules=["fc1"]))
    return ClassIncrementalLearner(model, processor, args=ARGS, strategy=strategy, classifiers=classifiers)


def answers(learner: ClassIncrementalLearner) -> list:
    test = digits(4, 6)
    return learner.predict([test[index]["image"] for index in range(len(test))], top_k=2, return_scores=True)


def write(folder: Path) -> None:
    torch.set_num_threads(1)
    tasks = class_incremental_tasks(digits(0, 4), digits(4, 6), increment=2)[:2]
    trained = learner_of("dulbe", "bridge", "lda")
    frozen = learner_of(
        "frozen", "bridge", "prototype", "lda", "ridge", "ranpac:features=64", "bayes:features=64", "text"
    )
    for learner in (trained, frozen):
        for task in tasks:
            learner.learn_task(task.train, task.class_names)
    found = {}
    for name, learner in (("trained", trained), ("frozen", frozen)):
        learner.save_pretrained(folder / name)
        found[name] = answers(learner)
    frozen.head.save_pretrained(folder / "head")
    running = learner_of("dulbe", "bridge")
    running.run(tasks, folder / "run")
    found["run"] = answers(running)
    (folder / "answers.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
