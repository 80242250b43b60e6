"""What `PeftModel` says and publishes of an adapter of this package, by methods for which PEFT has no hook."""

import functools
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner

from dulbe_peft.adapter.base import layers_of
from dulbe_peft.adapter.config import DENSE
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.adapter.text import TextLoraLinear
from dulbe_peft.utils.hub import is_repo_id, push

MARK = "<!-- made by dulbe_peft; without this line, saving leaves the text alone -->"
_KINDS = ("shared", "residual", "text")  # of trained parameters
_TEMPLATE = "# Model Card for Model ID"  # PEFT's, which nobody has filled in


def print_trainable_parameters(peft_own: Any, model: Any) -> None:
    """PEFT's line, and one that says in which tower the parameters are."""
    peft_own()
    trained = [(name, parameter.numel()) for name, parameter in model.named_parameters() if parameter.requires_grad]
    shared, residual, text = (sum(n for name, n in trained if f".{PREFIX}{kind}_" in name) for kind in _KINDS)
    print(f"vision tower: {shared:,} shared + {residual:,} residual || text tower's LoRA: {text:,}")


def adapter_card(model: Any, repo_id: str | None = None) -> str:
    """README.md of the adapters of a `PeftModel`; without `repo_id` its lines of code name a placeholder."""
    from dulbe_peft.utils.templates import render  # its packages are no part of an import of PEFT

    base = model.get_base_model()
    name = next(iter(model.peft_config.values())).base_model_name_or_path
    kind = getattr(getattr(base, "config", None), "model_type", None)
    # Whatever it is, as PEFT's own cards have it; but no published card tells of a folder.
    stated = BaseTuner.get_model_config(base).get("_name_or_path") if name is None else name
    header = ModelCardData(
        base_model=stated if repo_id is None or is_repo_id(stated) else None,
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
        source=repr(repo_id or "path/to/this/folder"),
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


def create_or_update_model_card(peft_own: Any, model: Any, output_dir: str) -> None:
    """A card of this package's own; where a person has written one, PEFT's update of its header."""
    card = Path(output_dir) / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else MARK
    if MARK in text or _TEMPLATE in text:
        card.write_text(adapter_card(model), encoding="utf-8")
    else:
        peft_own(output_dir)


def push_to_hub(peft_own: Any, model: Any, repo_id: str, *, commit_message: str | None = None, **commit: Any) -> Any:
    """Upload what `save_pretrained` writes; PEFT's own would put transformers' empty card in place of this one."""

    def write(folder: Path, repo_id: str) -> None:
        model.save_pretrained(str(folder))
        (folder / "README.md").write_text(adapter_card(model, repo_id), encoding="utf-8")

    return push(write, repo_id, commit_message=commit_message or "Upload DULBE adapter", **commit)


def extend_peft_model(tuner: type) -> None:
    """Let `PeftModel` use the functions above around a model of the class `tuner`; all others have PEFT's own."""
    for function in (print_trainable_parameters, create_or_update_model_card, push_to_hub):
        setattr(PeftModel, function.__name__, _choosing(getattr(PeftModel, function.__name__), function, tuner))
    # No name that is a part of the prefix confuses PEFT here: keys have whole names between dots. The message names
    # the prefix, so this hides no other method's.
    warnings.filterwarnings("ignore", f"Adapter name '.*' should not be contained in the prefix '{PREFIX}'")


def _choosing(peft_own: Any, function: Any, tuner: type) -> Any:
    @functools.wraps(peft_own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.base_model, tuner):
            return function(functools.partial(peft_own, self), self, *args, **kwargs)
        return peft_own(self, *args, **kwargs)

    return method
