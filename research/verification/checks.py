"""Read the checks from a YAML file that a reader can audit. Adding a check means adding a row, without code."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dulbe_peft.photos.runs.run_settings import read_yaml
from dulbe_peft.utils.records import Count, Record, first_problem
from dulbe_peft.utils.specs import closest

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{8,64}$")]  # the whole hash, or its beginning
OWN_CHECKS = Path(__file__).with_name("checks.yaml")


class SplitFile(Record):
    """CoOp's split of a data set into training, validation and test images. The file is never shipped."""

    name: str
    link: str = ""  # where a person can download it; many are on a drive that programs must not use
    url: str = ""  # where a program may download it
    sha256: Sha256 | None = None
    images: tuple[Count, Count, Count] | None = None  # numbers of train, val and test images


class Data(Record):
    """The images of a check.

    `source` is "hf:NAME" for parquet files on the Hub, the URL of an archive or a photograph, or a path relative to
    the file of the checks. Without a source, `--images` must name the folder, and `link` says where to download it.
    """

    of: str = ""  # the data set of which this is a variant; `--data` accepts this name as well
    source: str = ""
    link: str = ""
    revision: str | None = None
    sha256: Sha256 | None = None
    files: dict[str, str] = {}  # split -> pattern of the files on the Hub
    image_column: str = "image"
    label_column: str = "label"
    inside: str = ""  # path of an archive inside the archive
    folder: str = ""  # the archive's folder with the images, to which the paths of the split file are relative
    splits: SplitFile | None = None
    misspelt: dict[str, str] = {}  # misspelt class name in the data -> correct name
    names: tuple[str, ...] = ()  # class names for the prompts; by default, those of the data
    images: dict[str, Count] = {}  # split -> expected number of images
    classes: Count | None = None  # expected number of classes


class Check(Record):
    """A published number, and the settings with which it must be reproduced."""

    name: str
    level: Literal[0, 1, 2]
    measure: Literal["logits", "class_token", "zero_shot", "taught"]
    data: str
    model: str
    revision: str | None = None
    expected: tuple[float, ...]
    tolerance: Annotated[float, Field(ge=0)]
    source: str  # where the number was published
    confirmed: bool = True  # if False, nobody has looked the number up yet, and the check never fails
    texts: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    class_name_style: Literal["verbatim", "spaces"] = "spaces"
    image_resize: Literal["processor", "crop", "squash"] = "processor"
    split: str = "test"
    shots: Annotated[int, Field(ge=1)] | None = None  # training images per class, drawn as in CoOp; None means all
    seeds: tuple[int, ...] = (1,)
    views: Count = 0  # augmented views that replace each training image; 0 means that the image itself is used
    classifier: str = ""  # the classifier whose accuracy is compared
    alphas: tuple[float, ...] = ()  # for GDA-CLIP, the values that its authors' code selected, one per seed
    beside: tuple[str, ...] = ()  # further classifiers to show

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.expected:
            raise ValueError(f"{self.name!r} must expect at least one number")
        if (self.measure == "logits") != bool(self.texts) or (self.texts and len(self.texts) != len(self.expected)):
            raise ValueError(f"{self.name!r} needs one text per expected logit, and only logits need texts")
        if self.measure == "zero_shot" and not self.templates:
            raise ValueError(f"{self.name!r} needs templates")
        if (self.measure == "taught") != bool(self.classifier):
            raise ValueError(f"{self.name!r} needs a classifier if its measure is 'taught', and only then")
        if self.measure in ("zero_shot", "taught") and len(self.expected) != 1:
            raise ValueError(f"{self.name!r} must expect one accuracy, in percent")
        if self.alphas and (self.classifier != "gda" or len(self.alphas) != len(self.seeds)):
            raise ValueError(f"{self.name!r}: alphas belong to the classifier 'gda', and there must be one per seed")
        return self


class Checks(Record):
    """The content of a file of checks."""

    data: dict[str, Data]
    checks: tuple[Check, ...]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [check.name for check in self.checks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two checks are called {name!r}")
        for check in self.checks:
            if check.data not in self.data:
                raise ValueError(f"{check.name!r} has unknown data {check.data!r}{closest(check.data, self.data)}")
        return self


def read_checks(path: Path) -> Checks:
    """Read a YAML file of checks; its key `shared` only holds anchors. A `ValueError` names an invalid field."""
    loaded = read_yaml(path, "checks")
    loaded.pop("shared", None)
    try:
        checks: Checks = Checks.model_validate(loaded, strict=False)
    except ValidationError as error:
        raise ValueError(f"checks file {str(path)!r}: {first_problem(error)}") from error
    return checks


def select_checks(checks: Checks, level: int | None, data: str | None) -> list[Check]:
    """Return the checks of a level and of a data set, where None means all; raise a ValueError if there is none."""
    names_of = {name: {name, entry.of} for name, entry in checks.data.items()}
    known = sorted(set().union(*names_of.values()) - {""})
    if data is not None and data not in known:
        raise ValueError(f"no check has the data {data!r}{closest(data, known)}")
    selected = [
        check
        for check in checks.checks
        if level in (None, check.level) and (data is None or data in names_of[check.data])
    ]
    if not selected:
        raise ValueError(f"there is no check of level {level}" + (f" with the data {data!r}" if data else ""))
    return selected
