"""The PEFT tuner, which injects the layers into a model and takes the model from task to task."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from peft.config import PeftConfig
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, register_peft_method
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer, Pair, layers_of, temporarily
from dulbe_peft.adapter.beginning import Beginning, copied_modules, replaced, trained_modules
from dulbe_peft.adapter.config import DULBE, PREFIX, DualModeLoraConfig
from dulbe_peft.adapter.factors import add_weighted_adapter
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.peft_model import Rows, extend_owner, rows_with_adapters
from dulbe_peft.adapter.saved import (
    KEY_RENAMES,
    MisfitError,
    check_not_held,
    check_saved,
    check_tower,
    describe_origin,
    innermost,
    tower_of,
    warn_of_another_base,
)
from dulbe_peft.adapter.states import check_state
from dulbe_peft.adapter.targets import LLAVA_TARGETS, LLAVA_TYPES, check_targets, find_target, in_text_tower
from dulbe_peft.adapter.text import TextLoraLinear
from dulbe_peft.encoders.registry import ENCODERS, VISION_TOWERS, type_of
from dulbe_peft.subspaces.allocation import NO_STATISTICS, allocate_modes
from dulbe_peft.subspaces.modes import ModeBases, check_modes
from dulbe_peft.utils.processes import copy_from_main
from dulbe_peft.utils.settings import check_number


class DualModeLoraModel(BaseTuner):
    """A model whose vision tower learns through shared and residual modes, and whose text tower has plain LoRA.

    `peft.get_peft_model(model, DualModeLoraConfig(...))` creates it, inside a `PeftModel` that forwards every method.
    The methods act on the active adapter and require that exactly one is active. A layer's name is its dotted path
    in the model given to `get_peft_model`.
    """

    add_weighted_adapter = add_weighted_adapter
    prefix = PREFIX
    tuner_layer_cls = DualModeLayer
    target_module_mapping: dict[str, Any] = (
        TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        | {model_type: list(record.target_modules) for model_type, record in ENCODERS.items()}
        | {tower: list(ENCODERS[model_type].target_modules) for tower, model_type in VISION_TOWERS.items()}
        | dict.fromkeys(LLAVA_TYPES, LLAVA_TARGETS)
    )

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if layers_of(model, adapter_name, DualModeLayer):
            raise ValueError(
                f"the model already has the adapter {adapter_name!r}: unload() it, or choose another name"
            )
        if isinstance(peft_config, dict) and any(isinstance(module, DualModeLayer) for module in model.modules()):
            raise ValueError(
                "the model already has adapters, whose layers two PeftModels would share without knowing of each "
                f"other: unload() them, or call add_adapter({adapter_name!r}, config) on the first PeftModel"
            )
        self._beginnings: dict[str, Beginning] = {}  # before PEFT's `__init__`, which injects the first adapter
        super().__init__(model, peft_config, adapter_name, *args, **kwargs)
        self._in_previous_task = False  # whether a block has replaced `modules_to_save`
        if isinstance(peft_config, dict):  # from a `PeftModel`; `inject_adapter_in_model` passes one configuration
            extend_owner(self)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Inject as PEFT does, after checking the name, which becomes a part of parameter and folder names."""
        if not adapter_name or set(adapter_name) & set("./\\") or hasattr(nn.ParameterDict, adapter_name):
            raise ValueError(
                f"adapter name {adapter_name!r} is empty, contains one of ./\\, or is an attribute of ParameterDict"
            )
        config = cast(DualModeLoraConfig, self.peft_config[adapter_name])
        if config.modules_to_save and (adapter_name.startswith(PREFIX) or adapter_name in ("weight", "bias")):
            raise ValueError(
                f"adapter name {adapter_name!r} cannot be told from the names of tensors in a file of an adapter with "
                f"modules_to_save: choose one that does not begin with {PREFIX!r} and is not 'weight' or 'bias'"
            )
        tower = tower_of(type_of(model))
        check_tower(config, model, tower)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        self.save_first_beginning(adapter_name)
        warn_of_another_base(config, model)

    def save_first_beginning(self, adapter: str) -> None:
        """Copy what the first task of a new adapter changes, for `keep_share` to use later."""
        planned = not cast(DualModeLoraConfig, self.peft_config[adapter]).init_weights
        self._beginnings[adapter] = Beginning(planned, layers=self._copied_layers(adapter))

    def _copied_layers(self, adapter: str) -> dict[str, tuple[Pair, Pair]]:
        return {name: layer.copied(adapter) for name, layer in layers_of(self.model, adapter, DualModeLinear).items()}

    def delete_adapter(self, adapter_name: str) -> None:
        for layer in self._layers():
            layer.check_unused(adapter_name)  # before any layer is changed
        super().delete_adapter(adapter_name)
        self._beginnings.pop(adapter_name, None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        inner = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        for adapter in self.peft_config:
            check_not_held(self, adapter, inner)
            whole, ending = f".modules_to_save.{adapter}.", f".{adapter}"
            if any(whole in key or (f".{PREFIX}" in key and key.endswith(ending)) for key in inner):
                self._beginnings[adapter] = Beginning()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check_own_modules(self) -> None:
        if self._in_previous_task:
            raise ValueError(
                "a block of previous_task is running, in which modules_to_save are those of an earlier time: copy, "
                "move, save or load the model before or after the block"
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._check_own_modules()
        return super().state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "DualModeLoraModel":
        self._check_own_modules()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, object]:
        self._check_own_modules()
        return dict(super().__getstate__())

    def _check_target_module_exists(self, peft_config: DualModeLoraConfig, key: str) -> object:  # type: ignore[override]
        return find_target(peft_config, self.model, key)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, object]) -> PeftConfig:
        """Fill in the target layers of a known encoder; for any other model the user must name them."""
        if peft_config.target_modules is None and model_config["model_type"] not in self.target_module_mapping:
            known = ", ".join(record.model for record in ENCODERS.values())
            raise ValueError(
                f"the target layers of a {type(self.model).__name__} are not known. They are known for {known}, "
                "their vision towers and LLaVA. For another model, name its linear layers: "
                "DualModeLoraConfig(target_modules=[...])"
            )
        return super()._prepare_adapter_config(peft_config, model_config)

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        check_targets(peft_config, model)  # before any layer is replaced, so that an error leaves the model unchanged

    def _create_and_replace(  # type: ignore[override]
        self,
        config: DualModeLoraConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: object,
        current_key: str,
        **_: object,
    ) -> None:
        if isinstance(target, (DualModeLinear, TextLoraLinear)):
            target.update_layer(adapter_name, config, current_key)
            return
        kind = TextLoraLinear if in_text_tower(current_key) else DualModeLinear
        layer = kind(target, adapter_name, config, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)  # a further adapter is not trained until it is made active
        self._replace_module(parent, target_name, layer, target)

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Merge as PEFT does. If `safe_merge` finds an update that is not finite, no layer is changed."""
        if safe_merge:
            self._check_finite(adapter_names)
        super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)
        self._forget_weights()

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        """Merge and unload as PEFT does. If `safe_merge` finds an update that is not finite, no layer is changed."""
        if safe_merge:
            self._check_finite(adapter_names)
        return super().merge_and_unload(progressbar, safe_merge, adapter_names)

    def _check_finite(self, adapter_names: list[str] | None) -> None:
        for layer in self._layers():
            weight: Any = layer.get_base_layer().weight
            for name in layer.present_adapters(adapter_names or layer.active_adapters):
                dtype = torch.promote_types(weight.dtype, torch.float32)
                weight = (weight.detach().to(dtype) + layer.get_delta_weight(name, dtype).to(weight.device)).to(weight)
                if not torch.isfinite(weight).all():
                    raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")

    def _check_merge_allowed(self) -> None:
        super()._check_merge_allowed()
        self.check_state("merge_adapter")

    def rows_with_adapters(self, adapter_names: Rows) -> AbstractContextManager[None]:
        """Apply to each row of a batch the adapter that is named for it, in all passes of the block.

        Args:
            adapter_names: A name for each row, or "__base__" for no adapter. If images and texts have different rows,
                a mapping of "pixel_values" and "input_ids" to lists of names.

        Raises:
            ValueError: If a name is unknown, the model is in training mode, an adapter is merged, or another block is
                running.
        """
        self.check_state("rows_with_adapters")
        return rows_with_adapters(self, adapter_names)

    def _enable_peft_forward_hooks(
        self, *args: object, adapter_names: Rows | None = None, **kwargs: object
    ) -> AbstractContextManager[None]:
        return nullcontext() if adapter_names is None else self.rows_with_adapters(adapter_names)

    def unload(self) -> nn.Module:
        """Remove the adapters and return the base model, bit for bit as it was, even if an adapter is merged."""
        for layer in self._layers():
            if layer.merged:
                layer.unmerge()
        return super().unload()

    def _layers(self) -> list[DualModeLayer]:
        """Return the adapted layers of both towers, whichever adapters they have."""
        return [module for module in self.modules() if isinstance(module, DualModeLayer)]

    @property
    def adapter_name(self) -> str:
        """The name of the active adapter. Exactly one must be active."""
        if len(self.active_adapters) != 1:
            raise ValueError(f"one adapter must be active for this call, got {self.active_adapters}: call set_adapter")
        return self.active_adapters[0]

    @property
    def active_config(self) -> DualModeLoraConfig:
        return cast(DualModeLoraConfig, self.peft_config[self.adapter_name])

    def dual_mode_layers(self) -> dict[str, DualModeLinear]:
        """Return the adapted layers of the vision tower by name, in the model's order."""
        return layers_of(self.model, self.adapter_name, DualModeLinear)

    def shared_parameters(self) -> Iterator[nn.Parameter]:
        """Return B_S of every adapted vision layer, each (d_out, r_S)."""
        return (layer.dulbe_shared_B[self.adapter_name] for layer in self.dual_mode_layers().values())

    def residual_parameters(self) -> Iterator[nn.Parameter]:
        """Return B_R of every adapted vision layer, each (d_out, r_R)."""
        return (layer.dulbe_residual_B[self.adapter_name] for layer in self.dual_mode_layers().values())

    @property
    def history_rank(self) -> int:
        """The highest rank among the layers' histories; 0 if there is no history or all of them are matrices."""
        ranks = [layer.history_rank(self.adapter_name) for layer in self.dual_mode_layers().values()]
        return max([0, *ranks])

    @property
    def has_history(self) -> bool:
        """Whether a task was folded, or is trained and will be folded when the next one begins."""
        adapter, layers = self.adapter_name, self.dual_mode_layers().values()
        return any(layer.history(adapter)[1].any() or layer.is_trained(adapter) for layer in layers)

    def begin_task(
        self,
        modes: Mapping[str, ModeBases] | Mapping[str, torch.Tensor],
        stats: Mapping[str, torch.Tensor] | None = None,
        *,
        orthonormal: bool = True,
    ) -> None:
        """Fold the finished task's modes into the history (see `fold_task`), install new bases, and set B = 0.

        If `torch.distributed` is initialised, every process must call this method. All get the first process's bases.

        Make a new optimizer, and new moving averages of weights, for each task: those of the last task would change B
        in directions that have no meaning in the new bases.

        Args:
            modes: The gradients of the new task, layer name -> G, as `probe_gradients` returns them, from which modes
                of the adapter's ranks are planned; or the result of `allocate_modes`, layer name -> [`ModeBases`].
            stats: The statistics of earlier tasks, given together with gradients; None or empty for the first task.
            orthonormal: Whether to raise an error if the columns of a basis are not orthonormal.

        Raises:
            ValueError: If the modes do not fit the layers, an adapter is merged or disabled, none of its parameters is
                trainable, or a block such as `held_weights` is running. Nothing is changed in this case.
            TypeError: If `modes` holds neither gradients nor modes, or `stats` was given together with modes.
        """
        adapter, layers = self.adapter_name, self.dual_mode_layers()
        self.check_state("begin_task")
        for layer in layers.values():
            layer.drop_empty_history(adapter)
        if not any(p.requires_grad for both in (self.shared_parameters(), self.residual_parameters()) for p in both):
            raise ValueError(
                f"no parameter of the adapter {adapter!r} is trainable: load it with is_trainable=True, or call "
                f"set_adapter({adapter!r})"
            )
        if isinstance(modes, Mapping) and modes and all(isinstance(value, torch.Tensor) for value in modes.values()):
            if not stats and self.has_history:
                warnings.warn(NO_STATISTICS, stacklevel=2)
            modes = allocate_modes(dict(cast(Mapping[str, torch.Tensor], modes)), stats, config=self.active_config)
        elif stats is not None:
            raise TypeError("stats can only be given with gradients, as probe_gradients returns them, not with modes")
        modes = cast(Mapping[str, ModeBases], modes)
        ranks = {name: self.active_config.ranks_of(name) for name in layers}
        shapes = {n: tuple((layers[n].in_features, rank) for rank in both) for n, both in ranks.items()}
        check_modes(modes, shapes, orthonormal)
        self._warn_of_random_bases()
        self.fold_if_trained()
        for name, layer in layers.items():
            layer.install_bases(adapter, modes[name].shared, modes[name].residual)
        copy_from_main(layer.dulbe_P[adapter] for layer in layers.values())
        self.save_beginning()

    def fold_task(self, keep_factors: bool = False, share: float = 1.0) -> None:
        """Add the current modes to the history, dW = B_S P_S' + B_R P_R', and set B = 0.

        There is a warning if B is already 0, because the adapter was not trained or has already been folded, and if it
        was trained without `begin_task`, in random bases.

        Args:
            keep_factors: Keep the history as factors even if one matrix would take less memory.
            share: How much of what the task changed in the vision tower is kept, in [0, 1]; see `keep_share`. 1 keeps
                all of it.

        Raises:
            ValueError: If `share` is not in [0, 1], an adapter is merged or disabled, a block such as `scaled` is
                running, or `keep_share` refuses. Nothing is changed then.

        Reference:
            Section "Subspace-Frozen Parameterization", the task's update. `share`: Wortsman et al., "Robust
            fine-tuning of zero-shot models", 2022.
        """
        check_number("share", share, least=0, most=1)
        self.check_state("fold_task")
        self._warn_of_random_bases()
        self.keep_share(share)
        if not self.fold_if_trained(keep_factors):
            warnings.warn(
                "fold_task has nothing to fold: no mode was trained since the last task was folded or begun",
                stacklevel=2,
            )

    def _warn_of_random_bases(self) -> None:
        if not self._beginnings[self.adapter_name].planned and any(
            layer.is_trained(self.adapter_name) for layer in self.dual_mode_layers().values()
        ):
            warnings.warn(
                "this task was trained in random bases, which were not planned: call begin_task before each task",
                stacklevel=3,
            )

    def keep_share(self, share: float) -> None:
        """Keep only a share of what the task has changed in the vision tower since it began.

        The modes become share * B, so that share * dW joins the history. A pair that goes on from task to task, as in
        the strategy `lora`, moves back to B_0 + share (B - B_0), and A likewise, unless B_0 is 0. The text LoRA, one
        pair for all tasks, is kept whole: with a share of it, the names fit less well and no more of what the model
        knew remains. `keep` and `scaled` reduce both towers, because 0 is the base model there.

        Raises:
            ValueError: If `share` is not in [0, 1], the adapter has `modules_to_save`, or it is not known how the task
                began, because the adapter was loaded since. Nothing is changed then.
        """
        self._check_share("keep_share", share)
        adapter = self.adapter_name
        if share == 1:
            return
        begun = self._beginnings[adapter].layers
        if begun is None:
            raise ValueError(
                "it is not known how this task began, because the adapter was loaded or replaced since: call "
                "begin_task before the training, or use share=1"
            )
        for name, layer in self.dual_mode_layers().items():
            layer.keep_share(adapter, share, begun[name])

    def fold_if_trained(self, keep_factors: bool = False) -> bool:
        """Call `fold_task` without its warnings, and return whether there was anything to fold."""
        adapter, layers = self.adapter_name, self.dual_mode_layers()
        self.check_state("fold_if_trained")
        if not any(layer.is_trained(adapter) for layer in layers.values()):
            return False
        if all(layer.repeats_bases(adapter) for layer in layers.values()):
            warnings.warn(
                "this task was trained in the same bases as the previous task, so what the previous task learned is "
                "not protected: call begin_task(allocate_modes(...)) before each task",
                stacklevel=3,
            )
        for layer in layers.values():
            layer.fold(adapter, keep_factors)
            layer.forget_weight()
        self.save_beginning()
        return True

    def previous_task(self) -> AbstractContextManager[None]:
        """Use the vision tower as it was when this task began: history on, current modes off.

        Its `modules_to_save` are also as they were then. Everything else, such as the text LoRA, is as it is now.

        Raises:
            ValueError: If an adapter is merged, or there are `modules_to_save` and no task has begun since the adapter
                was created or loaded.
        """
        self.check_state("previous_task")
        adapter, layers = self.adapter_name, self.dual_mode_layers().values()
        wrappers, beginning = trained_modules(self.model, adapter), self._beginnings[adapter].modules or {}
        if wrappers.keys() - beginning.keys():
            names = sorted(wrappers.keys() - beginning.keys())
            raise ValueError(
                f"the state of modules_to_save {names} before this task is not known: call begin_task first"
            )
        resting = [layer.resting(adapter) for layer in layers]
        if not wrappers:
            return _all_of(resting)
        inside = temporarily(self, "_in_previous_task", True)
        return _all_of([*resting, replaced(wrappers, adapter, beginning), inside])

    def save_beginning(self) -> None:
        """Copy what a task changes, for `previous_task` and `keep_share` to use later."""
        name = self.adapter_name
        self._beginnings[name] = Beginning(True, copied_modules(self.model, name), self._copied_layers(name))

    def _forget_weights(self) -> None:
        for layer in self._layers():
            if isinstance(layer, DualModeLinear):
                layer.forget_weight()

    def skip_zero_modes(self) -> AbstractContextManager[None]:
        """Leave out the modes if every B is zero, as between tasks: the outputs are the same and cost less."""
        adapter, layers = self.adapter_name, self.dual_mode_layers().values()
        if any(layer.merged or layer.is_trained(adapter) for layer in layers):
            return nullcontext()
        return _all_of(layer.resting(adapter) for layer in layers)

    def held_weights(self) -> AbstractContextManager[None]:
        """Keep the present effective weights while a task is trained; changes of W_0 or the history have no effect."""
        # Without this, torch.compile recompiles for each rank of the history and computes the weights in every pass.
        adapter, layers = self.adapter_name, self.dual_mode_layers().values()
        self.check_state("held_weights")
        frozen = (layer for layer in layers if layer.plain and layer.caches[adapter])
        frozen = (layer for layer in frozen if not layer.base_layer.weight.requires_grad)
        weights = ((layer, layer.folded_weight(adapter).detach()) for layer in frozen)
        return _all_of(layer.holding(adapter, weight, as_saved=True) for layer, weight in weights)

    def scaled_history(self, scale: float) -> AbstractContextManager[None]:
        """Use W_0 + scale * B_hist P_hist' as the frozen weight of every vision layer while the block runs."""
        adapter, layers = self.adapter_name, self.dual_mode_layers().values()
        self.check_state("scaled_history")
        return _all_of(layer.holding(adapter, layer.scaled_weight(adapter, scale)) for layer in layers)

    def scaled(self, scale: float) -> AbstractContextManager[None]:
        """Use W_0 + scale * dW in every adapted layer of both towers while the block runs. Not for training.

        dW is everything that the adapter has learned. Scale 0 gives the base model and scale 1 the trained model, both
        bit for bit.

        Raises:
            ValueError: If the scale is not in [0, 1], an adapter is merged, or the adapter has `modules_to_save`.

        Reference:
            Wortsman et al., "Robust fine-tuning of zero-shot models", 2022: interpolation of all weights.
        """
        self._check_share("scaled", scale, "scale")
        adapter = self.adapter_name
        layers = layers_of(self.model, adapter, DualModeLayer).values()
        return _all_of(layer.scaled(adapter, scale) for layer in layers)

    def keep(self, share: float) -> None:
        """Make `scaled(share)` permanent, between two tasks: the adapter's whole update becomes share * dW.

        Raises:
            ValueError: If `share` is not in [0, 1], an adapter is merged or disabled, the adapter has
                `modules_to_save`, or a block such as `scaled` is running. Nothing is changed then.
        """
        self._check_share("keep", share)
        adapter = self.adapter_name
        for layer in layers_of(self.model, adapter, DualModeLayer).values():
            layer.scale_update(adapter, share)
        self._forget_weights()
        self._beginnings[adapter].layers = self._copied_layers(adapter)

    def _check_share(self, operation: str, share: float, name: str = "share") -> None:
        """Raise a `ValueError` if the adapter's update cannot be multiplied by a share, which errors call `name`."""
        check_number(name, share, least=0, most=1)
        self.check_state(operation)
        if share != 1 and self.active_config.modules_to_save:
            raise ValueError(f"the adapter has modules_to_save, and whole modules cannot be scaled: use {name}=1")

    @contextmanager
    def trained_bases(self, names: Iterable[str] | None = None) -> Iterator[list[torch.Tensor]]:
        """Train the bases P of the named layers (by default all) along with B; yields the bases, each (d_in, r)."""
        adapter, layers = self.adapter_name, self.dual_mode_layers()
        bases = [layers[name].dulbe_P[adapter] for name in (layers if names is None else names)]
        try:
            yield [basis.requires_grad_() for basis in bases]
        finally:
            for basis in bases:
                basis.requires_grad_(False)
                basis.grad = None

    def check_state(self, operation: str) -> None:
        """Raise a `ValueError` if an operation of the table in `states.py` would be wrong in the model's state."""
        check_state(self.model, operation)

    @classmethod
    def _get_adapter_state_dict(  # type: ignore[override]
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, **kwargs: Any
    ) -> Any:
        """Select the adapter's entries, unless the model's outputs are not those of the adapter now."""
        check_state(model, "get_peft_model_state_dict")
        layers = layers_of(model, adapter_name, DualModeLinear)
        for layer in layers.values():
            layer.forget_weight()  # values written through .data are saved, so the model must use them too
        return super()._get_adapter_state_dict(model=model, config=config, adapter_name=adapter_name, **kwargs)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Rename a file's keys to match the model, also between `CLIPModel` and stand-alone vision towers.

        Raises:
            ValueError: If the tensors do not fit the model.
        """
        known = model.state_dict()
        renames = KEY_RENAMES[:1] if tower_of(type_of(innermost(model))) == "text" else KEY_RENAMES
        renamed = [{rename(key): value for key, value in state_dict.items()} for rename in renames]
        remap = super()._remap_adapter_state_dict_for_load
        best = max(
            (remap(model, config, adapter_name, state) for state in renamed),
            key=lambda state: sum(key in known and PREFIX in key and not in_text_tower(key) for key in state),
        )
        check_not_held(model, adapter_name, best)
        try:
            check_saved(best, known, adapter_name)
        except MisfitError as error:
            raise ValueError(
                f"the adapter does not fit this model: {describe_origin(config, model)} ({error})"
            ) from error
        # With low_cpu_mem_usage, PEFT would use the file's tensors directly. They are unaligned in memory, so products
        # with them would be rounded differently. Copies are aligned.
        return {key: tensor.clone() for key, tensor in best.items()}


@contextmanager
def _all_of(blocks: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Enter context managers in order, each as soon as the iterable yields it."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield


def register() -> None:
    """Register the method with PEFT. Repeated calls change nothing."""
    if DULBE not in PEFT_TYPE_TO_TUNER_MAPPING:
        register_peft_method(name=DULBE.value.lower(), config_cls=DualModeLoraConfig, model_cls=DualModeLoraModel)
        # A name that is part of the prefix does no harm here, because the keys hold whole names between dots. The
        # message contains the prefix, so warnings of other methods are not hidden.
        warnings.filterwarnings("ignore", f"Adapter name '.*' should not be contained in the prefix '{PREFIX}'")
