"""A tiny learner, its images, and all that it is as plain values: what the tests of disturbed lives have in common."""

import copy
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from tiny_encoders import IMAGE_SIZE, make_model, make_processor

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, Task
from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.strategies import make_strategy

QUICK = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "device": "cpu", "progress": False}
QUICK |= {"prompt_template": "a {}."}


@cache
def tiny_base() -> tuple[Any, Any]:
    """A CLIP of two layers a tower, and its processor; copy the model before you adapt it."""
    return make_model("clip"), make_processor("clip")


def tiny_learner(
    strategy: str = "dulbe", classifiers: tuple[str, ...] = ("bridge", "lda"), adapter: Any = None, **fields: Any
) -> ClassIncrementalLearner:
    """The same learner every time: an adapter in one layer of each tower; `adapter` has settings of its own."""
    clip, processor = tiny_base()
    model = copy.deepcopy(clip)
    method = make_strategy(strategy)
    if method.adapts:
        targets = list(method.target_modules or ["fc1"])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = {"residual_rank": 2, "text_rank": 1, "target_modules": targets} | (adapter or {})
            model = get_peft_model(model, DualModeLoraConfig(**config))
    args = LearnerArguments(**QUICK | fields)
    return ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=classifiers)


def images_of(*labels: int, seed: int = 0) -> list[tuple[torch.Tensor, int]]:
    """One preprocessed image for each label; those of a label are alike."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, IMAGE_SIZE, IMAGE_SIZE)
    kinds = {label: torch.randn(shape, generator=torch.Generator().manual_seed(9 * seed + label)) for label in labels}
    return [(kinds[label] + 0.3 * torch.randn(shape, generator=generator), label) for label in labels]


def randomness() -> dict[str, Any]:
    """States of the generators of Python, numpy and torch."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
    }


def everything(learner: ClassIncrementalLearner) -> dict[str, Any]:
    """All that a learner and its model are, and what work on them changes for a while; name -> value."""
    state, found = learner.state, dict[str, Any]()
    for name, tensor in state.model.state_dict().items():
        found[f"model {name}"] = tensor.clone()
    for name, parameter in state.model.named_parameters():
        found[f"{name} trained"] = parameter.requires_grad, parameter.grad is not None
    for name, buffer in state.model.named_buffers():
        found[f"{name} trained"] = buffer.requires_grad
    for name, module in state.model.named_modules():
        found[f"{name} mode"] = module.training, len(module._forward_hooks), len(module._forward_pre_hooks)
        if isinstance(module, DualModeLayer):
            found[f"{name} merged"] = list(module.merged_adapters), module.disable_adapters
        if isinstance(module, DualModeLinear):
            found[f"{name} held"] = module._held, module._resting
    if isinstance(state.model, PeftModel):
        found["history"] = state.model.active_peft_config.history_rank, list(state.model.base_model.active_adapters)
    for name, classifier in state.classifiers.items():
        found |= {f"{name} {key}": value.clone() for key, value in classifier.tensors().items()}
        found[f"{name} names"] = list(classifier.class_names), classifier.settings()
    found |= {f"memory {name}": value.clone() for name, value in (state.memory or {}).items()}
    found["tasks"] = list(state.tasks), state.step, state.source, state.incomplete
    found["learner"] = learner.folder, None if learner.record is None else asdict(learner.record)
    found["turn"] = learner._turns.lock.acquire(blocking=False) and learner._turns.lock.release() is None
    found["profile"] = list(learner.profile._phases)
    found["torch"] = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names whose values are not the same, bit for bit."""

    def same(left: Any, right: Any) -> bool:
        return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right

    both = found.keys() & expected.keys()
    return sorted(found.keys() ^ expected.keys()) + sorted(n for n in both if not same(found[n], expected[n]))


def learned(learner: ClassIncrementalLearner, tasks: int, first: int = 0) -> ClassIncrementalLearner:
    """The learner after further tasks of two classes with two images each."""
    for index in range(first, first + tasks):
        learn(index)(learner)
    return learner


def learn(index: int) -> Callable[[ClassIncrementalLearner], None]:
    return lambda learner: learner.learn_task(images_of(0, 1, 0, 1, seed=index), [f"a{index}", f"b{index}"])


def stream(count: int) -> list[Task]:
    """Tasks of two classes, with test images."""
    return [
        Task(images_of(0, 1, 0, 1, seed=index), images_of(0, 1, seed=index + 50), [f"a{index}", f"b{index}"])
        for index in range(count)
    ]


def content(root: Path) -> dict[str, bytes]:
    """Every file's bytes, but those of times."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "timings.json")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
