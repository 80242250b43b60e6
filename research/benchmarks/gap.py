"""Add CLIP's modality gap to a model that has none, by changing two biases, and measure each classifier on it.

Before normalization, g |z| m is added to image features and -g/2 |e| m to text features, where |z| and |e| are the
mean lengths and m is a direction that is orthogonal to all names. The biases of the visual post-layernorm and of the
text tower's final layer norm do this, so that the stand-in is an ordinary model: `--save` writes it, for example for
`python -m research compare`.

    projection @ bias = shift        by least squares; exact if the projection has full rank
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, class_incremental_tasks
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.loading import load_clip
from dulbe_peft.photos.data.splits import draw_per_class
from dulbe_peft.streams.retention import zero_shot_retention
from research.benchmarks import common

CLASSIFIERS = ("text", "prototype", "lda", "bayes", "bridge")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=1)
    options.add_argument("--gaps", type=float, nargs="+", default=[0, 1, 2], help="g; 0 is the unchanged model")
    options.add_argument("--count", type=int, default=16, help="training images per class")
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--strategies", nargs="+", default=["frozen"])
    options.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    options.add_argument("--retention", help="data with other classes, for the zero-shot accuracy after the last task")
    options.add_argument("--save", type=Path, help="folder in which each stand-in is saved as gap-G")
    values = common.parse(options, argv)
    if values.quick:
        values.gaps, values.count = [1.0], 2
    rows = []
    for gap in values.gaps:
        clip, processor = load_clip(values.clip)
        train = common.some(load_data(values.data, "train"), values)
        learner = learner_of(clip, processor, "frozen", 0, 0.0)
        add_gap(learner, draw_per_class(train, 4), gap)
        if values.save:
            clip.save_pretrained(values.save / f"gap-{gap:g}")
            processor.save_pretrained(values.save / f"gap-{gap:g}")
        rows += shown(f"gap {gap:g}", cosines(learner, draw_per_class(train, 4)))
        for strategy, rate, seed in product(values.strategies, values.rates, range(values.repeats)):
            if strategy == "frozen" and rate != values.rates[0]:
                continue
            weights = {name: tensor.clone() for name, tensor in clip.state_dict().items()}
            results = accuracies(values, clip, processor, strategy, seed, rate)
            clip, processor = load_clip(values.clip)  # training changes the model in place
            clip.load_state_dict(weights)
            how = strategy if strategy == "frozen" else f"{strategy} with {rate:g}"
            rows += shown(f"gap {gap:g}, {how}, seed {seed}", results)
    common.write("gap", values, argv, rows)


def shown(where: str, figures: dict[str, float]) -> list[dict[str, Any]]:
    """Print some figures at once, and return their rows."""
    rows = [common.value_row(f"{where}: {name}", common.rounded(value), "") for name, value in figures.items()]
    print(where, {name: round(value, 3) for name, value in figures.items()}, flush=True)
    return rows


def learner_of(clip: Any, processor: Any, strategy: str, seed: int, rate: float) -> ClassIncrementalLearner:
    """Return a learner of a model. The learner changes the model in place."""
    torch.manual_seed(seed)
    model = clip if strategy == "frozen" else get_peft_model(clip, DualModeLoraConfig())
    args = LearnerArguments(
        seed=seed, learning_rate=rate or 1e-3, update_share=1, device="cpu", precision="float32", progress=False
    )
    return ClassIncrementalLearner(model, processor, args, strategy, CLASSIFIERS)


@torch.no_grad()
def add_gap(learner: ClassIncrementalLearner, images: LabelledImages, gap: float) -> None:
    """Add a gap between image and text features to a CLIP model of transformers, by changing two of its biases."""
    clip, names = learner.clip, learner.text_embeds(images.class_names).double()
    lengths = {}
    towers = (
        ("image", clip.visual_projection, clip.vision_model.post_layernorm, gap),
        ("text", clip.text_projection, clip.text_model.final_layer_norm, -gap / 2),
    )
    for kind, projection, _, _ in towers:
        hook = projection.register_forward_hook(
            lambda _, __, output, kind=kind: lengths.setdefault(kind, []).append(output.norm(dim=-1).flatten())
        )
        learner.image_embeds(images) if kind == "image" else learner.text_embeds(images.class_names)
        hook.remove()
    direction = torch.randn(names.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, _, within = torch.linalg.svd(names, full_matrices=False)
    within = within[: len(direction) - 1]  # leaves a direction even if there are as many names as dimensions
    direction = F.normalize(direction - within.T @ (within @ direction), dim=0)
    for kind, projection, norm, size in towers:
        shift = size * torch.cat(lengths[kind]).mean().double() * direction
        bias = torch.linalg.lstsq(projection.weight.double(), shift[:, None], driver="gelsd").solution[:, 0]
        norm.bias += bias.to(norm.bias)


@torch.no_grad()
def cosines(learner: ClassIncrementalLearner, images: LabelledImages) -> dict[str, float]:
    """Return the mean cosines of images with their class mean, other means, their name and other names."""
    features, names = learner.image_embeds(images), learner.text_embeds(images.class_names)
    labels = torch.as_tensor(images.labels)
    is_class = F.one_hot(labels, len(images.class_names)).bool()
    sums = is_class.to(features).T @ features
    rest = F.normalize(sums[labels] - features, dim=1)  # the class mean without the image
    means = {"own mean": float((features * rest).sum(dim=1).mean())}
    means["other means"] = float((features @ F.normalize(sums, dim=1).T)[~is_class].mean())
    by_name = features @ names.T
    return means | {"own name": float(by_name[is_class].mean()), "other names": float(by_name[~is_class].mean())}


def accuracies(values: Any, clip: Any, processor: Any, strategy: str, seed: int, rate: float) -> dict[str, float]:
    """Return A_last of each classifier and the zero-shot accuracy on other classes after the last task, in percent."""
    train, test = (common.some(load_data(values.data, split), values) for split in ("train", "test"))
    train = draw_per_class(train, values.count, seed)
    tasks = class_incremental_tasks(train, test, increment=values.increment, seed=seed)
    learner = learner_of(clip, processor, strategy, seed, rate)
    for task in tasks[:2] if values.quick else tasks:
        learner.learn_task(task.train, task.class_names)
    tests = [(task.test, task.class_names) for task in (tasks[:2] if values.quick else tasks)]
    evaluations = learner.evaluations(tests)
    sizes = torch.tensor([len(each.truth) for each in evaluations]).double()
    shares = {
        name: float(sizes @ torch.tensor([each.accuracy(each.classifiers[name]) for each in evaluations]).double())
        for name in CLASSIFIERS
    }
    figures = {name: 100 * share / float(sizes.sum()) for name, share in shares.items()}
    if values.retention:
        kept = zero_shot_retention(learner, load_data(values.retention, "test"))
        figures["still known"] = 100 * kept["after"]
    return figures


if __name__ == "__main__":
    main()
