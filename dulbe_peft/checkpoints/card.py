"""The model card of a learner, made from the template `assets/cards/learner.md`."""

import json
from dataclasses import fields

from huggingface_hub import EvalResult, ModelCardData

from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.classifiers.registry import answering
from dulbe_peft.encoders.loading import encoder_of
from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.metrics.results import Results
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.hub import is_repo_id
from dulbe_peft.utils.templates import render
from dulbe_peft.utils.terminal import counted


def model_card(
    state: LearnerState,
    repo_id: str | None,
    statistics: bool = True,
    results: Results | None = None,
    dataset_name: str | None = None,
) -> str:
    """Return the README.md of a saved learner; without `repo_id`, its code examples use a placeholder."""
    source = repo_id or "path/to/this/folder"
    count = f"{counted(len(state.class_names), 'class')} in {counted(len(state.tasks), 'task')}"
    title = source.rpartition("/")[2] if repo_id else f"A learner of {count}"
    base, kind = state.base_name[0], state.base.config.model_type
    base_on_hub = is_repo_id(base)
    rows = results.rows if results and results.classifiers else []
    measured = _measured(results, dataset_name, count) if results and rows else None
    header = ModelCardData(
        base_model=base if base_on_hub else None,
        library_name="dulbe_peft",
        pipeline_tag="image-classification",
        tags=["class-incremental-learning", kind, "continual-learning", "dulbe", "dulbe_peft"],
        model_name=title if measured else None,
        eval_results=measured,
    )
    settings: dict[str, object] = {
        "strategy": {"name": state.strategy.name, **state.strategy.settings()},
        "arguments": state.args.portable(),
        "classifiers": {name: classifier.settings() for name, classifier in state.classifiers.items()},
    }
    if state.config is not None:
        plain = state.config.to_dict()
        settings["adapter"] = {field.name: plain[field.name] for field in fields(AdapterSettings)}
    return render(
        "learner.md",
        header=header.to_yaml().strip(),
        title=title,
        encoder=encoder_of(state.base).title,
        count=count,
        state=state,
        memory=statistics and state.memory,
        base=base,
        base_on_hub=base_on_hub,
        source=repr(source),
        model_type=None if state.adapter is None else type(state.base).__name__,
        base_source=repr(base),
        classifier_type=type(state.classifier).__name__,
        tasks=[json.dumps(list(task), ensure_ascii=False) for task in state.tasks],
        results=[(name, percent(row.average_accuracy, 2), percent(row.last_accuracy, 2)) for name, row in rows],
        dataset_name=dataset_name,
        settings=json.dumps(settings, indent=2, ensure_ascii=False),
    )


def _measured(results: Results, dataset_name: str | None, count: str) -> list[EvalResult]:
    """Return the accuracies of the classifier that answers, as the Hub reads them; `count` describes the stream."""
    figures = results.classifiers[answering(results.classifiers)]
    shown = {"A_bar": figures.average_accuracy, "A_last": figures.last_accuracy}
    return [
        EvalResult(
            task_type="image-classification",
            task_name="Class-incremental image classification",
            dataset_type=dataset_name or "class-incremental-stream",
            dataset_name=dataset_name or f"a class-incremental stream, {count}",
            metric_type="accuracy",
            metric_name=metric,
            metric_value=value,
        )
        for metric, value in shown.items()
        if value is not None
    ]
