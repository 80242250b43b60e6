"""What `PeftModel` says and publishes of an adapter of this package, by methods for which PEFT has no hook."""

import functools
import warnings
from pathlib import Path
from typing import Any

from peft import PeftModel

from dulbe_peft.adapter.card import MARK, adapter_card
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.utils.hub import push

_KINDS = ("shared", "residual", "text")  # of trained parameters
_TEMPLATE = "# Model Card for Model ID"  # PEFT's, which nobody has filled in


def print_trainable_parameters(peft_own: Any, model: Any) -> None:
    """PEFT's line, and one that says in which tower the parameters are."""
    peft_own()
    trained = [(name, parameter.numel()) for name, parameter in model.named_parameters() if parameter.requires_grad]
    shared, residual, text = (sum(n for name, n in trained if f".{PREFIX}{kind}_" in name) for kind in _KINDS)
    print(f"vision tower: {shared:,} shared + {residual:,} residual || text tower's LoRA: {text:,}")


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
    """Let `PeftModel` use the functions above around a model of the class `tuner`, and be silent without a reason."""
    for function in (print_trainable_parameters, create_or_update_model_card, push_to_hub):
        setattr(PeftModel, function.__name__, _choosing(getattr(PeftModel, function.__name__), function, tuner))
    # No name that is a part of the prefix confuses PEFT here: keys have whole names between dots.
    warnings.filterwarnings("ignore", f"Adapter name '.*' should not be contained in the prefix '{PREFIX}'")
    # PEFT 0.21 reads an attribute that transformers 5.2x renamed.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def _choosing(peft_own: Any, function: Any, tuner: type) -> Any:
    @functools.wraps(peft_own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.base_model, tuner):
            return function(functools.partial(peft_own, self), self, *args, **kwargs)
        return peft_own(self, *args, **kwargs)

    return method
