"""Measure what decoding JPEG photographs at a fraction of their size changes: features, answers and accuracy.

Each photograph of `--folder` of at least `LEAST` pixels, and random crops of the larger ones, are JPEG files of
quality 90, whose sides are multiples of 8. They are decoded whole and at the smallest scale that leaves the short side
at least `--times` times as long as the model's, and at least `LEAST_SIDE` pixels. A CLIP answers with the nearest of
`WORDS` words of its vocabulary, another model with its own classes. Accuracy is that of a classifier whose classes are
the larger photographs: it learns half of their crops.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn.datasets
import torch
from PIL import Image
from scipy import stats
from transformers import AutoModelForImageClassification

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.decoding import UnreadableImageError, decode_file, decode_image, image_suffixes
from dulbe_peft.encoders.loading import has_text, image_shape, load_dual_encoder, pixel_values, unit_image_embeds
from dulbe_peft.encoders.pixels import LEAST_SIDE
from dulbe_peft.encoders.text_encoder import TextEncoder
from dulbe_peft.sklearn import FeatureClassifier
from research.benchmarks import common

LEAST, WORDS = 2_000_000, 1000
CLASSIFIERS = ("lda", "prototype")
Answer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Model(NamedTuple):
    """A model under its name, and its `answering`."""

    name: str
    clip: Any
    processor: Any
    answer: Answer


@dataclass
class Encoded:
    """Features, (n, d), answers, (n,), which files were decoded smaller, and the CPU seconds of reading."""

    features: list[torch.Tensor] = field(default_factory=list)
    answers: list[torch.Tensor] = field(default_factory=list)
    smaller: list[bool] = field(default_factory=list)
    seconds: float = 0.0


class File(NamedTuple):
    """A JPEG file: its bytes, the number of its photograph, and the number of the crop; -1 for the photograph."""

    content: bytes
    photograph: int
    crop: int


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=1, model=None)
    options.add_argument("--folder", help="photographs, in folders of any depth; default: two of scikit-learn")
    options.add_argument("--models", nargs="+", default=["demo"], help="folders or Hub ids of models")
    options.add_argument("--times", nargs="+", type=float, default=[3, 4, 6])
    options.add_argument("--crops", type=int, default=8, help="crops of each photograph of twice as many pixels")
    options.add_argument("--shares", nargs=2, type=float, default=[0.6, 0.6], help="least and largest side of crops")
    values = common.parse(options, argv)
    rows: list[dict[str, Any]] = []
    folder = Path(values.folder or Path(sklearn.datasets.__file__).parent / "images")
    files = written(folder, values.crops, values.shares, LEAST if values.folder else 100_000)
    models = []
    for name in values.models:
        clip, processor = load_dual_encoder(name)
        models.append(Model(Path(name).name, clip.eval(), processor, answering(name, clip, processor)))
    kinds, results = encoded(files, models, values.times)
    wheres = {times: f"{times:g} times and {LEAST_SIDE:,} pixels" for times in values.times}
    for model, of in zip(models, results, strict=True):
        rows += [
            row for times, where in wheres.items() for row in compared(f"{where}, {model.name}", kinds, of, times)
        ]
    smaller = [times for times in values.times if any(any(of[times].smaller) for of in results)]
    rows += [together(wheres[times], kinds, results, times) for times in smaller]
    values.models = [Path(name).name for name in values.models]
    common.write("scaled", values, argv, rows)


def written(folder: Path, crops: int, shares: Sequence[float], least: int) -> Iterator[File]:
    """Yield the photographs of a folder as JPEG files, without copies of other sizes, and crops of the large ones."""
    seen, random = set[bytes](), np.random.default_rng(0)
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in image_suffixes()):
        try:
            image = decode_image(path)
        except UnreadableImageError:
            continue
        look = image.resize((8, 8), Image.Resampling.BOX).tobytes()
        if image.width * image.height < least or look in seen:
            continue
        seen.add(look)
        yield File(as_file(image.crop((0, 0, image.width // 8 * 8, image.height // 8 * 8))), len(seen) - 1, -1)
        for number in range(crops if image.width * image.height >= 2 * least else 0):
            low, high = shares
            share = max(
                random.uniform(low, high) if low < high else low, (least / (image.width * image.height)) ** 0.5
            )
            width, height = (min(n // 8 * 8, int(share * n) // 8 * 8 + 8) for n in image.size)
            left, top = random.integers(image.width - width + 1), random.integers(image.height - height + 1)
            part = image.crop((int(left), int(top), int(left) + width, int(top) + height))
            yield File(as_file(part), len(seen) - 1, number)


def as_file(image: Image.Image) -> bytes:
    """Return the bytes of a JPEG file of quality 90, with the colours at half the size, as cameras write them."""
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=90)
    return packed.getvalue()


@torch.no_grad()
def encoded(
    files: Iterator[File], models: Sequence[Model], scales: Sequence[float]
) -> tuple[list[tuple[int, int]], list[dict[float, Encoded]]]:
    """Return photograph and crop of each file, and what each model makes of whole images (0) and at each scale."""
    kinds, results = [], [{times: Encoded() for times in (0, *scales)} for _ in models]
    for file in files:
        kinds.append((file.photograph, file.crop))
        decoded: dict[int, tuple[Image.Image, bool, float]] = {}  # of each side that is needed
        for model, of in zip(models, results, strict=True):
            side = image_shape(model.clip, model.processor)[-1]
            for times, found in of.items():
                needed = max(int(times * side), LEAST_SIDE) if times else 0
                start = time.process_time()
                if needed not in decoded:
                    image, header = decode_file("", file.content, needed)
                    smaller = max(image.size) < max(header.size)
                    decoded[needed] = image, smaller, time.process_time() - start
                    start = time.process_time()
                image, smaller, seconds = decoded[needed]
                pixels = pixel_values(model.processor, image)
                found.seconds += seconds + time.process_time() - start
                found.smaller.append(smaller)
                if times and not found.smaller[-1]:  # the same pixels
                    found.features.append(of[0].features[-1])
                    found.answers.append(of[0].answers[-1])
                else:
                    found.features.append(unit_image_embeds(model.clip, pixels[None]))
                    found.answers.append(model.answer(pixels[None], found.features[-1]))
        if len(kinds) % 100 == 0:
            print(len(kinds), *(together(f"{times:g}", kinds, results, times) for times in scales), flush=True)
    return kinds, results


@torch.no_grad()
def answering(path: str, clip: Any, processor: Any) -> Answer:
    """Return a function from an image's pixel values and features to the number of one of many classes, (1,)."""
    if has_text(clip):
        words = {word.removesuffix("</w>") for word in processor.tokenizer.get_vocab() if word.endswith("</w>")}
        names = sorted(word for word in words if word.isalpha() and word.isascii() and len(word) > 2)
        chosen = np.random.default_rng(0).permutation(len(names))[:WORDS]
        encoder = TextEncoder(clip, processor, LearnerArguments(), torch.device("cpu"))
        texts = encoder.text_embeds([names[number] for number in chosen])
        return lambda _, features: (features @ texts.T).argmax(dim=1)
    model = AutoModelForImageClassification.from_pretrained(path).float().eval()
    return lambda pixels, _: model(pixel_values=pixels).logits.argmax(dim=1)


def different(results: dict[float, Encoded], times: float) -> np.ndarray:
    """Return whether each image that was decoded smaller has another answer, or -1 for images that were not, (n,)."""
    whole, scaled = (torch.cat(results[each].answers).numpy() for each in (0, times))
    return np.where(results[times].smaller, whole != scaled, -1)


def together(
    where: str, kinds: Sequence[tuple[int, int]], models: Sequence[dict[float, Encoded]], times: float
) -> dict[str, Any]:
    """Return the row of all models together.

    The first interval, of Clopper and Pearson, takes the images as independent. The second one is that of 2,000 draws
    of photographs, since the crops of one photograph are similar.
    """
    changed, number = np.zeros(kinds[-1][0] + 1), np.zeros(kinds[-1][0] + 1)
    for results in models:
        each = different(results, times)
        np.add.at(changed, [place for place, _ in kinds], each == 1)
        np.add.at(number, [place for place, _ in kinds], each >= 0)
    wrong, count = int(changed.sum()), int(number.sum())
    low = stats.beta.ppf(0.025, count - wrong, wrong + 1) if count else 0.0
    high = stats.beta.ppf(0.975, count - wrong + 1, wrong) if wrong else 1.0
    drawn = np.random.default_rng(0).integers(len(number), size=(2000, len(number)))
    shares = 1 - changed[drawn].sum(axis=1) / number[drawn].sum(axis=1).clip(1)
    between, among = (
        f"{100 * first:.2f} to {100 * last:.2f}" for first, last in ((low, high), np.quantile(shares, [0.025, 0.975]))
    )
    unit = f"% of {count}, 95 %: {between}, by photographs {among}; {wrong} of {int((changed > 0).sum())} photographs"
    what = f"{where}, {len(models)} models: equal answers of the images that were decoded smaller"
    return common.value_row(what, round(100 * (1 - wrong / count), 3) if count else None, unit, "at least 99.8")


def compared(
    where: str, kinds: Sequence[tuple[int, int]], results: dict[float, Encoded], times: float
) -> list[dict[str, Any]]:
    """Return the rows of one model and scale."""
    seconds = [results[each].seconds for each in (times, 0)]
    whole, scaled = (torch.cat(results[each].features) for each in (0, times))
    cosines, count, each = (whole * scaled).sum(dim=1), len(kinds), different(results, times)
    decoded = f"{count} images, {int((each >= 0).sum())} decoded smaller"
    equal = round(100 * (1 - float((each == 1).mean())), 2)
    rows = [
        common.value_row(f"{where}: equal answers, {decoded}", equal, "%", "at least 99.8"),
        common.value_row(f"{where}: least cosine", round(float(cosines.min()), 5), ""),
        common.value_row(f"{where}: mean cosine", round(float(cosines.mean()), 6), ""),
        common.value_row(f"{where}: CPU time of reading", common.rounded(seconds[0] / seconds[1]), "of whole"),
    ]
    crops, labels = (np.array(column) for column in list(zip(*kinds, strict=True))[::-1])
    learned, tested = (crops >= 0) & (crops % 2 == 0), (crops >= 0) & (crops % 2 == 1)
    for name in CLASSIFIERS if tested.any() else ():
        right, answers = [], []
        for features in (whole.numpy(), scaled.numpy()):
            fitted = FeatureClassifier(name).fit(features[learned], labels[learned])
            answers.append(fitted.predict(features[tested]))
            right.append(100 * float(np.mean(answers[-1] == labels[tested])))
        same = 100 * float(np.mean(answers[0] == answers[1]))
        what = f"{where}: accuracy of {name}, {int(tested.sum())} crops of {len(set(labels[tested]))} photographs"
        rows.append(common.value_row(what, round(right[1], 2), f"%, whole {right[0]:.2f}, {same:.2f} % equal"))
    return rows


if __name__ == "__main__":
    main()
