"""Write files in this version's formats, to test that later versions load them: `python tests/write_saved.py FOLDER`.

`tests/saved` has a folder for each release. The folder of the next release is written again when a format changes. It
holds a frozen learner with several classifiers, a run that trained a learner, a bridge ensemble alone, and
`answers.json` with the predictions of each.
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
    run_stream,
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
    # The defaults when the first files were written.
    drift="none",
    whole_images=True,
)


def digits(start: int, stop: int) -> LabelledImages:
    """Return the handwritten digits `start` to `stop` - 1 of each class."""
    data = load_digits()
    rows = [row for label in range(10) for row in (data.target == label).nonzero()[0][start:stop]]
    return digit_images(data.images[rows], data.target[rows])


def learner_of(strategy: str, *classifiers: str) -> ClassIncrementalLearner:
    model, processor = load_clip(demo_model_folder())
    model.name_or_path = model.config._name_or_path = "someone/demo-clip"  # so that no local path is saved
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
    run_stream(running, tasks, folder / "run")
    expected = {"frozen": answers(frozen), "run": answers(running), "scores": scores(frozen.classifiers)}
    (folder / "answers.json").write_text(json.dumps(expected, indent=1) + "\n")


@torch.no_grad()
def scores(classifiers: Mapping[str, Any]) -> dict[str, list]:
    """Return the scores of each classifier for one fixed feature vector."""
    feature = torch.nn.functional.normalize(torch.arange(1.0, 65.0), dim=0)[None]
    return {name: classifier(feature)[0].tolist() for name, classifier in classifiers.items()}


def read(folder: Path) -> dict[str, Any]:
    """Load the files in a folder, and return the same answers."""
    torch.set_num_threads(1)
    load = partial(ClassIncrementalLearner.from_pretrained, machine={"device": "cpu", "progress": False})
    frozen = load(folder / "frozen", load_clip(demo_model_folder())[0])
    running = load(folder / "run", load_clip(demo_model_folder())[0])
    alone = {name: type(head).from_pretrained(folder / "frozen") for name, head in frozen.classifiers.items()}
    alone["bridge"] = BridgeEnsembleHead.from_pretrained(folder / "head")
    loaded = {"frozen": answers(frozen), "run": answers(running), "scores": scores(alone)}
    further = class_incremental_tasks(digits(0, 4), digits(4, 6), increment=2)[:2]
    resumed = learner_of("dulbe", "bridge")
    run_stream(resumed, further, folder / "run")  # continues after the saved task
    assert resumed.tasks == [task.class_names for task in further] and len(running.memory) == 1
    return loaded


if __name__ == "__main__":
    write(Path(sys.argv[1]))
