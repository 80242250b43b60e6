"""The checks: rows of a YAML file that a reader can audit. Another check is another row, and takes no code."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dulbe_peft.photos.runs.settings import read_yaml
from dulbe_peft.utils.records import Count, Record, first_problem
from dulbe_peft.utils.specs import closest

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{8,64}$")]  # the whole, or how it begins
OWN_CHECKS = Path(__file__).with_name("checks.yaml")


class SplitFile(Record):
    """CoOp's split of a data set: which images are learned from and tested on. It is never shipped."""

    name: str
    link: str = ""  # where a person gets it; many stand on a drive from which no program may fetch
    url: str = ""  # where a program may fetch it
    sha256: Sha256 | None = None
    images: tuple[Count, Count, Count] | None = None  # train, val, test


class Data(Record):
    """Images of which checks speak.

    `source` is "hf:NAME" of parquet files on the Hub, the address of an archive or a photograph, or a path beside the
    file of the checks. Without it, `--images` names the folder, and `link` says where one gets it.
    """

    of: str = ""  # the data set of which this is a form; `--data` takes this name, too
    source: str = ""
    link: str = ""
    revision: str | None = None
    sha256: Sha256 | None = None
    files: dict[str, str] = {}  # split -> pattern of the files on the Hub
    image_column: str = "image"
    label_column: str = "label"
    inside: str = ""  # an archive inside the archive
    folder: str = ""  # where in the archive the images stand, or the paths of the split file begin
    splits: SplitFile | None = None
    misspelt: dict[str, str] = {}  # names of the data, and what they should be
    names: tuple[str, ...] = ()  # how prompts call the classes; else as the data does
    images: dict[str, Count] = {}  # split -> how many there must be
    classes: Count | None = None


class Check(Record):
    """A published number, and the settings under which it must come out here."""

    name: str
    level: Literal[0, 1, 2]
    measure: Literal["logits", "class_token", "zero_shot", "taught"]
    data: str
    model: str
    revision: str | None = None
    expected: tuple[float, ...]
    tolerance: Annotated[float, Field(ge=0)]
    source: str  # where the number stands
    confirmed: bool = True  # False: nobody has looked the number up; it never fails
    texts: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    class_name_style: Literal["verbatim", "spaces"] = "spaces"
    image_resize: Literal["processor", "crop", "squash"] = "processor"
    split: str = "test"
    shots: Annotated[int, Field(ge=1)] | None = None  # images of a class, drawn as CoOp draws them; None: all
    seeds: tuple[int, ...] = (1,)
    views: Count = 0  # augmented views of an image, each a row in its place; 0: the images as they are
    classifier: str = ""  # whose accuracy is compared
    alphas: tuple[float, ...] = ()  # of GDA-CLIP as its authors' code found them, one a seed
    beside: tuple[str, ...] = ()  # classifiers that are shown, too

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.expected:
            raise ValueError(f"{self.name!r} expects no number")
        if (self.measure == "logits") != bool(self.texts) or (self.texts and len(self.texts) != len(self.expected)):
            raise ValueError(f"{self.name!r} needs a text for each number of its logits, and no other texts")
        if self.measure == "zero_shot" and not self.templates:
            raise ValueError(f"{self.name!r} needs templates")
        if (self.measure == "taught") != bool(self.classifier):
            raise ValueError(f"{self.name!r} needs a classifier where it is taught, and only there")
        if self.measure in ("zero_shot", "taught") and len(self.expected) != 1:
            raise ValueError(f"{self.name!r} must expect one accuracy, in percent")
        if self.alphas and (self.classifier != "gda" or len(self.alphas) != len(self.seeds)):
            raise ValueError(f"{self.name!r}: alphas are those of the classifier 'gda', one for each of its seeds")
        return self


class Checks(Record):
    """What a file of checks holds."""

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
    """The checks of a YAML file; `shared`, which holds anchors, is no check. A `ValueError` names the field."""
    loaded = read_yaml(path, "checks")
    loaded.pop("shared", None)
    try:
        found: Checks = Checks.model_validate(loaded, strict=False)
    except ValidationError as error:
        raise ValueError(f"checks file {str(path)!r}: {first_problem(error)}") from error
    return found


def chosen(checks: Checks, level: int | None, data: str | None) -> list[Check]:
    """The checks of a level and of a data set; None stands for all. A `ValueError` where there is none."""
    called = {name: {name, entry.of} for name, entry in checks.data.items()}
    known = sorted(set().union(*called.values()) - {""})
    if data is not None and data not in known:
        raise ValueError(f"no check has the data {data!r}{closest(data, known)}")
    found = [
        check
        for check in checks.checks
        if level in (None, check.level) and (data is None or data in called[check.data])
    ]
    if not found:
        raise ValueError(f"there is no check of level {level}" + (f" with the data {data!r}" if data else ""))
    return found
