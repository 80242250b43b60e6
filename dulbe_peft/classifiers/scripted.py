"""What `torch.jit.script` takes in the place of a classifier, whose checks and names TorchScript cannot express."""

from torch import Tensor, nn
from torch.nn import functional as F


class LinearScores(nn.Module):
    """Logits of features, (n, d), which are normalised here: z W' + b. Nothing is checked."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, image_embeds: Tensor) -> Tensor:
        images = image_embeds.float()
        # Scaled first: the squares of large or tiny entries leave float32's range.
        images = F.normalize(images / images.abs().amax(dim=1, keepdim=True), dim=1)
        return images @ self.weight.T + self.bias
