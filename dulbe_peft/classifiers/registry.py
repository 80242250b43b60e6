"""Register classifiers by name, for texts such as `--classifiers bridge,ranpac:features=4000`.

Other packages can register their own rules with `register_classifier`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dulbe_peft.classifiers.base import Classifier, classifier_of
from dulbe_peft.classifiers.rule import Rule, setting_defaults
from dulbe_peft.utils.specs import Registry, closest, convert, format_spec, parse_spec, split_specs

Kind = TypeVar("Kind", bound=type[Rule] | type[Classifier])

_PATHS = {  # name -> module in this package, and class
    "text": "classifiers.text:TextRule",
    "bridge": "classifiers.bridge:BridgeRule",
    "pooled_bridge": "classifiers.pooled_bridge:PooledBridgeRule",
    "prototype": "classifiers.prototype:PrototypeRule",
    "lda": "classifiers.lda:LdaRule",
    "gda": "classifiers.gda:GdaRule",
    "ridge": "classifiers.ridge:RidgeRule",
    "ranpac": "classifiers.ranpac:RanpacRule",
    "bayes": "classifiers.bayes:BayesRule",
    "visual_agent": "papers.mg_clip:VisualAgentRule",
    "rapf": "papers.rapf:RapfRule",
    "bofa": "papers.bofa:BofaRule",
    "slca": "papers.slca:SlcaRule",
    "engine": "papers.knowledge_injection:EngineRule",
    "proof": "papers.proof:ProofRule",
    "clap4clip": "papers.clap4clip:Clap4ClipRule",
    "clg_cbm": "papers.clg_cbm:ClgCbmRule",
    "linear_head": "papers.linear_head:LinearHeadRule",
}
CLASSIFIERS: Registry[Classifier] = Registry(
    "classifier",
    "dulbe_peft.classifiers",
    {name: f"dulbe_peft.{path}" for name, path in _PATHS.items()},
    classifier_of,
)


@dataclass(frozen=True)
class Recipe:
    """A classifier class and the settings chosen by the user."""

    kind: type[Classifier]
    chosen: dict[str, object]

    @property
    def settings(self) -> dict[str, object]:
        """Return all settings: the defaults, replaced by the chosen ones."""
        return setting_defaults(self.kind.rule_type) | self.chosen


def register_classifier(given: Kind) -> Kind:
    """Register a rule in `CLASSIFIERS` under its `name`; return it, so this works as a decorator of the dataclass.

    A class of classifiers may be given instead of its rule.

    Raises:
        TypeError: If it is not a dataclass derived from `Rule`, and no class with such a rule.
        ValueError: If its name is not a lower-case identifier, or another rule has the same name or file names.
    """
    rule = classifier_of(given).rule_type
    stem = rule.file_stem or rule.name
    if not rule.name.isidentifier() or rule.name != rule.name.lower() or not rule.name.isascii():
        raise ValueError(f"{rule.__name__}.name is {rule.name!r}; it must contain only the characters a-z, 0-9 and _")
    if (stem == "head") != (rule.name == "bridge") or stem in set(CLASSIFIERS) - {rule.name}:
        raise ValueError(f"the file_stem of {rule.__name__} is {stem!r}, which another classifier has for its files")
    CLASSIFIERS.register(rule)
    return given


def parse_classifier(text: str) -> Recipe:
    """Parse `name:key=value,key=value`; refuse unknown names, unknown settings and values out of their limits."""
    name, values = parse_spec(text)
    if name not in CLASSIFIERS:
        raise ValueError(f"there is no classifier {name!r}{closest(name, CLASSIFIERS)}")
    cls = CLASSIFIERS[name]
    hidden = ("embed_dim", "logit_scale", "text_dim")  # those of the model
    return Recipe(cls, convert(cls.rule_type, values, f"the {name!r} classifier", hidden=hidden))


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


def can_project(kind: type[Classifier]) -> bool:
    """Return whether a classifier can compare names with projected features, and not only with the features."""
    return "text_dim" in setting_defaults(kind.rule_type)


def make_classifier(
    spec: str | Recipe | Classifier, embed_dim: int, logit_scale: float = 100.0, text_dim: int = 0
) -> Classifier:
    """Make an empty classifier from `name:key=value,key=value`; return a `Classifier` without classes as it is.

    With `text_dim`, classifiers that can do so compare texts of this width with projected features.

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
    width = {"text_dim": text_dim} if text_dim and can_project(recipe.kind) else {}
    return recipe.kind(embed_dim=embed_dim, logit_scale=logit_scale, **width, **recipe.chosen)


def make_classifiers(
    specs: str | Classifier | Iterable[str | Recipe | Classifier],
    embed_dim: int,
    logit_scale: float = 100.0,
    text_dim: int = 0,
) -> dict[str, Classifier]:
    """Make empty classifiers by name; see `parse_classifiers` and `make_classifier`."""
    parsed = parse_classifiers(specs).items()
    return {name: make_classifier(one, embed_dim, logit_scale, text_dim) for name, one in parsed}


def answering(by_name: Mapping[str, object]) -> str:
    """Return the name of the classifier that `predict` uses, of those of a learner or of results: the first one."""
    return next(iter(by_name))


def spec(classifier: Classifier) -> str:
    """Return the text that makes an equal classifier: its name and the settings that differ from the defaults.

    >>> spec(make_classifier("bridge:depths=0/0.5", embed_dim=512))
    'bridge:depths=0.0/0.5'
    """
    usual = setting_defaults(classifier.rule_type)
    settings = classifier.settings().items()
    changed = {key: value for key, value in settings if usual[key] != value and key != "text_dim"}
    return format_spec(classifier.name, changed)
