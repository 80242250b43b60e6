"""`learner.json`, which has everything about a saved learner except its tensors."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dulbe_peft.checkpoints import base_models
from dulbe_peft.checkpoints.layout import LEARNER_FILE
from dulbe_peft.training.state import Estimates, LearnerState, Update
from dulbe_peft.utils.records import Count, Record, read_record


class LearnerFile(Record):
    """The contents of the file: a learner's state without its tensors."""

    adapter_name: str
    arguments: dict[str, Any]
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None
    base_model: base_models.SavedBase
    class_texts: dict[str, list[str]]
    classifiers: Annotated[list[str], Field(min_length=1)]
    estimates: Estimates
    graph: str | None
    memory: bool
    source: dict[str, str] | None
    step: Count
    strategy: dict[str, object]
    tasks: list[list[str]]
    updates: list[Update]


def describe(state: LearnerState, local: bool) -> LearnerFile:
    """Return the record of a learner; with `local`, it has the full path of the base model on this machine."""
    return LearnerFile(
        adapter_name=state.adapter_name,
        arguments=state.args.portable(),
        attn_implementation=state.base.config._attn_implementation,
        base_model=base_models.describe(state.base, *state.base_name, local),
        class_texts={name: list(state.class_texts[name]) for name in state.class_names if name in state.class_texts},
        classifiers=list(state.classifiers),
        estimates=state.estimates,
        graph=state.graph,
        memory=bool(state.memory) or state.incomplete,
        source=state.source,
        step=state.step,
        strategy={"name": state.strategy.name, **state.strategy.settings()},
        tasks=[list(task) for task in state.tasks],
        updates=state.updates,
    )


def read(folder: Path) -> LearnerFile:
    """Read the file in a folder, inside of `load_errors`."""
    return read_record(folder / LEARNER_FILE, LearnerFile)
