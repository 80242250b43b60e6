"""Write what this version saves, for a test that later versions load it: `python tests/write_saved.py FOLDER`.

`tests/saved` has a folder for each release. That of the next release is written anew when what it saves changes. The
folder then holds a frozen learner with several classifiers, a run that trained one, a bridge ensemble alone, and
`answers.json`, what each of them answers.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from sklearn.datasets import load_digits

from dulbe_peft import (
    BridgeEnsembleHead,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
)
from dulbe_peft.data.digits import digit_images
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.encoders.registry import demo_model_folder

ARGS = LearnerArguments(
    epochs=1,
    batch_size=8,
    learning_rate=1e-3,
    device="cpu",
    precision="float32",
    progress=False,
    prompt_template="the digit {}.",
    drift="none",  # as the first files have it, whose default it was
)


def digits(start: int, stop: int) -> LabelledImages:
    """Some handwritten digits of each class."""
    data = load_digits()
    rows = [row for label in range(10) for row in (data.target == label).nonzero()[0][start:stop]]
    return digit_images(data.images[rows], data.target[rows])


def learner_of(strategy: str, *classifiers: str) -> ClassIncrementalLearner:
    model, processor = load_clip(demo_model_folder())
    model.name_or_path = model.config._name_or_path = "someone/demo-clip"  # no path of this machine
    if strategy != "frozen":
        torch.manual_seed(0)
        config = DualModeLoraConfig(
            residual_rank=2, support_rank=8, text_rank=1, target_modules=["k_proj"], layers_to_transform=[0]
        )
        model = get_peft_model(model, config)
    return ClassIncrementalLearner(model, processor, args=ARGS, strategy=strategy, classifiers=classifiers)


def answers(learner: ClassIncrementalLearner) -> list:
    test = digits(4, 5)
    return learner.predict([test[index]["image"] for index in range(len(test))], top_k=2, return_scores=True)


def write(folder: Path) -> None:
    torch.set_num_threads(1)
    tasks = class_incremental_tasks(digits(0, 4), digits(4, 6), increment=2)[:1]
    frozen = learner_of(
        "frozen", "bridge", "prototype", "lda", "ridge", "ranpac:features=16", "bayes:features=16", "text"
    )
    frozen.learn_task(tasks[0].train)
    frozen.save_pretrained(folder / "frozen")
    frozen.head.save_pretrained(folder / "head")
    running = learner_of("dulbe", "bridge")
    running.run(tasks, folder / "run")
    found = {"frozen": answers(frozen), "run": answers(running), "scores": scores(frozen.classifiers)}
    (folder / "answers.json").write_text(json.dumps(found, indent=1) + "\n")


@torch.no_grad()
def scores(classifiers: Mapping[str, Any]) -> dict[str, list]:
    """What each classifier says of one fixed feature vector."""
    feature = torch.nn.functional.normalize(torch.arange(1.0, 65.0), dim=0)[None]
    return {name: classifier(feature)[0].tolist() for name, classifier in classifiers.items()}


def read(folder: Path) -> dict[str, Any]:
    """The same answers, from what lies in a folder."""
    torch.set_num_threads(1)
    load = partial(ClassIncrementalLearner.from_pretrained, machine={"device": "cpu", "progress": False})
    frozen = load(folder / "frozen", load_clip(demo_model_folder())[0])
    running = load(folder / "run", load_clip(demo_model_folder())[0])
    alone = {name: type(one).from_pretrained(folder / "frozen") for name, one in frozen.classifiers.items()}
    alone["bridge"] = BridgeEnsembleHead.from_pretrained(folder / "head")
    found = {"frozen": answers(frozen), "run": answers(running), "scores": scores(alone)}
    further = class_incremental_tasks(digits(0, 4), digits(4, 6), increment=2)[:2]
    again = learner_of("dulbe", "bridge")
    again.run(further, folder / "run")  # goes on after the saved task
    assert again.tasks == [task.class_names for task in further] and len(running.memory) == 1
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
