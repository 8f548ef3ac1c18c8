"""Variations of training images, computed for a whole batch at once on whatever device it is on.

All of them draw from a generator that they are given, so that the same numbers give the same batch.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bkn_zoo.config import Preprocessing


class Batch(NamedTuple):
    """Preprocessed images and, per image, the probability of each class (a row of zeros and a one where unmixed)."""

    images: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied. Every range is symmetric, and zero switches its part off.

    Attributes:
        crop: shift by up to this share of the side (the padded random crop of CIFAR, continuous).
        scale: smallest share of the area that a random crop keeps; 1 keeps all.
        rotate: degrees.
        colour: brightness, contrast and saturation, each by a factor within 1 +- this.
        flip: mirror half of the images.
        erase: side of a square that is blanked, as a share of the image's side.
        mixup, cutmix: the alphas of their Beta distributions; if both are set, each takes half of the batches.
    """

    crop: float = 0.0
    scale: float = 1.0
    rotate: float = 0.0
    colour: float = 0.0
    flip: bool = True
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0


def generator(device: torch.device | str, *numbers: int) -> torch.Generator:
    """A source of random numbers that depends on `numbers` alone."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
    return torch.Generator(device).manual_seed(seed)


def vary(pixels: Tensor, augmentation: Augmentation, preprocessing: Preprocessing, source: torch.Generator) -> Tensor:
    """Geometry (in one sampling, straight to the network's size), colour and erasing; another draw for each image."""
    count, device = pixels.shape[0], pixels.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand((count, *shape), generator=source, device=device) * (high - low) + low

    zoom = uniform(augmentation.scale, 1.0).sqrt()
    stretch = torch.exp(uniform(-1, 1) * (0.25 if augmentation.scale < 1 else 0.0))
    angle = torch.deg2rad(uniform(-augmentation.rotate, augmentation.rotate))
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0) if augmentation.flip else torch.ones(count, device=device)
    across, down = zoom * stretch, zoom / stretch
    reach = 2 * augmentation.crop + (1 - torch.stack([across, down], dim=1)).clamp_min(0)
    shift = uniform(-1, 1, 2) * reach
    if augmentation.scale == 1 and not augmentation.rotate:
        half = pixels.shape[-1] / 2
        shift = torch.round(shift * half) / half  # by whole pixels, which blurs nothing
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows = [
        torch.stack([mirror * across * cos, -down * sin, shift[:, 0]], dim=1),
        torch.stack([mirror * across * sin, down * cos, shift[:, 1]], dim=1),
    ]
    size = preprocessing.size
    grid = F.affine_grid(torch.stack(rows, dim=1), [count, 3, size, size], align_corners=False)
    pixels = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    if augmentation.colour:
        low, high = 1 - augmentation.colour, 1 + augmentation.colour
        pixels = pixels * uniform(low, high, 1, 1, 1)
        centre = pixels.mean(dim=(1, 2, 3), keepdim=True)
        pixels = centre + (pixels - centre) * uniform(low, high, 1, 1, 1)
        grey = pixels.mean(dim=1, keepdim=True)
        pixels = (grey + (pixels - grey) * uniform(low, high, 1, 1, 1)).clamp(0, 1)
    if augmentation.erase:
        middle = uniform(0, size, 2)
        at = torch.arange(size, device=device) + 0.5
        inside = (at[None, None] - middle[:, :, None]).abs() <= augmentation.erase * size / 2
        blank = inside[:, 0, None, :, None] & inside[:, 1, None, None, :]
        mean = torch.tensor(preprocessing.mean, device=device).view(1, 3, 1, 1)
        pixels = torch.where(blank, mean, pixels)
    return pixels


def mix(images: Tensor, targets: Tensor, augmentation: Augmentation, source: torch.Generator) -> Batch:
    """Mixup or cutmix of the batch with itself in another order."""
    mixers = [name for name in ("mixup", "cutmix") if getattr(augmentation, name)]
    if not mixers:
        return Batch(images, targets)
    device, size = images.device, images.shape[-1]
    kind = mixers[int(torch.randint(len(mixers), (), generator=source, device=device))]
    # numpy, since torch draws Beta values from its global generator only
    seed = int(torch.randint(2**31, (), generator=source, device=device))
    alpha = getattr(augmentation, kind)
    keep = float(np.random.default_rng(seed).beta(alpha, alpha))
    partner = torch.randperm(len(images), generator=source, device=device)
    if kind == "mixup":
        images = keep * images + (1 - keep) * images[partner]
    else:
        side = round(size * (1 - keep) ** 0.5)
        top, left = torch.randint(size - side + 1, (2,), generator=source, device=device).tolist()
        images = images.clone()
        images[:, :, top : top + side, left : left + side] = images[partner, :, top : top + side, left : left + side]
        keep = 1 - (side / size) ** 2
    return Batch(images, keep * targets + (1 - keep) * targets[partner])
