"""Make a smaller `.npz` file of images: the first so many training images of each class in a random order.

    python few_images.py photographs.npz few.npz --images 4 --seed 0

`--held-back 10` puts ten of each class's training images in the place of the test images. So settings can be chosen
without the test images.
"""

import argparse

import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("source", help="an .npz file in the layout of NpzImages")
parser.add_argument("output", help="the file to write")
parser.add_argument("--images", type=int, default=4, help="training images of each class that are kept")
parser.add_argument("--held-back", type=int, default=0, help="training images of each class to test on")
parser.add_argument("--seed", type=int, default=0, help="seed of the order")
values = parser.parse_args()

with np.load(values.source) as file:
    source = {name: file[name] for name in file.files}
random, labels, kept, split = np.random.default_rng(values.seed), source["labels"], [], []
for label in range(len(source["names"])):
    train = random.permutation(np.flatnonzero((labels == label) & (source["split"] == 0)))
    test = np.flatnonzero((labels == label) & (source["split"] == 1))
    if values.held_back:
        train, test = train[: -values.held_back], train[-values.held_back :]
    train = np.sort(train[: values.images])
    kept += [*train, *test]
    split += [0] * len(train) + [1] * len(test)

offsets = source["offsets"]
images = [source["blob"][offsets[index] : offsets[index + 1]] for index in kept]
np.savez(
    values.output,
    blob=np.concatenate(images),
    offsets=np.cumsum([0, *map(len, images)]),
    labels=labels[kept],
    split=np.array(split, dtype=source["split"].dtype),
    names=source["names"],
)
print(f"{values.output}: {split.count(0)} images to learn from, {split.count(1)} to test on")
