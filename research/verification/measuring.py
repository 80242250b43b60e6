"""Measure the number of a check, with the loading, resizing and tokenizing that every command uses."""

from statistics import fmean
from typing import Any

import numpy as np
import torch

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.encoders import loading
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.pixels import with_image_resize
from research.verification.checks import Check, Data
from research.verification.fetching import Fetcher, on_hub
from research.verification.images import Places, few_shots, open_split, photograph

Seeds = dict[str, tuple[float, ...]]  # classifier -> accuracies in percent, one per seed
VIEWS = "crop+flip"  # crops of at least half the area, with proportions from 3:4 to 4:3, every second one mirrored


def measure(
    check: Check, data: Data, places: Places, fetcher: Fetcher, device: str
) -> tuple[tuple[float, ...], Seeds]:
    """Return the numbers to compare with the expected ones, and the accuracies of the classifiers, if any, by seed.

    Accuracies are in percent; the first classifier is the check's own.
    """
    if single := check.measure in ("logits", "class_token"):
        images = photograph(check.data, data, places, fetcher)
    else:
        images = open_split(check.data, data, check.split, places, fetcher)
    if check.measure == "taught":
        learned = open_split(check.data, data, "train", places, fetcher)
    beside = places.beside / check.model
    revision = fetcher.revision(check.model, "model", check.revision) if on_hub(check.model) else None
    model, processor = loading.load_dual_encoder(beside if beside.is_dir() else check.model, revision)
    if single:
        pixels = loading.pixel_values(processor, images.image(0))[None]
        return _single_image(check, model, processor, pixels), {}
    if check.image_resize != "processor":
        processor = with_image_resize(processor, model, check.image_resize)
    prompts: Any = {"prompt_template": list(check.templates), "class_name_style": check.class_name_style}
    args = LearnerArguments(device=device, precision="float32", **(prompts if check.templates else {}))
    encoder = Encoder.at_rest(model, processor, args)  # stores features, so that a stopped check can continue
    if check.measure == "zero_shot":
        return (_zero_shot(encoder, images),), {}
    seeds = _taught(check, encoder, learned, images)
    return (fmean(next(iter(seeds.values()))),), seeds


@torch.no_grad()
def _single_image(check: Check, model: Any, processor: Any, pixels: torch.Tensor) -> tuple[float, ...]:
    """Return an image's logits tau z' e for the check's texts, plus the model's bias if it has one.

    For the measure `class_token`, return the first values of the class token before normalization.
    """
    if check.measure == "class_token":
        token: torch.Tensor = model(pixel_values=pixels).last_hidden_state[0, 0]
        return tuple(token[: len(check.expected)].tolist())
    z = loading.unit_image_embeds(model, pixels)
    e = loading.unit_text_embeds(model, loading.tokenize(processor, check.texts, model))
    bias = getattr(model, "logit_bias", None)
    scores = loading.logit_scale(model) * (z @ e.T)[0] + (0 if bias is None else bias)
    return tuple(scores.tolist())


def _zero_shot(encoder: Encoder, images: LabelledImages) -> float:
    """Return the zero-shot accuracy in percent."""
    features = encoder.dataset_embeds(encoder.images(images), "zero-shot")
    predicted = (features @ encoder.text_embeds(images.class_names).T).argmax(dim=1).cpu().numpy()
    return 100 * float((predicted == images.labels).mean())


def _taught(check: Check, encoder: Encoder, learned: LabelledImages, tested: LabelledImages) -> Seeds:
    """Return the accuracies of classifiers that learn all classes as one task, by seed."""
    if learned.class_names != tested.class_names:
        raise ValueError(f"{check.data}: the training images and the test images have different classes")
    features = encoder.dataset_embeds(encoder.images(tested), "test")
    texts = encoder.text_embeds(tested.class_names) if loading.has_text(encoder.clip) else None
    tau = loading.logit_scale(encoder.clip)
    views = encoder
    if check.views:  # views are squashed to the model's size, whereas images are resized and cropped
        squash = with_image_resize(encoder.processor, encoder.clip, "squash")
        views = Encoder.at_rest(encoder.clip, squash, encoder.args)
    seeds: dict[str, list[float]] = {}
    for number, seed in enumerate(check.seeds):
        places = range(len(learned)) if check.shots is None else few_shots(learned.labels, check.shots, seed)
        drawn = learned.at(np.array(places))
        rows, labels = _rows(views, drawn, check.views, seed)
        first = {check.classifier: check.classifier}
        if check.alphas:
            width = rows.shape[1]
            first = {"gda-clip": gda_clip(check.alphas[number], len(rows), len(drawn.class_names), width)}
        specs = first | {spec.partition(":")[0]: spec for spec in check.beside}
        for name, spec in specs.items():
            classifier = make_classifier(spec, rows.shape[1], tau).to(rows.device)
            classifier.add_classes(drawn.class_names, rows, labels, texts)
            predicted = torch.cat([classifier(part).argmax(dim=1) for part in features.split(1024)]).cpu().numpy()
            seeds.setdefault(name, []).append(100 * float((predicted == tested.labels).mean()))
    return {name: tuple(values) for name, values in seeds.items()}


def _rows(encoder: Encoder, drawn: LabelledImages, views: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of the images, (n, d), or of `views` views of each, (n views, d), and the rows' classes."""
    pixels = encoder.images(drawn)
    inputs = [pixels.view(VIEWS, seed, number) for number in range(views)] or [pixels]
    rows = torch.cat([encoder.dataset_embeds(view, f"seed {seed}, view {n}") for n, view in enumerate(inputs)])
    return rows, torch.as_tensor(drawn.labels).repeat(len(inputs))


def gda_clip(alpha: float, rows: int, classes: int, width: int) -> str:
    """Return the `gda` classifier whose scores equal those of GDA-CLIP's published code, for its weight `alpha`.

    The code inverts ((N - 1) S + tr(S) I) / d, where S divides the scatter of N rows by N - 1. With our shrinkage
    s = d / (N - 1 + d), this is Sigma times (N - C) / ((N - 1) s).
    """
    share = width / (rows - 1 + width)
    factor = share * (rows - 1) / (rows - classes)
    return f"gda:shrinkage={share!r},alpha={alpha * factor!r},prior_images=0"
