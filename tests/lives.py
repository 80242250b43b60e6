"""A tiny learner, its images, and its whole state as plain values, for tests that interrupt or damage learners."""

import copy
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from copies import copies
from peft import PeftModel, get_peft_model
from tiny_encoders import IMAGE_SIZE, make_model, make_processor

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, Task
from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.strategies import make_strategy

QUICK = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "device": "cpu", "progress": False}
QUICK |= {"prompt_template": "a {}."}
MODELS: dict[Any, Callable[[], Any]] = {}  # functions that return a new model of `tiny_learner`


@cache
def tiny_base() -> tuple[Any, Any]:
    """Return a CLIP with two layers in each tower, and its processor. Copy the model before adapting it."""
    return make_model("clip"), make_processor("clip")


def tiny_learner(
    strategy: str = "dulbe", classifiers: tuple[str, ...] = ("bridge", "lda"), adapter: Any = None, **fields: Any
) -> ClassIncrementalLearner:
    """Return the same learner every time, with an adapter in one linear layer of each block.

    `adapter` holds further settings of the adapter.
    """
    clip, processor = tiny_base()
    method = make_strategy(strategy)
    targets = list(method.target_modules or ["fc1"]) if method.adapts else None
    key = clip.name_or_path, repr((targets, adapter))
    if key not in MODELS:
        MODELS[key] = copies(_adapted(copy.deepcopy(clip), targets, adapter or {}))
    args = LearnerArguments(**QUICK | fields)
    return ClassIncrementalLearner(MODELS[key](), processor, args=args, strategy=strategy, classifiers=classifiers)


def _adapted(model: Any, targets: list[str] | None, adapter: dict[str, Any]) -> Any:
    if targets is None:
        return model
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = {"residual_rank": 2, "text_rank": 1, "target_modules": targets} | adapter
        return get_peft_model(model, DualModeLoraConfig(**config))


def images_of(*labels: int, seed: int = 0) -> list[tuple[torch.Tensor, int]]:
    """Return one preprocessed image for each label. Images with the same label are similar."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, IMAGE_SIZE, IMAGE_SIZE)
    centres = {
        label: torch.randn(shape, generator=torch.Generator().manual_seed(9 * seed + label)) for label in labels
    }
    return [(centres[label] + 0.3 * torch.randn(shape, generator=generator), label) for label in labels]


def randomness() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and torch."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
    }


def everything(learner: ClassIncrementalLearner) -> dict[str, Any]:
    """Return the whole state of a learner and its model by name, including settings that change only temporarily."""
    state, values = learner.state, dict[str, Any]()
    for name, tensor in state.model.state_dict().items():
        values[f"model {name}"] = tensor.clone()
    for name, parameter in state.model.named_parameters():
        values[f"{name} trained"] = parameter.requires_grad, parameter.grad is not None
    for name, buffer in state.model.named_buffers():
        values[f"{name} trained"] = buffer.requires_grad
    for name, module in state.model.named_modules():
        values[f"{name} mode"] = module.training, len(module._forward_hooks), len(module._forward_pre_hooks)
        if isinstance(module, DualModeLayer):
            values[f"{name} merged"] = list(module.merged_adapters), module.disable_adapters
            values[f"{name} held"] = module._held, module._rows
    if isinstance(state.model, PeftModel):
        values["history"] = state.model.history_rank, list(state.model.base_model.active_adapters)
    for name, classifier in state.classifiers.items():
        values |= {f"{name} {key}": value.clone() for key, value in classifier.tensors().items()}
        values[f"{name} names"] = list(classifier.class_names), classifier.settings()
    values |= {f"memory {name}": value.clone() for name, value in (state.memory or {}).items()}
    values["tasks"] = list(state.tasks), state.step, state.source, state.incomplete
    values["learner"] = learner.folder, None if learner.record is None else asdict(learner.record)
    values["turn"] = learner._turns.lock.acquire(blocking=False) and learner._turns.lock.release() is None
    values["profile"] = list(learner.profile._phases)
    values["torch"] = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
    return values


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names whose values are missing on one side or not equal bit for bit."""

    def same(left: Any, right: Any) -> bool:
        return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right

    both = actual.keys() & expected.keys()
    return sorted(actual.keys() ^ expected.keys()) + sorted(n for n in both if not same(actual[n], expected[n]))


def learned(learner: ClassIncrementalLearner, tasks: int, first: int = 0) -> ClassIncrementalLearner:
    """Teach the learner further tasks, each of two classes with two images, and return it."""
    for index in range(first, first + tasks):
        learn(index)(learner)
    return learner


def learn(index: int) -> Callable[[ClassIncrementalLearner], None]:
    return lambda learner: learner.learn_task(images_of(0, 1, 0, 1, seed=index), [f"a{index}", f"b{index}"])


def stream(count: int) -> list[Task]:
    """Return tasks of two classes, with test images."""
    return [
        Task(images_of(0, 1, 0, 1, seed=index), images_of(0, 1, seed=index + 50), [f"a{index}", f"b{index}"])
        for index in range(count)
    ]


def content(root: Path) -> dict[str, bytes]:
    """Return the bytes of every file, except of timings.json."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "timings.json")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
