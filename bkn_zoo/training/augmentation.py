"""Augmentation of training images: of a whole batch at once on its device, or of image files one by one.

Random numbers depend only on the given numbers, so the same numbers give the same batch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from bkn_zoo.images import Preprocessing, per_channel
from bkn_zoo.training.recipes import Augmentation

MAX_STRETCH = 0.5  # of a random crop: the logarithm of width / height


class Batch(NamedTuple):
    """Preprocessed images and, per image, the probability of each class (zeros and a one without mixing)."""

    images: Tensor
    targets: Tensor


def generator(device: torch.device | str, *numbers: int) -> torch.Generator:
    """A random generator that depends only on `numbers`."""
    return torch.Generator(device).manual_seed(_seed(*numbers))


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


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


def transforms(augmentation: Augmentation, preprocessing: Preprocessing) -> Callable[[Image.Image | Tensor], Tensor]:
    """The same augmentation for one image: a photograph of any size for random crops, otherwise its central square.

    It draws from PyTorch's global generator (`drawing_from`), and returns bytes, of the native size if there is one.
    """
    from torchvision.transforms import v2  # imported here, because it takes seconds and is needed for files only

    size = preprocessing.native_size or preprocessing.size
    steps: list[Any] = []
    if augmentation.scale < 1:
        ratio = math.exp(-MAX_STRETCH), math.exp(MAX_STRETCH)
        steps.append(v2.RandomResizedCrop(size, (augmentation.scale, 1.0), ratio))
    if augmentation.crop:
        steps.append(v2.RandomCrop(size, round(augmentation.crop * size), padding_mode="reflect"))
    if augmentation.rotate:
        corners = math.ceil(0.21 * size)  # enough for the diagonal
        turn = v2.RandomRotation(augmentation.rotate, v2.InterpolationMode.BILINEAR)
        steps += [v2.Pad(corners, padding_mode="reflect"), turn, v2.CenterCrop(size)]
    if augmentation.flip:
        steps.append(v2.RandomHorizontalFlip())
    if augmentation.colour:
        steps.append(v2.ColorJitter(augmentation.colour, augmentation.colour, augmentation.colour))
    steps.append(v2.ToImage())
    if augmentation.erase:
        area, blank = augmentation.erase**2, [float(round(255 * mean)) for mean in preprocessing.mean]
        steps.append(v2.RandomErasing(1.0, (area, area), (1.0, 1.0), blank))
    return v2.Compose([*steps, v2.ToPureTensor()])


@contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """Seed PyTorch's global generator with `numbers`, and restore its state at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_seed(*numbers))
        yield


def mix(images: Tensor, targets: Tensor, augmentation: Augmentation, *numbers: int) -> Batch:
    """Mixup or cutmix of the batch with a shifted copy. Random numbers depend only on `numbers`.

    They are numpy's, because the host needs them and would have to wait for a GPU.
    """
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
