"""Class names of a published protocol, read from a file."""

from pathlib import Path

from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_class_names, normalized
from dulbe_peft.utils.files import read_lines


def rename_classes(images: LabelledImages, path: str | Path) -> LabelledImages:
    """Return the images with the class names of a text file.

    Each line has the old name, a tab and the new name; or the lines have only the new names, in the order of the
    classes. Classes whose names are all whole numbers, such as 0, 1, 2 and 10, are sorted as numbers.
    """
    file, old = Path(path), images.class_names
    if not file.is_file():
        raise FileNotFoundError(f"the file of class names, {str(path)!r}, does not exist")
    lines = read_lines(file)
    if any("\t" in line for line in lines):
        pairs = {normalized(name.strip()): new.strip() for name, _, new in (line.partition("\t") for line in lines)}
        absent = [name for name in old if name not in pairs]
        if absent:
            raise ValueError(f"{file} has no line for the class {absent[0]!r} ({len(absent)} such classes)")
        new = [pairs[name] for name in old]
    elif len(lines) == len(old):
        numbers = all(name.isdecimal() for name in old)
        order = sorted(range(len(old)), key=lambda place: int(old[place])) if numbers else range(len(old))
        new = [name for _, name in sorted(zip(order, lines, strict=True))]
    else:
        raise ValueError(f"{file} has {len(lines)} names, but the data has {len(old)} classes")
    return images.at(slice(None), class_names=check_class_names(new))
