"""PROOF: each task adds a linear projection of images and one of texts; self-attention runs over all projections.

x = P_i(z),  p_c = P_i(v_c),  w_c = P_t(e_c), all of length 1      P(z) = sum over tasks b of A_b z + a_b; old b frozen
tokens = [x, w_1 .. w_C, p_1 .. p_C, contexts]                     each task adds 3 contexts; old ones are frozen
t~ = LN(t + O sum_s softmax_s((Q t) . (K s) / sqrt(d)) V s + o)    for each token t
score = tau (cos(x, w_c) + cos(x~, p~_c) + cos(x~, w~_c))          loss: the sum of the three terms' cross-entropies
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.state import Fitted, Layout, State, once, shared
from dulbe_peft.papers.fitting import ReplayedMeans, fit, minibatches, stand_ins, task_generator
from dulbe_peft.strategies.frozen import Frozen
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed

MOMENTUM, DECAY = 0.9, 0.05  # of SGD, as in the authors' configurations
PROJECTIONS = ("image_map", "image_shift", "text_map", "text_shift")  # sums over the tasks
ATTENTION = ("query", "key", "value", "out", "out_shift")
NUMBERS = (*PROJECTIONS, *ATTENTION)


def projected_fusion(
    z: torch.Tensor,
    image_map: torch.Tensor,
    image_shift: torch.Tensor,
    attention: torch.Tensor,
    carried: torch.Tensor,
    shift: torch.Tensor,
    texts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    asks: torch.Tensor,
    totals: torch.Tensor,
    base: torch.Tensor,
    rest: torch.Tensor,
    scale: torch.Tensor,
    sums: bool = True,
) -> torch.Tensor:
    """Return the scores, (n, C), of unit features z, (n, d): the sum of those of texts, fused means and fused texts.

    Without `sums`, the three terms are returned separately, (3, n, C).
    """
    x = torch.nn.functional.normalize(z @ image_map.T + image_shift, dim=1)
    self_score = (x @ attention * x).sum(dim=1, keepdim=True)
    weights = torch.cat([self_score, x @ keys.T], dim=1).softmax(dim=1)
    value = x @ carried.T
    image = x + shift + weights[:, :1] * value + weights[:, 1:] @ values
    image, value = image - image.mean(dim=1, keepdim=True), value - value.mean(dim=1, keepdim=True)
    # The attention among the other tokens is the same for every image; an image adds only a share of its value.
    share = (x @ asks.T - totals).sigmoid()
    # Row c is base_c + share_c (value - rest_c). Compute its product with the image, and its squared length.
    product = image @ base.T + share * ((image * value).sum(dim=1, keepdim=True) - image @ rest.T)
    apart = (value**2).sum(dim=1, keepdim=True) - 2 * value @ rest.T + (rest**2).sum(dim=1)
    square = (base**2).sum(dim=1) + 2 * share * (value @ base.T - (base * rest).sum(dim=1)) + share**2 * apart
    fused = product / (square.clamp(min=1e-12).sqrt() * image.norm(dim=1, keepdim=True))
    classes = len(texts)
    scores = scale * torch.stack([x @ texts.T, fused[:, classes:], fused[:, :classes]])
    return scores.sum(dim=0) if sums else scores


def fusion_tensors(
    texts: Tensor, means: Tensor, contexts: Tensor, scale: float, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the arguments of `projected_fusion` that do not depend on images.

    `texts`, `means` and `contexts` are (rows, d) each; `weights` has the tensors named in `NUMBERS`.
    """
    image_map, image_shift, text_map, text_shift, query, key, value, out, shift = (weights[n] for n in NUMBERS)
    w, p = F.linear(texts, text_map, text_shift), F.linear(means, image_map, image_shift)
    tokens = torch.cat([F.normalize(w, dim=1), F.normalize(p, dim=1), contexts])
    rows = tokens[: 2 * len(texts)]
    attention, carried = query.T @ key / math.sqrt(texts.shape[1]), out @ value
    values, asks = tokens @ carried.T, rows @ attention
    among = asks @ tokens.T
    rest = among.softmax(dim=1) @ values
    base = rows + shift + rest
    return {
        "image_map": image_map,
        "image_shift": image_shift,
        "attention": attention,
        "carried": carried,
        "shift": shift,
        "texts": rows[: len(texts)],
        "keys": tokens @ attention.T,
        "values": values,
        "asks": asks,
        "totals": among.logsumexp(dim=1),
        "base": base - base.mean(dim=1, keepdim=True),
        "rest": rest - rest.mean(dim=1, keepdim=True),
        "scale": torch.tensor(scale, device=texts.device),
    }


@dataclass(frozen=True)
class ProofRule(ReplayedMeans):
    """PROOF's classifier.

    It stores the summed projections, the attention, each class's text and mean feature, and each task's contexts. The
    projections start at random, so task 1 discards the zero-shot scores.

    Differences from the paper and the authors' code:

    - The authors replay 20 images of each old class. Here the mean feature is repeated instead, so the variation
      between images is lost, and matching a replayed feature with its class mean is trivial.
    - They keep the projections of every task; their sums are sufficient.
    - They fuse texts and class means with each image and average over the batch, so that a prediction depends on the
      other images. Here each image has its own fusion.
    - All three scores are tau times a cosine, as in the paper. In their code the fused ones are products of vectors of
      length sqrt(d), the first loss is CLIP's loss over the batch, and old text projections and tau are trained too.
    - Dropout and the gain and bias of the LayerNorm are left out.

    Args:
        epochs, batch_size: Number of passes over a task's features, and number of features per step.
        learning_rate: Learning rate of SGD; over a task it decays to 0 along a cosine.
        contexts: Number of context vectors that a task adds.
        exemplars: How often the mean of an old class is replayed; at most the number of images that the class had.
        seed: Seed of all random initial values and of the order of the features.

    Reference:
        Zhou et al., "Learning without Forgetting for Vision-Language Models", arXiv 2305.19270, and the authors'
        public code; settings from its configuration for CIFAR-100.
    """

    epochs: AtLeastOne = 5
    batch_size: AtLeastOne = 64
    learning_rate: Positive = 1e-3
    contexts: AtLeastOne = 3
    exemplars: AtLeastOne = 20
    seed: Seed = 0

    name = "proof"
    summary = "PROOF's rule: compares projected features, names and class means, before and after attention among them"
    belongs_to = "proof"
    by_task = "prompts"

    @property
    def numbers(self) -> int:
        return self.contexts * self.embed_dim

    def tensors(self) -> dict[str, Layout]:
        shapes = {name: (self.embed_dim,) * (1 if name.endswith("shift") else 2) for name in NUMBERS}
        return {name: shared(*shape) for name, shape in shapes.items()} | super().tensors()

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        changes, generator = self.with_means(state, images, labels, new), task_generator(self.seed, state.classes)
        replayed, classes = stand_ins(state.means, state.counts, self.exemplars)
        images, labels = torch.cat([images, replayed]), torch.cat([labels, classes])
        texts, contexts = state.text_embeds.float(), state.prompts.float().view(-1, self.embed_dim)
        old = {name: state[name].float() for name in PROJECTIONS}
        initial = self._initial_tensors(state, generator, first=not len(contexts))
        leaves = {name: tensor.to(images).clone().requires_grad_() for name, tensor in initial.items()}
        optimizer = torch.optim.SGD(leaves.values(), self.learning_rate, MOMENTUM, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)

        def loss(_: int, rows: Tensor) -> Tensor:
            weights = leaves | {name: old[name] + leaves[name] for name in PROJECTIONS}
            tokens = texts, changes["means"], torch.cat([contexts, leaves["contexts"]])
            terms = projected_fusion(images[rows], sums=False, **fusion_tensors(*tokens, self.logit_scale, weights))
            return torch.stack([F.cross_entropy(scores, labels[rows]) for scores in terms]).sum()

        fit(loss, optimizer, (minibatches(images, self.batch_size, generator) for _ in range(self.epochs)), schedule)
        trained = {name: tensor.detach() for name, tensor in leaves.items()}
        prompts = state.with_rows(prompts=trained.pop("contexts").view(1, -1))
        return changes | prompts | trained | {name: old[name] + trained[name] for name in PROJECTIONS}

    def _initial_tensors(self, state: State, generator: torch.Generator, first: bool) -> dict[str, Tensor]:
        """Return the task's initial tensors; as in the authors' code, only the attention is carried over."""
        width, bound = self.embed_dim, 1 / math.sqrt(self.embed_dim)

        def uniform(*shape: int) -> Tensor:
            return bound * (2 * torch.rand(*shape, generator=generator) - 1)

        initial = {name: uniform(*state[name].shape) for name in PROJECTIONS}
        initial["contexts"] = torch.randn(self.contexts, width, generator=generator)
        for name in ATTENTION[:-1]:
            initial[name] = bound * torch.randn(width, width, generator=generator) if first else state[name]
        return initial | {"out_shift": uniform(width) if first else state.out_shift}

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return projected_fusion, self.fitted(state).tensors

    def fitted(self, state: State) -> Fusion:
        return Fusion.of(self, state)


class Fusion(Fitted):
    """The fusion of the texts and class means of all tasks."""

    rule: ProofRule

    @once
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `projected_fusion`."""
        state, rule = self.state, self.rule
        tokens = state.text_embeds.float(), state.means.float(), state.prompts.float().view(-1, rule.embed_dim)
        return fusion_tensors(*tokens, rule.logit_scale, {name: state[name].float() for name in NUMBERS})


@dataclass(frozen=True)
class Proof(Frozen):
    """Train nothing: the method is implemented by the classifier `proof`."""

    name = "proof"
    classifiers = ("proof",)
