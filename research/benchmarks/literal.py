"""A literal implementation of the paper, line by line, which shares no computation between steps.

Each mode is a separate module. The teacher is a deep copy that runs on every batch. Each loss has a separate call of
`autograd.grad`. Each layer has a full eigendecomposition and a full SVD. Prototypes, reliability and statistics each
need a pass over the data, and the ensemble evaluates one classifier after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dulbe_peft.utils.profiling import Profile

Bases = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
ADAPTED = ("k_proj", "v_proj", "fc1", "fc2")


class DualMode(nn.Module):
    """A linear layer with two modes: base(x) + B_S P_S' x + B_R P_R' x."""

    def __init__(self, base: nn.Linear, shared_rank: int, residual_rank: int) -> None:
        super().__init__()
        self.base = base
        self.shared_down = nn.Linear(base.in_features, shared_rank, bias=False)
        self.shared_up = nn.Linear(shared_rank, base.out_features, bias=False)
        self.residual_down = nn.Linear(base.in_features, residual_rank, bias=False)
        self.residual_up = nn.Linear(residual_rank, base.out_features, bias=False)
        for frozen in (self.base, self.shared_down, self.residual_down):
            frozen.requires_grad_(False)
        nn.init.zeros_(self.shared_up.weight)
        nn.init.zeros_(self.residual_up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.shared_up(self.shared_down(x))
        residual = self.residual_up(self.residual_down(x))
        return self.base(x) + shared + residual


class Lora(nn.Module):
    """A linear layer of the text tower with LoRA: base(x) + scale * B A x."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = alpha / rank
        nn.init.xavier_uniform_(self.down.weight)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def adapt(model: nn.Module, shared_rank: int = 1, residual_rank: int = 8, text_rank: int = 8) -> nn.Module:
    """Freeze the model, and add the two modes to its vision tower and LoRA to its text tower."""
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or not name.endswith(ADAPTED):
            continue
        parent, _, child = name.rpartition(".")
        text = name.startswith("text_model")
        new = Lora(linear, text_rank, 1.0) if text else DualMode(linear, shared_rank, residual_rank)
        setattr(model.get_submodule(parent), child, new)
    return model


def layers(model: nn.Module) -> dict[str, DualMode]:
    """Return name -> adapted layer of the vision tower, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DualMode)}


@torch.no_grad()
def begin_task(model: nn.Module, bases: Bases) -> None:
    """Add the modes of the finished task to the weights, set new frozen bases, and start from B = 0."""
    for name, layer in layers(model).items():
        layer.base.weight += layer.shared_up.weight @ layer.shared_down.weight
        layer.base.weight += layer.residual_up.weight @ layer.residual_down.weight
        layer.shared_down.weight.copy_(bases[name][0].T)
        layer.residual_down.weight.copy_(bases[name][1].T)
        layer.shared_up.weight.zero_()
        layer.residual_up.weight.zero_()


# ---------------------------------------------------------------------- losses and one step


def structure_loss(
    student: torch.Tensor, teacher: torch.Tensor, class_temperature: float = 5.0, instance_temperature: float = 0.1
) -> torch.Tensor:
    """Return the bidirectional KL of logits of shape (images, old classes)."""

    def divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
        log_student = F.log_softmax(student / temperature, dim=1)
        return temperature**2 * F.kl_div(log_student, F.softmax(teacher / temperature, dim=1), reduction="batchmean")

    return divergence(student, teacher, class_temperature) + divergence(student.T, teacher.T, instance_temperature)


def set_gradients(
    model: nn.Module, task_loss: torch.Tensor, structure: torch.Tensor | None, weight: float = 0.5
) -> None:
    """Set the gradient of the cross-entropy on all trainable parameters; add that of the structure loss to B_S."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    task_gradients = torch.autograd.grad(task_loss, trainable, retain_graph=structure is not None)
    for parameter, gradient in zip(trainable, task_gradients, strict=True):
        parameter.grad = gradient
    if structure is not None:
        shared = [layer.shared_up.weight for layer in layers(model).values()]
        for parameter, gradient in zip(shared, torch.autograd.grad(structure, shared), strict=True):
            parameter.grad = parameter.grad + weight * gradient


def step(
    model: nn.Module,
    teacher: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    encode: Callable[[Any, torch.Tensor], torch.Tensor],
    batch: tuple[torch.Tensor, torch.Tensor],
    text: torch.Tensor,
    old_text: torch.Tensor | None,
    scale: float,
) -> None:
    """Make a training step. Without a teacher, it is a step of the first task."""
    pixels, labels = batch
    features = encode(model, pixels)
    task_loss = F.cross_entropy(scale * features @ text.T, labels)
    structure = None
    if teacher is not None and old_text is not None:
        with torch.no_grad():
            reference = encode(teacher, pixels)
        structure = structure_loss(scale * features @ old_text.T, scale * reference @ old_text.T)
    set_gradients(model, task_loss, structure)
    optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------------- allocation


def allocate(
    probe: Mapping[str, torch.Tensor],
    statistics: Mapping[str, torch.Tensor],
    shared_rank: int = 1,
    residual_rank: int = 8,
    support_rank: int = 128,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return P_S and P_R of every layer, from the gradient and the statistic of that layer."""
    bases = {}
    for name, gradient in probe.items():
        if name in statistics:
            bases[name] = allocate_layer(gradient, statistics[name], shared_rank, residual_rank, support_rank)
        else:
            right = torch.linalg.svd(gradient, full_matrices=False)[2]
            bases[name] = right[:shared_rank].T, right[shared_rank : shared_rank + residual_rank].T
    return bases


def allocate_layer(
    gradient: torch.Tensor, statistic: torch.Tensor, shared_rank: int, residual_rank: int, support_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P_S = U q, q the top eigenvectors of U'G'GU, and P_R, the top right singular vectors of G(I - UU')."""
    support = torch.linalg.eigh(statistic)[1].flip(1)[:, :support_rank]
    rotation = torch.linalg.eigh(support.T @ gradient.T @ gradient @ support)[1].flip(1)
    outside = gradient @ (torch.eye(len(support)) - support @ support.T)
    right = torch.linalg.svd(outside, full_matrices=False)[2]
    return support @ rotation[:, :shared_rank], right[:residual_rank].T


# ---------------------------------------------------------------------- the ensemble


def bridge(visual: torch.Tensor, text: torch.Tensor, depth: float) -> torch.Tensor:
    """Return the spherical interpolation (slerp) from v_c to e_c, (C, d), by the textbook formula."""
    angle = torch.acos((visual * text).sum(dim=1, keepdim=True))
    return (torch.sin((1 - depth) * angle) * visual + torch.sin(depth * angle) * text) / torch.sin(angle)


def ensemble_logits(
    features: torch.Tensor, bridges: Sequence[torch.Tensor], weights: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return sum_k pi_c(alpha_k) tau z.b_c(alpha_k), with one classifier per depth."""
    features = F.normalize(features, dim=1)
    total = torch.zeros(len(features), len(weights))
    for k, prototypes in enumerate(bridges):
        total = total + weights[:, k] * (scale * features @ prototypes.T)
    return total


# ---------------------------------------------------------------------- whole tasks


class LiteralLearner:
    """Algorithm 1 for a CLIPModel, with a separate pass over the data for each step that needs one.

    Args:
        clip: the model; its weights are changed.
        processor: an object with a `tokenizer`.
        batch_size: images per batch, in training and elsewhere.
    """

    def __init__(self, clip: Any, processor: Any, batch_size: int, epochs: int = 2, num_depths: int = 10) -> None:
        self.clip = self.adapted(clip).eval()
        self.processor = processor
        self.batch_size, self.epochs = batch_size, epochs
        self.depths = torch.linspace(0, 1, num_depths).tolist()
        self.scale = float(clip.logit_scale.detach().exp())
        self.names: list[str] = []
        self.statistics: dict[str, torch.Tensor] = {}
        self.visual = torch.zeros(0, clip.config.projection_dim)
        self.weights = torch.zeros(0, num_depths)
        self.profile = Profile()

    def adapted(self, clip: Any) -> Any:
        return adapt(clip)

    def learn_task(self, pixels: torch.Tensor, labels: torch.Tensor, names: Sequence[str]) -> None:
        """Learn new classes. Labels are indices of their names."""
        data = TensorDataset(pixels, labels)
        with self.profile.phase("probe"):
            probe = self._probe(data, names)
        with self.profile.phase("allocate"):
            begin_task(self.clip, allocate(probe, self.statistics))
        with self.profile.phase("train"):
            self._train(data, names)
            begin_task(self.clip, {n: (m.shared_down.weight.T, m.residual_down.weight.T) for n, m in self._layers()})
        with self.profile.phase("close"), torch.no_grad():
            self._prototypes(data, len(names))
            self._reliability(data, [*self.names, *names])
            self._occupation(data)
        self.names += names

    def _layers(self) -> Iterator[tuple[str, DualMode]]:
        return iter(layers(self.clip).items())

    def _batches(self, data: TensorDataset, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(data, batch_size=self.batch_size, shuffle=shuffle)

    def _image_embeds(self, model: Any, pixels: torch.Tensor) -> torch.Tensor:
        return F.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)

    def _text_embeds(self, names: Sequence[str]) -> torch.Tensor:
        prompts = [f"a photo of a {name}." for name in names]
        tokens = self.processor.tokenizer(prompts, padding=True, return_tensors="pt")
        inputs = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        return F.normalize(self.clip.get_text_features(**inputs).pooler_output, dim=-1)

    def _probe(self, data: TensorDataset, names: Sequence[str]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            text = self._text_embeds(names)
        weights = {name: layer.base.weight for name, layer in self._layers()}
        gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for weight in weights.values():
            weight.requires_grad_(True)
        for pixels, labels in self._batches(data):
            loss = F.cross_entropy(self.scale * self._image_embeds(self.clip, pixels) @ text.T, labels)
            batch_gradients = torch.autograd.grad(loss, list(weights.values()))
            for name, gradient in zip(gradients, batch_gradients, strict=True):
                gradients[name] += gradient * (len(labels) / len(data))
        for weight in weights.values():
            weight.requires_grad_(False)
        return gradients

    def _train(self, data: TensorDataset, names: Sequence[str]) -> None:
        teacher = copy.deepcopy(self.clip) if self.names else None
        with torch.no_grad():
            old_text = self._text_embeds(self.names) if self.names else None
        optimizer = torch.optim.Adam([p for p in self.clip.parameters() if p.requires_grad], lr=1e-3)
        steps = self.epochs * len(self._batches(data))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        for _ in range(self.epochs):
            for batch in self._batches(data, shuffle=True):
                text = self._text_embeds(names)
                step(self.clip, teacher, optimizer, self._image_embeds, batch, text, old_text, self.scale)
                schedule.step()

    def _prototypes(self, data: TensorDataset, count: int) -> None:
        sums = torch.zeros(count, self.visual.shape[1])
        for pixels, labels in self._batches(data):
            sums.index_add_(0, labels, self._image_embeds(self.clip, pixels))
        self.visual = torch.cat([self.visual, F.normalize(sums, dim=1)])

    def _reliability(self, data: TensorDataset, names: Sequence[str]) -> None:
        self.text = self._text_embeds(names)
        old = len(self.names)
        sums, counts = torch.zeros(len(names) - old, len(self.depths)), torch.zeros(len(names) - old)
        for pixels, labels in self._batches(data):
            features = self._image_embeds(self.clip, pixels)
            counts.index_add_(0, labels, torch.ones(len(labels)))
            for k, depth in enumerate(self.depths):
                logits = self.scale * features @ bridge(self.visual, self.text, depth).T
                sums[:, k].index_add_(0, labels, logits.softmax(dim=1)[torch.arange(len(labels)), labels + old])
        self.weights = torch.cat([self.weights, (sums / counts[:, None] / 0.05).softmax(dim=1)])

    def _occupation(self, data: TensorDataset) -> None:
        def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
            def accumulate(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                tokens = inputs[0].reshape(-1, inputs[0].shape[-1])
                if name not in self.statistics:
                    self.statistics[name] = torch.zeros(tokens.shape[1], tokens.shape[1])
                self.statistics[name] += tokens.T @ tokens

            return accumulate

        handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in self._layers()]
        for pixels, _ in self._batches(data):
            self._image_embeds(self.clip, pixels)
        for handle in handles:
            handle.remove()
