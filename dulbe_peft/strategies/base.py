"""Base class of the strategies. A strategy defines how a method constrains the update that is trained on a new task.

For each task, the learner goes through these steps in order:

    measure   measure gradients or layer inputs on the new images, if `needs` asks for them
    plan      choose the frozen bases of the task, one pair of modes for each layer
    loss      compute the loss of each training step; `backward` and `after_step` give more control over the step
    finish    change the trained update before it joins the history
    remember  keep what later tasks need
    encoding  change how images and texts are encoded, from what was kept

A method that differs only in its bases overrides `plan` and nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch

from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.linear import Updates
from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.arguments import PAPER_RATE, LearnerArguments
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.encoding import Encoding
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.subspaces.modes import ModeBases
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.processes import world
from dulbe_peft.utils.settings import check_settings

Modes = dict[str, ModeBases]  # layer name -> bases, for all adapted layers
# What a strategy keeps between tasks: occupation statistics, or other named tensors.
Memory = OccupationStatistics | dict[str, torch.Tensor]
GRADIENTS, INPUTS, TEACHER = "gradients", "inputs", "teacher"


@contextmanager
def replaced_modes(
    task: "NewTask", layers: Mapping[str, DualModeLinear], updates: Callable[[str], Updates], history: bool = True
) -> Iterator[None]:
    """Make the given layers add `updates(name)` in place of their modes and, without `history`, of the history too."""
    adapter = task.adapter_name
    with ExitStack() as stack:
        for name, layer in layers.items():
            weight = layer.folded_weight(adapter).detach() if history else layer.scaled_weight(adapter, 0.0)
            stack.enter_context(layer.holding(adapter, weight, partial(updates, name)))
        yield


@dataclass
class NewTask:
    """The state that a strategy can use while a task is learned."""

    index: int  # number of tasks that were finished before this one
    adapter: DualModeLoraModel  # the tuner; a strategy may read its layers, and may change them in `finish`
    args: LearnerArguments
    memory: Memory | None = None  # the last value that `remember` returned
    # Layer name -> G, (d_out, d_in). Filled if `needs` contains "gradients".
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # Layer name -> X'X, (d_in, d_in), of the task's images. Filled if `needs` contains "inputs".
    inputs: OccupationStatistics = field(default_factory=OccupationStatistics)
    planned: int | None = None  # number of tasks of the stream that `run` learns
    encoder: Encoder | None = None  # encodes further images and texts; set while a task is trained
    images: PixelDataset | None = None  # the task's images; set while it is trained
    class_texts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # texts of classes in place of templates
    # Values that one hook leaves for a later one. `plan` runs in the first process only; all processes get its notes.
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def adapter_name(self) -> str:
        """The name under which the layers store the adapter's tensors."""
        return self.adapter.adapter_name

    @property
    def layers(self) -> dict[str, DualModeLinear]:
        """Name -> adapted layer, in the order of the model."""
        return self.adapter.dual_mode_layers()

    @property
    def ranks(self) -> tuple[int, int]:
        """r_S and r_R of the layers that `rank_pattern` does not list."""
        return self.adapter.active_config.ranks_of("")

    def rank(self, layer: str) -> int:
        """Return r_S + r_R of a layer."""
        return sum(self.adapter.active_config.ranks_of(layer))

    def generator(self, salt: int = 0) -> torch.Generator:
        """Return a random generator on the CPU that depends only on the seed, the task and `salt`."""
        return torch.Generator().manual_seed((self.args.seed * 1_000_003 + self.index * 1_009 + salt) % 2**63)

    def modes(self, bases: Mapping[str, torch.Tensor]) -> Modes:
        """Split the first r_S + r_R columns of each basis, (d_in, ...), into shared (r_S) and residual (r_R) modes."""
        modes = {}
        for name, basis in bases.items():
            shared, residual = basis[:, : self.rank(name)].float().tensor_split([self.ranks[0]], dim=1)
            modes[name] = ModeBases(shared, residual)
        return modes


@dataclass
class Step:
    """One training step: the loss of a batch and the tensors from which it was computed."""

    task_loss: torch.Tensor  # cross-entropy over the current classes, a scalar
    features: torch.Tensor  # (n, d), unit image features
    labels: torch.Tensor  # (n,), indices of the task's classes
    text: torch.Tensor  # (classes, d), unit text embeddings of the task's classes; (0, d) without a text tower
    # (old classes, d), encoded by the model before this task. Set if `needs` contains "teacher".
    old_text: torch.Tensor | None
    encode: Callable[[], torch.Tensor]  # computes the features of the same images with the current model
    teacher: Callable[[], torch.Tensor]  # computes the features of the same images with the model before this task
    logit_scale: float  # tau
    queries: torch.Tensor | None = None  # (n, d), features by the untouched model. Set if the encoding needs them.
    index: torch.Tensor | None = None  # (n,), the place of each image among the task's images
    gradient_scale: float = 1.0  # factor by which the caller multiplies the loss before a half-precision backward pass


@dataclass(frozen=True)
class Strategy:
    """Base class. A strategy is a frozen dataclass whose fields are its settings. They are saved with the learner."""

    def __post_init__(self) -> None:
        check_settings(self, owner=f"the strategy {self.name!r}")

    name: ClassVar[str]  # the name by which users select the strategy
    # What is measured before the first step: any of "gradients", "inputs" and "teacher".
    needs: ClassVar[frozenset[str]] = frozenset()
    adapts: ClassVar[bool] = True  # whether the model is trained; if not, only the classifiers learn
    trains_bases: ClassVar[bool] = False  # whether P is trained as well as B, as in LoRA
    # Whether the update joins the frozen history after the task. If not, the next task goes on training it.
    folds: ClassVar[bool] = True
    # Whether the strategy reads the factor pairs of finished tasks. They are then not merged into a dense matrix.
    keeps_factors: ClassVar[bool] = False
    # The type of what `remember` returns after each task, if the next task, or the encoding, cannot do without it.
    memory_kind: ClassVar[type | None] = None
    remembers_inputs: ClassVar[bool] = False  # whether `remember` needs X'X of the images, from the finished model
    # Whether `remember` is also called for further images of known classes. The memory must then be a sum over images.
    remembers_more: ClassVar[bool] = False
    # Whether the adapter's parameters are trained. If not, only what `training` yields is.
    trains_adapter: ClassVar[bool] = True
    published_rate: ClassVar[float] = PAPER_RATE  # the learning rate of "auto"
    # Whether a share of what a task changed can be kept. The strategy must train the adapter, and later tasks must go
    # on from what was kept.
    shares: ClassVar[bool] = True
    orthonormal: ClassVar[bool] = True  # whether the planned bases have orthonormal columns
    classifiers: ClassVar[tuple[str, ...]] = ("bayes", "pooled_bridge")  # the default if the user names no classifier
    # The default if the user names no target modules. None: the adapter's default.
    target_modules: ClassVar[tuple[str, ...] | None] = None

    def rate(self, args: LearnerArguments) -> float:
        """Return the learning rate at the start of a task."""
        return self.published_rate if args.learning_rate == "auto" else args.learning_rate

    def settings(self) -> dict[str, object]:
        """Return the fields and their values as plain data."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @property
    def needs_names(self) -> bool:
        """Whether training compares images with the names of classes, for which the model needs a text tower."""
        return self.adapts

    def trained_weights(self, layer: DualModeLinear) -> int:
        """Return how many single weights of a layer are trained instead of its modes; 0 if the modes are trained."""
        return 0

    def encoding(self, memory: Memory | None) -> Encoding | None:
        """Return how images and texts are encoded after the tasks of `memory`; None: as the model does.

        The result acts in every pass except those of `training`, which enters `task.encoder.encoding_by` if its steps
        need an encoding. Such a learner cannot be exported, scaled or merged.
        """
        return None

    def check_memory(self, memory: Memory | None) -> None:
        """Raise a `ValueError` unless `memory` is of the type that this strategy has after a task."""
        if self.memory_kind is not None and not isinstance(memory, self.memory_kind):
            kind, found = self.memory_kind.__name__, type(memory).__name__ if memory is not None else "none"
            raise ValueError(f"the strategy {self.name!r} needs its memory of the finished tasks, {kind}, got {found}")

    def measuring(self, task: NewTask) -> AbstractContextManager[object] | None:
        """Return a context for the passes that measure gradients and inputs; None leaves the model unchanged."""
        return None

    def plan(self, task: NewTask) -> Modes | None:
        """Return the bases of the new task, one entry for each adapted layer; None keeps the current modes."""
        if self.trains_adapter:
            raise NotImplementedError
        return None  # the modes stay at 0

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        """Enter a context for the training steps of a task; yield the tensors to train besides the adapter's own."""
        names = None if self.trains_bases else ()
        with task.adapter.held_weights(), task.adapter.trained_bases(names) as bases:
            yield bases

    def penalty(self, task: NewTask) -> torch.Tensor | None:
        """Return a scalar that is added to the loss of each step; None adds nothing."""
        return None

    def loss(self, task: NewTask, step: Step) -> torch.Tensor:
        """Return the scalar loss of a step: by default, the task's loss plus the penalty."""
        penalty = self.penalty(task)
        # The gradients are summed over the processes, so each process adds its part of the penalty.
        return step.task_loss if penalty is None else step.task_loss + penalty / world()[1]

    def backward(self, task: NewTask, step: Step) -> None:
        """Accumulate the gradients of a step into `.grad`."""
        self.loss(task, step).backward()

    def after_step(self, task: NewTask) -> None:
        """Change parameters after an optimiser step, if needed. Called without gradients."""

    def epochs(self, task: NewTask) -> int:
        """Return the maximum number of epochs, which is also the length of the learning rate schedule."""
        return task.args.epochs

    def stop_early(self, task: NewTask, epoch: int, wrong_logit: Callable[[], float]) -> bool:
        """Return whether to stop training after `epoch` epochs. Called before each epoch and after the last one.

        `wrong_logit` makes a pass over the task's images and returns the mean logit of their incorrect classes.
        """
        return False

    def finish(self, task: NewTask) -> None:
        """Change the trained update before it joins the history. Called once after training, without gradients."""

    def linear_head(self, task: NewTask) -> torch.Tensor | None:
        """Return the rows of a linear head that was trained on the task, (classes, d + 1), with the bias last."""
        return None

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory | None:
        """Return what to keep for later tasks. Must not change `task.memory`.

        `inputs` is X'X of the task's images, from the finished model. It is empty unless `remembers_inputs` is set.
        """
        return task.memory
