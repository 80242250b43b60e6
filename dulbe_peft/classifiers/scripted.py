"""The module that `torch.jit.script` compiles instead of a classifier, whose checks TorchScript does not support."""

from torch import Tensor, nn
from torch.nn import functional as F


class LinearScores(nn.Module):
    """Compute the logits z W' + b of features, (n, d), which are normalised here but not checked."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, image_embeds: Tensor) -> Tensor:
        images = image_embeds.float()
        # Scaled first, because squares of very large or small entries exceed the range of float32.
        images = F.normalize(images / images.abs().amax(dim=1, keepdim=True), dim=1)
        return images @ self.weight.T + self.bias
