"""Read the settings of a run, which are the fields of five dataclasses, from flags and a YAML file.

Flags override the file, and the file overrides the defaults.
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

from dulbe_peft.arguments import AdapterSettings, LearnerArguments
from dulbe_peft.photos.data.source import DataSource
from dulbe_peft.utils.settings import AtLeastOne, check_settings, check_value, documented, field_types, setting

if TYPE_CHECKING:  # the command line reads its flags without these
    import yaml

    from dulbe_peft.classifiers.base import Classifier
    from dulbe_peft.classifiers.registry import Recipe
    from dulbe_peft.strategies.base import Strategy


@documented
@dataclass(frozen=True)
class ModelSettings:
    """The model of a run, how it is trained, and its classifiers."""

    model: str = setting("", "Dual encoder such as CLIP or SigLIP: a folder or a Hub id. Required.")
    revision: str | None = setting(None, "Revision of a model on the Hub.")
    attn_implementation: str | None = setting(None, "eager or sdpa. By default, eager on a CPU, where it is faster.")
    strategy: str = setting(
        "frozen", "How to train: NAME or NAME:KEY=VALUE. frozen trains nothing; dulbe is the paper's method."
    )
    classifiers: str | None = setting(
        None, "Classifiers, such as bridge,ranpac:features=4000. By default, the strategy chooses."
    )
    store: bool = setting(True, "Store the features of images and reuse them, if nothing is trained.")

    def __post_init__(self) -> None:
        check_settings(self)

    @cached_property
    def methods(self) -> "tuple[Strategy, list[Recipe | Classifier] | None]":
        """The strategy, and the requested classifiers or None. This is the only place where they are parsed."""
        from dulbe_peft.classifiers.registry import parse_classifiers
        from dulbe_peft.strategies.registry import make_strategy

        classifiers = None if self.classifiers is None else list(parse_classifiers(self.classifiers).values())
        return make_strategy(self.strategy), classifiers


@documented
@dataclass(frozen=True)
class StreamSettings:
    """The tasks of a run, in their order, and its output folder."""

    output: str = setting("", "Folder for checkpoints and results. Required.")
    increment: AtLeastOne | None = setting(None, "Classes per task. By default, one task has all new classes.")
    initial_increment: AtLeastOne | None = setting(None, "Number of classes in the first task, if it differs.")
    class_order: str | None = setting(
        None, "icarl, pilot, natural, magmax, or a text file with the name or number of a class per line."
    )
    order_seed: int | None = setting(
        None, "Seed of a random class order (1993 in the paper). By default, the order is that of the data."
    )
    class_texts: str | None = setting(
        None, "YAML file with texts that describe a class, which are averaged: 'owl: [an owl, a night bird]'."
    )
    dry_run: bool = setting(False, "Print the tasks, layers, parameters and memory of the run, and exit.")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.class_texts == "":
            raise ValueError("class_texts is '', expected the path of a file")


class RunSettings(NamedTuple):
    """The settings of a run: what is learned, by which model, in which order, and how."""

    data: DataSource
    model: ModelSettings
    stream: StreamSettings
    adapter: AdapterSettings
    learner: LearnerArguments

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> "RunSettings":
        """Return settings by name as these records, which check them."""
        return cls(*(pick(kind, settings) for kind in GROUPS.values()))


GROUPS: dict[str, Any] = RunSettings.__annotations__


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; error messages call it a `kind` file."""
    import yaml

    if not path.is_file():
        raise FileNotFoundError(f"{kind} file {str(path)!r} does not exist")
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _yaml_loader()) or {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{kind} file {str(path)!r} is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{kind} file {str(path)!r} must map names to values, got a {type(loaded).__name__}")
    return loaded


def _yaml_loader() -> "type[yaml.SafeLoader]":
    """Return YAML's safe loader, changed to read `no` as a string and to raise an error for repeated names."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            names = [str(key.value) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            for name in names:
                if names.count(name) > 1:
                    raise yaml.YAMLError(f"{name!r} occurs twice, line {node.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    bool_tag = "tag:yaml.org,2002:bool"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != bool_tag]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(bool_tag, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))
    return Loader


def given_settings(config: str | None, flags: dict[str, object]) -> dict[str, object]:
    """Return the settings of the YAML file, overridden by the flags that were given."""
    file = {} if config is None else read_yaml(Path(config), "configuration")
    settings = setting_values(file, f"configuration file {config!r}")
    return settings | _templates({name: value for name, value in flags.items() if value not in (None, ())})


def setting_values(loaded: dict[str, object], owner: str) -> dict[str, object]:
    """Return the settings of a YAML file, with strings such as 1e-3 or no converted to the types of the fields."""
    from dulbe_peft.utils.specs import closest

    hints = {name: hint for kind in GROUPS.values() for name, hint in field_types(kind).items()}
    for name in loaded:
        if name not in hints:
            hint = closest(str(name), sorted(hints)).partition(" (known")[0]
            raise ValueError(f"{owner} has an unknown setting {name!r}{hint}")
    converted = {name: from_text(name, value, hints[name]) for name, value in loaded.items() if isinstance(value, str)}
    if isinstance(specs := loaded.get("classifiers"), list):
        converted["classifiers"] = ",".join(map(str, specs))
    return _templates(loaded | converted)


def from_text(name: str, text: str, hint: object) -> Any:
    """Convert the text of a flag or a YAML file to the setting's type; commas separate the items of a list."""
    kinds = get_args(hint)
    # A setting may be a list of names or a regular expression; characters that names lack mark a regular expression.
    if any(get_origin(kind) is list for kind in kinds) and (str not in kinds or re.fullmatch(r"[\w.,]+", text)):
        try:
            return check_value(name, hint, text.split(","), strict=False)
        except (ValueError, TypeError):
            if str not in kinds:
                raise
    return check_value(name, hint, text, strict=False)


def validated(settings: Mapping[str, object]) -> RunSettings:
    """Return the settings of a run as records, which check them; strategy and classifiers are parsed as well."""
    records = RunSettings.of(settings)
    _ = records.model.methods
    return records


def pick(kind: Any, settings: Mapping[str, object]) -> Any:
    """Return an instance of the dataclass `kind`, made from those settings that are its fields."""
    return kind(**{name: settings[name] for name in field_types(kind) if name in settings})


def _templates(settings: dict[str, object]) -> dict[str, object]:
    """Return the settings with the name of a file of prompt templates replaced by the file's lines."""
    value = settings.get("prompt_template")
    if not isinstance(value, (str, list, tuple)):
        return settings
    from dulbe_peft.utils.files import read_lines

    texts: list[object] = []
    for text in [value] if isinstance(value, str) else value:
        texts += read_lines(text) if isinstance(text, str) and "{}" not in text and Path(text).is_file() else [text]
    return settings | {"prompt_template": texts[0] if len(texts) == 1 else texts}
