"""Images as patches in their own proportions, as SigLIP 2 NaFlex reads them: each image is packed into one tensor.

A row holds one patch and, in two more columns, height and width of the image's grid of patches; padding comes last.
"""

import math
from collections.abc import Mapping

import torch


def packed(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the image processor makes of one image, as (patches, 3 patch_size^2 + 2) in float32."""
    patches, grid = inputs["pixel_values"][0], inputs["spatial_shapes"][0]
    return torch.cat([patches, grid.expand(len(patches), 2)], dim=1)


def grids(images: torch.Tensor) -> torch.Tensor:
    """Height and width of each image's grid, (batch, 2) on the CPU; a square one for images of zeros or on "meta"."""
    found = torch.zeros(len(images), 2) if images.is_meta else images[:, 0, -2:].cpu()
    return found.long().where(found > 0, torch.tensor(math.isqrt(images.shape[1])))


def unpacked(images: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """What the model takes of packed images, (batch, patches, columns), cut to the largest; mask None: no padding."""
    shapes = grids(images)
    counts = shapes.prod(dim=1)
    most = int(counts.max())
    mask = torch.arange(most) < counts[:, None]
    return {
        "pixel_values": images[:, :most, :-2],
        "pixel_attention_mask": None if mask.all() else mask.to(images.device),
        "spatial_shapes": shapes,
    }
