"""What a strategy is: how one method constrains the update that a new task trains.

    measure   gradients or layer inputs of the new images, where `needs` asks for them
    plan      the frozen bases of the task, one pair of modes a layer
    loss      each training step's loss; backward, where a loss says not enough; after_step may correct the step itself
    finish    what is done to the trained update before it joins the history
    remember  what the strategy keeps for later tasks

A task passes through in this order. A method that only chooses other bases overrides `plan` alone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch

from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.linear import Updates
from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.subspaces.modes import ModeBases
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.processes import world
from dulbe_peft.utils.settings import check_settings

Modes = dict[str, ModeBases]  # layer name -> bases, of all adapted layers
# What a strategy keeps between tasks: occupation statistics, or named tensors of its own.
Memory = OccupationStatistics | dict[str, torch.Tensor]
GRADIENTS, INPUTS, TEACHER = "gradients", "inputs", "teacher"


@contextmanager
def replaced_modes(
    task: "NewTask", layers: Mapping[str, DualModeLinear], updates: Callable[[str], Updates], history: bool = True
) -> Iterator[None]:
    """Let some layers add `updates(name)` in place of their modes, and without `history` in place of it, too."""
    adapter = task.adapter_name
    with ExitStack() as stack:
        for name, layer in layers.items():
            weight = layer.folded_weight(adapter).detach() if history else layer.scaled_weight(adapter, 0.0)
            stack.enter_context(layer.holding(weight, partial(updates, name), modes=False))
        yield


@dataclass
class NewTask:
    """What a strategy may look at while one task is learned."""

    index: int  # how many tasks were finished before this one
    adapter: DualModeLoraModel  # the tuner; a strategy may read its layers and, in `finish`, write them
    args: LearnerArguments
    memory: Memory | None = None  # what `remember` returned last
    # Layer name -> G, (d_out, d_in), where `needs` has "gradients".
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # Layer name -> X'X, (d_in, d_in), of the task's images, where `needs` has "inputs".
    inputs: OccupationStatistics = field(default_factory=OccupationStatistics)
    encoder: Encoder | None = None  # where a task is trained; encodes further images and texts
    # What one hook leaves for a later one. `plan` runs in the first process alone; all processes get its notes.
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def adapter_name(self) -> str:
        """The name under which the layers hold the adapter's tensors."""
        return self.adapter.adapter_name

    @property
    def layers(self) -> dict[str, DualModeLinear]:
        """Name -> adapted layer, in the model's order."""
        return self.adapter.dual_mode_layers()

    @property
    def ranks(self) -> tuple[int, int]:
        """r_S and r_R of all layers that `rank_pattern` does not name."""
        return self.adapter.active_config.ranks_of("")

    def rank(self, layer: str) -> int:
        """r_S + r_R of a layer."""
        return sum(self.adapter.active_config.ranks_of(layer))

    def generator(self, salt: int = 0) -> torch.Generator:
        """A random generator on the CPU that depends on the seed, the task and `salt` alone."""
        return torch.Generator().manual_seed((self.args.seed * 1_000_003 + self.index * 1_009 + salt) % 2**63)

    def modes(self, bases: Mapping[str, torch.Tensor]) -> Modes:
        """Bases as modes: of their first r_S + r_R columns, (d_in, ...), the first r_S are the shared mode."""
        modes = {}
        for name, basis in bases.items():
            shared, residual = basis[:, : self.rank(name)].float().tensor_split([self.ranks[0]], dim=1)
            modes[name] = ModeBases(shared, residual)
        return modes


@dataclass
class Step:
    """One training step: a batch's loss and what it was computed from."""

    task_loss: torch.Tensor  # cross-entropy over the current classes, a scalar
    features: torch.Tensor  # (n, d), unit image features
    labels: torch.Tensor  # (n,), indices of the task's classes
    text: torch.Tensor  # (classes, d), unit text embeddings of the task's classes
    old_text: torch.Tensor | None  # (old classes, d) by the model before this task, where `needs` has "teacher"
    encode: Callable[[], torch.Tensor]  # the features of the same images by the model as it is at the call
    teacher: Callable[[], torch.Tensor]  # the features of the same images by the model before this task
    logit_scale: float  # tau
    gradient_scale: float = 1.0  # by which the caller multiplies the loss for its backward pass in half precision


@dataclass(frozen=True)
class Strategy:
    """Base class. A strategy is a frozen dataclass: its fields are its settings, and are saved with the learner."""

    def __post_init__(self) -> None:
        check_settings(self, owner=f"the strategy {self.name!r}")

    name: ClassVar[str]  # how users ask for it
    # What is measured before the first step, of "gradients", "inputs" and "teacher".
    needs: ClassVar[frozenset[str]] = frozenset()
    adapts: ClassVar[bool] = True  # whether anything is trained; if not, the classifiers alone learn
    trains_bases: ClassVar[bool] = False  # whether P is trained beside B, as LoRA does
    folds: ClassVar[bool] = True  # whether the update joins the frozen history at the end; if not, it is trained on
    keeps_factors: ClassVar[bool] = False  # whether it reads the pairs of finished tasks, which must not become dense
    remembers_inputs: ClassVar[bool] = False  # whether `remember` needs X'X of the images by the finished model
    # Whether `remember` is called for further images of known classes, too: the memory must be a sum over images.
    remembers_more: ClassVar[bool] = False
    orthonormal: ClassVar[bool] = True  # whether the planned bases have orthonormal columns
    classifiers: ClassVar[tuple[str, ...]] = ("pooled_bridge",)  # of a learner whose user names none
    target_modules: ClassVar[tuple[str, ...] | None] = None  # where the user names none; None: the adapter's default

    def settings(self) -> dict[str, Any]:
        """The fields and their values, plain data."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def trained_weights(self, layer: DualModeLinear) -> int:
        """How many single weights of a layer are trained in place of its modes; 0: the modes are trained."""
        return 0

    def measuring(self, task: NewTask) -> AbstractContextManager[Any] | None:
        """A context around the passes that measure gradients and inputs; None: the model is measured as it is."""
        return None

    def plan(self, task: NewTask) -> Modes | None:
        """The bases of the new task, one entry for every adapted layer; None goes on with the present modes."""
        raise NotImplementedError

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        """A context around all steps of a task; yields the tensors to train beside the adapter's own."""
        names = None if self.trains_bases else ()
        with task.adapter.held_weights(), task.adapter.trained_bases(names) as bases:
            yield bases

    def penalty(self, task: NewTask) -> torch.Tensor | None:
        """A scalar that is added to the loss of every step; None adds nothing."""
        return None

    def loss(self, task: NewTask, step: Step) -> torch.Tensor:
        """The scalar whose gradient is one step's; here the task's loss and the penalty."""
        penalty = self.penalty(task)
        return step.task_loss if penalty is None else step.task_loss + penalty / world()[1]  # summed over processes

    def backward(self, task: NewTask, step: Step) -> None:
        """Accumulate one step's gradients into `.grad`."""
        self.loss(task, step).backward()

    def after_step(self, task: NewTask) -> None:
        """Called after every step of the optimiser, without gradients."""

    def epochs(self, task: NewTask) -> int:
        """How many epochs to train at most; the learning rate's schedule is as long."""
        return task.args.epochs

    def stop_early(self, task: NewTask, epoch: int, wrong_logit: Callable[[], float]) -> bool:
        """Whether to end training after `epoch` epochs; called before each epoch and after the last one.

        `wrong_logit` makes a pass over the task's images and returns the mean logit of their wrong classes.
        """
        return False

    def finish(self, task: NewTask) -> None:
        """Called once after training, without gradients, before the update joins the history."""

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory | None:
        """What to keep for later tasks; `task.memory` must stay as it is.

        `inputs` is X'X of the task's images by the finished model, where `remembers_inputs`; else empty.
        """
        return task.memory
