"""`learner.json`, what a saved learner says of itself beside its tensors: written, and checked when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dulbe_peft.arguments import MACHINE_SETTINGS, LearnerArguments
from dulbe_peft.checkpoints import base_models
from dulbe_peft.data.names import check_class_names
from dulbe_peft.strategies import make_strategy
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.checks import is_int
from dulbe_peft.utils.files import read_json
from dulbe_peft.utils.folders import LEARNER_FILE, strictly

# What earlier versions left out; 0.1 had one method and one classifier.
_DEFAULTS: dict[str, Any] = {
    "base_model": None,
    "classifiers": ["bridge"],
    "memory": True,
    "source": None,
    "strategy": {"name": "dulbe"},
    "updates": [],
}
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flex_attention")


def content(state: LearnerState, local: bool) -> dict[str, Any]:
    """What the file holds; with `local`, also where the base model lies on this machine."""
    return {
        "arguments": state.args.portable(),
        "attn_implementation": state.base.config._attn_implementation,
        "base_model": base_models.describe(state.base, *state.base_name, local),
        "classifiers": list(state.classifiers),
        "memory": bool(state.memory) or state.incomplete,
        "source": state.source,
        "step": state.step,
        "strategy": {"name": state.strategy.name, **state.strategy.settings()},
        "tasks": [list(task) for task in state.tasks],
        "updates": state.updates,
    }


def read(folder: Path) -> dict[str, Any]:
    """What the file in a folder holds, with what an earlier version left out.

    Raises:
        CheckpointError: no learner writes such a file.
    """
    with strictly(folder):
        state: dict[str, Any] = _DEFAULTS | read_json(folder / LEARNER_FILE)
        missing = sorted({"arguments", "attn_implementation", "step", "tasks"} - set(state))
        if missing:
            raise ValueError(f"{LEARNER_FILE} misses {missing}")
        _check(state)
        seen: list[str] = []
        for task in state["tasks"]:
            seen += check_class_names(task, seen) if task else ()  # `forget_class` may leave a task without classes
        portable(state["arguments"])
        make_strategy(state["strategy"])
    return state


def portable(saved: dict[str, Any]) -> LearnerArguments:
    """Saved settings without those of the machine."""
    return LearnerArguments(**{name: value for name, value in saved.items() if name not in MACHINE_SETTINGS})


def _check(state: dict[str, Any]) -> None:
    """Raise a `ValueError` unless the entries are what `content` makes them."""

    def texts(value: Any) -> bool:
        return value is None or (
            isinstance(value, dict) and all(isinstance(v, (str, type(None))) for v in (*value, *value.values()))
        )

    classifiers, tasks = state["classifiers"], state["tasks"]
    right = {
        "arguments": isinstance(state["arguments"], dict),
        "attn_implementation": state["attn_implementation"] in _ATTENTION,
        "base_model": texts(state["base_model"]),
        "classifiers": isinstance(classifiers, list) and classifiers and all(isinstance(n, str) for n in classifiers),
        "memory": isinstance(state["memory"], bool),
        "source": texts(state["source"]),
        "step": is_int(state["step"]) and state["step"] >= 0,
        "tasks": isinstance(tasks, list) and all(isinstance(task, list) for task in tasks),
        "updates": isinstance(state["updates"], list) and all(map(_is_update, state["updates"])),
    }
    wrong = [name for name, fits in right.items() if not fits]
    if wrong:
        raise ValueError(f"{LEARNER_FILE} has {wrong[0]} = {state[wrong[0]]!r:.100}, which no learner writes")


def _is_update(entry: Any) -> bool:
    """Whether an entry is as `LearnerState.updates` has it."""
    if not isinstance(entry, dict) or set(entry) != {"after", "images", "forgotten"}:
        return False
    after, images, forgotten = entry["after"], entry["images"], entry["forgotten"]
    counts = isinstance(images, dict) and all(map(is_int, images.values()))
    return counts and is_int(after) and (forgotten is None or is_int(forgotten))
