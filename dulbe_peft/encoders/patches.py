"""Pack images of any aspect ratio into one tensor each, for SigLIP 2 NaFlex.

A row of the tensor holds one patch and, in two more columns, the height and width of the image's grid of patches.
Padding rows come last.
"""

import math
from collections.abc import Mapping

import torch


def packed(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Pack the image processor's output for one image into (patches, 3 patch_size^2 + 2) in float32."""
    patches, grid = inputs["pixel_values"][0], inputs["spatial_shapes"][0]
    return torch.cat([patches, grid.expand(len(patches), 2)], dim=1)


def grids(images: torch.Tensor) -> torch.Tensor:
    """Return the height and width of each image's grid, (batch, 2) on the CPU.

    The grid is square for images that consist of zeros or are on the device "meta".
    """
    sides = torch.zeros(len(images), 2) if images.is_meta else images[:, 0, -2:].cpu()
    return sides.long().where(sides > 0, torch.tensor(math.isqrt(images.shape[1])))


def unpacked(images: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Return the model's inputs for packed images, (batch, patches, columns), cut to the longest image.

    The mask is None if no image is padded.
    """
    shapes = grids(images)
    counts = shapes.prod(dim=1)
    most = int(counts.max())
    mask = torch.arange(most) < counts[:, None]
    return {
        "pixel_values": images[:, :most, :-2],
        "pixel_attention_mask": None if mask.all() else mask.to(images.device),
        "spatial_shapes": shapes,
    }
