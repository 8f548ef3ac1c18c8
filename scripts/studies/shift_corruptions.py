"""The corruptions of CIFAR-10-C, CIFAR-100-C, Tiny-ImageNet-C and ImageNet-C, on a whole batch and from a seed.

The names, the constants and the order of operations are those of Hendrycks & Dietterich (2019, github
hendrycks/robustness, make_cifar_c.py, make_tinyimagenet_c.py and make_imagenet_c.py). The code is our own: PyTorch on
the device of the images, and Pillow for JPEG. It differs from theirs in these points:

- frost: their six photographs are replaced by random textures with the same brightness quantiles and spectral slope.
- spatter (one of the four extra corruptions): the outline of the liquid stands in for OpenCV's Canny edges.
- elastic_transform: OpenCV rounds source positions to 1/32 pixel, these do not.
- all random numbers: they depend on the seed, the corruption, the severity and the device type.

Like theirs, glass_blur copies a neighbour's pixel where it means to swap two.
"""

import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator, Tensor

from bkn_zoo.errors import UnknownNameError
from bkn_zoo.training.augmentation import generator
from studies.shift_constants import CONSTANTS
from studies.shift_filters import box_weights, filtered, gaussian, moved, normal, plasma, replaced, uniform, zoomed

SEVERITIES = (1, 2, 3, 4, 5)

NAMES = tuple(CONSTANTS[32])
EXTRA = NAMES[15:]
"""The four official extra corruptions: everything that is tuned is tuned on these."""
MAIN = NAMES[:15]

Corruption = Callable[[Tensor, Any, Generator], Tensor]
"""From pixels in [0, 1], (images, 3, side, side), the constants of a severity and a source of random numbers."""


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupted copies of `images`, bytes of shape (images, 3, side, side); severity 0 returns them unchanged.

    Args:
        name: one of `NAMES`.
        severity: 0 to 5.
        seed: other numbers give other noise. Everything else being equal, the result is the same on every call.
    """
    if name not in NAMES:
        raise UnknownNameError(f"unknown corruption {name!r}: choose one of {', '.join(NAMES)}.")
    if severity == 0:
        return images
    constants = CONSTANTS[images.shape[-1]][name][severity - 1]
    source = generator(images.device, seed, NAMES.index(name), severity)
    pixels = CORRUPTIONS[name](images.float() / 255, constants, source)
    return (pixels.clamp(0, 1) * 255 + 1e-3).to(torch.uint8)  # whole levels stay what they are, as in float64


# Noise


def gaussian_noise(x: Tensor, c: float, source: Generator) -> Tensor:
    return x + c * normal(x.shape, source)


def shot_noise(x: Tensor, c: float, source: Generator) -> Tensor:
    return torch.poisson(x * c, generator=source) / c


def impulse_noise(x: Tensor, c: float, source: Generator) -> Tensor:
    salt = (uniform(x.shape, source) < 0.5).float()
    return torch.where(uniform(x.shape, source) < c, salt, x)


def speckle_noise(x: Tensor, c: float, source: Generator) -> Tensor:
    return x + x * c * normal(x.shape, source)


# Blur


def gaussian_blur(x: Tensor, c: float, source: Generator) -> Tensor:
    return gaussian(x, c)


def defocus_blur(x: Tensor, c: tuple[float, float], source: Generator) -> Tensor:
    radius, alias = c
    margin = 1 if radius <= 8 else 2
    reach = math.ceil(radius) + 1
    line = torch.arange(-reach, reach + 1.0)
    disk = (line.square()[:, None] + line.square() <= radius**2).float()
    soft = torch.exp(-torch.arange(-margin, margin + 1.0).square() / (2 * alias**2))
    soft /= soft.sum()
    kernel = F.conv2d((disk / disk.sum())[None, None], (soft[:, None] * soft)[None, None], padding=margin)
    return filtered(x, kernel[0, 0].to(x.device), "mirror")


def glass_blur(x: Tensor, c: tuple[float, int, int], source: Generator) -> Tensor:
    sigma, delta, times = c
    blurred = (gaussian(x, sigma) * 255 + 1e-3).floor() / 255
    count, _, side, _ = x.shape
    line = torch.arange(side - delta, delta, -1, device=x.device)
    here = (line[:, None] * side + line).flatten()  # in the order in which pixels are replaced
    pixels = torch.arange(side * side, device=x.device)[:, None].repeat(1, count)  # where each pixel comes from
    for _ in range(times):
        moves = torch.randint(-delta, delta, (2, len(here), count), generator=source, device=x.device)
        pixels = pixels.gather(0, replaced(here, here[:, None] + moves[0] * side + moves[1], len(pixels)))
    shuffled = blurred.flatten(2).gather(2, pixels.t()[:, None].expand(-1, 3, -1)).view_as(x)
    return gaussian(shuffled, sigma)


def motion_blur(x: Tensor, c: tuple[float, float], source: Generator) -> Tensor:
    angle = uniform((len(x),), source, -45, 45)
    return moved((x * 255).round(), *c, angle) / 255


def zoom_blur(x: Tensor, c: tuple[float, float], source: Generator) -> Tensor:
    factors = np.arange(1, *c)
    total = x.clone()
    for factor in factors:
        total += zoomed(x, float(factor))
    return total / (len(factors) + 1)


# Weather


def snow(x: Tensor, c: tuple[float, ...], source: Generator) -> Tensor:
    loc, scale, zoom, threshold, radius, sigma, keep = c
    side = x.shape[-1]
    layer = zoomed(loc + scale * normal((len(x), 1, side, side), source), zoom)
    layer = torch.where(layer < threshold, 0.0, layer).clamp(0, 1)
    layer = moved((layer * 255).floor(), radius, sigma, uniform((len(x),), source, -135, -45)) / 255
    pale = torch.maximum(x, grey(x) * 1.5 + 0.5)
    return keep * x + (1 - keep) * pale + layer + layer.flip(2, 3)


def grey(x: Tensor) -> Tensor:
    return (x * torch.tensor([0.299, 0.587, 0.114], device=x.device).view(3, 1, 1)).sum(1, keepdim=True)


FROST = {32: (0.42, 0.24), 64: (0.42, 0.24), 224: (0.85, 0.36)}
"""By side: the power of the frequency by which the amplitude falls, and the share of variance within a texture."""
FROST_LEVELS = (
    (0.133, 0.177, 0.223), (0.290, 0.464, 0.527), (0.350, 0.543, 0.602), (0.459, 0.595, 0.642), (0.582, 0.649, 0.693),
    (0.689, 0.718, 0.758), (0.770, 0.790, 0.829), (0.823, 0.841, 0.882), (0.930, 0.958, 0.984),
)  # fmt: skip
"""Red, green and blue at equally spaced quantiles of the brightness. All were measured on parts of the official
photographs: of 32 pixels, reduced as for CIFAR, and of 224."""


def frost(x: Tensor, c: tuple[float, float], source: Generator) -> Tensor:
    side = x.shape[-1]
    slope, within = FROST[side]
    frequency = torch.fft.fftfreq(2 * side, device=x.device)
    radius = (frequency.square()[:, None] + frequency.square()).sqrt()
    amplitude = torch.where(radius > 0, radius.clamp_min(0.5 / side) ** -slope, 0.0)
    noise = torch.fft.ifft2(torch.fft.fft2(normal((len(x), 2 * side, 2 * side), source)) * amplitude).real
    noise = noise[:, :side, :side] / amplitude.square().mean().sqrt()
    whole = normal((len(x), 1, 1), source)
    share = torch.special.ndtr(math.sqrt(within) * noise + math.sqrt(1 - within) * whole)
    levels = torch.tensor(FROST_LEVELS, device=x.device)
    at = share * (len(levels) - 1)
    low = at.floor().long().clamp(max=len(levels) - 2)
    texture = torch.lerp(levels[low], levels[low + 1], (at - low)[..., None]).permute(0, 3, 1, 2)
    return c[0] * x + c[1] * texture


def fog(x: Tensor, c: tuple[float, float], source: Generator) -> Tensor:
    thickness, decay = c
    side = x.shape[-1]
    largest = x.amax((1, 2, 3), keepdim=True)
    heights = plasma(len(x), 1 << (side - 1).bit_length(), decay, source)[..., :side, :side]
    return (x + thickness * heights) * largest / (largest + thickness)


def brightness(x: Tensor, c: float, source: Generator) -> Tensor:
    """The value of HSV raised: all channels grow by one factor; black becomes grey."""
    value = x.amax(1, keepdim=True)
    raised = (value + c).clamp(0, 1)
    return torch.where(value > 0, x * (raised / value.clamp_min(1e-12)), raised)


# Digital


def contrast(x: Tensor, c: float, source: Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * c + mean


def saturate(x: Tensor, c: tuple[float, float], source: Generator) -> Tensor:
    """The saturation of HSV changed: every channel's distance from the largest one; grey counts as red."""
    value, least = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    saturation = (value - least) / value.clamp_min(1e-12)
    red = torch.tensor([0.0, 1.0, 1.0], device=x.device).view(3, 1, 1).expand_as(x)
    distance = torch.where(value > least, (value - x) / (value - least).clamp_min(1e-12), red)
    return value - value * (saturation * c[0] + c[1]).clamp(0, 1) * distance


def jpeg_compression(x: Tensor, c: int, source: Generator) -> Tensor:
    def compressed(image: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=c)
        return np.array(Image.open(file))

    images = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    with ThreadPoolExecutor() as threads:
        results = np.stack(list(threads.map(compressed, images)))
    return torch.from_numpy(results).to(x.device).permute(0, 3, 1, 2).float() / 255


def pixelate(x: Tensor, c: float, source: Generator) -> Tensor:
    side = x.shape[-1]
    for size in (int(side * c), side):
        boxes = box_weights(x.shape[-1], size).to(x.device)
        x = (torch.einsum("nchw,xw->nchx", x, boxes) * 255).round() / 255
        x = (torch.einsum("nchw,yh->ncyw", x, boxes) * 255).round() / 255
    return x


def elastic_transform(x: Tensor, c: tuple[float, float, float], source: Generator) -> Tensor:
    count, _, side, _ = x.shape
    alpha, sigma, shift = (side * share for share in c)
    middle, reach = side // 2, side // 3
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], device=x.device) * reach + middle  # x, y
    moved_corners = corners + uniform((count, 3, 2), source, -shift, shift)
    ones = torch.ones(count, 3, 1, device=x.device)
    # From where each pixel is taken: the affine map that leads from the moved corners back.
    back = torch.linalg.solve(torch.cat([moved_corners, ones], 2), corners.expand(count, 3, 2))
    line = torch.arange(float(side), device=x.device)
    pixels = torch.stack(
        [line.expand(side, side), line[:, None].expand(side, side), torch.ones_like(line).expand(side, side)], 2
    )
    places = torch.einsum("hwi,nio->nhwo", pixels, back)
    x = F.grid_sample(x, places * (2 / (side - 1)) - 1, padding_mode="reflection", align_corners=True)
    noise = uniform((count, 2, side, side), source, -1, 1)
    drift = gaussian(noise, sigma, truncate=3.0, edge="reflect") * alpha
    places = pixels[..., :2] + drift.permute(0, 2, 3, 1)
    return F.grid_sample(x, (places + 0.5) * (2 / side) - 1, padding_mode="reflection", align_corners=False)


def spatter(x: Tensor, c: tuple[float, ...], source: Generator) -> Tensor:
    loc, scale, sigma, threshold, strength, mud = c
    side = x.shape[-1]
    layer = gaussian(loc + scale * normal((len(x), 1, side, side), source), sigma)
    layer = torch.where(layer < threshold, 0.0, layer)
    if mud:
        amount = gaussian((layer > threshold).float(), strength)
        amount = torch.where(amount < 0.8, 0.0, amount)
        return x * (1 - amount) + amount * colour(63, 42, 20, x)
    layer = (layer.clamp(0, 1) * 255).floor()
    amount = layer * shaded(layer > 0)
    amount = strength * amount / amount.amax((2, 3), keepdim=True).clamp_min(1e-12)
    return x + amount * colour(175, 238, 238, x)


def colour(red: int, green: int, blue: int, x: Tensor) -> Tensor:
    return torch.tensor([red, green, blue], device=x.device).view(3, 1, 1) / 255


def shaded(liquid: Tensor) -> Tensor:
    """The relief that OpenCV's filters make of the distance from the outline of drops, in levels from 0 to 255."""
    eroded = -F.max_pool2d(-liquid.float(), 3, 1, 1)
    distance = torch.where(liquid & (eroded == 0), 0.0, 20.0)
    moves = [(1, 0, 1.0), (0, 1, 1.0), (1, 1, 1.4), (1, 2, 2.1969), (2, 1, 2.1969)]
    moves = [(down * y, across * x, cost) for y, x, cost in moves for down in (1, -1) for across in (1, -1)]
    for _ in range(12 if liquid.shape[-1] < 224 else 20):  # every round reaches at least one pixel further
        near = F.pad(distance, (2, 2, 2, 2), value=20.0)
        side = distance.shape[-1]
        steps = [near[..., 2 + y : 2 + y + side, 2 + x : 2 + x + side] + cost for y, x, cost in moves]
        distance = torch.stack([distance, *steps]).amin(0)
    box = torch.full((3, 3), 1 / 9, device=liquid.device)
    levels = equalized(filtered(distance.clamp(max=20), box, "mirror").floor())
    slope = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]], device=liquid.device)
    levels = filtered(levels, slope, "mirror").clamp(0, 255)
    return filtered(levels, box, "mirror").round()


def equalized(levels: Tensor) -> Tensor:
    """Whole levels from 0 to 255, spread so that each image's histogram is flat."""
    flat = levels.flatten(1).long()
    counts = torch.zeros(len(flat), 256, device=levels.device).scatter_add_(1, flat, torch.ones_like(flat).float())
    below = counts.cumsum(1)
    first = counts.gather(1, (counts > 0).float().argmax(1, keepdim=True))
    spread = ((below - first) * 255 / (flat.shape[1] - first).clamp_min(1)).round().clamp(0, 255)
    return spread.gather(1, flat).view_as(levels)


CORRUPTIONS: dict[str, Corruption] = {name: globals()[name] for name in NAMES}
