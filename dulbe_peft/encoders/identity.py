"""Identify an encoder's features by its weights, layers, preprocessing, versions and processor."""

import hashlib
import json
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from dulbe_peft.data import decoding
from dulbe_peft.data.store import EncoderKey
from dulbe_peft.encoders import loading
from dulbe_peft.utils.tensors import sampled_values, tensors_digest

_NO_LAYERS = ("architectures", "dtype", "torch_dtype", "transformers_version")  # settings that change no layer
_version = cache(version)  # `version` reads a package's whole metadata, and is called in every pass over images


class ImageTowerFacts:
    """Describe an image tower in a way that is equal on every machine.

    The digest of all weights is kept until a weight is replaced or written to. PyTorch does not count writes through
    `.data`, such as those of PEFT's `merge_and_unload`, so 256 values of each weight are compared every time.
    """

    def __init__(self) -> None:
        self._written: tuple[object, ...] = ()
        self._digest = ""

    def __call__(self, clip: PreTrainedModel, processor: Any, untouched: bool = False) -> dict[str, str]:
        """Return the SHA-256 of the weights, of the layers' settings and of the image processor's settings.

        With `untouched`, the weights are those of the model without its adapter.
        """
        text = loading.encoder_of(clip).text_tower
        weights = {name: t for name, t in clip.state_dict().items() if not name.startswith(f"{text}.")}
        if untouched:
            weights = {_base_name(name): t for name, t in weights.items() if not _is_adapter(name)}
        plain = [t for t in weights.values() if type(t) is torch.Tensor]
        written = tuple((t.data_ptr(), -1 if t.is_inference() else t._version, sampled_values(t)) for t in plain)
        if written != self._written:
            self._written, self._digest = written, tensors_digest(weights)
        config = getattr(clip.config, "vision_config", clip.config).to_diff_dict()
        layers = {name: value for name, value in config.items() if name not in _NO_LAYERS and name[0] != "_"}
        image_processor = _sha256(processor.image_processor.to_dict())
        return {"weights": self._digest, "layers": _sha256(layers), "image_processor": image_processor}


def _base_name(name: str) -> str:
    """Return the name that a weight of an adapted model has in the base model."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _is_adapter(name: str) -> bool:
    return any(part.startswith("dulbe_") or part == "modules_to_save" for part in name.split("."))


def encoder_key(
    facts: dict[str, str], attention: str, device: torch.device, batch_size: int, tower: tuple[str, str, str] | None
) -> EncoderKey:
    """Return the key of features that are equal bit by bit; it also covers versions and the processor.

    Args:
        facts: The facts of `Encoder.facts`.
        attention: Name of the attention implementation in transformers.
        device: Device that computes the features.
        batch_size: Images in a batch; it selects the kernels of a GPU.
        tower: SHA-256, name and version of another backend; None if torch computes.
    """
    facts = dict(facts)
    precision, kind = facts.pop("precision"), device.type
    facts |= {"attention": attention, "device": kind, "reading": decoding.READING}
    facts["products"] = torch.get_float32_matmul_precision()
    if kind == "cpu":
        facts["processor"] = torch.backends.cpu.get_cpu_capability()
    else:
        name = torch.cuda.get_device_name(device) if kind == "cuda" else kind
        facts |= {"processor": name, "batch": str(batch_size)}
    facts |= {name: _version(name) for name in ("torch", "transformers", "pillow")}
    backend = "torch"
    if tower is not None:
        facts["graph"], backend, facts["backend"] = tower
    return EncoderKey(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(), precision, backend)


def _sha256(settings: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
