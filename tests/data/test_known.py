"""What is recorded of learned images, and what is no longer recorded once they are forgotten."""

import numpy as np
import pytest

from dulbe_peft.data.known import KnownImages

ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))
KNOWN = KnownImages({"a": (ONE, TWO), "b": (THREE, TWO)}, groups={ONE: 10, TWO: 20, THREE: 30})


def test_groups_of_forgotten_images_are_forgotten():
    """Otherwise `suggest` would take their items for labelled ones. TWO is learned under both classes."""
    assert KNOWN.without_class("a").groups == {TWO: 20, THREE: 30}
    assert KNOWN.without_contents({TWO}).groups == {ONE: 10, THREE: 30}
    for new in ("c", "b"):
        assert KNOWN.renamed("a", new).groups == KNOWN.groups
    arrays, metadata = KNOWN.without_class("b").arrays(["a"])
    assert KnownImages.from_arrays(arrays, metadata, ["a"]).groups == {ONE: 10, TWO: 20}


@pytest.mark.parametrize(
    "name, change",
    [
        ("learned class", lambda array: array - 1),  # -1 would be the last class
        ("learned class", lambda array: array + 2),
        ("learned class", lambda array: array.astype(bool)),  # False would be the first class
        ("tested class", lambda array: array.astype(np.float64)),
        ("learned class", lambda array: array[:, None]),
        ("learned", lambda array: array[:, :31]),
        ("learned", lambda array: array.astype(np.int64)),
        ("grouped", lambda array: array[:, :0]),
        ("group", lambda array: array.astype(np.float64)),
        ("group", lambda array: array[:1]),
    ],
)
def test_record_of_images_that_was_changed_is_refused(name, change):
    contents = {"a": (b"1" * 32, b"2" * 32), "b": (b"3" * 32,)}
    known = KnownImages(contents, contents, groups={b"1" * 32: 7, b"2" * 32: 8})
    arrays, metadata = known.arrays(["a", "b"])
    assert KnownImages.from_arrays(arrays, metadata, ["a", "b"]) == known
    with pytest.raises(ValueError):
        KnownImages.from_arrays(arrays | {name: change(arrays[name])}, metadata, ["a", "b"])
