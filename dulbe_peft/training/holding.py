"""What holds a learner's state: the encoder that reads images by it, changes that are done whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.closing import ClosingPass
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import logit_scale
from dulbe_peft.encoders.pixels import with_image_resize
from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.training.locking import TakesTurns
from dulbe_peft.training.preparing import check_adapter_name, check_tracker
from dulbe_peft.training.state import LearnerState, set_adapter_state
from dulbe_peft.training.trainer import Log, TaskRecord
from dulbe_peft.utils.devices import choose_device, has_bfloat16, settled_precision
from dulbe_peft.utils.processes import copy_from_main
from dulbe_peft.utils.profiling import Profile


def _of(path: str) -> Any:
    """An attribute that says what a part of the learner says."""
    return property(attrgetter(path))


class StateHolder(TakesTurns):
    """A learner as far as its state goes; `ClassIncrementalLearner` names the attributes."""

    model: Any = _of("state.model")
    clip: Any = _of("state.base")  # the model under the adapter
    processor: Any = _of("state.processor")
    args: LearnerArguments = _of("state.args")
    strategy: Strategy = _of("state.strategy")
    classifiers: dict[str, Classifier] = _of("state.classifiers")
    classifier: Classifier = _of("state.classifier")  # the one that answers
    memory: Memory | None = _of("state.memory")
    tasks: list[tuple[str, ...]] = _of("state.tasks")
    class_names: tuple[str, ...] = _of("state.class_names")
    source: dict[str, str] | None = _of("state.source")
    profile: Profile = _of("encoder.profile")  # where the time of the last task went

    def _adopt(self, state: LearnerState) -> None:
        """Become the learner of a state, on the device that its settings name."""
        args, processor = state.args, state.processor
        check_tracker(args.log_with)
        self.device = choose_device(args.device)
        self.precision_chosen = args.precision == "auto"
        able = args.backend != "onnx" and has_bfloat16(self.device)
        args = replace(args, precision=settled_precision(args.precision, None, state.strategy.adapts, able))
        model = state.model.to(self.device).eval()
        copy_from_main(state.adapter_tensors().values())
        if args.image_resize != "processor":
            processor = with_image_resize(processor, state.base, args.image_resize)
        classifiers = {name: classifier.to(self.device) for name, classifier in state.classifiers.items()}
        self.state = replace(state, args=args, model=model, processor=processor, classifiers=classifiers)
        self.encoder = self._encoder(None)
        self.logit_scale = logit_scale(self.clip)
        self.record: TaskRecord | None = None
        self.closing: ClosingPass | None = None
        self.folder: Path | None = None
        self.log: Log | None = None
        super().__init__()

    def change_settings(self, args: LearnerArguments) -> None:
        """Go on with other settings on the same device; what was learned stays, and with "auto" the precision."""
        args = replace(args, precision=self.args.precision) if args.precision == "auto" else args
        self.state = replace(self.state, args=args)
        self.encoder = self._encoder(self.encoder.store)

    def _encoder(self, store: FeatureStore | None) -> Encoder:
        made = Encoder(self.clip, self.processor, self.args, self.device)
        made.graph, made.store, made.scores = self.state.graph, store, self._scores
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.encoder.scores = self._scores

    def _scores(self, features: torch.Tensor) -> torch.Tensor | None:
        """What another backend's features are compared by, beside their cosines."""
        return self.classifier.logits(features) if self.tasks else None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A block that is done whole or not at all: where it raises, the learner becomes what it was before."""
        before = self.state, self.record, self.closing
        adapter = {name: tensor.clone() for name, tensor in self.state.adapter_tensors().items()}
        try:
            yield
        except BaseException:
            self.state, self.record, self.closing = before
            if adapter:
                set_adapter_state(self.model, adapter)
                self.model.zero_grad(set_to_none=True)
                self.model.eval()
            raise

    def _check_learned(self) -> None:
        if not self.tasks:
            raise ValueError("no task has been learned yet: call learn_task first")
        check_adapter_name(self.model)
