"""Buffers that grow with the number of classes, and are resized when a state dict is loaded."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, cast, dataclass_transform

import torch
from annotated_types import Ge, Le
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from dulbe_peft import classifiers
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.settings import LEAST, check_settings, check_value, field_types
from dulbe_peft.utils.tensors import has_values, identity, is_finite
from dulbe_peft.utils.torch_settings import one_thread

if TYPE_CHECKING:
    from dulbe_peft.classifiers.calibration import TaskNovelty, TaskTemperature

EXTRA_STATE = "_extra_state"
CLASSES = ".classes"  # contains a dot, so it cannot be the name of a buffer
UNIT_ROWS = ("visual_prototypes", "text_embeds")
LogitScale = Annotated[float, Ge(LEAST), Le(1e30)]  # logits stay finite in float32
MOST_IMAGES = 2**40  # images of one class, so that sums over all classes stay far below the largest int64


class _Derived(NamedTuple):
    """A value that was computed from buffers, and the key of these buffers.

    The buffers are stored, too, because ids of deleted tensors could be used again.
    """

    key: tuple[Any, ...]
    sources: tuple[Tensor, ...]
    value: Any


@dataclass_transform(eq_default=False, kw_only_default=True, field_specifiers=(field,))
@dataclass(eq=False, repr=False)
class GrowingState(nn.Module):
    """A module whose state consists of class names, a calibration and buffers, some of which have one row per class.

    Every subclass becomes a dataclass whose fields are its settings; their types say which values are allowed. It must
    not define a constructor. A float64 buffer stays float64 if the module is converted to another type, and stays on
    the CPU if a device has no float64.
    """

    if TYPE_CHECKING:  # every attribute that is not a setting is a buffer

        def __getattr__(self, name: str) -> Tensor: ...

    name: ClassVar[str] = ""
    file_stem: ClassVar[str] = ""
    may_be_absent: ClassVar[tuple[str, ...]] = ()  # buffers of unit vectors whose rows may be zero instead

    embed_dim: Annotated[int, Ge(2)]
    logit_scale: LogitScale = 100.0

    def __init_subclass__(cls, kw_only: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):  # its parameters would not be saved
            raise TypeError(
                f"{cls.__name__} has an __init__: make its settings dataclass fields, and register buffers in "
                "register()"
            )
        dataclass(eq=False, repr=False, kw_only=kw_only)(cls)
        for entry in fields(cls):  # a default on the class would hide a buffer with the name of the setting
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
        self._axes: dict[str, tuple[int | str, ...]] = {}  # axes of each growing buffer, see `register_rows`
        self._derived: dict[str, _Derived] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Rows of unit vectors are normalised; other values of the state are checked as in files."""
        if "_derived" in self.__dict__ and has_values():  # not in the constructor, which checks everything itself
            if name in self._buffers and isinstance(value, Tensor):
                if name in UNIT_ROWS and value.is_floating_point():
                    value = F.normalize(value.float(), dim=-1).to(value.dtype)
                self._check(self.tensors() | {name: value}, self._class_names)
            elif name in (types := field_types(cast(Any, type(self)))):
                value = check_value(f"the {self.name!r} classifier: {name}", types[name], value)
        super().__setattr__(name, value)

    @classmethod
    def setting_defaults(cls) -> dict[str, Any]:
        """Return the settings of the class and their defaults, without `embed_dim` and `logit_scale`."""
        return {entry.name: entry.default for entry in fields(cls) if entry.name not in ("embed_dim", "logit_scale")}

    @classmethod
    def file_names(cls) -> tuple[str, str]:
        """Return the names of the configuration file and of the tensor file."""
        return f"{cls.file_stem}_config.json", f"{cls.file_stem}.safetensors"

    def settings(self) -> dict[str, Any]:
        """Return the settings, without `embed_dim` and `logit_scale`, and their values as plain data."""
        return {name: getattr(self, name) for name in self.setting_defaults()}

    @property
    def class_names(self) -> list[str]:
        """All seen classes, in the order in which they were learned."""
        return list(self._class_names)

    def extra_repr(self) -> str:
        settings = "".join(f"{name}={value}, " for name, value in self.settings().items())
        return f"embed_dim={self.embed_dim}, {settings}classes={len(self._class_names)}"

    def register_rows(
        self, name: str, *row_shape: int | str, dtype: torch.dtype = torch.float32, of: str = CLASSES
    ) -> None:
        """Register a buffer with one row per class, which is empty at first.

        Use `register_buffer` for buffers that do not grow.

        Args:
            name: Name of the buffer.
            row_shape: Shape of a row. An entry may be a name, as in `of`, if the columns grow.
            dtype: Type of the buffer.
            of: What the rows belong to. The default means one row per class. The name of a buffer of integers means
                as many rows per class as that buffer says, from 0 to the width of a row. Any other name means a number
                of rows that the classifier itself manages.
        """
        self._axes[name] = (of, *row_shape)
        self.register_buffer(
            name, torch.zeros([0 if isinstance(n, str) else n for n in self._axes[name]], dtype=dtype)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers that belong to the state, by name."""
        return dict(self.named_buffers(recurse=False, remove_duplicate=False))

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` computes from the buffers, and cache it until a buffer is replaced or written to."""
        if not has_values():  # while a graph is exported, which computes the value itself
            return make()
        cached = self._derived.get(name)
        if cached is None or cached.key != self._key():
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad(), one_thread():
                value = make()
            self.keep_derived(name, value)
            return value
        return cached.value

    def forget_derived(self) -> None:
        """Compute what follows from the buffers again when it is next used."""
        self._derived = {}

    def keep_derived(self, name: str, value: Any) -> None:
        """Let `derived` return this value until a buffer changes."""
        self._derived[name] = _Derived(self._key(), tuple(self.tensors().values()), value)

    def _key(self) -> tuple[Any, ...]:
        return identity(self.tensors().values(), samples=distributed.is_available() and distributed.is_initialized())

    def solved(self) -> dict[str, Tensor]:
        """Return tensors in float32 that take long to compute from the buffers, and are therefore saved with them.

        Subclasses cache them as `derived("solved", ...)`.
        """
        return {}

    def solved_shapes(self, classes: int) -> list[dict[str, tuple[int, ...]]]:
        """Return the possible shapes of `solved` for a number of classes."""
        return []

    def fork(self) -> Self:
        """Return a copy that shares the tensors, and can learn without changing this module."""
        twin = copy.copy(self)
        buffers = self.tensors().items()
        twin._buffers = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in buffers}
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached values, which can be computed again."""
        return {**vars(self), "_derived": {}}

    def install(self, changes: Mapping[str, Tensor]) -> None:
        """Replace buffers by new values in one step."""
        buffers = self.tensors()
        self._buffers |= {n: value.to(buffers[n].dtype).to(buffers[n].device) for n, value in changes.items()}
        self._derived = {}

    def with_rows(self, **further: Tensor) -> dict[str, Tensor]:
        """Return buffers with further rows added, in the type of these rows, by name."""
        return {name: torch.cat([self.tensors()[name].to(rows.dtype), rows]) for name, rows in further.items()}

    def with_new_rows(self, new: int) -> dict[str, Tensor]:
        """Return the buffers with one row per class, extended by rows of zeros for `new` classes."""
        rows = {name: self.tensors()[name] for name, axes in self._axes.items() if axes[0] == CLASSES}
        return {name: torch.cat([rows[name], rows[name].new_zeros(new, *rows[name].shape[1:])]) for name in rows}

    @property
    def nbytes(self) -> int:
        """Size of the buffers in bytes."""
        return self.nbytes_with(len(self._class_names))

    def nbytes_with(self, classes: int) -> int:
        """Return the size of the buffers in bytes for a number of classes.

        The average number of rows per class is taken to be the present one.
        """
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
        """The device on which features are classified. float64 buffers may be on the CPU instead."""
        tensors = list(self.tensors().values())
        return next((tensor for tensor in tensors if tensor.dtype != torch.float64), tensors[0]).device

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]], classes: int) -> None:
        """Raise a `ValueError` unless the tensors of a classifier with this number of classes have these shapes."""
        buffers = self.tensors()
        for problem, names in (("Missing", set(buffers) - set(shapes)), ("Unexpected", set(shapes) - set(buffers))):
            if names:
                raise ValueError(f"{problem} key(s) among the tensors: {', '.join(sorted(names)):.200}")
        sizes: dict[int | str, int] = {CLASSES: classes}
        for name, buffer in buffers.items():
            axes = self._axes.get(name, tuple(buffer.shape))
            for axis, size in zip(axes, shapes[name]):
                if isinstance(axis, str):  # the first buffer with an axis determines its size for the others
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
        """Resize to the number of classes in the state. An incomplete or inconsistent state changes nothing."""
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

    def check_tensors(self) -> None:
        """Raise a `ValueError` if a tensor was written to in place and is no longer one that could be loaded."""
        self._check(self.tensors(), self._class_names)

    def _check(self, state: Mapping[str, Tensor], class_names: list[str]) -> None:
        if class_names:
            check_class_names(class_names)
        for name, buffer in self.tensors().items():
            if state[name].is_floating_point() != buffer.is_floating_point():
                raise ValueError(f"{name} must be of the kind of {buffer.dtype}, got {state[name].dtype}")
            if not is_finite(state[name]):
                raise ValueError(f"{name} contains NaN or infinity")
            if not buffer.is_floating_point() and ((state[name] < 0) | (state[name] > MOST_IMAGES)).any():
                given = f"{state[name].tolist()!r:.100}"
                raise ValueError(f"{name} must be numbers of images, 0 to {MOST_IMAGES}, got {given}")
            lengths = state[name].float().norm(dim=-1) if name in UNIT_ROWS else torch.ones(0)
            if not (((lengths - 1).abs() < 1e-2) | ((lengths == 0) & (name in self.may_be_absent))).all():
                raise ValueError(f"{name} must consist of unit vectors")
        self.check_shapes({name: tuple(tensor.shape) for name, tensor in state.items()}, len(class_names))
        for name, axes in self._axes.items():
            rows = state.get(str(axes[0]))
            if rows is not None and int(rows.sum()) != len(state[name]):
                raise ValueError(f"{axes[0]} adds up to {int(rows.sum())}, but {name} has {len(state[name])} rows")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `<stem>_config.json` and `<stem>.safetensors`, which can be in the same folder as an adapter."""
        classifiers.saved.save(self, folder)

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
            FileNotFoundError: The folder, the repository, its revision or a file does not exist.
            ValueError: A file is damaged or has another format, or the two files do not belong together.
        """
        return classifiers.saved.load(cls, source, revision, token, cache_dir)

    def push_to_hub(self, repo_id: str, *, commit_message: str | None = None, **options: Any) -> Any:
        """Upload the files of `save_pretrained` to a repository on the Hub, which is created if it does not exist.

        `options` are the arguments `private`, `token`, `revision` and `create_pr` of huggingface_hub.
        """
        message = commit_message or f"Upload {self.name} classifier"
        return classifiers.saved.push(self, repo_id, message, options)
