"""The model card of a learner, written from its own data; nothing stands in it that the data does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from dulbe_peft.backbone import encoder_of

TITLE = "Dual-Mode Low-Rank Learner with Bridge-Prototype Ensemble for Vision-Language Class-Incremental Learning"
AUTHORS = (
    "Chiyuan He and Zihuan Qiu and Fanman Meng and Chao Wang and Liangjiang Chen and Linfeng Xu and Qingbo Wu and "
    "Hongliang Li"
)
CLASSIFIERS = (("zero_shot", "zero-shot"), ("text", "text classifier"), ("head", "bridge-prototype head"))


def model_card(
    learner: Any,
    repo_id: str | None,
    statistics: bool = True,
    results: dict[str, Any] | None = None,
    dataset_name: str | None = None,
) -> str:
    """README.md of a saved learner: a YAML header for the Hub, and Markdown.

    Args:
        learner: a `ClassIncrementalLearner`.
        repo_id: where it will be; None writes a placeholder into the snippets.
        statistics: whether they are saved with it.
        results: what `ClassIncrementalLearner.run` returned; accuracies in it become the header's model-index.
        dataset_name: of the images that `results` are about.
    """
    source = repo_id or "path/to/this/folder"
    config = learner.model.active_peft_config
    count = f"{len(learner.class_names)} classes in {len(learner.tasks)} task{'s' * (len(learner.tasks) != 1)}"
    title = source.rpartition("/")[2] if repo_id else f"A learner of {count}"
    base = config.base_model_name_or_path
    elsewhere = "" if _is_repo_id(base) else " (a folder where it was made; anywhere else, pass `base_model=`)"
    goes_on = ", and the statistics that are needed to go on learning" if statistics and learner.statistics else ""
    sections = [
        f"# {title}",
        f"This {encoder_of(learner.clip).title} model learned {count}, one task after the other, without keeping "
        f"images of old ones: a dual-mode low-rank adapter for PEFT, a bridge-prototype head{goes_on}. Made with "
        "`dulbe_peft`. "
        f"Base model: `{base}`{elsewhere}.",
        "## Use",
        _snippets(source, base, type(learner.clip).__name__),
        "## Classes",
        "One line a task, in the order they were learned.",
        _fenced("json", "\n".join(json.dumps(list(task), ensure_ascii=False) for task in learner.tasks)),
    ]
    if results and "head" in results:
        about = f" on {dataset_name}" if dataset_name else ""
        sections += ["## Results", f"Top-1 accuracy in percent over all seen classes{about}.", _results(results)]
    sections += ["## Settings", _settings(learner), "## Decisions", _decisions(learner.args, config)]
    sections += ["## Citation", _fenced("bibtex", _CITATION)]
    return f"---\n{_header(learner, title, count, results, dataset_name)}\n---\n\n" + "\n\n".join(sections) + "\n"


def _header(learner: Any, title: str, count: str, results: dict[str, Any] | None, dataset_name: str | None) -> str:
    base = learner.model.active_peft_config.base_model_name_or_path
    measured = []
    for metric, key in (("A_bar", "average_accuracy"), ("A_last", "last_accuracy")):
        if results and "head" in results:
            measured.append(
                EvalResult(
                    task_type="image-classification",
                    task_name="Class-incremental image classification",
                    dataset_type=dataset_name or "class-incremental-stream",
                    dataset_name=dataset_name or f"a class-incremental stream, {count}",
                    metric_type="accuracy",
                    metric_name=metric,
                    metric_value=results["head"][key],
                )
            )
    data = ModelCardData(
        base_model=base if _is_repo_id(base) else None,
        library_name="peft",
        pipeline_tag="image-classification",
        tags=[
            "class-incremental-learning",
            learner.clip.config.model_type,
            "continual-learning",
            "dulbe",
            "dulbe_peft",
        ],
        model_name=title if measured else None,
        eval_results=measured or None,
    )
    return data.to_yaml().strip()


def _is_repo_id(name: str | None) -> bool:
    if not name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _snippets(source: str, base: str | None, model_class: str) -> str:
    whole = f"""import dulbe_peft  # registers the method with PEFT; without it loading ends in KeyError: 'DULBE'
from PIL import Image

learner = dulbe_peft.ClassIncrementalLearner.from_pretrained({source!r})
print(learner.predict(Image.open("photo.jpg")))"""
    adapter = f"""import dulbe_peft
from peft import PeftModel
from transformers import {model_class}

clip = {model_class}.from_pretrained({base!r})
model = PeftModel.from_pretrained(clip, {source!r})"""
    head = f"""from dulbe_peft import BridgeEnsembleHead

head = BridgeEnsembleHead.from_pretrained({source!r})
print(head.class_names)"""
    parts = [_fenced("python", whole), "The adapter alone, for PEFT:", _fenced("python", adapter)]
    return "\n\n".join([*parts, "The head alone, for the model's image features:", _fenced("python", head)])


def _results(results: dict[str, Any]) -> str:
    rows = ["| classifier | A_bar | A_last |", "|---|---|---|"]
    for key, label in CLASSIFIERS:
        block = results[key]
        rows.append(f"| {label} | {100 * block['average_accuracy']:.2f} | {100 * block['last_accuracy']:.2f} |")
    return "\n".join(rows)


def _settings(learner: Any) -> str:
    config = learner.model.active_peft_config
    plain = config.to_dict()
    values = {field.name: plain[field.name] for field in config.own_fields()}
    values |= learner.args.portable()
    return _fenced("json", json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False))


def _decisions(args: Any, config: Any) -> str:
    """docs/decisions.md in short, as this learner's settings have them."""
    rate = "per step" if args.lr_schedule == "step" else "per epoch, with a floor of 1 %"
    reduction = "their means" if args.kl_reduction == "mean" else "their sums, divided by the batch size"
    teacher = "from the probe pass" if args.teacher == "cached" else "computed at every step"
    texts = "encoded anew after each task" if args.text_embeds == "current" else "kept from the class's own task"
    text_lora = f"rank {config.text_rank}, alpha {config.text_alpha:g}, carried over all tasks"
    lines = (
        f"teacher: the model before the task, its image features {teacher}",
        "first task: top right singular vectors of the gradient, the first ones shared, the next residual",
        f"structure loss: class term over images and instance term over old classes, {reduction}, each times its "
        "squared temperature",
        "old classes' texts in that loss: encoded once at the task's start, one matrix for student and teacher",
        f"learning rate: cosine to 0 {rate}; one Adam for each task",
        f"text LoRA: {text_lora if config.text_rank else 'none'}",
        f"input statistics: un-centred sums over the tokens `{args.statistics_tokens}`; layers that read one tensor "
        "share one matrix",
        f"class texts: {texts}",
        "visual prototypes and reliability: fixed when a class arrives",
        f"depths: {args.num_depths}, evenly spaced from 0 to 1 unless the head was made with others; folded "
        "prototypes are not normalised again",
        f"prompt: `{args.prompt_template}`, class names `{args.class_name_style}`",
    )
    return "Where the paper leaves a choice open:\n\n" + "\n".join(f"- {line}" for line in lines)


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


_CITATION = f"""@unpublished{{dulbe,
  title  = {{{TITLE}}},
  author = {{{AUTHORS}}},
  note   = {{Preprint}}
}}"""
