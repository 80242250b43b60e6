"""Register classifiers by name, for texts such as `--classifiers bridge,ranpac:features=4000`.

Other packages can register their own classes with `register_classifier`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.utils.specs import Registry, closest, convert, format_spec, parse_spec, split_specs

Kind = TypeVar("Kind", bound=type[Classifier])

_BUILT_IN = {
    "text": "text:TextClassifier",
    "bridge": "bridge:BridgeEnsembleHead",
    "pooled_bridge": "pooled_bridge:PooledBridgeHead",
    "prototype": "prototype:PrototypeClassifier",
    "lda": "lda:LdaClassifier",
    "gda": "gda:GdaClassifier",
    "ridge": "ridge:RidgeClassifier",
    "ranpac": "ranpac:RanpacClassifier",
    "bayes": "bayes:BayesClassifier",
}
_FROM_PAPERS = {
    "visual_agent": "mg_clip:VisualAgentClassifier",
    "rapf": "rapf:RapfClassifier",
    "bofa": "bofa:BofaClassifier",
    "slca": "slca:SlcaClassifier",
    "engine": "engine:EngineClassifier",
    "proof": "proof:ProofClassifier",
    "clap4clip": "clap4clip:Clap4ClipClassifier",
    "clg_cbm": "clg_cbm:ClgCbmClassifier",
    "linear_head": "linear_head:LinearHeadClassifier",
}
CLASSIFIERS: Registry[Classifier] = Registry(
    "classifier",
    "dulbe_peft.classifiers",
    {name: f"dulbe_peft.classifiers.{path}" for name, path in _BUILT_IN.items()}
    | {name: f"dulbe_peft.papers.{path}" for name, path in _FROM_PAPERS.items()},
)


@dataclass(frozen=True)
class Recipe:
    """A classifier class and the settings chosen by the user."""

    kind: type[Classifier]
    chosen: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """Return all settings: the defaults, replaced by the chosen ones."""
        return self.kind.rule_type.setting_defaults() | self.chosen


def register_classifier(cls: Kind) -> Kind:
    """Register a classifier class in `CLASSIFIERS` under its `name`; return the class, so it works as a decorator.

    Raises:
        TypeError: If `cls` is not a class derived from `Classifier`.
        ValueError: If its name is not a lower-case identifier, or another class has the same name or file names.
    """
    if not isinstance(cls, type) or not issubclass(cls, Classifier):
        raise TypeError(f"a classifier must be a class derived from Classifier, got {cls!r:.100}")
    if not cls.name.isidentifier() or cls.name != cls.name.lower() or not cls.name.isascii():
        raise ValueError(f"{cls.__name__}.name is {cls.name!r}; it must contain only the characters a-z, 0-9 and _")
    stem = cls.rule_type.file_stem or cls.name
    if (stem == "head") != (cls.name == "bridge") or stem in set(CLASSIFIERS) - {cls.name}:
        raise ValueError(f"the file_stem of {cls.__name__} is {stem!r}, which another classifier has for its files")
    CLASSIFIERS.register(cls)
    return cls


def parse_classifier(text: str) -> Recipe:
    """Parse `name:key=value,key=value`; refuse unknown names, unknown settings and values out of their limits."""
    name, values = parse_spec(text)
    if name not in CLASSIFIERS:
        raise ValueError(f"there is no classifier {name!r}{closest(name, CLASSIFIERS)}")
    cls = CLASSIFIERS[name]
    return Recipe(cls, convert(cls.rule_type, values, f"the {name!r} classifier", hidden=("embed_dim", "logit_scale")))


def parse_classifiers(specs: str | Classifier | Iterable[str | Recipe | Classifier]) -> dict[str, Recipe | Classifier]:
    """Parse one or more classifiers and return them by name; refuse an empty list and names that occur twice."""
    rows: Iterable[str | Recipe | Classifier] = [specs] if isinstance(specs, (str, Classifier)) else specs
    if isinstance(specs, str):
        rows = split_specs(specs)
    found: dict[str, Recipe | Classifier] = {}
    for row in rows:
        one = row if isinstance(row, (Recipe, Classifier)) else parse_classifier(row)
        name = (one.kind if isinstance(one, Recipe) else one).name
        if name in found:
            raise ValueError(f"the classifier {name!r} is given twice: a learner can have only one of each name")
        found[name] = one
    if not found:
        raise ValueError("classifiers is empty: name at least one, such as 'bridge'")
    return found


def make_classifier(spec: str | Recipe | Classifier, embed_dim: int, logit_scale: float = 100.0) -> Classifier:
    """Make an empty classifier from `name:key=value,key=value`; return a `Classifier` without classes as it is.

    >>> make_classifier("bridge:num_depths=5", embed_dim=512)
    BridgeEnsembleHead(embed_dim=512, num_depths=5, reliability_temperature=0.05, classes=0)
    """
    if isinstance(spec, Classifier):
        who = f"the {spec.name!r} classifier"
        if spec.class_names:
            raise ValueError(f"{who} already has {len(spec.class_names)} classes: pass an empty one")
        if spec.embed_dim != embed_dim:
            raise ValueError(f"{who} takes {spec.embed_dim} dimensions, but the model has {embed_dim}")
        return spec
    recipe = parse_classifier(spec) if isinstance(spec, str) else spec
    return recipe.kind(embed_dim=embed_dim, logit_scale=logit_scale, **recipe.chosen)


def make_classifiers(
    specs: str | Classifier | Iterable[str | Recipe | Classifier], embed_dim: int, logit_scale: float = 100.0
) -> dict[str, Classifier]:
    """Make empty classifiers by name; see `parse_classifiers` and `make_classifier`."""
    return {name: make_classifier(one, embed_dim, logit_scale) for name, one in parse_classifiers(specs).items()}


def answering(by_name: Mapping[str, object]) -> str:
    """Return the name of the classifier that `predict` uses, of those of a learner or of results: the first one."""
    return next(iter(by_name))


def spec(classifier: Classifier) -> str:
    """Return the text that makes an equal classifier: its name and the settings that differ from the defaults.

    >>> spec(make_classifier("bridge:depths=0/0.5", embed_dim=512))
    'bridge:depths=0.0/0.5'
    """
    usual = classifier.rule.setting_defaults()
    changed = {key: value for key, value in classifier.settings().items() if usual[key] != value}
    return format_spec(classifier.name, changed)
