"""What is recorded of learned images, and what is no longer recorded once they are forgotten."""

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
