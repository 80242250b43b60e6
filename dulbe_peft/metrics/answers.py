"""What a type checker knows of `ClassIncrementalLearner.predict`: the type of the answer for each form of the call."""

# mypy: disable-error-code="overload-overlap"
# One image is also an `object`, which stands for everything that holds several; the first overload that fits counts.

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Literal, Protocol, TypedDict, Unpack, cast, overload

import numpy as np
from PIL import Image
from torch import Tensor

Yes = Literal[True]
Scored = tuple[str, float]  # a class and its probability
One = Image.Image | np.ndarray | BinaryIO | Mapping[str, Any] | tuple[Any, int]
Either = str | os.PathLike[str] | Tensor  # a file or a folder; an image or a batch of them


class Among(TypedDict, total=False):
    """The options that change which answers are possible, but not their type."""

    only: Sequence[str] | None
    sum_up: Mapping[str, str] | None


class Predict(Protocol):
    """The calls of `predict`: for one image, for what may be one or several, and for several.

    Options whose values are not known before the call, and `reject` and `coverage` beside others, give `Any`.
    """

    @overload
    def __call__(self, images: One, **among: Unpack[Among]) -> str: ...
    @overload
    def __call__(self, images: One, *, return_scores: Yes, **among: Unpack[Among]) -> Scored: ...
    @overload
    def __call__(self, images: One, *, top_k: int, **among: Unpack[Among]) -> list[str]: ...
    @overload
    def __call__(self, images: One, *, top_k: int, return_scores: Yes, **among: Unpack[Among]) -> list[Scored]: ...
    @overload
    def __call__(self, images: One, *, return_novelty: Yes, **among: Unpack[Among]) -> tuple[str, float]: ...
    @overload
    def __call__(
        self, images: One, *, return_scores: Yes, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[Scored, float]: ...
    @overload
    def __call__(
        self, images: One, *, top_k: int, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[list[str], float]: ...
    @overload
    def __call__(
        self, images: One, *, top_k: int, return_scores: Yes, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[list[Scored], float]: ...
    @overload
    def __call__(self, images: One, *, reject: float, **among: Unpack[Among]) -> str | None: ...
    @overload
    def __call__(self, images: One, *, coverage: float, **among: Unpack[Among]) -> list[str]: ...
    @overload
    def __call__(self, images: Either, **among: Unpack[Among]) -> str | list[str]: ...
    @overload
    def __call__(self, images: Either, *, return_scores: Yes, **among: Unpack[Among]) -> Scored | list[Scored]: ...
    @overload
    def __call__(self, images: Either, *, top_k: int, **among: Unpack[Among]) -> list[str] | list[list[str]]: ...
    @overload
    def __call__(
        self, images: Either, *, top_k: int, return_scores: Yes, **among: Unpack[Among]
    ) -> list[Scored] | list[list[Scored]]: ...
    @overload
    def __call__(
        self, images: Either, *, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[str, float] | tuple[list[str], list[float]]: ...
    @overload
    def __call__(
        self, images: Either, *, return_scores: Yes, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[Scored, float] | tuple[list[Scored], list[float]]: ...
    @overload
    def __call__(
        self, images: Either, *, top_k: int, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[list[str], float] | tuple[list[list[str]], list[float]]: ...
    @overload
    def __call__(
        self, images: Either, *, top_k: int, return_scores: Yes, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[list[Scored], float] | tuple[list[list[Scored]], list[float]]: ...
    @overload
    def __call__(self, images: Either, *, reject: float, **among: Unpack[Among]) -> str | list[str | None] | None: ...
    @overload
    def __call__(self, images: Either, *, coverage: float, **among: Unpack[Among]) -> list[str] | list[list[str]]: ...
    @overload
    def __call__(self, images: object, **among: Unpack[Among]) -> list[str]: ...
    @overload
    def __call__(self, images: object, *, return_scores: Yes, **among: Unpack[Among]) -> list[Scored]: ...
    @overload
    def __call__(self, images: object, *, top_k: int, **among: Unpack[Among]) -> list[list[str]]: ...
    @overload
    def __call__(
        self, images: object, *, top_k: int, return_scores: Yes, **among: Unpack[Among]
    ) -> list[list[Scored]]: ...
    @overload
    def __call__(
        self, images: object, *, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[list[str], list[float]]: ...
    @overload
    def __call__(
        self, images: object, *, return_scores: Yes, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[list[Scored], list[float]]: ...
    @overload
    def __call__(
        self, images: object, *, top_k: int, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[list[list[str]], list[float]]: ...
    @overload
    def __call__(
        self, images: object, *, top_k: int, return_scores: Yes, return_novelty: Yes, **among: Unpack[Among]
    ) -> tuple[list[list[Scored]], list[float]]: ...
    @overload
    def __call__(self, images: object, *, reject: float, **among: Unpack[Among]) -> list[str | None]: ...
    @overload
    def __call__(self, images: object, *, coverage: float, **among: Unpack[Among]) -> list[list[str]]: ...
    @overload
    def __call__(
        self,
        images: object,
        *,
        top_k: int | None = None,
        return_scores: bool = False,
        reject: float | None = None,
        coverage: float | None = None,
        return_novelty: bool = False,
        **among: Unpack[Among],
    ) -> Any: ...


def typed_predict(function: Callable[..., Any]) -> Predict:
    """Return the method unchanged, with the types of [`Predict`]."""
    return cast(Predict, function)
