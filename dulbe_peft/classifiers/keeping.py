"""What a classifier keeps: its rule, the names of the classes, the tensors, their calibration, and files of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dulbe_peft.classifiers.checks import unit_features
from dulbe_peft.classifiers.rule import Rule, setting_defaults
from dulbe_peft.classifiers.state import Fitted, State
from dulbe_peft.utils.settings import check_value, field_types
from dulbe_peft.utils.tensors import has_values
from dulbe_peft.utils.torch_settings import float32_by_default

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

    from dulbe_peft.classifiers.calibration import TaskNovelty, TaskTemperature
    from dulbe_peft.classifiers.saved import ExtraState

P = ParamSpec("P")
EXTRA_STATE = "_extra_state"


def takes(rule: Callable[P, Rule]) -> Callable[[object], Callable[Concatenate[object, P], None]]:
    """Tell type checkers that a constructor has the parameters of a rule."""
    return lambda make: cast(Callable[Concatenate[object, P], None], make)


class Kept(nn.Module):
    """The rule and the tensors of a classifier, which `Classifier` describes."""

    rule_type: ClassVar[type[Rule]]
    name: ClassVar[str] = ""
    needs_text: ClassVar[bool] = False

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__()
        if not hasattr(type(self), "rule_type"):
            raise TypeError(f"{type(self).__name__} has no rule: write classifier_of(rule)")
        if isinstance(named.get("logit_scale"), nn.Parameter):
            raise TypeError("logit_scale must be a number, got a Parameter: pass clip.logit_scale.exp().item()")
        self.rule = self.rule_type(*settings, **named)
        if 1 < self.rule.logit_scale < 5:  # a model without a scale has 1
            warnings.warn(
                f"logit_scale={self.rule.logit_scale} is small: CLIP stores the logarithm of its scale, so pass "
                "clip.logit_scale.exp().item()",
                stacklevel=2,
            )
        self.source: dict[str, str] | None = None
        self.calibration: tuple[TaskTemperature, ...] = ()
        self.novelty_tasks: tuple[TaskNovelty, ...] = ()
        with float32_by_default():
            self._layouts = self.rule.layouts()
        if taken := self._layouts.keys() & {*dir(type(self)), *dir(State({}, {}, []))}:
            raise TypeError(f"the {self.name!r} classifier: {min(taken)!r} cannot be the name of a tensor")
        self._class_names: list[str] = []
        self._fitted: dict[type[Fitted], Fitted] = {}
        self._warned = False
        self._take(State(self._layouts, {name: layout.empty() for name, layout in self._layouts.items()}, []))

    def __getattr__(self, name: str) -> Any:
        """Return a tensor, or else a setting of the rule."""
        rule = vars(self).get("rule")  # not yet there while the constructor runs
        for known in (vars(self).get("_buffers", {}), {} if rule is None else vars(rule)):
            if name in known:
                return known[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor and a setting of the rule are checked as in files."""
        made = "_fitted" in vars(self) and has_values()  # the constructor checks everything itself
        if made and name in self._layouts and isinstance(value, Tensor):
            self._set_tensor(name, value)
        elif made and name in vars(self.rule):
            self._set_setting(name, value)
        else:
            super().__setattr__(name, value)

    def _set_tensor(self, name: str, value: Tensor) -> None:
        """Replace a tensor, whose rows are normalised if they must be unit vectors."""
        if self._layouts[name].unit and value.is_floating_point():
            value = F.normalize(value.float(), dim=-1).to(value.dtype)
        self._check(self.tensors() | {name: value}, self._class_names)
        self._take(State(self._layouts, self.tensors() | {name: value}, self._class_names, self._fitted))

    def _set_setting(self, name: str, value: object) -> None:
        """Replace the rule by one with another value of a setting that does not determine the tensors."""
        kind: Any = self.rule_type
        checked: Any = {name: check_value(f"the {self.name!r} classifier: {name}", field_types(kind)[name], value)}
        rule = replace(self.rule, **checked)
        if str(rule.layouts()) != str(self._layouts):
            raise ValueError(f"{name} of a {self.name!r} classifier determines its tensors: make a new one")
        self.rule = rule

    @property
    def state(self) -> State:
        """The tensors and the class names, as the functions of the rule take them."""
        return State(self._layouts, self._buffers, self._class_names, self._fitted)  # type: ignore[arg-type]

    def install(self, changes: Mapping[str, Tensor], class_names: Sequence[str] | None = None) -> None:
        """Replace tensors, and the class names if they are given, in one step."""
        self._take(self.state.replaced(changes, class_names))

    def _take(self, state: State) -> None:
        self._buffers = dict(state)  # one assignment, so that other threads see all old tensors or all new ones
        self._class_names, self._fitted = list(state.class_names), state.fitted

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return dict(self.state)

    @property
    def class_names(self) -> list[str]:
        """All seen classes, in the order in which they were learned."""
        return list(self._class_names)

    @property
    def reads_text(self) -> bool:
        """Whether it uses text embeddings, required or optional."""
        return "text_embeds" in self._layouts

    def settings(self) -> dict[str, object]:
        """Return the settings, without `embed_dim` and `logit_scale`, and their values as plain data."""
        return {name: getattr(self.rule, name) for name in setting_defaults(self.rule_type)}

    @classmethod
    def file_names(cls) -> tuple[str, str]:
        """Return the names of the configuration file and of the tensor file."""
        stem = cls.rule_type.file_stem or cls.name
        return f"{stem}_config.json", f"{stem}.safetensors"

    def extra_repr(self) -> str:
        settings = "".join(f"{name}={value}, " for name, value in self.settings().items())
        return f"embed_dim={self.embed_dim}, {settings}classes={len(self._class_names)}"

    @property
    def device(self) -> torch.device:
        """The device on which features are classified. float64 tensors may be on the CPU instead."""
        return self.state.device

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return self.state.nbytes(len(self._class_names))

    def fork(self) -> Self:
        """Return a copy that shares the tensors, and can learn without changing this module."""
        twin = copy.copy(self)
        buffers = self.tensors().items()
        twin._buffers = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in buffers}
        return twin

    def __getstate__(self) -> dict[str, object]:
        """Leave out cached values, which can be computed again."""
        return {**vars(self), "_fitted": {}}

    def _unit(self, features: object, name: str, rows: int | None = None, width: int = 0) -> Tensor:
        return unit_features(features, name, width or self.embed_dim, rows, self.device)

    # State dict and files

    def _extra(self) -> ExtraState:
        from dulbe_peft.classifiers.saved import ExtraState

        facts: Any = {name: getattr(self, name) for name in ExtraState.model_fields}
        return ExtraState(**facts)

    def get_extra_state(self) -> Tensor:
        return self._extra().to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        from dulbe_peft.classifiers.saved import ExtraState

        extra = ExtraState.from_tensor(state)
        self._class_names = extra.class_names
        self.calibration, self.novelty_tasks = extra.calibration, extra.novelty_tasks

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        device = fn(torch.zeros(1, device=self.device)).device
        solved = vars(self.rule.fitted(self.state)).get("solved", {})
        moved = {name: tensor.to(device) for name, tensor in solved.items()}
        self._fitted = {}

        def convert(tensor: Tensor) -> Tensor:
            if tensor.dtype != torch.float64 or tensor.is_meta:
                return fn(tensor)
            device = fn(torch.zeros(1, device=tensor.device)).device
            return tensor if device.type == "mps" else tensor.to(device)

        super()._apply(convert, recurse)
        if moved:
            self.rule.fitted(self.state).keep(solved=moved)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resize to the number of classes in the state. An incomplete or inconsistent state changes nothing."""
        from dulbe_peft.classifiers.saved import ExtraState

        _, _, missing_keys, _, error_msgs = rest
        missing = [prefix + key for key in (*self._layouts, EXTRA_STATE) if prefix + key not in state_dict]
        if missing:
            missing_keys += missing
            return
        state = {key: state_dict[prefix + key] for key in self._layouts}
        try:
            extra = ExtraState.from_tensor(state_dict[prefix + EXTRA_STATE])
            self._check(state, extra.class_names)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"state is inconsistent: {error}")
            return
        for key, buffer in self.tensors().items():
            device = state[key].device if buffer.is_meta else buffer.device
            self._buffers[key] = buffer.new_empty(state[key].shape, device=device)
        self._fitted = {}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check(self, tensors: Mapping[str, Tensor], class_names: list[str]) -> None:
        state = State(self._layouts, tensors, class_names)
        state.check()
        self.rule.check(state)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `<stem>_config.json` and `<stem>.safetensors`, which can be in the same folder as an adapter.

        Raises:
            ValueError: If a tensor is not valid, because it was written to in place. Nothing is written.
        """
        from dulbe_peft.classifiers import saved

        self._check(self.tensors(), self._class_names)
        self._fitted = {}  # values written through .data, which torch does not count, are saved, too
        facts = {name: getattr(self, name) for name in ("name", "embed_dim", "logit_scale", "source")}
        config = saved.SavedClassifier(**dict(self._extra()), **facts, settings=self.settings())
        saved.write(folder, self.file_names(), config, self.tensors(), self.rule.fitted(self.state).solved)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
    ) -> Self:
        """Load a saved classifier onto the CPU.

        Args:
            source: Folder of `save_pretrained`, or repository on the Hub.
            revision: Revision on the Hub.
            token: Access token for the Hub.
            cache_dir: Folder for downloads.

        Raises:
            FileNotFoundError: If the folder, the repository, its revision or a file does not exist.
            ValueError: If a file is damaged or has another format, or the two files do not belong together.
        """
        from dulbe_peft.classifiers import saved

        loaded = saved.read(cls.__name__, cls.rule_type, cls.file_names(), source, (revision, token, cache_dir))
        with torch.device("meta"):
            classifier = cls(**loaded.arguments)
        tensors = {name: loaded.state[name].to(layout.dtype) for name, layout in classifier._layouts.items()}
        classifier._take(State(classifier._layouts, tensors, loaded.config.class_names))
        for name in ("calibration", "novelty_tasks", "source"):
            setattr(classifier, name, getattr(loaded.config, name))
        if loaded.solved:
            solved = {name: tensor.float() for name, tensor in loaded.solved.items()}
            classifier.rule.fitted(classifier.state).keep(solved=solved)
        return classifier.eval()

    def push_to_hub(self, repo_id: str, *, commit_message: str | None = None, **options: Any) -> CommitInfo:
        """Upload the files of `save_pretrained` to a repository on the Hub, which is created if it does not exist.

        `options` are the arguments `private`, `token`, `revision` and `create_pr` of huggingface_hub.
        """
        from dulbe_peft.utils import hub

        message = commit_message or f"Upload {self.name} classifier"
        return hub.push(lambda folder, _: self.save_pretrained(folder), repo_id, commit_message=message, **options)
