"""PROOF: linear projections of both branches, one more pair a task, and one self-attention over all that they give.

x = P_i(z),  p_c = P_i(v_c),  w_c = P_t(e_c), all of length 1      P(z) = sum over tasks of A_b z + a_b; old A_b stay
tokens = [x, w_1 .. w_C, p_1 .. p_C, contexts]                     3 contexts more a task; old ones stay
t~ = LN(t + O sum_s softmax_s((Q t) . (K s) / sqrt(d)) V s + o)    for each token t
score = tau (cos(x, w_c) + cos(x~, p~_c) + cos(x~, w~_c))          a task minimises the three cross-entropies
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """Scores, (n, C), of unit features z, (n, d): by texts, by fused class means, by fused texts; or all three."""
    x = torch.nn.functional.normalize(z @ image_map.T + image_shift, dim=1)
    itself = (x @ attention * x).sum(dim=1, keepdim=True)
    taken = torch.cat([itself, x @ keys.T], dim=1).softmax(dim=1)
    own = x @ carried.T
    image = x + shift + taken[:, :1] * own + taken[:, 1:] @ values
    image, own = image - image.mean(dim=1, keepdim=True), own - own.mean(dim=1, keepdim=True)
    # The tokens see one another alike beside each image; what the image adds is a share of its own value.
    share = (x @ asks.T - totals).sigmoid()
    # Row c is base_c + share_c (own - rest_c); its product with the image, and its length squared.
    product = image @ base.T + share * ((image * own).sum(dim=1, keepdim=True) - image @ rest.T)
    apart = (own**2).sum(dim=1, keepdim=True) - 2 * own @ rest.T + (rest**2).sum(dim=1)
    square = (base**2).sum(dim=1) + 2 * share * (own @ base.T - (base * rest).sum(dim=1)) + share**2 * apart
    fused = product / (square.clamp(min=1e-12).sqrt() * image.norm(dim=1, keepdim=True))
    classes = len(texts)
    scores = scale * torch.stack([x @ texts.T, fused[:, classes:], fused[:, :classes]])
    return scores.sum(dim=0) if sums else scores


def beside_images(
    texts: Tensor, means: Tensor, contexts: Tensor, scale: float, now: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What `projected_fusion` takes besides the features, from texts, means and contexts, (rows, d) each."""
    image_map, image_shift, text_map, text_shift, query, key, value, out, shift = (now[n] for n in NUMBERS)
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


class ProofClassifier(ReplayedMeans):
    """The projections' sums, the attention, each class's text and mean feature, and each task's contexts.

    The authors replay 20 images of each old class. Here each old class is replayed as its mean feature, as many times
    as they would have images of it: how its images differ is lost, and its match with its own mean is trivial. They
    keep every task's projections; their sums are enough. They fuse texts and class means with each image and take the
    mean over the batch, so that an answer depends on the other images; here each image has its own. All three scores
    are tau times a cosine, as in the paper. In their code the fused ones are plain products of vectors of length
    sqrt(d), the first loss is CLIP's over the batch, and old text projections and tau are trained on. Dropout and the
    gain and bias of the LayerNorm are left out. The projections start at random, so task 1 gives the zero-shot scores
    up.

    Args:
        epochs, batch_size: passes over a task's features, and features per step.
        learning_rate: of SGD; over a task it falls to 0 on a cosine.
        contexts: c, how many context vectors a task adds.
        exemplars: as how many images an old class is replayed, at most as it had.
        seed: of all that starts at random, and of the order of the features.

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
    summary = "PROOF's rule: projected features, names and class means, compared before and after they see one another"
    belongs_to = "proof"
    by_task = "prompts"

    def register(self) -> None:
        for name in NUMBERS:
            self.register_buffer(name, torch.zeros((self.embed_dim,) * (1 if name.endswith("shift") else 2)))
        self.keep_means(self.contexts * self.embed_dim)

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        changes, generator = self.with_means(images, labels, new), task_generator(self.seed, len(self._class_names))
        replayed, classes = stand_ins(self.means, self.counts, self.exemplars)
        images, labels = torch.cat([images, replayed]), torch.cat([labels, classes])
        texts, contexts = self.text_embeds.float(), self.prompts.float().view(-1, self.embed_dim)
        old = {name: getattr(self, name).float() for name in PROJECTIONS}
        started = self._started(generator, first=not len(contexts))
        leaves = {name: tensor.to(images).clone().requires_grad_() for name, tensor in started.items()}
        optimizer = torch.optim.SGD(leaves.values(), self.learning_rate, MOMENTUM, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)

        def loss(_: int, rows: Tensor) -> Tensor:
            now = leaves | {name: old[name] + leaves[name] for name in PROJECTIONS}
            tokens = texts, changes["means"], torch.cat([contexts, leaves["contexts"]])
            tensors: Any = beside_images(*tokens, self.logit_scale, now)
            scores = projected_fusion(images[rows], **tensors, sums=False)
            return torch.stack([F.cross_entropy(one, labels[rows]) for one in scores]).sum()

        fit(loss, optimizer, (minibatches(images, self.batch_size, generator) for _ in range(self.epochs)), schedule)
        found = {name: tensor.detach() for name, tensor in leaves.items()}
        prompts = self.with_rows(prompts=found.pop("contexts").view(1, -1))
        return changes | prompts | found | {name: old[name] + found[name] for name in PROJECTIONS}

    def _started(self, generator: torch.Generator, first: bool) -> dict[str, Tensor]:
        """Where the task's tensors start, as the authors': only the attention goes on from where it was."""
        width, bound = self.embed_dim, 1 / math.sqrt(self.embed_dim)

        def uniform(*shape: int) -> Tensor:
            return bound * (2 * torch.rand(*shape, generator=generator) - 1)

        started = {name: uniform(*getattr(self, name).shape) for name in PROJECTIONS}
        started["contexts"] = torch.randn(self.contexts, width, generator=generator)
        for name in ATTENTION[:-1]:
            started[name] = bound * torch.randn(width, width, generator=generator) if first else getattr(self, name)
        return started | {"out_shift": uniform(width) if first else self.out_shift}

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return projected_fusion, self.derived("tensors", self._tensors)

    def _tensors(self) -> dict[str, Tensor]:
        tokens = self.text_embeds.float(), self.means.float(), self.prompts.float().view(-1, self.embed_dim)
        return beside_images(*tokens, self.logit_scale, {name: getattr(self, name).float() for name in NUMBERS})


@dataclass(frozen=True)
class Proof(Frozen):
    """Trains nothing; the classifier `proof` has the paper's rule."""

    name = "proof"
    classifiers = ("proof",)
