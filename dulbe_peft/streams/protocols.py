"""What a published protocol fixes beside its settings: the names of the classes."""

from pathlib import Path

from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_class_names, normalized
from dulbe_peft.utils.files import read_lines


def rename_classes(images: LabelledImages, path: str | Path) -> LabelledImages:
    """Images whose classes have the names of a text file: `old name`, a tab, `new name`; or the new names in order.

    Classes whose names are whole numbers, as folders 0, 1, 2, 10, stand in the order of the numbers.
    """
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
        numbers = all(name.isdecimal() for name in old)
        order = sorted(range(len(old)), key=lambda place: int(old[place])) if numbers else range(len(old))
        new = [name for _, name in sorted(zip(order, lines, strict=True))]
    else:
        raise ValueError(f"{file} has {len(lines)} names, the data has {len(old)} classes")
    return images.at(slice(None), class_names=check_class_names(new))
