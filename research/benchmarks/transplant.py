"""Give a CLIP the vision tower of a ViT classifier of ImageNet, with names in the geometry of a published CLIP.

The stand-in has a real pretrained vision tower, and is an ordinary `CLIPModel`. Its classes are clothes, whose names
have the text embeddings of similar ImageNet classes. A file in the format of `research.benchmarks.real` contains those
of the even classes. A class without one gets its name from the regression below.

The tower is carried over exactly, up to rounding:

    mean      layer norms do not see the mean over the width d, so it is removed from everything that is added up
    width     d + one head of zeros = D; the weights of layer norms shrink by sqrt(d / D), so that they divide by the
              same length
    start     CLIP's first layer norm has to leave its input as it is. Two of the added dimensions contain K and -K,
              so that it divides by about K sqrt(2 / D), its weight; the relative error is |x|^2 / (4 K^2)

Image features are z = q + a u + b m. q, with mean 0 and of mean length 1, is a ridge regression from the class vectors
of the ViT to the centred text embeddings, u is the direction of their mean, and m is orthogonal to all of them. a and
b give images the cosines of CLIP's features with other names and with their class mean.

`--known` is a data set of other images. Its classes with the names of even ImageNet classes get these text embeddings,
and their test images are saved in the folder `known` of the stand-in: what is left of this knowledge can be measured.

    python -m research.benchmarks.transplant --vit deit-tiny --clip small-clip --data clothing --real real-clip \
        --known photographs --save tower
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.loading import load_clip
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.photos.data.splits import draw_per_class
from research.benchmarks import common, real
from research.benchmarks.gap import cosines, learner_of

# Places of ImageNet's classes. 655, miniskirt, has an odd number.
CLOTHES = {
    "dress": 578,
    "hat": 808,
    "longsleeve": 474,
    "outwear": 568,
    "pants": 608,
    "shirt": 834,
    "shoes": 630,
    "shorts": 842,
    "skirt": 655,
    "t-shirt": 610,
}
OTHER_NAME, OWN_MEAN = 0.20, 0.76  # cosines of CLIP's image features with another name, and with the class mean
START = 3000.0  # K
RIDGE = 0.1  # of the regression to the text embeddings, relative to the mean eigenvalue


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=1)
    options.add_argument("--vit", help="folder of a ViTForImageClassification; default: a small one, not trained")
    options.add_argument("--real", type=Path, help="folder with imagenet-even.npz; default: random text embeddings")
    options.add_argument("--known", help="images of other classes, with names of ImageNet classes; default: none")
    options.add_argument("--save", type=Path, help="folder in which the stand-in is saved")
    values = common.parse(options, argv)
    train = draw_per_class(load_data(values.data, "train"), 2 if values.quick else 16)
    vit = ViTForImageClassification.from_pretrained(values.vit, dtype=torch.float32) if values.vit else untrained_vit()
    places, texts = even_classes(values.real)
    classes = {name: CLOTHES[name] if values.vit else 2 * place for place, name in enumerate(train.class_names)}
    tests = load_data(values.data, "test")
    known = None
    if values.known:
        known = load_data(values.known, "test")
        known = known.select([name for name in known.class_names if name in places], others=True)
        classes |= {name: places[name] for name in known.class_names}
    clip, processor = transplanted(vit.eval(), values.clip, texts, classes, train)
    difference, largest = distance(vit, clip)
    rows = [common.value_row("largest difference to the ViT's features, relative", difference / largest, "")]
    learner = learner_of(clip, processor, "frozen", 0, 0.0)
    figures = cosines(learner, train)
    figures["right by name"] = right_by_name(learner, tests)
    if known is not None:
        figures["known images, right by name"] = right_by_name(learner, known)
    rows += [common.value_row(name, common.rounded(value), "") for name, value in figures.items()]
    if values.save:
        clip.save_pretrained(values.save)
        processor.save_pretrained(values.save)
        for number, item in enumerate(known or ()):
            folder = values.save / "known" / known.class_names[item["label"]]
            folder.mkdir(parents=True, exist_ok=True)
            item["image"].save(folder / f"{number}.png")
    common.write("transplant", values, argv, rows)


def untrained_vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=60, **size))


def right_by_name(learner: ClassIncrementalLearner, images: LabelledImages) -> float:
    """Return the zero-shot accuracy in percent."""
    names = learner.text_embeds(images.class_names)
    right = (learner.image_embeds(images) @ names.T).argmax(dim=1) == torch.as_tensor(images.labels)
    return 100 * float(right.double().mean())


def even_classes(folder: Path | None) -> tuple[dict[str, int], Tensor]:
    """Return the even classes' places by name, and unit text embeddings, (classes, width), float64."""
    if folder is None:
        return {}, F.normalize(torch.randn(30, 48, dtype=torch.float64).abs(), dim=1)
    with np.load(folder / "imagenet-even.npz") as arrays:
        places = {name: 2 * place for place, name in enumerate(arrays["names"].tolist())}
        return places, F.normalize(torch.from_numpy(arrays["t"]).double(), dim=1)


@torch.no_grad()
def transplanted(
    vit: ViTForImageClassification, clip: str, texts: Tensor, classes: dict[str, int], images: LabelledImages
) -> tuple[CLIPModel, CLIPProcessor]:
    """Return a CLIP with the ViT's tower. Each name in `classes` means the ImageNet class at this place."""
    donor, donor_processor = load_clip(clip)
    tower = carried(vit)
    config = CLIPConfig(
        text_config=donor.config.text_config.to_dict(),
        vision_config=tower.config.to_dict(),
        projection_dim=texts.shape[1],
    )
    made = CLIPModel(config).eval()
    made.vision_model.load_state_dict(tower.state_dict())
    made.text_model.load_state_dict(donor.text_model.state_dict())
    made.logit_scale.fill_(math.log(real.SCALE))
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": vit.config.image_size},
        crop_size=vit.config.image_size,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    processor = CLIPProcessor(image_processor, donor_processor.tokenizer)

    heads = vit.classifier.weight.double()
    rows, mean = heads[0::2][: len(texts)], texts.mean(dim=0)
    gram = rows.T @ rows
    ridge = RIDGE * gram.trace() / len(gram) * torch.eye(len(gram)).to(gram)
    to_texts = torch.linalg.solve(gram + ridge, rows.T @ (texts - mean)).T  # (width of the texts, width of the ViT)
    named = [texts[place // 2] if place % 2 == 0 else mean + to_texts @ heads[place] for place in classes.values()]
    wanted = F.normalize(torch.stack(named), dim=1)

    # Text tower: the projection takes the tower's output for each name to its text embedding.
    learner = learner_of(made, processor, "frozen", 0, 0.0)
    outputs: list[Tensor] = []
    hook = made.text_projection.register_forward_hook(lambda _, given, __: outputs.append(given[0].double()))
    learner.text_embeds(list(classes))
    hook.remove()
    made.text_projection.weight.copy_(torch.linalg.lstsq(torch.cat(outputs), wanted, driver="gelsd").solution.T)

    # Image tower: q, then the offset, which is the column of an added dimension that contains 1.
    width = heads.shape[1]
    made.visual_projection.weight.zero_()
    made.visual_projection.weight[:, :width] = to_texts.float()
    features: list[Tensor] = []
    hook = made.visual_projection.register_forward_hook(lambda _, __, output: features.append(output.double()))
    learner_of(made, processor, "frozen", 0, 0.0).image_embeds(images)
    hook.remove()
    raw = torch.cat(features)[: len(images.labels)]  # the last batch is filled up
    middle = raw.mean(dim=0)
    centred = raw - middle
    length = centred.norm(dim=1).mean()
    made.visual_projection.weight /= length
    offset = offset_for(centred / length, torch.as_tensor(images.labels), OWN_MEAN)
    common_direction = F.normalize(wanted.mean(dim=0), dim=0)
    along = OTHER_NAME * math.sqrt(1 + offset) / float((wanted @ common_direction).mean())
    apart = torch.randn(texts.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    apart = F.normalize(apart - torch.linalg.pinv(wanted) @ (wanted @ apart), dim=0)
    column = along * common_direction + math.sqrt(max(0.0, offset - along**2)) * apart
    made.visual_projection.weight[:, width] = (column - middle / length).float()
    made.vision_model.post_layernorm.bias[width] = 1
    return made, processor


def offset_for(features: Tensor, labels: Tensor, cosine: float) -> float:
    """Return |o|^2 such that features + o have this mean cosine with the mean of their class without the image.

    o is taken to be orthogonal to the features, which have mean 0.
    """
    member = F.one_hot(labels).to(features)
    sums, counts = (member.T @ features)[labels], member.sum(dim=0)[labels, None]
    means = (sums - features) / (counts - 1).clamp_min(1)
    inner, lengths, rest = ((features * means).sum(dim=1), features.square().sum(dim=1), means.square().sum(dim=1))

    def missing(offset: float) -> float:
        return float(((inner + offset) / ((lengths + offset) * (rest + offset)).sqrt()).mean()) - cosine

    return float(brentq(missing, 0, 100)) if missing(0) < 0 else 0.0


@torch.no_grad()
def carried(vit: ViTForImageClassification) -> CLIPVisionModel:
    """Return the tower of a ViT as a CLIP vision model with one more attention head, of zeros."""
    old, given = vit.config, {name: tensor.double() for name, tensor in vit.vit.state_dict().items()}
    width, size = old.hidden_size, old.hidden_size // old.num_attention_heads
    wide = width + size
    config = CLIPVisionConfig(
        hidden_size=wide,
        num_attention_heads=old.num_attention_heads + 1,
        num_hidden_layers=old.num_hidden_layers,
        intermediate_size=old.intermediate_size,
        image_size=old.image_size,
        patch_size=old.patch_size,
        hidden_act=old.hidden_act,
        layer_norm_eps=old.layer_norm_eps * width / wide,
    )
    tower = CLIPVisionModel(config).eval()
    centred = torch.eye(width, dtype=torch.float64) - 1 / width
    shrink, made = math.sqrt(width / wide), tower.state_dict()
    prefix = next(name for name in made if name.endswith("class_embedding")).removesuffix("embeddings.class_embedding")

    def put(name: str, *parts: tuple[Any, Tensor]) -> None:
        made[prefix + name].zero_()
        for where, value in parts:
            made[prefix + name][where] = value.to(made[prefix + name])

    kept = slice(width)
    places = given["embeddings.position_embeddings"][0]
    places[1:] += given["embeddings.patch_embeddings.projection.bias"]
    patches = torch.einsum("dw,w...->d...", centred, given["embeddings.patch_embeddings.projection.weight"])
    put("embeddings.class_embedding", (kept, centred @ given["embeddings.cls_token"][0, 0]))
    put("embeddings.patch_embedding.weight", (kept, patches))
    put("embeddings.position_embedding.weight", ((slice(None), kept), places @ centred))
    made[prefix + "embeddings.position_embedding.weight"][:, width] = START
    made[prefix + "embeddings.position_embedding.weight"][:, width + 1] = -START
    put("pre_layrnorm.weight", (kept, torch.full((width,), START * math.sqrt(2 / wide))))
    put("pre_layrnorm.bias")

    def norm(name: str, source: str) -> None:
        put(f"{name}.weight", (kept, shrink * given[f"{source}.weight"]))
        put(f"{name}.bias", (kept, given[f"{source}.bias"]))

    for layer in range(old.num_hidden_layers):
        here, there = f"encoder.layers.{layer}.", f"layers.{layer}."
        norm(here + "layer_norm1", there + "layernorm_before")
        norm(here + "layer_norm2", there + "layernorm_after")
        for name in ("q_proj", "k_proj", "v_proj"):
            put(f"{here}self_attn.{name}.weight", ((kept, kept), given[f"{there}attention.{name}.weight"]))
            put(f"{here}self_attn.{name}.bias", (kept, given[f"{there}attention.{name}.bias"]))
        for new, name in (("self_attn.out_proj", "attention.o_proj"), ("mlp.fc2", "mlp.fc2")):
            weight = centred @ given[f"{there}{name}.weight"]
            put(f"{here}{new}.weight", ((kept, slice(weight.shape[1])), weight))
            put(f"{here}{new}.bias", (kept, centred @ given[f"{there}{name}.bias"]))
        put(f"{here}mlp.fc1.weight", ((slice(None), kept), given[there + "mlp.fc1.weight"]))
        put(f"{here}mlp.fc1.bias", (slice(None), given[there + "mlp.fc1.bias"]))
    norm("post_layernorm", "layernorm")
    tower.load_state_dict(made)
    return tower


@torch.no_grad()
def distance(vit: ViTForImageClassification, clip: CLIPModel) -> tuple[float, float]:
    """Return the largest difference of the features of random images in float32, and the largest feature."""
    pixels = torch.randn(
        4, 3, vit.config.image_size, vit.config.image_size, generator=torch.Generator().manual_seed(0)
    )
    expected = vit.vit(pixels).last_hidden_state[:, 0]
    found = clip.vision_model(pixels).pooler_output[:, : expected.shape[1]]
    return float((found - expected).abs().max()), float(expected.abs().max())


if __name__ == "__main__":
    main()
