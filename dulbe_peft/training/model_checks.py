"""What a learner asks of a model before it works with it."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from torch import nn

from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.encoders.loading import check_encoder
from dulbe_peft.strategies import Strategy
from dulbe_peft.training.state import LearnerState


def check_adapter_name(model: Any) -> None:
    """A learner trains, saves and loads the adapter that PEFT calls "default"; another one beside it is left alone."""
    active = list(model.base_model.active_adapters)
    if active != ["default"]:
        raise ValueError(
            f"the model's active adapters are {active}: a learner works on the one named 'default' alone; call "
            "set_adapter('default') on the model"
        )
    if not model.base_model.dual_mode_layers():
        raise ValueError(
            "the model's layers have no adapter any more, as unload() and merge_and_unload() leave it: load the saved "
            "learner again, and take the adapter out of a copy of the model (copy.deepcopy)"
        )


def check_trainable(state: LearnerState) -> None:
    """Raise where an adapter is merged or scaled, or where a strategy would train another part of the model."""
    if state.adapter is not None:
        state.adapter.check_unmerged()
        state.adapter.check_unscaled()
        if state.strategy.adapts:
            _check_trained(state.model)


def _check_trained(model: Any) -> None:
    """Raise where somebody has chosen other parameters for training than the adapter's.

    A task that fails is taken back, and a learner is saved, by its adapter alone.
    """
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    names = [name for name, p in model.get_base_model().named_parameters() if id(p) in own and PREFIX not in name]
    wrong = [name for name in names if "modules_to_save" not in name]
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} requires a gradient ({len(wrong)} such parameters of the base model): a learner trains the "
            "adapter alone; call requires_grad_(False) on the base model, then set_adapter('default')"
        )
    adapter = [(name, p) for name, p in model.named_parameters() if PREFIX in name and name.endswith(".default")]
    frozen = [name for name, p in adapter if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"{frozen[0]!r} requires no gradient ({len(frozen)} such parameters of the adapter), so a task would not "
            "train it: call set_adapter('default') on the model"
        )


def check_model(model: Any, strategy: Strategy) -> Any:
    """The model under the adapter, after a check that the strategy can work with it."""
    if isinstance(model, PeftModel) and isinstance(model.base_model, DualModeLoraModel):
        check_adapter_name(model)
        targets = strategy.target_modules
        other = [n for n in model.base_model.dual_mode_layers() if targets and n.rpartition(".")[2] not in targets]
        if other:
            raise ValueError(
                f"the strategy {strategy.name!r} adapts {list(targets or ())} alone, the model has an adapter in "
                f"{other[0]!r}: pass DualModeLoraConfig(target_modules={list(targets or ())})"
            )
        model = model.get_base_model()
    elif strategy.adapts or isinstance(model, PeftModel) or not isinstance(model, nn.Module):
        raise ValueError(
            f"model must come from get_peft_model(clip, DualModeLoraConfig(...)) for the strategy {strategy.name!r}, "
            f"got {type(model).__name__}"
        )
    check_encoder(model, text=strategy.adapts)
    return model
