"""The settings of a run: the fields of three dataclasses, as flags and as keys of a YAML file.

Flags win over the file, the file over the defaults.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Gt, Lt

from dulbe_peft.arguments import AdapterSettings, LearnerArguments
from dulbe_peft.utils.settings import AtLeastOne, check_settings, check_value, field_types, setting

Part = Annotated[float, Gt(0), Lt(1)]  # of the images


@dataclass(frozen=True)
class StreamArguments:
    """Where a stream comes from and where it goes."""

    model: str = setting("", "Dual encoder such as CLIP or SigLIP: a folder, or a Hub id. Required.")
    data: str = setting(
        "", "Images: a folder with train/class/*.jpg, class/*.jpg or parquet files, or hf:NAME. This or --labels."
    )
    output: str = setting("", "Folder for checkpoints and results. Required.")
    strategy: str = setting("frozen", "What is trained: NAME or NAME:KEY=VALUE. frozen: nothing; dulbe: the paper's.")
    classifiers: str | None = setting(None, "Such as bridge,ranpac:features=4000. None: the strategy's.")
    increment: AtLeastOne | None = setting(None, "Classes per task. None: all that are new are one task.")
    initial_increment: AtLeastOne | None = setting(None, "Classes of the first task, where it differs.")
    train_split: str = setting("train", "Name of the split to learn from.")
    test_split: str = setting("test", "The split to test on, or none.")
    test_fraction: Part | None = setting(None, "Without a test split: the share to hold back.")
    test_data: str | None = setting(None, "Other images to test on, as for --data.")
    leave_out: list[str] | None = setting(None, "Classes, or folders such as cat/old, to leave out.")
    validation_fraction: Part | None = setting(
        None, "Test on this share of the training images, which is not learned, for choosing settings."
    )
    images_per_class: AtLeastOne | list[AtLeastOne] | str | None = setting(
        None,
        "Learn from at most so many images of each class, drawn at random. Several counts, such as 2,32, go round "
        "among the classes; longtail:32 gives 32 images to one class, 16 to the next, 32 / 3 to the third, and so on.",
    )
    draw_seed: int = setting(0, "Seed of the images that are drawn, or held back for --validation-fraction.")
    strict: bool = setting(False, "Stop at an image that cannot be read; else go on.")
    vocabulary: str | None = setting(None, "Text file: exiftool's keywords that are classes.")
    image_column: str = setting("image", "Column with the images, of the Hub.")
    label_column: str = setting("label", "Column with the labels, also in a table.")
    path_column: str | None = setting(None, "Column with the paths, in a table of --labels.")
    class_names: str | None = setting(
        None, "Text file, a line for each class: 'old name', a tab, 'new name', or new names in the data's order."
    )
    class_texts: str | None = setting(
        None, "YAML file with texts that stand for classes, and count by their mean: 'owl: [an owl, a night bird]'."
    )
    class_order: str | None = setting(None, "icarl, or a text file with a class's name or number a line.")
    order_seed: int | None = setting(None, "Seed of a random class order (1993 in the paper); none: as in the data.")
    revision: str | None = setting(None, "Revision of a model on the Hub.")
    attn_implementation: str | None = setting(None, "eager or sdpa. None: eager on a CPU, the faster one there.")
    store: bool = setting(True, "Where nothing is trained: keep features of images, and find them again.")
    dry_run: bool = setting(False, "Print tasks, layers, parameters and the memory of what is kept, and exit.")

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("class_names", "class_texts", "vocabulary"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is '', expected the path of a file")
        count = self.images_per_class
        if count == [] or (isinstance(count, str) and not re.fullmatch(r"longtail:[1-9]\d*", count)):
            raise ValueError(f"images_per_class must be like 8, or 2,32, or longtail:32, got {count!r:.100}")

    @cached_property
    def methods(self) -> tuple[Any, Any]:
        """The strategy, and what is asked for as classifiers, or None; both are parsed here, and nowhere else."""
        from dulbe_peft.classifiers.registry import parse_classifiers
        from dulbe_peft.strategies.registry import make_strategy

        asked = None if self.classifiers is None else list(parse_classifiers(self.classifiers).values())
        return make_strategy(self.strategy), asked


GROUPS: dict[str, Any] = {"stream": StreamArguments, "adapter": AdapterSettings, "learner": LearnerArguments}


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """The names and values of a YAML file; messages call it a `kind` file."""
    import yaml

    if not path.is_file():
        raise FileNotFoundError(f"{kind} file {str(path)!r} does not exist")
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _yaml_loader()) or {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{kind} file {str(path)!r} is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{kind} file {str(path)!r} must hold names and values, got a {type(loaded).__name__}")
    return loaded


def _yaml_loader() -> Any:
    """YAML's safe loader, for which `no` is a text, and a name that stands twice is an error."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [str(key.value) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            for name in names:
                if names.count(name) > 1:
                    raise yaml.YAMLError(f"{name!r} stands twice, line {node.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    bool_tag = "tag:yaml.org,2002:bool"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != bool_tag]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(bool_tag, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))
    return Loader


def given_settings(config: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """The settings that somebody gave: those of the YAML file, with the flags on top."""
    file = {} if config is None else read_yaml(Path(config), "configuration")
    settings = setting_values(file, f"configuration file {config!r}")
    return settings | _templates({name: value for name, value in flags.items() if value not in (None, ())})


def setting_values(loaded: dict[str, Any], owner: str) -> dict[str, Any]:
    """Settings as a YAML file gives them, with texts such as 1e-3 or no as what they were meant to be."""
    from dulbe_peft.utils.specs import closest

    hints = {name: hint for kind in GROUPS.values() for name, hint in field_types(kind).items()}
    for name in loaded:
        if name not in hints:
            hint = closest(str(name), sorted(hints)).partition(" (known")[0]
            raise ValueError(f"{owner} has an unknown setting {name!r}{hint}")
    read = {name: from_text(name, value, hints[name]) for name, value in loaded.items() if isinstance(value, str)}
    if isinstance(loaded.get("classifiers"), list):
        read["classifiers"] = ",".join(map(str, loaded["classifiers"]))
    return _templates(loaded | read)


def from_text(name: str, text: str, hint: Any) -> Any:
    """The setting that a text of a flag or a YAML file means; where a list is wanted, it is cut at its commas."""
    kinds = get_args(hint)
    # Where a regular expression is taken, too, a text with other characters than those of names is one.
    if any(get_origin(kind) is list for kind in kinds) and (str not in kinds or re.fullmatch(r"[\w.,]+", text)):
        try:
            return check_value(name, hint, text.split(","), strict=False)
        except (ValueError, TypeError):
            if str not in kinds:
                raise
    return check_value(name, hint, text, strict=False)


def validated(settings: dict[str, Any]) -> tuple[StreamArguments, AdapterSettings, LearnerArguments]:
    """The settings of a run as the three objects that check them; strategy and classifiers are checked, too."""
    stream = pick(StreamArguments, settings)
    _ = stream.methods
    return stream, pick(AdapterSettings, settings), pick(LearnerArguments, settings)


def pick(kind: Any, settings: dict[str, Any]) -> Any:
    """An object of the dataclass, with those settings that are its own."""
    return kind(**{name: settings[name] for name in field_types(kind) if name in settings})


def _templates(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings; in the place of a prompt template that names a file stand the file's lines."""
    value = settings.get("prompt_template")
    if not isinstance(value, (str, list, tuple)):
        return settings
    from dulbe_peft.utils.files import read_lines

    texts: list[Any] = []
    for text in [value] if isinstance(value, str) else value:
        texts += read_lines(text) if isinstance(text, str) and "{}" not in text and Path(text).is_file() else [text]
    return settings | {"prompt_template": texts[0] if len(texts) == 1 else texts}
