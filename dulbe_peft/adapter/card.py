"""The card of an adapter alone, `assets/cards/adapter.md` with its data; a learner's folder has one of its own."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from dulbe_peft.adapter.base import layers_of
from dulbe_peft.adapter.config import DENSE
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.text import TextLoraLinear
from dulbe_peft.utils.hub import is_repo_id

MARK = "<!-- made by dulbe_peft; without this line, saving leaves the text alone -->"
PLACEHOLDER = "path/to/this/folder"


def adapter_card(model: Any, repo_id: str | None = None) -> str:
    """README.md of the adapters of a `PeftModel`; without `repo_id` its lines of code name a placeholder."""
    from dulbe_peft.utils.templates import render  # its packages are no part of an import of PEFT

    base = model.get_base_model()
    name = next(iter(model.peft_config.values())).base_model_name_or_path
    kind = getattr(getattr(base, "config", None), "model_type", None)
    header = ModelCardData(
        base_model=name if is_repo_id(name) else None,
        library_name="peft",
        tags=[*([kind] if kind else []), "class-incremental-learning", "continual-learning", "dulbe", "dulbe_peft"],
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
        source=repr(repo_id or PLACEHOLDER),
        adapters=[_facts(model, adapter, config) for adapter, config in model.peft_config.items()],
    )


def _facts(model: Any, adapter: str, config: Any) -> dict[str, Any]:
    """What the card says of one adapter."""
    layers = layers_of(model.base_model.model, adapter, DualModeLinear)
    ranks = {name: (layer.history_rank(adapter), layer.dulbe_P[adapter].shape[1]) for name, layer in layers.items()}
    counted = [history // rank for history, rank in ranks.values() if history != DENSE]
    return {
        "name": adapter,
        "config": config,
        "layers": len(layers),
        "kinds": sorted({name.rpartition(".")[2] for name in layers}),
        "text_layers": len(layers_of(model.base_model.model, adapter, TextLoraLinear)),
        "tasks": max(counted) if counted else None,  # one matrix does not say of how many tasks it is the sum
        "unfinished": any(layer.is_trained(adapter) for layer in layers.values()),
    }
