"""Write the digits of the demo as poor cameras take them: black and white become two shades of grey.

The folder `one` has the pictures of one camera for all digits, and `each` those of another camera for every two
digits, in the order of their names. The demo's CLIP recognises a third of the pictures instead of nine of ten:

    python -m research.benchmarks.cameras --save cameras
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dulbe_peft.data.digits import load_digit_images

ONE = (100, 160)  # the shades of black and white
EACH = ((140, 110), (160, 100), (60, 90), (220, 170), ONE)


def write(folder: Path, cameras: Sequence[tuple[int, int]]) -> None:
    """Write the training and the test digits into folders by class; the cameras take equally many classes each."""
    for split in ("train", "test"):
        images = load_digit_images(split)
        rank = {name: place for place, name in enumerate(sorted(images.class_names))}
        for number, item in enumerate(images):
            name = images.class_names[item["label"]]
            black, white = cameras[rank[name] * len(cameras) // len(rank)]
            place = folder / split / name
            place.mkdir(parents=True, exist_ok=True)
            shades = [black + (white - black) * value // 255 for value in range(256)]
            item["image"].convert("L").point(shades).save(place / f"{number:04}.png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, required=True, help="folder to write, which must not exist")
    folder = parser.parse_args(argv).save
    if folder.exists():
        parser.error(f"--save {folder} exists; choose a new folder")
    for name, cameras in (("one", [ONE]), ("each", EACH)):
        write(folder / name, cameras)


if __name__ == "__main__":
    main()
