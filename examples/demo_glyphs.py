"""Images of glyphs for `pretrain_demo_clip.py`: rendered from fonts, then bent until they look drawn by hand.

```
font --render--> 48 x 48 glyph --stroke, warp--> 32 x 32 --4 x 4 means--> 8 x 8 --bicubic--> 16 x 16 pixel values
```
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

# These map letters and digits to pictures or to fragments of formulas, or carry no Latin glyphs at all.
NOT_TEXT_FONTS = ("symbol", "dingbat", "d050000", "stixsiz", "cmsy", "cmex", "cmmi", "emoji", "lastresort")
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SYMBOLS = {"!": "exclamation mark", "?": "question mark", "&": "ampersand", "@": "at sign", "#": "hash sign",
           "%": "percent sign", "+": "plus sign", "=": "equals sign", "$": "dollar sign", "*": "asterisk"}  # fmt: skip
IMAGE_SIZE, GLYPH_SIZE, FONT_PIXELS = 16, 48, 64


@dataclass(frozen=True)
class Concept:
    """One thing that a glyph can show.

    Args:
        character: What the font renders.
        names: The phrases that captions use for it.
        weight: How often it is drawn, relative to the other concepts.
    """

    character: str
    names: tuple[str, ...]
    weight: float


def concepts() -> list[Concept]:
    """The digits (nearly half of what is drawn), then the letters and a few symbols: the rest of the written world."""
    found = [
        Concept(str(i), (f"digit {word}", f"digit {word}", f"number {word}", word, f"digit {i}", f"number {i}"), 4.5)
        for i, word in enumerate(DIGIT_WORDS)
    ]
    found += [Concept(c, (f"letter {c}", f"small letter {c}"), 0.9) for c in string.ascii_lowercase]
    found += [Concept(c, (f"capital letter {c.lower()}",), 0.9) for c in string.ascii_uppercase]
    return found + [Concept(c, (name,), 0.9) for c, name in SYMBOLS.items()]


@dataclass
class GlyphBank:
    """Rendered glyphs, ink 1 on ground 0.

    Args:
        glyphs: (fonts, concepts, 48, 48) uint8, each glyph cropped and scaled so that its longer side is 32 pixels.
        families: The family of each font, sorted; weights of one family stand together.
    """

    glyphs: torch.Tensor
    families: list[str]

    def split(self, every: int = 10) -> tuple[GlyphBank, GlyphBank]:
        """Hold out one family in `every`, with all its weights."""
        names = sorted(set(self.families))
        if len(names) < 2:
            raise ValueError(f"found {len(names)} usable font families, need at least 2; name more folders in --fonts")
        held = set(names[1::every])
        parts = [[i for i, name in enumerate(self.families) if (name in held) == is_held] for is_held in (False, True)]
        train, test = (GlyphBank(self.glyphs[part], [self.families[i] for i in part]) for part in parts)
        return train, test

    def face_weights(self) -> torch.Tensor:
        """(fonts,) probabilities under which every family is drawn alike, however many weights it has."""
        counts = {name: self.families.count(name) for name in set(self.families)}
        return torch.tensor([1.0 / (len(counts) * counts[name]) for name in self.families])


def render(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray | None:
    """(48, 48) uint8 image of one character, or None where the font draws nothing."""
    left, top, right, bottom = font.getbbox(character)
    canvas = Image.new("L", (int(right - left) + 8, int(bottom - top) + 8))
    ImageDraw.Draw(canvas).text((4 - left, 4 - top), character, fill=255, font=font)
    box = canvas.getbbox()
    if box is None:
        return None
    crop = canvas.crop(box)
    scale = 32 / max(crop.size)
    crop = crop.resize((max(1, round(crop.width * scale)), max(1, round(crop.height * scale))), Image.Resampling.BOX)
    glyph = Image.new("L", (GLYPH_SIZE, GLYPH_SIZE))
    glyph.paste(crop, ((GLYPH_SIZE - crop.width) // 2, (GLYPH_SIZE - crop.height) // 2))
    return np.asarray(glyph)


def load_fonts(folders: list[Path], characters: str) -> GlyphBank:
    """Render `characters` in every font below `folders` that has all of them.

    Raises:
        FileNotFoundError: A folder does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no such font folder: {folder}; name an existing one in --fonts")
    paths = sorted({p for folder in folders for p in folder.rglob("*") if p.suffix.lower() in (".ttf", ".otf")})
    found: dict[tuple[str, str, str], np.ndarray] = {}
    for path in paths:
        if any(word in path.stem.lower() for word in NOT_TEXT_FONTS):
            continue
        try:
            font = ImageFont.truetype(path, FONT_PIXELS)
            missing = render(font, "\ue5f3")  # a private-use code point: what the font draws for a glyph it lacks
            glyphs = [render(font, c) for c in characters]
        except (OSError, ValueError):  # bitmap-only and broken fonts
            continue
        kept = [g for g in glyphs if g is not None and (missing is None or not np.array_equal(g, missing))]
        if len(kept) == len(characters):
            family, style = font.getname()
            # matplotlib and the system both carry DejaVu; a face enters once.
            found.setdefault((str(family), str(style), path.name), np.stack(kept))
    keys = sorted(found)
    empty = np.zeros((0, len(characters), GLYPH_SIZE, GLYPH_SIZE), dtype=np.uint8)
    return GlyphBank(torch.from_numpy(np.stack([found[k] for k in keys]) if keys else empty), [k[0] for k in keys])


def uniform(n: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """(n,) floats, uniform in [low, high)."""
    return low + (high - low) * torch.rand(n, generator=generator)


def restroke(ink: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Vary the thickness of the strokes, as pens do: dilate some glyphs, then blur and cut at a random level."""
    n = len(ink)
    for share in (0.5, 0.25):
        chosen = torch.rand(n, generator=generator) < share
        ink = torch.where(chosen[:, None, None, None], F.max_pool2d(ink, 3, stride=1, padding=1), ink)
    kernel = torch.exp(-(torch.arange(-3.0, 4.0) ** 2) / (2 * 1.3**2))
    kernel = kernel / kernel.sum()
    ink = F.conv2d(F.conv2d(ink, kernel.view(1, 1, 1, 7), padding=(0, 3)), kernel.view(1, 1, 7, 1), padding=(3, 0))
    level = uniform(n, 0.12, 0.5, generator) * ink.amax(dim=(1, 2, 3))
    return torch.sigmoid((ink - level[:, None, None, None]) / 0.04)


def warp(ink: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random affine map and smooth elastic displacement; (n, 1, 48, 48) to (n, 1, 32, 32), the glyph filling it."""
    n = len(ink)
    angle = uniform(n, -0.3, 0.3, generator)
    shear = uniform(n, -0.4, 0.4, generator)
    zoom = 32 / GLYPH_SIZE * uniform(n, 0.95, 1.25, generator)  # above 1: the glyph leaves a margin
    stretch = torch.exp(uniform(n, -0.15, 0.35, generator))  # above 1: narrower than the font drew it
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows = [cos * stretch, (shear * cos - sin), uniform(n, -0.08, 0.08, generator)]
    rows += [sin * stretch, (shear * sin + cos), uniform(n, -0.08, 0.08, generator)]
    theta = torch.stack(rows, dim=1).view(n, 2, 3) * zoom[:, None, None]
    grid = F.affine_grid(theta, [n, 1, 32, 32], align_corners=False)
    for cells, most in ((3, 0.12), (5, 0.06)):
        size = uniform(n, 0.0, most, generator)
        bend = torch.randn(n, 2, cells, cells, generator=generator) * size[:, None, None, None]
        bend = F.interpolate(bend, size=(32, 32), mode="bicubic", align_corners=True)
        grid = grid + bend.permute(0, 2, 3, 1)
    return F.grid_sample(ink, grid, align_corners=False)


def augment(glyphs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Turn (n, 48, 48) uint8 glyphs into (n, 3, 16, 16) pixel values in [-1, 1], most of them seen at 8 x 8 pixels."""
    n = len(glyphs)
    ink = warp(restroke(glyphs[:, None].float() / 255, generator), generator)
    coarse = F.avg_pool2d(ink, 4)
    coarse = F.interpolate(coarse, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", antialias=True)
    is_coarse = torch.rand(n, generator=generator) < 0.75
    image = torch.where(is_coarse[:, None, None, None], coarse, F.avg_pool2d(ink, 2)).clamp(0, 1)
    image = image ** torch.exp(uniform(n, -0.5, 0.4, generator))[:, None, None, None]
    image = image * uniform(n, 0.75, 1.0, generator)[:, None, None, None]
    noise = torch.randn(image.shape, generator=generator) * uniform(n, 0.0, 0.08, generator)[:, None, None, None]
    image = (image + noise).clamp(0, 1)
    inverted = torch.rand(n, generator=generator) < 0.1
    image = torch.where(inverted[:, None, None, None], 1 - image, image)
    return (2 * image - 1).expand(n, 3, IMAGE_SIZE, IMAGE_SIZE)


def batches(bank: GlyphBank, size: int, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (pixel_values, concept index) batches."""
    faces, weights = bank.face_weights(), torch.tensor([c.weight for c in concepts()])
    while True:
        face = torch.multinomial(faces, size, replacement=True, generator=generator)
        concept = torch.multinomial(weights, size, replacement=True, generator=generator)
        yield augment(bank.glyphs[face, concept], generator), concept
