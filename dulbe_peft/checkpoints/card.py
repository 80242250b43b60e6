"""The model card of a learner, written from its own data; nothing stands in it that the data does not hold."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from dulbe_peft.encoders.loading import encoder_of
from dulbe_peft.metrics.accuracy import percent, result_rows
from dulbe_peft.training.state import LearnerState

TITLE = "Dual-Mode Low-Rank Learner with Bridge-Prototype Ensemble for Vision-Language Class-Incremental Learning"
AUTHORS = (
    "Chiyuan He and Zihuan Qiu and Fanman Meng and Chao Wang and Liangjiang Chen and Linfeng Xu and Qingbo Wu and "
    "Hongliang Li"
)


def model_card(
    state: LearnerState,
    repo_id: str | None,
    statistics: bool = True,
    results: dict[str, Any] | None = None,
    dataset_name: str | None = None,
) -> str:
    """README.md of a saved learner: a YAML header for the Hub, and Markdown.

    Args:
        state: the learner.
        repo_id: where it will be; None writes a placeholder into the snippets.
        statistics: whether what the strategy keeps is saved with it.
        results: what `ClassIncrementalLearner.run` returned; accuracies in it become the header's model-index.
        dataset_name: of the images that `results` are about.
    """
    source = repo_id or "path/to/this/folder"
    count = f"{len(state.class_names)} classes in {len(state.tasks)} task{'s' * (len(state.tasks) != 1)}"
    title = source.rpartition("/")[2] if repo_id else f"A learner of {count}"
    base = state.base_name[0]
    elsewhere = "" if is_repo_id(base) else " (a folder where it was made; anywhere else, pass `base_model=`)"
    parts = [] if state.adapter is None else ["a dual-mode low-rank adapter for PEFT"]
    parts.append(f"the classifiers {', '.join(f'`{name}`' for name in state.classifiers)}")
    if statistics and state.memory:
        parts.append("and the statistics that are needed to go on learning")
    sections = [
        f"# {title}",
        f"This {encoder_of(state.base).title} model learned {count}, one task after the other, without keeping images "
        f"of old ones, with the strategy `{state.strategy.name}`: {', '.join(parts)}. Made with {project()}. Base "
        f"model: `{base}`{elsewhere}.",
        "## Use",
        fenced("bash", "pip install dulbe_peft"),
        _snippets(source, state),
        _ELSEWHERE,
        "## Classes",
        "One line a task, in the order they were learned.",
        fenced("json", "\n".join(json.dumps(list(task), ensure_ascii=False) for task in state.tasks)),
    ]
    if results and results.get("classifiers"):
        about = f" on {dataset_name}" if dataset_name else ""
        sections += ["## Results", f"Top-1 accuracy in percent over all seen classes{about}.", _results(results)]
    sections += ["## Settings", _settings(state), _DECISIONS]
    sections += ["## Citation", fenced("bibtex", _CITATION)]
    return f"---\n{_header(state, title, count, results, dataset_name)}\n---\n\n" + "\n\n".join(sections) + "\n"


def _header(
    state: LearnerState, title: str, count: str, results: dict[str, Any] | None, dataset_name: str | None
) -> str:
    base = state.base_name[0]
    measured = []
    for metric, key in (("A_bar", "average_accuracy"), ("A_last", "last_accuracy")):
        if results and results.get("classifiers") and _first(results)[key] is not None:
            measured.append(
                EvalResult(
                    task_type="image-classification",
                    task_name="Class-incremental image classification",
                    dataset_type=dataset_name or "class-incremental-stream",
                    dataset_name=dataset_name or f"a class-incremental stream, {count}",
                    metric_type="accuracy",
                    metric_name=metric,
                    metric_value=_first(results)[key],
                )
            )
    data = ModelCardData(
        base_model=base if is_repo_id(base) else None,
        library_name="dulbe_peft",
        pipeline_tag="image-classification",
        tags=[
            "class-incremental-learning",
            state.base.config.model_type,
            "continual-learning",
            "dulbe",
            "dulbe_peft",
        ],
        model_name=title if measured else None,
        eval_results=measured or None,
    )
    return data.to_yaml().strip()


def _first(results: dict[str, Any]) -> dict[str, Any]:
    """The figures of the first classifier."""
    block: dict[str, Any] = next(iter(results["classifiers"].values()))
    return block


def project() -> str:
    """The package's name, linked to the address that its metadata has for the project, where there is one."""
    try:
        fields = metadata.metadata("dulbe_peft")
    except metadata.PackageNotFoundError:
        return "`dulbe_peft`"
    labelled = [entry.partition(", ")[2] for entry in fields.get_all("Project-URL") or ()]
    addresses = [address for address in (*(fields.get_all("Home-page") or ()), *labelled) if address]
    return f"[`dulbe_peft`]({addresses[0]})" if addresses else "`dulbe_peft`"


def is_repo_id(name: str | None) -> bool:
    """Whether `name` can be a repository on the Hub, and is no folder here."""
    if not name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _snippets(source: str, state: LearnerState) -> str:
    whole = f"""import dulbe_peft
from PIL import Image

learner = dulbe_peft.ClassIncrementalLearner.from_pretrained({source!r})
print(learner.predict(Image.open("photo.jpg")))"""
    parts = [fenced("python", whole)]
    if state.adapter is not None:
        kind = type(state.base).__name__
        adapter = f"""import dulbe_peft
from peft import PeftModel
from transformers import {kind}

clip = {kind}.from_pretrained({state.base_name[0]!r})
model = PeftModel.from_pretrained(clip, {source!r})"""
        parts += ["The adapter alone, for PEFT:", fenced("python", adapter)]
    classifier = type(next(iter(state.classifiers.values()))).__name__
    head = f"""from dulbe_peft import {classifier}

classifier = {classifier}.from_pretrained({source!r})
print(classifier.class_names)"""
    return "\n\n".join([*parts, "A classifier alone, for the model's image features:", fenced("python", head)])


def _results(results: dict[str, Any]) -> str:
    rows = ["| classifier | A_bar | A_last |", "|---|---|---|"]
    for label, block in result_rows(results):
        rows.append(f"| {label} | {percent(block['average_accuracy'], 2)} | {percent(block['last_accuracy'], 2)} |")
    return "\n".join(rows)


def _settings(state: LearnerState) -> str:
    values: dict[str, Any] = {"strategy": {"name": state.strategy.name, **state.strategy.settings()}}
    if state.config is not None:
        plain = state.config.to_dict()
        values["adapter"] = {field.name: plain[field.name] for field in state.config.own_fields()}
    values["arguments"] = state.args.portable()
    values["classifiers"] = {name: classifier.settings() for name, classifier in state.classifiers.items()}
    return fenced("json", json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False))


def fenced(language: str, text: str) -> str:
    """A block of code in Markdown."""
    return f"```{language}\n{text}\n```"


_ELSEWHERE = (
    "`import dulbe_peft` registers the method with PEFT. Without it, PEFT ends in `KeyError: 'DULBE'`, and "
    "transformers in an error that names `dulbe_peft`. For use without this package, `dulbe-peft export` writes stock "
    "LoRA, a plain model for transformers, or an ONNX graph."
)
_DECISIONS = (
    "What each setting decides where the paper leaves a choice open: `docs/decisions.md` in the repository of "
    "`dulbe_peft`."
)
_CITATION = f"""@unpublished{{dulbe,
  title  = {{{TITLE}}},
  author = {{{AUTHORS}}},
  note   = {{Preprint}}
}}"""
