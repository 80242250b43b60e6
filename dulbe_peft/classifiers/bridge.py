"""The classifier: every class's geodesic bridge from its visual prototype to its text embedding, weighted by depth.

    v_c ----b_c(a_2)----b_c(a_3)---- ... ----e_c      K_b points on the great circle, pi_c says which to trust
    w_c = sum_k pi_c(a_k) b_c(a_k)                    one folded vector: logits = tau z W'

Needs neither peft nor transformers: it works on any model's image and text features.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dulbe_peft import hub
from dulbe_peft.checks import check_int, check_number
from dulbe_peft.files import read_tensors, tensor_shapes, write_json, write_tensors
from dulbe_peft.functional import bridge_prototypes, reliability, reliability_weights, without_autocast
from dulbe_peft.streams.names import check_class_names

CONFIG_FILE = "head_config.json"
TENSORS_FILE = "head.safetensors"
FORMAT = "dulbe-bridge-ensemble-head-1"
NAMES_KEY = "_extra_state"
MAX_DEPTHS = 1000


class BridgeEnsembleHead(nn.Module):
    """Reliability-guided bridge-prototype ensemble over a growing set of classes.

    Args:
        embed_dim: d, width of the features.
        num_depths: K_b, evenly spaced from 0 to 1, both ends included.
        depths: the depths themselves, each in [0, 1]; where given, `num_depths` has no effect.
        reliability_temperature: beta.
        logit_scale: tau itself, 100 for CLIP, never its logarithm.

    Attributes:
        visual_prototypes: v_c, (C, d), unit vectors, fixed when the class arrives.
        text_embeds: e_c, (C, d), unit vectors.
        reliability: pi_c, (C, K_b), rows sum to 1, fixed when the class arrives.
        depths: alpha_k, (K_b,); 0 is the visual end.
        source: `repo_id` and `commit` on the Hub that the head was loaded from, or None; kept when it is saved.

    Raises:
        ValueError: an argument is out of its range; the message names it.
        TypeError: an argument is of another type.

    Reference:
        Section "Reliability-Guided Bridge-Prototype Ensemble".
    """

    visual_prototypes: torch.Tensor
    text_embeds: torch.Tensor
    reliability: torch.Tensor
    depths: torch.Tensor

    def __init__(
        self,
        embed_dim: int,
        num_depths: int = 10,
        depths: Sequence[float] | torch.Tensor | None = None,
        reliability_temperature: float = 0.05,
        logit_scale: float = 100.0,
    ) -> None:
        super().__init__()
        embed_dim = check_int("embed_dim", embed_dim, 2)
        check_number("reliability_temperature", reliability_temperature, positive=True)
        check_number("logit_scale", logit_scale, positive=True)
        values = _depths(num_depths, depths)
        self.embed_dim = embed_dim
        self.reliability_temperature = float(reliability_temperature)
        self.logit_scale = float(logit_scale)
        self.register_buffer("visual_prototypes", torch.zeros(0, embed_dim))
        self.register_buffer("text_embeds", torch.zeros(0, embed_dim))
        self.register_buffer("reliability", torch.zeros(0, len(values)))
        self.register_buffer("depths", values)
        self._class_names: list[str] = []
        self._ensemble: torch.Tensor | None = None
        self.source: dict[str, str] | None = None

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_depths={self.num_depths}, classes={len(self._class_names)}"

    @property
    def class_names(self) -> list[str]:
        """All seen classes, in the order they came."""
        return list(self._class_names)

    @property
    def num_depths(self) -> int:
        return len(self.depths)

    @property
    def state_size(self) -> int:
        """Numbers kept beside the text embeddings, C * d + C * K_b, as the paper's overhead table counts them."""
        return self.visual_prototypes.numel() + self.reliability.numel()

    # ------------------------------------------------------------------ learning

    @torch.no_grad()
    def add_classes(
        self,
        class_names: Sequence[str],
        image_embeds: torch.Tensor,
        labels: torch.Tensor | Sequence[int],
        text_embeds: torch.Tensor,
    ) -> None:
        """Take in the classes of one task; on any error the head is as it was.

        Args:
            class_names: the new classes.
            image_embeds: (n, d), features of the task's images; normalised here.
            labels: (n,), integers that index `class_names`; every class needs at least one image.
            text_embeds: (C_seen, d), of all seen classes, the old ones' rows first, in the order they came, then the
                new ones'; normalised here. The old classes' embeddings are replaced by them.

        Raises:
            ValueError: a name is empty, repeated or already known, a class has no image, a label is out of range, a
                row is zero or not finite, or the shapes do not fit.
            TypeError: a name is not a string, or labels are not integers.

        Reference:
            v_c, rho_c(alpha_k) and pi_c(alpha_k) in "Reliability-Guided Bridge-Prototype Ensemble".
        """
        names = list(check_class_names(class_names, self._class_names))
        images = self._unit(image_embeds, "image_embeds")
        texts = self._unit(text_embeds, "text_embeds", len(self._class_names) + len(names))
        indices = _check_labels(labels, len(images), names).to(images.device)
        sums = torch.stack([images[indices == index].sum(dim=0) for index in range(len(names))])
        cancelled = sums.norm(dim=1) < 1e-4
        if cancelled.any():
            name = names[int(cancelled.nonzero()[0])]
            raise ValueError(f"features of class {name!r} cancel out: they have no mean direction")
        visual = torch.cat([self.visual_prototypes.float(), F.normalize(sums, dim=1)])
        first = len(self._class_names)
        bridges = bridge_prototypes(visual, texts, self.depths.float())
        rho = reliability(images, indices + first, bridges, self.logit_scale, first_class=first)
        weights = reliability_weights(rho, self.reliability_temperature)
        dtype = self.visual_prototypes.dtype
        self.visual_prototypes = visual.to(dtype)
        self.text_embeds = texts.to(dtype)
        self.reliability = torch.cat([self.reliability, weights.to(dtype)])
        self._class_names += names
        self._ensemble = None

    @torch.no_grad()
    def set_text_embeds(self, text_embeds: torch.Tensor) -> None:
        """Replace the text embeddings of all seen classes, (C_seen, d), after the text tower has moved.

        Raises:
            ValueError: the shape does not fit, or a row is zero or not finite. Nothing is changed then.
        """
        texts = self._unit(text_embeds, "text_embeds", len(self._class_names))
        self.text_embeds = texts.to(self.text_embeds.dtype)
        self._ensemble = None

    # ------------------------------------------------------------------ using

    def forward(self, image_embeds: torch.Tensor) -> torch.Tensor:
        """Logits of all seen classes.

        Args:
            image_embeds: (n, d), features; normalised here.

        Returns:
            (n, C), float32.

        Raises:
            ValueError: there is no class yet, the shape does not fit, or a row is zero or not finite.

        Reference:
            The prediction rule in "Reliability-Guided Bridge-Prototype Ensemble": linear in z, so the sum over the
            depths is folded into one vector per class.
        """
        if not self._class_names:
            raise ValueError("the head has no class yet: call add_classes first")
        images = self._unit(image_embeds, "image_embeds")
        with without_autocast(images):
            return self.logit_scale * images @ self.ensemble_prototypes.T

    @property
    def ensemble_prototypes(self) -> torch.Tensor:
        """w_c = sum_k pi_c(alpha_k) b_c(alpha_k), (C, d), float32; shorter than 1 by design."""
        if self._ensemble is None:
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                weights = self.reliability.float()[:, :, None]
                self._ensemble = (weights * self.bridge_prototypes()).sum(dim=1)
        return self._ensemble

    @torch.no_grad()
    def bridge_prototypes(self) -> torch.Tensor:
        """b_c(alpha_k), (C, K_b, d), float32 unit vectors."""
        return bridge_prototypes(self.visual_prototypes.float(), self.text_embeds.float(), self.depths.float())

    @torch.no_grad()
    def expected_depth(self) -> torch.Tensor:
        """sum_k pi_c(alpha_k) alpha_k, (C,), float32: 0 trusts the visual prototype, 1 the text embedding."""
        return (self.reliability.float() * self.depths.float()).sum(dim=1)

    def _unit(self, features: torch.Tensor, name: str, rows: int | None = None) -> torch.Tensor:
        """`features` at unit norm, in float32, on the head's device; raises for what cannot be normalised."""
        if not isinstance(features, torch.Tensor) or not features.is_floating_point():
            raise TypeError(
                f"{name} must be a floating-point tensor, got {getattr(features, 'dtype', type(features))}"
            )
        if features.ndim != 2 or features.shape[1] != self.embed_dim:
            raise ValueError(f"{name} must be (rows, {self.embed_dim}), got shape {tuple(features.shape)}")
        if rows is not None and len(features) != rows:
            raise ValueError(f"{name} must have {rows} rows, one per seen class in order, got {len(features)}")
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        largest = features.abs().amax(dim=1, keepdim=True)
        for problem, bad in (("holds NaN or infinity", ~torch.isfinite(largest)), ("is zero", largest == 0)):
            if bad.any():
                raise ValueError(f"{name} row {int(bad.nonzero()[0, 0])} {problem}")
        # Scaled first: the squares of large or tiny entries leave float32's range.
        scaled = (features / largest).to(self.visual_prototypes.device, torch.float32)
        return F.normalize(scaled, dim=1)

    # ------------------------------------------------------------------ state

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> BridgeEnsembleHead:
        self._ensemble = None
        return super()._apply(fn, recurse)

    def get_extra_state(self) -> torch.Tensor:
        """The class names as UTF-8 JSON in a uint8 tensor, which every serialiser of state dicts can carry."""
        return _encode_names(self._class_names)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self._class_names = _decode_names(state)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Resizes to the number of classes in the file; a state that is incomplete or inconsistent changes nothing."""
        keys = [*self._buffers, NAMES_KEY]
        missing = [prefix + key for key in keys if prefix + key not in state_dict]
        if missing:
            missing_keys += missing
            return
        state = {key: state_dict[prefix + key] for key in keys}
        try:
            _check_state(state, self.embed_dim, self.num_depths)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"head state is inconsistent: {error}")
            return
        for key, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[key] = buffer.new_zeros(state[key].shape)
        self._ensemble = None
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    # ------------------------------------------------------------------ files

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `head_config.json` and `head.safetensors`, names that do not collide with an adapter's files.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "format": FORMAT,
            "embed_dim": self.embed_dim,
            "reliability_temperature": self.reliability_temperature,
            "logit_scale": self.logit_scale,
            "class_names": self._class_names,
        }
        if self.source:
            config["source"] = self.source
        tensors = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        write_tensors(folder / TENSORS_FILE, tensors, {"format": FORMAT})
        write_json(folder / CONFIG_FILE, config)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
    ) -> BridgeEnsembleHead:
        """Load what `save_pretrained` wrote, onto the CPU, in float32.

        Args:
            source: a folder, or the id of a repository on the Hub.
            revision: branch, tag or commit on the Hub; the commit that it stands for is kept in `source`.
            token: of the Hub.
            cache_dir: where downloads are kept.

        Raises:
            FileNotFoundError: there is no such folder, repository or revision, or a file is missing from it.
            ValueError: a file is damaged, of another format, or the two do not fit each other.
        """
        folder, commit = Path(source), None
        if not folder.is_dir():
            folder, commit = hub.fetch(source, (CONFIG_FILE, TENSORS_FILE), revision, token, cache_dir)
        config = _read_config(folder / CONFIG_FILE)
        names, saved_source = config.pop("class_names"), config.pop("source", None)
        _check_size(folder / TENSORS_FILE, names, config["embed_dim"])
        tensors, _ = read_tensors(folder / TENSORS_FILE)
        try:
            head = cls(**config, depths=tensors.get("depths"))
            state = {**tensors, NAMES_KEY: _encode_names(names)}
            head.load_state_dict(state)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"head in {str(source)!r} cannot be loaded: {error}") from error
        head.source = {"repo_id": str(source), "commit": commit} if commit else saved_source
        return head.eval()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload bridge-prototype ensemble head",
        create_pr: bool = False,
    ) -> Any:
        """Upload what `save_pretrained` writes to a repository on the Hub, which is made where it does not exist.

        Returns:
            huggingface_hub's CommitInfo.
        """
        repo_id = hub.create(repo_id, private, token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return hub.upload(
                Path(folder),
                repo_id,
                commit_message=commit_message,
                token=token,
                revision=revision,
                create_pr=create_pr,
            )


def _depths(num_depths: int, depths: Sequence[float] | torch.Tensor | None) -> torch.Tensor:
    if depths is None:
        return torch.linspace(0, 1, check_int("num_depths", num_depths, 2, MAX_DEPTHS))
    if len(depths) > MAX_DEPTHS:
        raise ValueError(f"depths must be at most {MAX_DEPTHS} numbers, got {len(depths)}")
    try:
        values = torch.as_tensor(depths, dtype=torch.float32, device="cpu").clone()
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"depths must be numbers, got {depths!r:.100}") from error
    if values.ndim != 1 or not len(values) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"depths must be a non-empty list of numbers in [0, 1], got {depths!r:.100}")
    return values


def _check_labels(labels: torch.Tensor | Sequence[int], count: int, names: Sequence[str]) -> torch.Tensor:
    try:
        indices = torch.as_tensor(labels)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"labels must be integers, got {labels!r:.100}") from error
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {indices.dtype}")
    if indices.shape != (count,):
        raise ValueError(f"labels must be ({count},), one per image, got shape {tuple(indices.shape)}")
    indices = indices.long()
    bad = (indices < 0) | (indices >= len(names))
    if bad.any():
        raise ValueError(f"label {indices[bad][0].item()} is out of range for {len(names)} classes")
    absent = (torch.bincount(indices, minlength=len(names)) == 0).nonzero()
    if len(absent):
        raise ValueError(f"class {names[int(absent[0])]!r} has no image")
    return indices


def _check_state(state: dict[str, Any], embed_dim: int, num_depths: int) -> None:
    """Raise unless a state dict's entries form a head of this width and number of depths."""
    names = _decode_names(state[NAMES_KEY])
    if names:
        check_class_names(names)
    classes = len(names)
    shapes = {
        "visual_prototypes": (classes, embed_dim),
        "text_embeds": (classes, embed_dim),
        "reliability": (classes, num_depths),
        "depths": (num_depths,),
    }
    for key, shape in shapes.items():
        tensor = state[key]
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.shape != shape:
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"{key} must be floating-point {shape} for {classes} classes, got {got}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{key} holds NaN or infinity")
    for key in ("visual_prototypes", "text_embeds"):
        if ((state[key].float().norm(dim=1) - 1).abs() > 1e-2).any():
            raise ValueError(f"{key} must hold unit vectors")
    weights = state["reliability"].float()
    if (weights < 0).any() or ((weights.sum(dim=1) - 1).abs() > 1e-2).any():
        raise ValueError("reliability must hold non-negative rows that sum to 1")
    if ((state["depths"] < 0) | (state["depths"] > 1)).any():
        raise ValueError(f"depths must lie in [0, 1], got {state['depths'].tolist()}")


def _encode_names(names: list[str]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(names).encode()), dtype=torch.uint8)


def _decode_names(state: torch.Tensor) -> list[str]:
    try:
        names = json.loads(bytes(state.tolist()).decode())
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"class names in the state are damaged: {error}") from error
    if not isinstance(names, list):
        raise TypeError(f"class names in the state must be a list, got {names!r}")
    return names


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist: {path.parent} holds no saved head") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else config
        raise ValueError(f"{path} has format {found!r}, expected {FORMAT!r}")
    del config["format"]
    expected = {"embed_dim", "reliability_temperature", "logit_scale", "class_names"}
    if set(config) - {"source"} != expected:
        raise ValueError(f"{path} has the fields {sorted(config)}, expected {sorted(expected)}")
    return config


def _check_size(path: Path, class_names: Any, embed_dim: Any) -> None:
    """Raise where the header promises more numbers than the configuration's head can have; none has been read yet."""
    if not isinstance(class_names, list) or not isinstance(embed_dim, int):
        return  # refused by what follows
    numbers = sum(math.prod(shape) for shape in tensor_shapes(path).values())
    most = len(class_names) * (2 * embed_dim + MAX_DEPTHS) + MAX_DEPTHS
    if numbers > most:
        raise ValueError(f"{path} holds {numbers} numbers, a head of {len(class_names)} classes at most {most}")
