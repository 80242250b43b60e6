"""The classifier that users know. It learns, answers and is corrected, each in a file of its own.

    keeping       the rule, the tensors, the names of the classes, files
    answering     scores, probabilities, prediction sets, novelty
    learning      classes and further images, groups, drift
    this file     corrections: merging, forgetting, renaming, joining

It works on the image and text features of any model, and needs neither peft nor transformers. `rule` says how to write
a classifier of your own.
"""

import inspect
from typing import Self

import torch
from torch import Tensor

from dulbe_peft.classifiers.checks import SAME_TEXT, check_directions
from dulbe_peft.classifiers.learning import Learning
from dulbe_peft.classifiers.rule import ABILITIES, Rule, check_can
from dulbe_peft.classifiers.state import State

OF_RULES = {"__init__", "register", "logits", *(each for each in vars(Rule) if each[0] != "_")}
RAISES = """Raises:
        TypeError: If a setting has another type.
        ValueError: If a setting has a value outside its limits.
"""
EXAMPLE = """Example:
        >>> features = torch.eye(8)[[0, 0, 1, 1]] + 0.1 * torch.eye(8)[[4, 5, 6, 7]]  # of four images, (4, 8)
        >>> classifier = {made}
        >>> classifier.add_classes(["cat", "dog"], features, labels=[0, 0, 1, 1]{texts})
        >>> classifier.probabilities(features).argmax(dim=1)
        tensor([0, 0, 1, 1])
"""
CLASSES: "dict[type[Rule], type[Classifier]]" = {}  # rule -> the class of its classifiers


class Classifier(Learning):
    """A classifier over given features that learns class by class and stores no images.

    A call that raises an error changes nothing. The settings of the rule and the tensors are attributes, too. float64
    tensors stay float64 if the module is converted to another type, and stay on the CPU if a device has no float64.

    Args:
        settings: Those of the rule, of which only `embed_dim` has no default.

    Attributes:
        rule_type: The class of the rule.
        rule: The rule, with its settings.
        name: That of the rule, the key of the classifier in the registry.
        needs_text: That of the rule: whether learning needs text embeddings.
        source: `repo_id` and `commit` on the Hub that it was loaded from, or None.
        calibration: The records of the tasks from which the temperature and thresholds follow.
        novelty_tasks: The records of the tasks from which the novelty follows.
    """

    def __init_subclass__(cls, rule: type[Rule] | None = None, example: str = "", **kwargs: object) -> None:
        """Make the class of the classifiers with a rule. Its docstring shows one, made with the settings `example`."""
        super().__init_subclass__(**kwargs)
        if wrong := OF_RULES & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__} defines {', '.join(sorted(wrong))}: define this in a class derived from Rule"
            )
        if rule is None:
            return
        check_rule(rule)
        cls.rule_type, cls.name, cls.needs_text = rule, rule.name, rule.needs_text
        texts = ", text_embeds=features[[0, 2]]" if rule.needs_text else ""
        shown = example and EXAMPLE.format(made=f"{cls.__name__}({example})", texts=texts)
        parts = (vars(cls).get("__doc__"), shown, rule.__doc__, RAISES)
        cls.__doc__ = "\n\n    ".join(part.rstrip() for part in parts if part) + "\n"
        cls.__signature__ = inspect.signature(rule)  # type: ignore[attr-defined]
        CLASSES[rule] = cls

    def __reduce__(self) -> tuple[object, ...]:
        """Name the rule when pickled, because a class made by `classifier_of` is in no module."""
        kind = self.rule_type if CLASSES[self.rule_type] is type(self) else type(self)
        return _unfilled, (kind,), self.__getstate__()

    @torch.no_grad()
    def merge(self, other: Self) -> Self:
        """Merge another classifier into this one, as if this one had learned all images, and return this one.

        The two must have the same class, settings and texts, and keep sums over images.
        """
        check_can(self.rule, "merge")
        check_alike(self, other)
        self._take(self._merged(self.state, other.state))
        # Scores and novelties measured for each classifier alone guarantee nothing for the merged one. Temperatures
        # and their weights are kept.
        tasks, measured = (*self.calibration, *other.calibration), (*self.novelty_tasks, *other.novelty_tasks)
        self.calibration = tuple(task.model_copy(update={"own": (), "largest": ()}) for task in tasks)
        self.novelty_tasks = tuple(task.model_copy(update={"novelties": (), "area": None}) for task in measured)
        return self

    def _merged(self, state: State, other: State) -> State:
        names = list(dict.fromkeys([*state.class_names, *other.class_names]))
        place = {name: index for index, name in enumerate(names)}
        places = torch.tensor([place[name] for name in other.class_names], dtype=torch.int64)
        changes = self.rule.merged(state, other, places)
        if self.reads_text:
            new = other.text_embeds[places >= state.classes]
            changes["text_embeds"] = torch.cat([state.text_embeds, new.to(state.text_embeds)])
        return state.replaced(changes, names)

    @torch.no_grad()
    def forget_class(self, name: str) -> None:
        """Remove a class and its rows of every tensor that has rows for classes.

        The contribution of its images to sums over all classes remains, unless the rule overrides `forgotten`. What
        was measured on held-out images, such as temperatures, stays. Without its last class, a classifier is like a
        new one.
        """
        self._place(name, "forgotten")
        kept = torch.tensor([known != name for known in self._class_names])
        changes = self.rule.forgotten(self.state, kept)
        names = [known for known in self._class_names if known != name]
        if not names:
            changes = type(self)(embed_dim=self.embed_dim, logit_scale=self.logit_scale, **self.settings()).tensors()
            self.calibration, self.novelty_tasks = (), ()
        self.install(changes, names)

    @torch.no_grad()
    def forget_image(self, image_embed: Tensor, name: str) -> None:
        """Remove one learned image from its class: up to rounding, the result is as if it had not been learned.

        What was measured on held-out images, such as temperatures, stays.

        Args:
            image_embed: (d,), the unit feature of the image.
            name: The class of the image.
        """
        check_can(self.rule, "forget images")
        place, state = self._place(name, "forgotten"), self.state
        if "counts" in state and int(state.counts[place]) < 2:
            raise ValueError(f"class {name!r:.100} has only one image: forget the class instead")
        image = self._unit(image_embed[None], "image_embed", 1)
        changes = self.rule.without(state, image, torch.tensor([place], device=image.device))
        if "sums" in changes:
            check_directions(changes["sums"][[place], : self.embed_dim], [name])
        self.install(changes)

    @torch.no_grad()
    def rename_class(self, old: str, new: str, text_embed: Tensor | None = None) -> None:
        """Rename a class, and replace its text embedding if the classifier has one.

        A rule that is computed from sums and current texts is then as if it had been learned with the new name.
        Anything else that was trained or chosen with the old text does not change.

        Args:
            old: The present name.
            new: The new name.
            text_embed: (d,), unit text embedding of the new name. Required if the classifier has those of others.
        """
        place, changes = self._place(old, "renamed"), {}
        if self.rule.needs_each_text:
            raise ValueError(
                f"the {self.name!r} classifier was trained with the texts of its classes and cannot rename one: "
                "learn again"
            )
        if self.reads_text and (self.needs_text or text_embed is not None or self.text_embeds.any()):
            if text_embed is None:
                raise TypeError(f"the {self.name!r} classifier needs the text embedding of {new!r:.100}")
            changes["text_embeds"] = self.text_embeds.clone()
            changes["text_embeds"][place] = self._unit(text_embed[None], "text_embed", 1, self.rule.text_dim)[0]
            changes |= self.rule.retold(self.state, changes["text_embeds"])
        self.install(changes, [new if known == old else known for known in self._class_names])

    @torch.no_grad()
    def join_classes(self, old: str, new: str) -> None:
        """Add the images of class `old` to class `new`: split off the state of `old`, and merge it again."""
        check_can(self.rule, "merge")
        kept = torch.arange(len(self._class_names)) == self._place(old, "joined")
        text, state = self._place(new, "joined"), self.state
        # Tensors that do not belong to single classes stay in `rest` and are zero in `part`, so they count once.
        rows = self.rule.forgotten(state, kept)
        rows = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name not in rows} | rows
        part = state.replaced(rows, [new])
        if self.reads_text:
            own = self.text_embeds[[text]]
            part = part.replaced({"text_embeds": own} | self.rule.retold(part, own))
        rest = state.replaced(self.rule.forgotten(state, ~kept), [n for n in self._class_names if n != old])
        self._take(self._merged(rest, part))

    def _place(self, name: str, what: str) -> int:
        if name not in self._class_names:
            raise ValueError(f"class {name!r:.100} is not known, so it cannot be {what}")
        return self._class_names.index(name)


def classifier_of(rule: type[Rule] | type[Classifier]) -> type[Classifier]:
    """Return the class of the classifiers with a rule. Its constructor takes the settings of the rule.

    A class that has a rule is returned as it is.

    Raises:
        TypeError: If `rule` is not a dataclass derived from `Rule`.
    """
    if isinstance(rule, type) and issubclass(rule, Classifier) and hasattr(rule, "rule_type"):
        return rule
    check_rule(rule)
    assert issubclass(rule, Rule)
    if rule not in CLASSES:
        name = f"{rule.__name__.removesuffix('Rule')}Classifier"
        type(name, (Classifier,), {"__module__": rule.__module__}, rule=rule)  # puts itself there
    return CLASSES[rule]


def check_rule(rule: object) -> None:
    """Raise a `TypeError` unless `rule` is a dataclass derived from `Rule`."""
    if not (isinstance(rule, type) and issubclass(rule, Rule)) or "__dataclass_fields__" not in vars(rule):
        raise TypeError(f"a rule must be a class derived from Rule with @dataclass(frozen=True), got {rule!r:.100}")
    if wrong := rule.can - ABILITIES.keys():
        raise TypeError(f"{rule.__name__}.can must be of {', '.join(ABILITIES)}, got {min(wrong)!r:.100}")


def _unfilled(kind: type[Rule] | type[Classifier]) -> Classifier:
    """Return a classifier without attributes, which pickle sets."""
    cls = kind if issubclass(kind, Classifier) else classifier_of(kind)
    return cls.__new__(cls)


def check_alike(one: Classifier, other: Classifier) -> None:
    """Raise an error unless two classifiers have the same class, settings and texts, so that they can be merged."""
    if other is one:
        raise ValueError(f"a {one.name!r} classifier cannot be merged with itself: its images would count twice")
    if other.rule_type is not one.rule_type:
        raise TypeError(
            f"a {one.name!r} classifier can be merged only with a {type(one).__name__}, got {type(other).__name__}"
        )
    settings = [{"embed_dim": c.embed_dim, "logit_scale": c.logit_scale, **c.settings()} for c in (one, other)]
    for name in settings[0] | settings[1]:
        mine, theirs = (each.get(name) for each in settings)
        if mine != theirs:
            raise ValueError(f"two {one.name!r} classifiers to merge need the same {name}, got {mine} and {theirs}")
    if "text_embeds" in one.tensors():
        texts = dict(zip(other.class_names, other.text_embeds, strict=True))
        for name, text in zip(one.class_names, one.text_embeds, strict=True):
            if name in texts and not torch.allclose(text, texts[name].to(text), atol=SAME_TEXT):
                raise ValueError(f"the text embeddings of class {name!r} differ, so they cannot be merged")
    if "projection" in one.tensors() and not torch.allclose(one.projection, other.projection.to(one.projection)):
        raise ValueError(f"the projections of the two {one.name!r} classifiers differ, so they cannot be merged")
