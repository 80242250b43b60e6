"""Bayesian regression with the texts as its prior: right with no image a class, with one, and with many.

h = [z, relu(z R)]                            R: the random layer of RanPAC, made from the seed
Y = H W + noise,  W ~ N(W_0, s2 L^-1)         one-hot Y; W_0 scores an image by its likeness to the classes' texts
W = W_0 + (G + L)^-1 (C - G W_0)              the posterior mean: few images leave W at W_0, many forget it
L = lambda (G / g + 0.001 I)^f                g: mean eigenvalue of G; f = 0: lambda times the identity
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import positive
from dulbe_peft.classifiers.evidence import Regression, best_step, log_evidence
from dulbe_peft.classifiers.sums import RIDGES, RegressionSums, check_ridge, random_layer
from dulbe_peft.utils.checks import check_int, check_number

FLOOR = 1e-3  # of the mean eigenvalue: no direction is freer than one of so little variation
STEPS = len(RIDGES) - 1  # of the grid, up or down


def linear_and_random(
    z: torch.Tensor, projection: torch.Tensor, linear: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    return z @ linear + (z @ projection).relu() @ weight


class BayesClassifier(Classifier):
    """Regression to one-hot classes, pulled to the text classifier as far as the images do not say otherwise.

    The text enters in two ways. It is the prior mean: W_0 = a (e_c - mean of e) on z, and 0 on the random layer. And
    it is an image of its class, at the place where the images are: in the direction of their mean plus that of
    e_c - mean of e, as far from the mean as images are. lambda is the one that makes the targets most likely under
    the prior, see `log_evidence`, unless another is clearly better on held-back images, see `best_step`.

    G and C are sums, so the solution for a lambda is the one on all data at once, but for the rounding of G to
    float32. What held-back images say of lambda depends on the tasks, and fades with further images of known classes.
    Images of a forgotten class stay in G, as images of none of the classes.

    Args:
        features: M, width of the random layer; G takes 4 (M + d)^2 bytes. 0: h = z alone.
        seed: of R.
        text_weight: a / tau, positive. The scores are divided by it, so without images they would be the text
            classifier's, up to a number that is the same for all classes.
        text_images: how many images of its class a text counts for, 0 or more.
        flatness: f, from 0 to 1. Above 0, the prior leaves more room in directions in which features vary less.
        ridge: lambda, positive. "auto": chosen from 13 values, from 1e-4 M to 100 M, or from 1e-4 to 100 without R.
            "evidence": the most likely of these, whatever held-back images say.

    Attributes:
        gram: G, (d + M, d + M), float32; float64 without R.
        sums: C transposed, (C, d + M), float64.
        counts: (C,), int64, images of each class.
        images: int64, number of images in G, those of forgotten classes included.
        text_embeds: e_c, (C, d), unit vectors.
        wins: (25, 25), int64. Row i, column j: how many held-back images are right with lambda i - 12 steps of the
            grid above the most likely one, and wrong with j - 12 steps.

    Reference:
        MacKay, "Bayesian Interpolation", 1992, for lambda; McDonnell et al., "RanPAC", 2023, for the random layer.
    """

    name = "bayes"
    needs_text = True

    def __init__(
        self,
        embed_dim: int,
        logit_scale: float = 100.0,
        features: int = 2000,
        seed: int = 0,
        text_weight: float = 0.03,
        text_images: float = 1.0,
        flatness: float = 0.25,
        ridge: float | Literal["auto", "evidence"] = "auto",
    ) -> None:
        super().__init__(embed_dim, logit_scale)
        self.features = check_int("features", features, 0, 10**6)
        self.ridge = check_ridge(ridge, ["auto", "evidence"])
        self.seed = check_int("seed", seed, 0, 2**32 - 1)
        self.text_weight = positive("text_weight", text_weight)
        check_number("text_images", text_images, least=0)
        self.text_images = float(text_images)
        check_number("flatness", flatness, least=0, most=1)
        self.flatness = float(flatness)
        RegressionSums.register(self, embed_dim + features, torch.float32 if features else torch.float64)
        self.register_rows("text_embeds", embed_dim)
        self.register_buffer("images", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wins", torch.zeros(2 * STEPS + 1, 2 * STEPS + 1, dtype=torch.int64))

    def _kept(self) -> RegressionSums:
        return RegressionSums(self.gram, self.sums, self.counts, self.lifted)

    def _ridges(self) -> list[float]:
        """The grid of lambda."""
        return [ridge * (self.features or 1) for ridge in RIDGES]

    def lifted(self, images: Tensor) -> Tensor:
        """h of unit features z, (n, d) to (n, d + M), in the type of `images`."""
        if not self.features:
            return images
        return torch.cat([images, (images @ self._layer(images)).relu()], dim=1)

    def _layer(self, like: Tensor) -> Tensor:
        layer = self.derived("layer", lambda: random_layer(self.embed_dim, self.features, self.seed))
        return self.derived(f"layer {like.dtype} {like.device}", lambda: layer.to(like))

    def learn(self, names: Sequence[str], images: Tensor, labels: Tensor, texts: Tensor | None) -> dict[str, Tensor]:
        assert texts is not None
        added = self._kept().added(images, labels + len(self._class_names), len(names))
        return added | {"images": self.images + len(images), "text_embeds": texts}

    def choose(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Add to `wins` what every lambda of the grid says of held-back images, all from one eigendecomposition."""
        if self.ridge != "auto":
            return {}
        fit = self.derived("regression", self._regress)
        scores = fit.scores(self._kept().lifted(images), self._ridges())
        right = torch.stack([each.argmax(dim=1) == labels.to(each.device) for each in scores], dim=1).double()
        steps = torch.arange(-STEPS, STEPS + 1, device=right.device)
        right = right[:, (fit.likeliest + steps).clamp(0, STEPS)]
        return {"wins": self.wins.cpu() + (right.T @ (1 - right)).long().cpu()}

    def learn_more(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        total = self.images + len(images)
        # With more images, the evidence errs less than it did when the wins were counted.
        return self._kept().added(images, labels) | {"images": total, "wins": self.wins * self.images // total}

    def logits(self, images: Tensor) -> Tensor:
        return self.lifted(images) @ self.derived("solution", self._solve)[0]

    def strength(self) -> float:
        """lambda."""
        return self.derived("solution", self._solve)[1]

    def _solve(self) -> tuple[Tensor, float]:
        """W / text_weight, (d + M, C), float32, and lambda."""
        # `choose` leaves it on the copy that it is called on. It is large, so nobody else keeps it.
        fit: Regression = self._derived.get("regression") or self._regress()
        if isinstance(self.ridge, str):
            ridge = self._ridges()[min(STEPS, max(0, fit.likeliest + best_step(self.wins)))]
        else:
            ridge = self.ridge
        return (fit.solution(ridge) / self.text_weight).float().to(self.device), ridge

    def _regress(self) -> Regression:
        """The regression on images and texts, and where in the grid its most likely lambda is."""
        d, device = self.embed_dim, self.sums.device
        texts = self.text_embeds.to(device).double()
        texts = texts - texts.mean(dim=0)
        prior = torch.zeros_like(self.sums.T)
        prior[:d] = self.text_weight * self.logit_scale * texts.T
        shown = self.lifted(self._as_images(texts))
        gram = self._kept().gram64() + self.text_images * shown.T @ shown
        sums = self.sums.T + self.text_images * shown.T
        # R = Y - H W_0 is what the prior mean leaves over, and H'R = C - G W_0.
        left = sums - gram @ prior
        values, vectors = torch.linalg.eigh(gram)
        values = values.clamp_min(0)  # rounding G to float32 can leave eigenvalues a little below zero
        shape = (values / values.mean() + FLOOR) ** self.flatness
        turned = vectors.T @ left
        targets = float(self.counts.sum()) + self.text_images * len(texts)
        residual = targets - float((prior * (sums + left)).sum())
        rows = int(self.images) + (len(texts) if self.text_images else 0)
        evidence = [log_evidence(values, turned, residual, rows, ridge * shape) for ridge in self._ridges()]
        return Regression(prior, values, vectors, turned, shape, evidence.index(max(evidence)))

    def _as_images(self, texts: Tensor) -> Tensor:
        """The unit features that the texts stand for, (C, d), from e_c less their mean."""
        mean = self.sums[:, : self.embed_dim].sum(dim=0) / self.counts.sum().to(self.sums.device)
        spread = (1 - mean @ mean).clamp_min(0).sqrt()
        return F.normalize(mean + spread * F.normalize(texts, dim=1), dim=1)

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        if not self.features:
            return super().formula()
        weight = self.derived("solution", self._solve)[0]
        tensors = {"projection": self._layer(weight), "linear": weight[: self.embed_dim].contiguous()}
        tensors["weight"] = weight[self.embed_dim :].contiguous()
        return linear_and_random, tensors

    @classmethod
    def follows_drift(cls, settings: Mapping[str, Any]) -> bool:
        return not settings["features"]

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """Without R: G to M' G M and C to M' C. With it nothing: G is of features behind a ReLU."""
        return {} if self.features else self._kept().moved(matrix)
