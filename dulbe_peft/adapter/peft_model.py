"""What a `PeftModel` with an adapter of this package does otherwise than PEFT, for which PEFT's tuners have no hook.

It writes a card, facts about the base model and a digest, checks them, and counts the parameters of each tower. Each
row of a batch may name its adapter.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from huggingface_hub import CommitInfo, ModelCardData
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from dulbe_peft.adapter.base import DualModeLayer, layers_of, temporarily
from dulbe_peft.adapter.config import DENSE, PREFIX, DualModeLoraConfig, history_fields, write_facts
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.saved import facts_of
from dulbe_peft.adapter.targets import in_text_tower
from dulbe_peft.adapter.text import TextLoraLinear
from dulbe_peft.utils.files import read_json, write_json
from dulbe_peft.utils.hub import is_repo_id, push

MARK = "<!-- made by dulbe_peft; without this line, saving leaves the text alone -->"
_TAGS = ("class-incremental-learning", "continual-learning", "dulbe", "dulbe_peft")
_KINDS = ("shared", "residual", "text")  # the kinds of trained parameters
_TEMPLATE = "# Model Card for Model ID"  # the title of PEFT's template until somebody fills it in


def adapter_card(model: PeftModel, repo_id: str | None = None, tags: Sequence[str] = ()) -> str:
    """Return the README.md for the adapters of a `PeftModel`. Without `repo_id`, its code loads a placeholder path."""
    from dulbe_peft.utils.templates import render  # here, so that importing PEFT does not import the template packages

    base = model.get_base_model()
    name = next(iter(model.peft_config.values())).base_model_name_or_path
    kind = getattr(getattr(base, "config", None), "model_type", None)
    # As in PEFT's cards, the base model may be a local folder, unless the card is going to be published.
    stated = BaseTuner.get_model_config(base).get("_name_or_path") if name is None else name
    header = ModelCardData(
        base_model=stated if repo_id is None or is_repo_id(stated) else None,
        library_name="peft",
        tags=[*dict.fromkeys([*([kind] if kind else []), *_TAGS, *tags])],
    )
    return render(
        "adapter.md",
        header=header.to_yaml().strip(),
        mark=MARK,
        base=name if is_repo_id(name) else Path(name).name if name else None,
        base_on_hub=is_repo_id(name),
        model_type=type(base).__name__,
        from_transformers=kind is not None,
        base_source=repr(name if is_repo_id(name) else "path/to/the/base/model"),
        source=repr(repo_id or "path/to/this/folder"),
        adapters=[_facts(model, adapter, config) for adapter, config in model.peft_config.items()],
    )


def _facts(model: PeftModel, adapter: str, config: PeftConfig) -> dict[str, object]:
    """Return what the card says about one adapter."""
    base = model.get_base_model()
    layers = layers_of(base, adapter, DualModeLinear)
    ranks = {name: (layer.history_rank(adapter), layer.dulbe_P[adapter].shape[1]) for name, layer in layers.items()}
    counted = [history // rank for history, rank in ranks.values() if history != DENSE]
    return {
        "name": adapter,
        "config": config,
        "layers": len(layers),
        "kinds": sorted({name.rpartition(".")[2] for name in layers}),
        "text_layers": len(layers_of(base, adapter, TextLoraLinear)),
        "tasks": max(counted) if counted else None,  # one matrix does not show how many tasks it sums up
        "unfinished": any(layer.is_trained(adapter) for layer in layers.values()),
    }


class DualModePeftModel(PeftModel):
    """A `PeftModel` whose tuner is a `DualModeLoraModel`. Only a model that has such a tuner is of this class.

    PEFT chooses the class of a model before it makes the tuner, and asks the tuner nothing when it writes a card, the
    metadata of a file, or the line about parameters. So the model is given this class when it takes its tuner.
    """

    peft_class: type[PeftModel] = PeftModel  # the class that PEFT, or a user, has made it of

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> PeftModel:
        return cls.peft_class.from_pretrained(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _without_values, (self.peft_class,), self.__getstate__()

    def print_trainable_parameters(self) -> None:
        """Print PEFT's line, and a line with the number of trained parameters in each tower."""
        super().print_trainable_parameters()
        trained = [(name, parameter.numel()) for name, parameter in self.named_parameters() if parameter.requires_grad]
        shared, residual, text = (sum(n for name, n in trained if f".{PREFIX}{kind}_" in name) for kind in _KINDS)
        print(f"vision tower: {shared:,} shared + {residual:,} residual || text tower's LoRA: {text:,}")

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Write this package's card. If a person has written a card, let PEFT update its header instead."""
        card = Path(output_dir) / "README.md"
        text = card.read_text(encoding="utf-8") if card.is_file() else MARK
        if MARK in text or _TEMPLATE in text:
            card.write_text(adapter_card(self), encoding="utf-8")
        else:
            super().create_or_update_model_card(output_dir)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save as PEFT does, and write facts about each adapter into its file's metadata."""
        self.check_state("get_peft_model_state_dict")
        directory, base = str(save_directory), self.get_base_model()
        configs = cast(dict[str, DualModeLoraConfig], self.peft_config)
        for name in self.peft_config.keys() & set(selected_adapters or self.peft_config):
            self._check_scales(name, configs[name])
        super().save_pretrained(
            directory, safe_serialization, selected_adapters, save_embedding_layers, is_main_process, **kwargs
        )
        for name in (selected_adapters or self.peft_config) if is_main_process else ():
            folder = Path(directory) if name == "default" else Path(directory, name)
            layers = layers_of(base, name, DualModeLinear)
            ranks = history_fields({key: layer.history_rank(name) for key, layer in layers.items()})
            facts = facts_of(configs[name], base)
            made_on = {key: getattr(facts, key) for key in ("tower", "base_digests", "base_settings")}
            write_json(folder / CONFIG_NAME, read_json(folder / CONFIG_NAME) | ranks | {"made_on": made_on})
            if safe_serialization:
                write_facts(folder / SAFETENSORS_WEIGHTS_NAME, facts)

    def _check_scales(self, adapter: str, config: DualModeLoraConfig) -> None:
        for layer in layers_of(self.get_base_model(), adapter, TextLoraLinear).values():
            layer.check_scale(adapter, config)

    def load_adapter(  # type: ignore[override]
        self, model_id: str, adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Load as PEFT does, after checking the weights. PEFT reads no configuration if the model has the adapter."""
        if adapter_name in self.peft_config:
            names = ("subfolder", "revision", "token", "cache_dir")
            config = DualModeLoraConfig.from_pretrained(model_id, **{n: kwargs[n] for n in names if n in kwargs})
            self._check_scales(adapter_name, config)
        return super().load_adapter(model_id, adapter_name, *args, **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        max_shard_size: object = None,
        tags: Sequence[str] | None = None,
        **commit: Any,
    ) -> CommitInfo:
        """Upload what `save_pretrained` writes. PEFT's method would replace the card by transformers' empty one.

        `tags` are added to those of the card. PEFT writes an adapter as one file, whatever `max_shard_size` is.
        """

        def write(folder: Path, repo_id: str) -> None:
            self.save_pretrained(str(folder))
            (folder / "README.md").write_text(adapter_card(self, repo_id, tags or ()), encoding="utf-8")

        return push(write, repo_id, commit_message=commit_message or "Upload DULBE adapter", **commit)


@functools.cache
def extended(peft_class: Any) -> Any:
    """Return the subclass of `PeftModel`, or of one of its subclasses, that has the methods above."""
    if issubclass(DualModePeftModel, peft_class):
        return DualModePeftModel
    if issubclass(peft_class, DualModePeftModel):
        return peft_class
    names = {"peft_class": peft_class, "__module__": __name__}
    return type(f"DualMode{peft_class.__name__}", (DualModePeftModel, peft_class), names)


def _without_values(peft_class: Any) -> object:
    kind = extended(peft_class)
    return kind.__new__(kind)


def extend_owner(tuner: BaseTuner) -> None:
    """Give the class above to the `PeftModel` that takes this tuner next, which PEFT passes to no method of a tuner.

    torch calls the hook when a module is made a part of another. It is removed when the model has taken the tuner.
    """
    own = weakref.ref(tuner)

    def extend(module: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is not None and part is own() and isinstance(module, PeftModel):
            hook.remove()
            kind: Any = type(module)
            module.__class__ = extended(kind)

    hook = register_module_module_registration_hook(extend)
    weakref.finalize(tuner, hook.remove)


INPUTS = ("pixel_values", "input_ids")
BASE = "__base__"

Rows = Sequence[str] | Mapping[str, Sequence[str]]


@contextmanager
def rows_with_adapters(tuner: BaseTuner, names: Rows) -> Iterator[None]:
    """Apply to each row the adapter that `names` gives it: a list of names, or one list for each of `INPUTS`."""
    rows = names if isinstance(names, Mapping) else dict.fromkeys(INPUTS, names)
    if set(rows) != set(INPUTS):
        raise ValueError(f"adapter_names must be a list, or a mapping with the keys {INPUTS}, got {list(rows)}")
    known = [*tuner.peft_config, BASE]
    unknown = sorted({name for row_names in rows.values() for name in row_names}.difference(known))
    if unknown:
        raise ValueError(f"adapter_names has {unknown}, but the adapters of the model are {known}")
    if tuner.training:
        raise ValueError("adapter_names requires a model in evaluation mode: call eval()")
    with ExitStack() as stack:
        for name, module in tuner.model.named_modules():
            row_names = [*rows[INPUTS[in_text_tower(name)]]]
            if isinstance(module, DualModeLayer):
                stack.enter_context(temporarily(module, "_rows", row_names))
            elif isinstance(module, AuxiliaryTrainingWrapper):
                hook = module.register_forward_pre_hook(partial(_add_names, row_names), with_kwargs=True)
                stack.callback(hook.remove)
        yield


def _add_names(
    names: list[str], _: nn.Module, args: object, kwargs: dict[str, object]
) -> tuple[object, dict[str, object]]:
    return args, kwargs | {"adapter_names": names}
