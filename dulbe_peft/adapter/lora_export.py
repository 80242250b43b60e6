"""Export an adapter as a stock LoRA adapter, which loads without this package.

dW = [B_1 ... B_t] [P_1 ... P_t]'    exact: LoRA's B and A; every task adds r_S + r_R to their rank

If the history is one matrix, this matrix is B_1 and P_1 is the identity.
"""

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from dulbe_peft.adapter.config import PREFIX, DualModeLoraConfig
from dulbe_peft.adapter.factors import Factors, all_factors, best_of_rank
from dulbe_peft.utils.files import write_json
from dulbe_peft.utils.folders import commit_folder
from dulbe_peft.utils.settings import check_int
from dulbe_peft.utils.tensors import write_tensors

COMPRESSION_FILE = "compression.json"


def export_lora(model: PeftModel, folder: str | Path, compress_to: int | None = None) -> Path:
    """Write the active adapter as a LoRA adapter of PEFT: A = stacked bases, B = stacked up-projections, alpha = rank.

    The export includes the history, the current modes, the text LoRA and `modules_to_save`, even while the adapter is
    merged or disabled. Without `compress_to`, the factors equal those of this adapter bit for bit.

    Args:
        model: A model from `get_peft_model` with one active dual-mode adapter.
        folder: The folder to write. An earlier export in it is replaced.
        compress_to: Replace every update of a higher rank by its best approximation of this rank, and write
            `compression.json` with the relative errors |dW - dW_k|_F / |dW|_F of all layers together and of each.

    Returns:
        The path of `folder`.

    Raises:
        ValueError: If an update to compress is not finite, or not exactly one adapter is active.
        FileExistsError: If the folder lies inside a saved learner, or it holds files that no export wrote.
    """
    commit_folder(Path(folder), "export", lambda temporary: write_lora(model, temporary, compress_to))
    return Path(folder)


def write_lora(model: PeftModel, folder: Path, compress_to: int | None = None) -> None:
    """Write the files of `export_lora` into an existing folder."""
    tuner: Any = model.base_model
    adapter = tuner.adapter_name
    tuner.check_state("export_lora")
    layers = all_factors(model.get_base_model(), adapter)
    if compress_to is not None:
        layers, report = _compress(layers, check_int("compress_to", compress_to, 1))
        write_json(folder / COMPRESSION_FILE, report)
    saved = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    tensors = {key: value for key, value in saved.items() if f".{PREFIX}" not in key}
    for name, factors in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = factors.down
        tensors[f"base_model.model.{name}.lora_B.weight"] = factors.up
    _lora_config(tuner.active_config, layers).save_pretrained(str(folder))
    write_tensors(folder / SAFETENSORS_WEIGHTS_NAME, tensors, {"format": "pt"})


def _compress(layers: dict[str, Factors], rank: int) -> tuple[dict[str, Factors], dict[str, object]]:
    """Return the best factors of at most `rank` for each layer, and the content of `compression.json`."""
    compressed, rows = {}, {}
    lost = total = 0.0
    for name, factors in layers.items():
        best, values = best_of_rank(factors, rank, name)
        energy = values**2
        layer_lost, layer_total = energy[len(best.down) :].sum().item(), energy.sum().item()
        error = (layer_lost / layer_total) ** 0.5 if layer_total else 0.0
        compressed[name] = best
        rows[name] = {"rank_before": len(factors.down), "rank": len(best.down), "relative_error": error}
        lost, total = lost + layer_lost, total + layer_total
    error = (lost / total) ** 0.5 if total else 0.0
    return compressed, {"rank": rank, "relative_error": error, "layers": rows}


def _lora_config(config: DualModeLoraConfig, layers: dict[str, Factors]) -> LoraConfig:
    """Return a configuration whose default is the highest rank, with patterns for the layers that differ."""
    ranks = {name: len(factors.down) for name, factors in layers.items()}
    alphas = {name: factors.scale * ranks[name] for name, factors in layers.items()}
    rank = max(ranks.values())
    different = sorted(name for name in ranks if ranks[name] != rank or alphas[name] != rank)
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=sorted(ranks),
        rank_pattern={f"^{name}": ranks[name] for name in different},
        alpha_pattern={f"^{name}": alphas[name] for name in different},
        modules_to_save=config.modules_to_save,
        base_model_name_or_path=config.base_model_name_or_path,
        revision=config.revision,
        inference_mode=True,
    )
