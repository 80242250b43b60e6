"""Test streams of tasks: class orders, increments, labels, class names, and the errors for invalid arguments."""

from typing import Any

import numpy as np
import pytest
import torch

from dulbe_peft.data.images import labelled_images
from dulbe_peft.data.names import check_class_names, format_prompts
from dulbe_peft.streams.orders import ICARL_CIFAR100_ORDER, MAGMAX_CIFAR100_ORDER
from dulbe_peft.streams.tasks import class_incremental_tasks


def pairs(labels: list[Any]) -> list[tuple[str, Any]]:
    """Return a list of (image, label) pairs, which has no separate list of labels."""
    return [(f"image {index}", label) for index, label in enumerate(labels)]


class Labelled:
    """A data set of dicts with `.labels` and class names, which counts how often an item is read."""

    def __init__(self, labels: list[Any], class_names: list[str] | None = None) -> None:
        self.labels, self.reads = labels, 0
        self.class_names = class_names or [f"class_{label}" for label in range(max(labels) + 1)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"image": f"image {index}", "label": self.labels[index]}


class Decoy:
    """A data set with labels and class names only; reading an image is an error."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.length = len(next(iter(attributes.values())))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an image was read for its label")


def letters(count: int) -> list[str]:
    return [chr(ord("a") + index) for index in range(count)]


def test_every_image_is_in_exactly_one_task_with_its_label():
    labels = np.random.RandomState(0).permutation(np.arange(40) % 5).tolist()
    train, test = Labelled(labels), Labelled(labels[:20])
    order = [3, 0, 4, 1, 2]
    tasks = class_incremental_tasks(train, test, increment=2, class_order=order)
    assert [task.class_names for task in tasks] == [("class_3", "class_0"), ("class_4", "class_1"), ("class_2",)]
    assert train.reads == test.reads == 0
    for split, source in (("train", train), ("test", test)):
        images = []
        for number, task in enumerate(tasks):
            subset = getattr(task, split)
            classes = order[2 * number : 2 * number + 2]
            expected = [
                {"image": f"image {index}", "label": classes.index(label)}
                for index, label in enumerate(source.labels)
                if label in classes
            ]
            assert [subset[index] for index in range(len(subset))] == list(subset) == expected
            assert subset.labels.dtype == np.int64
            assert subset.labels.tolist() == [sample["label"] for sample in expected]
            assert subset.class_names == task.class_names
            images += [sample["image"] for sample in expected]
        assert sorted(images) == sorted(f"image {index}" for index in range(len(source)))
    with pytest.raises(ValueError, match="no class 'z'"):
        labelled_images(train).select(["z"])


def test_class_orders_by_seed_name_and_list():
    data = Labelled(list(range(100)))

    def first(**order: Any) -> list[str]:
        return list(class_incremental_tasks(data, increment=10, **order)[0].class_names)

    assert first() == [f"class_{label}" for label in range(10)]
    # the first ten of RandomState(1993).permutation(100), as the field's logs print them
    assert first(seed=1993) == [f"class_{label}" for label in (68, 56, 78, 8, 23, 84, 90, 65, 74, 76)]
    assert first(class_order="icarl") == [f"class_{label}" for label in (87, 0, 52, 58, 44, 91, 68, 97, 51, 15)]
    assert first(class_order="natural") == first() and first(class_order="pilot") == first(seed=1993)
    assert first(class_order="magmax") == [f"class_{label}" for label in (70, 89, 11, 13, 63, 53, 86, 57, 41, 43)]
    assert sorted(MAGMAX_CIFAR100_ORDER) == list(range(100)) and MAGMAX_CIFAR100_ORDER[-3:] == (12, 85, 32)
    assert sorted(ICARL_CIFAR100_ORDER) == list(range(100)) and ICARL_CIFAR100_ORDER[-3:] == (26, 35, 39)
    names = [f"class_{label}" for label in range(99, -1, -1)]
    assert first(class_order=names) == names[:10]
    assert first(class_order=np.arange(100)[::-1]) == names[:10]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"increment": 0}, ValueError, "increment must be at least 1, got 0"),
        ({"increment": 1, "seed": 1, "class_order": [0, 1, 2]}, ValueError, "class_order and seed=1 are both given"),
        ({"increment": 1, "class_order": 5}, TypeError, "class_order must be a sequence of ints or class names"),
        ({"increment": 1, "class_order": [0, 1]}, ValueError, "2 is missing"),
        ({"increment": 1, "class_order": [0, True, 2]}, TypeError, r"class_order\[1\] must be a valid integer"),
        (
            {"increment": 1, "class_order": "imagenet"},
            ValueError,
            "'imagenet'; the orders with a name are icarl",
        ),
        ({"increment": 1, "class_order": ["a", "b", "x"]}, ValueError, "names 'x'"),
        ({"increment": 1, "class_order": "icarl"}, ValueError, "100 classes of CIFAR-100, got 3"),
        ({"increment": 1, "class_order": "magmax"}, ValueError, "'magmax' is for the 100 classes of CIFAR-100, got 3"),
        ({"increment": 1, "class_names": letters(2)}, ValueError, r"label of train sample 2 is 2; .* 0\.\.1"),
        ({"increment": 1, "class_names": letters(4)}, ValueError, r"class 3 \('d'\) has no training image"),
        ({"increment": 1, "test": Labelled([0, 1, 2], ["a", "b", "x"])}, ValueError, "disagree .* 'c' is in only one"),
        ({"increment": 1, "test": Labelled([0, 1, 2], ["b", "a", "c"])}, ValueError, "their order differs"),
        ({"increment": 1, "test": Labelled([0, 1], letters(3))}, ValueError, r"task 3 has no test image .*\['c'\]"),
        ({"increment": 1, "test": pairs([])}, ValueError, "test is empty"),
        ({"increment": 1, "train": pairs([0, 1])}, ValueError, "pass class_names"),
    ],
)
def test_invalid_arguments_of_a_stream_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        class_incremental_tasks(**{"train": Labelled([0, 1, 2], letters(3))} | arguments)


def test_labels_are_read_without_decoding_images():
    decoy = Decoy(labels=torch.tensor([4, 3, 2]), classes=letters(5))
    subset = torch.utils.data.Subset(torch.utils.data.Subset(decoy, [2, 1]), [1, 0])
    assert labelled_images(subset).class_names == tuple("abcde")
    for data, labels in (
        (Decoy(labels=np.array([2, 0], np.int16)), [2, 0]),
        (Decoy(targets=[1, 0, 1]), [1, 0, 1]),
        (subset, [3, 2]),
        (pairs([1, np.int32(0), np.uint8(3), torch.tensor(1)]), [1, 0, 3, 1]),
    ):
        assert labelled_images(data).labels.tolist() == labels


NO_INTS = ([0, 1.0], [0, True], [True, False], ["a", "b"], [None, 1])  # labels that are not all integers
KINDS = (pairs, lambda labels: Decoy(labels=labels), lambda labels: Decoy(targets=tuple(labels)))


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        *((kind(labels), TypeError, "int") for labels in NO_INTS for kind in KINDS),
        (pairs([0, -1]), ValueError, "sample 1 is -1"),
        (Decoy(labels=np.zeros((2, 1), int)), ValueError, "2 dimensions"),
        ((label for label in [0]), TypeError, "generator"),
        (Decoy(names="abc", labels=[0, 1]), ValueError, "2 labels but 3 images"),
        ([("image", 0, "extra")], TypeError, "sample 0 is a tuple"),
        ([{"image": 0, "target": 1}], ValueError, r"sample 0 has the keys \['image', 'target'\]"),
        ({"train": []}, TypeError, r"keys \['train'\]; pass one of its splits"),
    ],
)
def test_malformed_datasets_are_refused(dataset, error, message):
    with pytest.raises(error, match=message):
        labelled_images(dataset)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("cat", TypeError, "single string 'cat'"),
        (["cat", 3], TypeError, r"class_names\[1\] must be a string, got 3"),
        ([], ValueError, "class_names is empty"),
        ({"cat", "dog"}, TypeError, "which has no order"),
        (["cat", ""], ValueError, r"class_names\[1\] is ''"),
        (["cat", "dog", "cat"], ValueError, r"class_names\[2\] and \[0\] are both 'cat'"),
        (["c\0t"], ValueError, "control characters"),
        (["\udcff"], ValueError, "UTF-8"),
        (["bird"], ValueError, "'bird', a class that was already seen"),
    ],
)
def test_invalid_class_names_are_refused(names, error, message):
    with pytest.raises(error, match=message):
        check_class_names(names, seen=["bird"])


def test_prompts_contain_the_class_name_in_either_style():
    templates = ("a photo of {}, a type of food.", "{a} {} {0}")
    assert format_prompts("great_white_shark", templates, "spaces") == [
        "a photo of great white shark, a type of food.",
        "{a} great white shark {0}",
    ]
    assert format_prompts("{0} {}", ["the {}."]) == ["the {0} {}."]
