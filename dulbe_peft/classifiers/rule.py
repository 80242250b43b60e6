"""The base class of all rules. A rule says what a classifier keeps of its images, and how it classifies with that.

    @register_classifier
    @dataclass(frozen=True)
    class MineRule(Rule):
        power: Positive = 2.0            settings, whose types say which values are allowed
        name = "mine"

        can = frozenset({"merge"})       what it can besides learning new classes, see `ABILITIES`

        tensors                          which tensors are kept: `per_class` (one row per class) and `shared`
        added                            new values of the tensors after learning further images
        scores                           unit features to scores
        formula                          the scores in plain PyTorch, if they are not linear in the features

A rule holds settings only. Its functions take the tensors as a `State`, and return new ones without changing anything.
What follows from the tensors and takes long is a property of a `Fitted`, and is computed once:

    class Mine(Fitted):
        rule: MineRule

        @once
        def weight(self) -> Tensor: ...  of self.rule and self.state

    def fitted(self, state): return Mine.of(self, state)                                of the rule
    def scores(self, state, images): return images @ self.fitted(state).weight.T

`Classifier` does everything else, and `classifier_of(MineRule)` is its class for this rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.checks import random_features, same_scores
from dulbe_peft.classifiers.state import Fitted, Layout, State, per_class, shared
from dulbe_peft.utils.settings import LEAST, check_settings, documented, setting

if TYPE_CHECKING:
    from dulbe_peft.classifiers.leaving import Left

TextDim = Annotated[int, Ge(0)]
LogitScale = Annotated[float, Ge(LEAST), Le(1e30)]  # logits stay finite in float32
# What only some rules can -> what is said of a rule that cannot.
ABILITIES = {
    "update": "cannot learn more images of a known class",
    "merge": "cannot be merged: it does not keep sums over images",
    "forget images": "cannot forget a single image: it does not keep sums over images",
    "move": "does not follow a linear map of the features",
    "follow": "does not follow drift",
}


def projected_and_linear(z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the scores, (n, C), of unit features, (n, d), by a projection, (text_dim, d), and a matrix."""
    return torch.nn.functional.normalize(z @ projection.T, dim=1) @ weight.T


def linear(z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the scores, (n, C), of unit features z, (n, d), by a matrix and a bias."""
    return z @ weight.T + bias


@documented
@dataclass(frozen=True)
class Rule:
    """Base class. A rule is a frozen dataclass whose fields are its settings. They are saved with the classifier.

    Attributes:
        name: Key of the classifier in the registry.
        file_stem: The beginning of its file names; by default the name.
        summary: One line for readers who have not read the paper. Reports show it.
        belongs_to: The strategy that this rule belongs to, or "".
        needs_text: Whether learning needs text embeddings, which are kept in the rows `text_embeds`.
        needs_each_text: Whether every single text is kept, in the rows `each_text`, `num_texts` per class.
        text_dim: Width of the texts, if they are compared with the `projected` features; 0 if with the features.
        can: What it can besides learning new classes, of "update": `added` accepts further images of known classes;
            "merge": `merged`; "forget images": `without`; "move": `moved` by a map of z, and "follow": of x.
    """

    embed_dim: Annotated[int, Ge(2)] = field(metadata={"help": "Width d of the features."})
    logit_scale: LogitScale = setting(100.0, "tau, the factor of the cosines (not its logarithm); 100 for CLIP.")

    name: ClassVar[str] = ""
    file_stem: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    belongs_to: ClassVar[str] = ""
    needs_text: ClassVar[bool] = False
    needs_each_text: ClassVar[bool] = False
    text_dim = 0  # a subclass may make it a setting
    can: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        documented(cls)

    def __post_init__(self) -> None:
        check_settings(self, owner=f"the {self.name!r} classifier")

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts of all tensors: those of the texts, then those of `tensors`."""
        texts = {"text_embeds": per_class(self.text_dim or self.embed_dim, unit=True)} if self.needs_text else {}
        if self.text_dim:
            texts |= {"projection": shared(self.text_dim, self.embed_dim)}
        if self.needs_each_text:
            texts |= {
                "each_text": per_class(self.embed_dim, of="num_texts"),
                "num_texts": per_class(dtype=torch.int64),
            }
        return texts | self.tensors()

    def tensors(self) -> dict[str, Layout]:
        """Return the layouts of the tensors besides those of the texts, by name. A file contains nothing else."""
        return {}

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors' new values after learning images of `new` or known classes.

        Args:
            state: The tensors before. The texts of new classes are already there; `State.with_new_rows` adds rows for
                them to the other tensors.
            images: (n, d), unit features in float32.
            labels: (n,), indices into all seen classes. The new classes come last, and each has at least one image.
            new: Names of the new classes; empty only if the rule can "update".
        """
        raise NotImplementedError

    def fitted(self, state: State) -> Fitted:
        """Return what follows from the tensors, such as a solved equation, each part computed once; see `Fitted`."""
        return Fitted.of(self, state)

    def scores(self, state: State, images: Tensor) -> Tensor:
        """Return the scores, (n, C) in float32, of unit features, (n, d) in float32. The default uses `formula`."""
        function, tensors = self.formula(state)
        return function(images, **tensors)

    @torch.no_grad()
    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        """Return the scores as a function in plain PyTorch and its tensors, which exports contain.

        The function is defined at the top of a module, uses only `torch`, and takes unit features z, (n, d), and the
        tensors by name. The default is `z @ weight.T + bias`; rules with other scores override it.
        """
        if type(self).scores is Rule.scores:
            raise NotImplementedError(f"{type(self).__name__} has neither scores() nor formula()")
        bias = self.scores(state, torch.zeros(1, self.embed_dim, device=state.device))[0]
        weight = (self.scores(state, torch.eye(self.embed_dim, device=state.device)) - bias).T
        features = random_features(self.embed_dim, state.device)
        if not same_scores(linear(features, weight, bias), self.scores(state, features)):
            raise ValueError(
                f"the {self.name!r} classifier is not linear in the features, but {type(self).__name__} does not "
                "override formula(): write it, or export as onnx, which does not need it"
            )
        return linear, {"weight": weight, "bias": bias}

    def judged(
        self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None
    ) -> tuple[State, Left | None]:
        """Leave out images that `state` has just learned; return their scores, as if their groups were not learned.

        The state may be replaced by one with choices that these scores suggest. The scores are None if no image can
        be left out. A rule without a closed form does not override this; some images are then held out, see
        `Fitted.chosen`.
        """
        return state, None

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor | None:
        """Return the scores, (n, C), of learned images, (n, d), each as if its group had not been learned.

        Args:
            state: The tensors after learning.
            images: (n, d), learned images: all of each group.
            labels: (n,), index all classes. Each class has images outside of each group.
            groups: (n,), the group of each image; None means that each image is a group.

        Returns:
            The scores, or None if the rule cannot leave images out. By default they are computed by the states of
            `without`, group by group; rules with a closed form override it.
        """
        if type(self).without is Rule.without:
            return None
        from dulbe_peft.classifiers.groups import rows_by_group

        found = torch.zeros(len(images), state.classes, device=images.device)
        for rows in rows_by_group(torch.arange(len(images)) if groups is None else groups):
            rest = state.replaced(self.without(state, images[rows], labels[rows]))
            found[rows] = self.scores(rest, images[rows].float()).to(found)
        return found

    def without(self, state: State, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the tensors' new values without learned images, (n, d), of classes that keep at least one image."""
        raise NotImplementedError

    def merged(self, state: State, other: State, places: Tensor) -> dict[str, Tensor]:
        """Return the tensors' new values after merging those of another classifier with the same settings.

        The default adds the tensors that are laid out with `adds`. The caller merges `text_embeds`.

        Args:
            state: The tensors of one classifier.
            other: Those of the other one.
            places: (C_other,), index of each class of `other` among the merged classes. These are the classes of
                `state`, then those that only `other` has.
        """
        sums = {**state, **state.with_new_rows(int((places >= state.classes).sum()))}
        for name in (names := [name for name, layout in state.layouts.items() if layout.adds]):
            theirs, at = other[name].to(sums[name]), places.to(sums[name].device)
            grows = state.layouts[name].grows
            sums[name] = sums[name].index_add(0, at, theirs) if grows else sums[name] + theirs
        return {name: sums[name] for name in names}

    def forgotten(self, state: State, kept: Tensor) -> dict[str, Tensor]:
        """Return the tensors' new values without the classes for which `kept`, (C,), is False."""
        return state.rows_of(kept)

    def retold(self, state: State, texts: Tensor) -> dict[str, Tensor]:
        """Return the other tensors' new values when the text embeddings of the classes become `texts`, (C, d)."""
        return {}

    def moved(self, state: State, matrix: Tensor, lifted: bool = False) -> dict[str, Tensor]:
        """Return the tensors' new values after features z have drifted to z M, or x to x M.

        The default maps the tensors that are laid out with `moves`.

        Args:
            state: The tensors before.
            matrix: M, float64, on the CPU: (d, d), or (w, w) for x of `lifted`.
            lifted: Whether M maps x.
        """
        changes = {name: tensor for name, tensor in state.items() if state.layouts[name].moves}
        for name, tensor in changes.items():
            tensor = tensor if tensor.dtype == torch.float64 else tensor.cpu().double()  # some devices lack float64
            by = matrix.to(tensor.device)
            changes[name] = tensor @ by if state.layouts[name].grows else by.T @ tensor @ by
        return changes

    def lifted(self, state: State, images: Tensor) -> Tensor:
        """Map unit features, (n, embed_dim), to the x, (n, w), that is summed up, in the same type. Here x = z."""
        return images

    def check(self, state: State) -> None:
        """Raise a `ValueError` if tensors that have valid types and shapes contradict each other."""


def setting_defaults(rule: type[Rule]) -> dict[str, object]:
    """Return the settings and their defaults, without `embed_dim` and `logit_scale`."""
    return {entry.name: entry.default for entry in fields(rule) if entry.name not in ("embed_dim", "logit_scale")}


def check_can(rule: Rule, ability: str) -> None:
    """Raise a `ValueError` unless a rule has an ability, one of `ABILITIES`."""
    if ability not in rule.can:
        raise ValueError(f"the {rule.name!r} classifier {ABILITIES[ability]}")


def projected(state: State, images: Tensor) -> Tensor:
    """Return the unit features that are compared with texts, z = W u / |W u|, from features u, (n, embed_dim)."""
    return F.normalize(images @ state.projection.to(images).T, dim=1)


def added_views(
    rule: Rule, state: State, views: Tensor, labels: Tensor, new: Sequence[str], number: int
) -> dict[str, Tensor]:
    """Return the tensors of `Rule.added` with the weight 1 / V for each of V views.

    `added` knows no weights, so the known images count V times, and the result is divided by V. Tensors that are laid
    out with `views=False` are left out.

    Args:
        rule: The rule.
        state: The tensors before, as in `added`.
        views: (n V, d), unit features of the views, those of an image one after another.
        labels: (n,), as in `added`.
        new: Names of the new classes.
        number: V.
    """
    times = {name: number**layout.power for name, layout in state.layouts.items() if layout.power}
    start = state.replaced({name: state[name] * (int(by) if by == number else by) for name, by in times.items()})
    changes = rule.added(start, views, labels.repeat_interleave(number), new)
    changes = {name: change for name, change in changes.items() if state.layouts[name].views}
    for name in changes.keys() & times.keys():
        integer = not changes[name].is_floating_point()
        changes[name] = changes[name] // number if integer else changes[name] / times[name]
    if "freedom" in changes:
        changes["freedom"] = state.freedom + len(labels) - len(new)
    return changes


def sums_without(state: Mapping[str, Tensor], rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return `sums` and `counts` without the `rows`, (n, w), of images with labels, (n,)."""
    sums = state["sums"].index_add(0, labels.to(state["sums"].device), -rows.to(state["sums"]))
    return {"sums": sums, "counts": state["counts"] - labels.bincount(minlength=len(sums)).to(state["counts"])}
