"""What a command can be told: the fields of dataclasses as flags and as keys of a YAML file.

Flags win over the file, the file over the defaults.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.utils.checks import check_int, check_number
from dulbe_peft.utils.files import read_lines
from dulbe_peft.utils.specs import closest

_MOST_ENTRIES = 100_000  # of a YAML file, its aliases written out


@dataclass(frozen=True)
class StreamArguments:
    """Where a stream comes from and where it goes."""

    model: str = field(
        default="", metadata={"help": "Dual encoder such as CLIP or SigLIP: a folder, or a Hub id. Required."}
    )
    data: str = field(
        default="",
        metadata={
            "help": "Images: a folder with train/class/*.jpg, class/*.jpg or train*.parquet, or hf:NAME of the Hub. "
            "Required."
        },
    )
    output: str = field(default="", metadata={"help": "Folder for checkpoints and results. Required."})
    strategy: str = field(
        default="dulbe",
        metadata={"help": "What is trained: a name, or name:key=value,key=value. 'frozen' trains nothing."},
    )
    classifiers: str | None = field(
        default=None,
        metadata={"help": "Classifiers with commas between them: bridge,ranpac:features=4000. None: the strategy's."},
    )
    increment: int | None = field(
        default=None,
        metadata={"help": "Classes per task. None: 10, or about half of the classes where there are fewer than 20."},
    )
    initial_increment: int | None = field(
        default=None, metadata={"help": "Classes of the first task, where it differs."}
    )
    train_split: str = field(default="train", metadata={"help": "Name of the split to learn from."})
    test_split: str = field(default="test", metadata={"help": "Name of the split to test on, where there is one."})
    test_fraction: float | None = field(
        default=None, metadata={"help": "Without a test split: how much of each class to hold back for tests."}
    )
    validation_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Test on this share of each class's training images, which are then not learned, and leave the "
            "test images alone: for choosing settings."
        },
    )
    images_per_class: int | None = field(
        default=None, metadata={"help": "Learn from at most so many images of each class, drawn at random."}
    )
    draw_seed: int = field(
        default=0, metadata={"help": "Seed of the images that are drawn, or held back for --validation-fraction."}
    )
    skip_unreadable: bool = field(
        default=False,
        metadata={"help": "Leave images out that cannot be read, instead of stopping. Decodes all images first."},
    )
    class_names: str | None = field(
        default=None,
        metadata={
            "help": "Text file with the names of the classes: 'old name', a tab, 'new name' on each line, or one name "
            "for each class in the order of the data. None: the names that the data carries."
        },
    )
    max_tasks: int | None = field(default=None, metadata={"help": "Learn the first so many tasks alone."})
    class_order: str | None = field(
        default=None, metadata={"help": "Order of the classes: icarl, or a text file with a name or number a line."}
    )
    order_seed: int | None = field(
        default=None, metadata={"help": "Seed of a random class order (1993 in the paper); none: as in the data."}
    )
    expected_classes: int | None = field(
        default=None, metadata={"help": "Stop before anything else where the data has another number of classes."}
    )
    expected_train: int | None = field(
        default=None, metadata={"help": "Stop where there are not so many images to learn from."}
    )
    expected_test: int | None = field(
        default=None, metadata={"help": "Stop where there are not so many images to test on."}
    )
    expected_zero_shot: float | None = field(
        default=None,
        metadata={
            "help": "Stop before training where the pristine model has another accuracy, in percent, over all classes."
        },
    )
    zero_shot_tolerance: float = field(
        default=1.0, metadata={"help": "How far from expected_zero_shot it may be, in points of percent."}
    )
    revision: str | None = field(default=None, metadata={"help": "Revision of a model on the Hub."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention kernel: eager or sdpa. None: eager on a CPU, the faster one there."}
    )
    test_ahead: bool = field(
        default=False,
        metadata={"help": "After each task, test by class names also on the tasks that are still to come."},
    )
    resume: bool = field(default=True, metadata={"help": "Go on after the newest valid task folder."})
    dry_run: bool = field(
        default=False,
        metadata={"help": "Print tasks, adapted layers, parameters, memory and an estimate of the time, and exit."},
    )

    def __post_init__(self) -> None:
        for name, hint in types_of(StreamArguments).items():
            value = getattr(self, name)
            if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
                raise TypeError(f"{name} must be of type {inspect.formatannotation(hint)}, got {value!r}")
        for name in ("increment", "initial_increment", "images_per_class", "max_tasks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_number("zero_shot_tolerance", self.zero_shot_tolerance, least=0)


_GROUPS: dict[str, Any] = {"stream": StreamArguments, "adapter": DualModeLoraConfig, "learner": LearnerArguments}


def fields_of(cls: Any) -> list[Any]:
    """The fields of a dataclass that are settings."""
    return cls.own_fields() if hasattr(cls, "own_fields") else list(fields(cls))


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """The names and values of a YAML file.

    Args:
        path: the file.
        kind: what messages call it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, or holds something else.
    """
    import yaml

    if not path.is_file():
        raise FileNotFoundError(f"{kind} file {str(path)!r} does not exist")
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _strict_loader()) or {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{kind} file {str(path)!r} is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{kind} file {str(path)!r} must hold names and values, got a {type(loaded).__name__}")
    return loaded


def _strict_loader() -> Any:
    """YAML's safe loader that refuses a name which stands twice, of which YAML's own takes the last one in silence,
    and a file whose aliases stand for so much that nobody could have meant it."""
    import yaml

    class Loader(yaml.SafeLoader):
        def get_single_node(self) -> Any:
            node = super().get_single_node()
            if node is not None and _entries(node, {}) > _MOST_ENTRIES:
                raise yaml.YAMLError(f"with its aliases in full it has more than {_MOST_ENTRIES} entries")
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [str(key.value) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            if twice:
                raise yaml.YAMLError(f"{twice[0]!r} stands twice, line {node.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    return Loader


def _entries(node: Any, counted: dict[int, int]) -> int:
    """How many entries a node of YAML has, each alias counted as what it stands for."""
    if id(node) not in counted:
        counted[id(node)] = 1  # where it holds itself
        parts = [] if isinstance(node.value, str) else node.value
        inner = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        counted[id(node)] = 1 + sum(_entries(part, counted) for part in inner)
    return counted[id(node)]


def setting_values(loaded: dict[str, Any], owner: str) -> dict[str, Any]:
    """Settings as a YAML file gives them, as they were meant.

    Args:
        loaded: names and values.
        owner: what messages call the thing that has the settings.
    """
    hints = _hints()
    for name in loaded:
        if name not in hints:
            hint = closest(str(name), sorted(hints)).partition(" (known")[0]
            raise ValueError(f"{owner} has an unknown setting {name!r}{hint}")
    values = {name: _from_yaml(value, hints[name]) for name, value in loaded.items()}
    return values | _templates(values)


def validated(settings: dict[str, Any]) -> tuple[StreamArguments, DualModeLoraConfig, LearnerArguments]:
    """The settings of a run as the three objects that check them."""
    return pick(StreamArguments, settings), pick(DualModeLoraConfig, settings), pick(LearnerArguments, settings)


@cache
def types_of(cls: type) -> dict[str, Any]:
    """Name -> type of every field of a dataclass; Python takes a while to read them."""
    return get_type_hints(cls)


@cache
def _hints() -> dict[str, Any]:
    """Name -> type of every setting of a run."""
    return {setting.name: types_of(cls)[setting.name] for cls in _GROUPS.values() for setting in fields_of(cls)}


def _templates(settings: dict[str, Any]) -> dict[str, Any]:
    """The prompt templates where they are set; in the place of a text that names a file stand the file's lines."""
    value = settings.get("prompt_template")
    if not isinstance(value, (str, list)):
        return {}
    texts: list[Any] = []
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and "{}" not in text and Path(text).is_file():
            texts += read_lines(text)
        else:
            texts.append(text)
    return {"prompt_template": texts[0] if len(texts) == 1 else texts}


def _from_yaml(value: Any, hint: Any) -> Any:
    """What was meant by the values that YAML reads otherwise: 1e-3, for it a text, 1, an int, and no, for it false."""
    if hint in (float, float | None) and isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            return value
    if hint is str and isinstance(value, bool):
        return "yes" if value else "no"
    return value


def pick(cls: Any, settings: dict[str, Any]) -> Any:
    """An object of the dataclass, with those settings that are its own."""
    return cls(**{entry.name: settings[entry.name] for entry in fields_of(cls) if entry.name in settings})
