"""What a published protocol fixes beside its settings: the names of the classes, counts, and a figure to meet first.

A run that follows a protocol checks its data and its pristine model against the published numbers before it trains.
"""

from pathlib import Path

from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_class_names, normalized
from dulbe_peft.utils.files import read_lines


def rename_classes(images: LabelledImages, path: str | Path) -> LabelledImages:
    """Images whose classes have the names of a text file: `old name`, a tab, `new name`; or the new names in order."""
    file, old = Path(path), images.class_names
    if not file.is_file():
        raise FileNotFoundError(f"class names {str(path)!r} is no file")
    lines = read_lines(file)
    if any("\t" in line for line in lines):
        pairs = {normalized(name.strip()): new.strip() for name, _, new in (line.partition("\t") for line in lines)}
        absent = [name for name in old if name not in pairs]
        if absent:
            raise ValueError(f"{file} has no line for the class {absent[0]!r} ({len(absent)} such classes)")
        new = [pairs[name] for name in old]
    elif len(lines) == len(old):
        new = lines
    else:
        raise ValueError(f"{file} has {len(lines)} names, the data has {len(old)} classes")
    return images.at(slice(None), class_names=check_class_names(new))


def check_counts(
    train: LabelledImages,
    test: LabelledImages | None,
    classes: int | None = None,
    images: int | None = None,
    test_images: int | None = None,
) -> None:
    """Raise a `ValueError` where a stream's data has other numbers than its protocol; None stands for any number."""
    found = (
        (len(train.class_names), "classes", classes),
        (len(train), "images to learn from", images),
        (0 if test is None else len(test), "images to test on", test_images),
    )
    wrong = [f"{count} {what}, expected {wanted}" for count, what, wanted in found if wanted not in (None, count)]
    if wrong:
        raise ValueError(f"the data is not the one of the protocol: it has {'; '.join(wrong)}")


def check_zero_shot(found: float | None, expected: float, tolerance: float) -> None:
    """Raise where the pristine model's accuracy, in [0, 1] or None, is not the published one, in percent."""
    if found is None:
        raise ValueError(f"expected_zero_shot is {expected} %, but there is none without test images and texts")
    if abs(100 * found - expected) > tolerance:
        raise ValueError(
            f"zero-shot accuracy over all classes is {100 * found:.2f} %, expected {expected} % within {tolerance}: "
            "the model, the prompts, the class names or the images are not those of the protocol"
        )
