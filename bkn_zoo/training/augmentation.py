"""Augmentation of batches on their device, by the given random numbers; only random boxes are taken from files."""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bkn_zoo.images import Preprocessing, per_channel
from bkn_zoo.images.reading import Box
from bkn_zoo.training.recipes import Augmentation

MAX_STRETCH = 0.5  # of a random crop: the logarithm of width / height


class Batch(NamedTuple):
    """Preprocessed images and, per image, the probability of each class (zeros and a one without mixing)."""

    images: Tensor
    targets: Tensor


def generator(device: torch.device | str, *numbers: int) -> torch.Generator:
    """A random generator that depends only on `numbers`."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1
    return torch.Generator(device).manual_seed(seed)


def apply_policy(pixels: Tensor, policy: str, *numbers: int) -> Tensor:
    """Images as bytes, each changed by a policy of torchvision with its default settings."""
    from torchvision.transforms import v2

    change = {"randaugment": v2.RandAugment, "trivialaugment": v2.TrivialAugmentWide}[policy]()
    with torch.random.fork_rng(devices=[]):
        # It draws from this generator only, on the host; torch.manual_seed would also change those of GPUs.
        torch.default_generator.manual_seed(generator("cpu", *numbers).initial_seed())
        return torch.stack([change(image) for image in pixels])


def vary(pixels: Tensor, augmentation: Augmentation, preprocessing: Preprocessing, source: torch.Generator) -> Tensor:
    """Geometry (in one sampling, directly to the network's size), colour and erasing, drawn for each image."""
    count, device, size = pixels.shape[0], pixels.device, preprocessing.size
    # Everything in one draw and few operations, because on a GPU the number of operations determines the time.
    draws = torch.rand((11, count), generator=source, device=device) * 2 - 1
    zoom, stretch, angle, mirror, shift, tint, middle = draws.split([1, 1, 1, 1, 2, 3, 2])
    area = (1 + augmentation.scale) / 2 + zoom * ((1 - augmentation.scale) / 2)
    half_stretch = MAX_STRETCH / 2 if augmentation.scale < 1 else 0.0
    sides = area.sqrt() * torch.exp(torch.cat([stretch, -stretch]) * half_stretch)  # width, height
    shift = shift * (2 * augmentation.crop + (1 - sides).clamp_min(0))
    if augmentation.scale == 1 and not augmentation.rotate:
        half = pixels.shape[-1] / 2
        shift = torch.round(shift * half) / half  # by whole pixels, which does not blur
    if augmentation.flip:
        sides[0].copysign_(mirror[0])
    angle = angle * math.radians(augmentation.rotate)
    straight, slanted = sides * torch.cos(angle), sides * torch.sin(angle)
    rows = [straight[0], -slanted[1], shift[0], slanted[0], straight[1], shift[1]]
    affine = torch.stack(rows, dim=1).view(count, 2, 3)
    grid = F.affine_grid(affine, [count, 3, size, size], align_corners=False)
    pixels = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    if augmentation.colour:
        brightness, contrast, saturation = (1 + augmentation.colour * tint).view(3, count, 1, 1, 1)
        pixels = pixels * brightness
        centre = pixels.mean(dim=(1, 2, 3), keepdim=True)
        pixels = centre + (pixels - centre) * contrast
        grey = pixels.mean(dim=1, keepdim=True)
        pixels = (grey + (pixels - grey) * saturation).clamp(0, 1)
    if augmentation.erase:
        at = (torch.arange(size, device=device) + 0.5) * (2 / size) - 1
        inside = (at - middle[:, :, None]).abs() <= augmentation.erase
        blank = inside[0, :, None, :, None] & inside[1, :, None, None, :]
        pixels = torch.where(blank, per_channel(preprocessing.mean, device), pixels)
    return pixels


def random_box(size: tuple[int, int], scale: float, *numbers: int) -> Box:
    """A part of a photograph of this width and height; `scale` is the smallest share of its area."""
    rng = np.random.default_rng(numbers)
    area, ratio = rng.uniform(scale, 1) * size[0] * size[1], math.exp(rng.uniform(-MAX_STRETCH, MAX_STRETCH))
    width, height = min(math.sqrt(area * ratio), size[0]), min(math.sqrt(area / ratio), size[1])
    left, top = rng.uniform(0, size[0] - width), rng.uniform(0, size[1] - height)
    return left, top, left + width, top + height


def mix(images: Tensor, targets: Tensor, augmentation: Augmentation, *numbers: int) -> Batch:
    """Mixup or cutmix of the batch with a shifted copy, by `numbers`; on the host, which must not wait for a GPU."""
    mixers = [name for name in ("mixup", "cutmix") if getattr(augmentation, name)]
    if not mixers:
        return Batch(images, targets)
    rng = np.random.default_rng(numbers)
    kind = mixers[rng.integers(len(mixers))]
    alpha = getattr(augmentation, kind)
    keep = float(rng.beta(alpha, alpha))
    # The batch is already in random order. The shift varies, because a shift of one would mix images of one group.
    shift = int(rng.integers(1, max(len(images), 2)))
    if kind == "mixup":
        images = keep * images + (1 - keep) * images.roll(shift, 0)
    else:
        size = images.shape[-1]
        side = round(size * (1 - keep) ** 0.5)
        top, left = rng.integers(size - side + 1, size=2).tolist()
        part = slice(None), slice(None), slice(top, top + side), slice(left, left + side)
        images, before = images.clone(), images
        images[part] = before[part].roll(shift, 0)
        keep = 1 - (side / size) ** 2
    return Batch(images, keep * targets + (1 - keep) * targets.roll(shift, 0))
