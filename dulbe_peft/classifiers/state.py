"""Buffers that grow with the classes, and a state dict that brings its own number of classes."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, dataclass_transform

import torch
from annotated_types import Ge, Le
from torch import Tensor, distributed, nn

from dulbe_peft import classifiers
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.settings import LEAST, check_settings
from dulbe_peft.utils.tensors import has_values, identity, is_finite
from dulbe_peft.utils.torch_settings import one_thread

if TYPE_CHECKING:
    from dulbe_peft.classifiers.calibration import TaskNovelty, TaskTemperature

EXTRA_STATE = "_extra_state"
CLASSES = ".classes"  # no buffer can be called so
UNIT_ROWS = ("visual_prototypes", "text_embeds")
LogitScale = Annotated[float, Ge(LEAST), Le(1e30)]  # logits stay finite in float32
MOST_IMAGES = 2**40  # of a class: sums over the counts of all classes stay far below the largest int64


class _Derived(NamedTuple):
    """A value that was computed from buffers, and their key; they are kept, so that their ids stay unique."""

    key: tuple[Any, ...]
    sources: tuple[Tensor, ...]
    value: Any


@dataclass_transform(eq_default=False, kw_only_default=True, field_specifiers=(field,))
@dataclass(eq=False, repr=False)
class GrowingState(nn.Module):
    """A module whose state is class names, a calibration and buffers, of which some have one row a class.

    Every subclass becomes a dataclass. Its fields are its settings, whose types say what is allowed; it has no
    constructor of its own. A float64 buffer stays float64 whatever the module is converted to, and stays on the CPU
    where a device has no float64.
    """

    if TYPE_CHECKING:  # every attribute that is no setting is a buffer

        def __getattr__(self, name: str) -> Tensor: ...

    name: ClassVar[str] = ""
    file_stem: ClassVar[str] = ""
    may_be_absent: ClassVar[tuple[str, ...]] = ()  # buffers of unit vectors of which rows may be zeros

    embed_dim: Annotated[int, Ge(2)]
    logit_scale: LogitScale = 100.0

    def __init_subclass__(cls, kw_only: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):  # its own parameters would not be saved
            raise TypeError(
                f"{cls.__name__} has an __init__: make its settings fields, and register buffers in register"
            )
        dataclass(eq=False, repr=False, kw_only=kw_only)(cls)
        for entry in fields(cls):  # a default is no attribute of the class: a buffer may have the setting's name
            if entry.name in vars(cls):
                delattr(cls, entry.name)
        if "name" in vars(cls):
            cls.file_stem = vars(cls).get("file_stem", cls.name)

    def __post_init__(self) -> None:
        super().__init__()
        check_settings(self, owner=f"the {self.name!r} classifier")
        self.source: dict[str, str] | None = None
        self.calibration: tuple[TaskTemperature, ...] = ()
        self.novelty_tasks: tuple[TaskNovelty, ...] = ()
        self._class_names: list[str] = []
        self._axes: dict[str, tuple[int | str, ...]] = {}  # of buffers that grow, see `register_rows`
        self._derived: dict[str, _Derived] = {}

    @classmethod
    def setting_defaults(cls) -> dict[str, Any]:
        """The class's own settings, those beside `embed_dim` and `logit_scale`, with their defaults."""
        return {entry.name: entry.default for entry in fields(cls) if entry.name not in ("embed_dim", "logit_scale")}

    @classmethod
    def file_names(cls) -> tuple[str, str]:
        """Names of the configuration and of the tensors."""
        return f"{cls.file_stem}_config.json", f"{cls.file_stem}.safetensors"

    def settings(self) -> dict[str, Any]:
        """The class's own settings and their values, plain data."""
        return {name: getattr(self, name) for name in self.setting_defaults()}

    @property
    def class_names(self) -> list[str]:
        """All seen classes, in the order they came."""
        return list(self._class_names)

    def extra_repr(self) -> str:
        settings = "".join(f"{name}={value}, " for name, value in self.settings().items())
        return f"embed_dim={self.embed_dim}, {settings}classes={len(self._class_names)}"

    def register_rows(
        self, name: str, *row_shape: int | str, dtype: torch.dtype = torch.float32, of: str = CLASSES
    ) -> None:
        """Register a buffer with one row a class, empty at first; `register_buffer` makes those that do not grow.

        `of` may name the buffer that says how many rows each class has, 0 to the width of a row, and so may an entry
        of `row_shape` for its columns. A name of no buffer is of rows that the classifier counts itself.
        """
        self._axes[name] = (of, *row_shape)
        self.register_buffer(
            name, torch.zeros([0 if isinstance(n, str) else n for n in self._axes[name]], dtype=dtype)
        )

    def tensors(self) -> dict[str, Tensor]:
        """The buffers that belong to the state, by name."""
        return dict(self.named_buffers(recurse=False, remove_duplicate=False))

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` computes from the buffers, kept until a buffer is replaced or written to."""
        if not has_values():  # a graph computes it
            return make()
        kept = self._derived.get(name)
        if kept is None or kept.key != self._key():
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad(), one_thread():
                value = make()
            self.keep_derived(name, value)
            return value
        return kept.value

    def keep_derived(self, name: str, value: Any) -> None:
        """Let `derived` return this value as long as the buffers stay as they are."""
        self._derived[name] = _Derived(self._key(), tuple(self.tensors().values()), value)

    def _key(self) -> tuple[Any, ...]:
        return identity(self.tensors().values(), samples=distributed.is_available() and distributed.is_initialized())

    def solved(self) -> dict[str, Tensor]:
        """What follows from the buffers and takes long, float32: `derived("solved", ...)`; it is saved beside them."""
        return {}

    def solved_shapes(self, classes: int) -> list[dict[str, tuple[int, ...]]]:
        """The shapes that `solved` can have with so many classes."""
        return []

    def fork(self) -> Self:
        """A module with the same classes that can learn on without changing this one; tensors are shared."""
        twin = copy.copy(self)
        buffers = self.tensors().items()
        twin._buffers = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in buffers}
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: not what can be computed again."""
        return {**vars(self), "_derived": {}}

    def install(self, changes: Mapping[str, Tensor]) -> None:
        """Put new values of buffers in, all at once."""
        buffers = self.tensors()
        self._buffers |= {n: value.to(buffers[n].dtype).to(buffers[n].device) for n, value in changes.items()}
        self._derived = {}

    def with_rows(self, **further: Tensor) -> dict[str, Tensor]:
        """Buffers, by name, with further rows, in the type of these."""
        return {name: torch.cat([self.tensors()[name].to(rows.dtype), rows]) for name, rows in further.items()}

    def with_new_rows(self, new: int) -> dict[str, Tensor]:
        """The buffers with one row a class, with zeros in rows for so many new classes."""
        rows = {name: self.tensors()[name] for name, axes in self._axes.items() if axes[0] == CLASSES}
        return {name: torch.cat([rows[name], rows[name].new_zeros(new, *rows[name].shape[1:])]) for name in rows}

    @property
    def nbytes(self) -> int:
        """Bytes that the kept numbers take."""
        return self.nbytes_with(len(self._class_names))

    def nbytes_with(self, classes: int) -> int:
        """Bytes that the kept numbers take with so many classes, which have as many rows each as those of today."""
        known, total = max(1, len(self._class_names)), 0
        for name, tensor in self.tensors().items():
            sizes = list(tensor.shape)
            for place, axis in enumerate(self._axes.get(name, ())):
                if isinstance(axis, str):
                    sizes[place] = classes if axis == CLASSES else -(-sizes[place] * classes // known)
            total += math.prod(sizes) * tensor.element_size()
        return total

    @property
    def device(self) -> torch.device:
        """Where features are taken to; float64 buffers may have to stay on the CPU."""
        tensors = list(self.tensors().values())
        return next((tensor for tensor in tensors if tensor.dtype != torch.float64), tensors[0]).device

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]], classes: int) -> None:
        """Raise a `ValueError` unless these are the shapes of all tensors with this number of classes."""
        buffers = self.tensors()
        for problem, names in (("Missing", set(buffers) - set(shapes)), ("Unexpected", set(shapes) - set(buffers))):
            if names:
                raise ValueError(f"{problem} key(s) among the tensors: {', '.join(sorted(names)):.200}")
        sizes: dict[int | str, int] = {CLASSES: classes}
        for name, buffer in buffers.items():
            axes = self._axes.get(name, tuple(buffer.shape))
            for axis, size in zip(axes, shapes[name]):
                if isinstance(axis, str):  # buffers with the same axis have as many rows as the first one
                    sizes.setdefault(axis, min(size, classes * axes[-1]) if isinstance(axes[-1], int) else size)
            expected = tuple(sizes.get(axis, axis) for axis in axes)
            if tuple(shapes[name]) != expected:
                raise ValueError(f"{name} must be {expected} for {classes} classes, got {tuple(shapes[name])}")

    def get_extra_state(self) -> Tensor:
        return classifiers.saved.ExtraState.of(self).to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        extra = classifiers.saved.ExtraState.from_tensor(state)
        self._class_names = extra.class_names
        self.calibration, self.novelty_tasks = extra.calibration, extra.novelty_tasks

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        device, solved = fn(torch.zeros(1, device=self.device)).device, self._derived.get("solved")
        moved = {name: tensor.to(device) for name, tensor in (solved.value if solved else {}).items()}
        self._derived = {}

        def convert(tensor: Tensor) -> Tensor:
            if tensor.dtype != torch.float64 or tensor.is_meta:
                return fn(tensor)
            device = fn(torch.zeros(1, device=tensor.device)).device
            return tensor if device.type == "mps" else tensor.to(device)

        super()._apply(convert, recurse)
        if moved:
            self.keep_derived("solved", moved)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resizes to the number of classes in the file; a state that is incomplete or inconsistent changes nothing."""
        _, _, missing_keys, _, error_msgs = rest
        missing = [prefix + key for key in (*self.tensors(), EXTRA_STATE) if prefix + key not in state_dict]
        if missing:
            missing_keys += missing
            return
        state = {key: state_dict[prefix + key] for key in self.tensors()}
        try:
            extra = classifiers.saved.ExtraState.from_tensor(state_dict[prefix + EXTRA_STATE])
            self._check(state, extra.class_names)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"state is inconsistent: {error}")
            return
        for key, buffer in self.tensors().items():
            device = state[key].device if buffer.is_meta else buffer.device
            self._buffers[key] = buffer.new_empty(state[key].shape, device=device)
        self._derived = {}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check(self, state: Mapping[str, Tensor], class_names: list[str]) -> None:
        if class_names:
            check_class_names(class_names)
        for name, buffer in self.tensors().items():
            if state[name].is_floating_point() != buffer.is_floating_point():
                raise ValueError(f"{name} must be of the kind of {buffer.dtype}, got {state[name].dtype}")
            if not is_finite(state[name]):
                raise ValueError(f"{name} holds NaN or infinity")
            if not buffer.is_floating_point() and ((state[name] < 0) | (state[name] > MOST_IMAGES)).any():
                found = f"{state[name].tolist()!r:.100}"
                raise ValueError(f"{name} must be numbers of images, 0 to {MOST_IMAGES}, got {found}")
            lengths = state[name].float().norm(dim=-1) if name in UNIT_ROWS else torch.ones(0)
            if not (((lengths - 1).abs() < 1e-2) | ((lengths == 0) & (name in self.may_be_absent))).all():
                raise ValueError(f"{name} must hold unit vectors")
        self.check_shapes({name: tuple(tensor.shape) for name, tensor in state.items()}, len(class_names))
        for name, axes in self._axes.items():
            rows = state.get(str(axes[0]))
            if rows is not None and int(rows.sum()) != len(state[name]):
                raise ValueError(f"{axes[0]} adds up to {int(rows.sum())}, but {name} has {len(state[name])} rows")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `<stem>_config.json` and `<stem>.safetensors`, names that do not collide with an adapter's files."""
        classifiers.saved.save(self, folder)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
    ) -> Self:
        """Load what `save_pretrained` wrote, onto the CPU, from a folder or from a repository on the Hub.

        Raises:
            FileNotFoundError: There is no such folder, repository or revision, or a file is missing from it.
            ValueError: A file is damaged or has another format, or the two files do not fit each other.
        """
        return classifiers.saved.load(cls, source, revision, token, cache_dir)

    def push_to_hub(self, repo_id: str, *, commit_message: str | None = None, **options: Any) -> Any:
        """Upload what `save_pretrained` writes to a repository on the Hub; it is made where it does not exist.

        `options` are `private`, `token`, `revision` and `create_pr` of huggingface_hub.
        """
        message = commit_message or f"Upload {self.name} classifier"
        return classifiers.saved.push(self, repo_id, message, options)
