"""What the corruptions are made of: random numbers, filters, enlargement and height maps, on whole batches."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def normal(shape: Sequence[int], source: Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=source, device=source.device)


def uniform(shape: Sequence[int], source: Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(tuple(shape), generator=source, device=source.device)


def moved(x: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """ImageMagick's motion blur: half a Gaussian along a line from each pixel, whose rows and columns are rounded.

    Takes and returns levels from 0 to 255, whole ones as an 8-bit image has them.
    """
    width = 2 * math.ceil(radius) + 1
    weights = torch.exp(-torch.arange(width).square() / (2 * sigma**2))
    radians = torch.deg2rad(degrees)
    lines = torch.stack([torch.sin(radians), torch.cos(radians)])  # down, across
    side = torch.arange(x.shape[-1], device=x.device)
    images = torch.arange(len(x), device=x.device)[:, None, None]
    channels_last, result = x.permute(0, 2, 3, 1), torch.zeros_like(x)
    for step, weight in enumerate((weights / weights.sum()).tolist()):
        down, across = torch.ceil(step * lines - 0.5).long()
        rows = (side + down[:, None]).clamp(0, len(side) - 1)
        columns = (side + across[:, None]).clamp(0, len(side) - 1)
        result += weight * channels_last[images, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return result.round().clamp(0, 255)


def zoomed(x: Tensor, factor: float) -> Tensor:
    """The middle of images, enlarged by `factor`."""
    side = x.shape[-1]
    part = math.ceil(side / factor)
    start = (side - part) // 2
    part_of_x = x[..., start : start + part, start : start + part]
    large = F.interpolate(part_of_x, size=[round(part * factor)] * 2, mode="bilinear", align_corners=True)
    start = (large.shape[-1] - side) // 2
    return large[..., start : start + side, start : start + side]


def gaussian(x: Tensor, sigma: float, truncate: float = 4.0, edge: str = "nearest") -> Tensor:
    radius = int(truncate * sigma + 0.5)
    if not radius:
        return x
    line = torch.exp(-torch.arange(-radius, radius + 1, device=x.device).square() / (2 * sigma**2))
    line /= line.sum()
    return filtered(filtered(x, line[:, None], edge), line[None], edge)


def filtered(x: Tensor, kernel: Tensor, edge: str) -> Tensor:
    """Each channel correlated with one kernel of odd sides, in float64: a GPU would round float32 to 10 bits here."""
    rows, columns = (reflected(x.shape[-1], size // 2, edge, x.device) for size in kernel.shape)
    wide = x.flatten(0, 1)[:, None, rows][..., columns]
    return F.conv2d(wide.double(), kernel[None, None].double()).to(x.dtype).view_as(x)


def reflected(side: int, margin: int, edge: str, device: torch.device) -> Tensor:
    """Positions from -margin on, as they lie within an image of this side.

    Args:
        edge: "nearest" repeats the last pixel, "mirror" reflects about its middle, "reflect" about its outer border.
    """
    at = torch.arange(-margin, side + margin, device=device)
    if edge == "nearest":
        return at.clamp(0, side - 1)
    period = 2 * side - 2 if edge == "mirror" else 2 * side
    at = at.remainder(period)
    return torch.minimum(at, period - at if edge == "mirror" else period - 1 - at)


def box_weights(side: int, size: int) -> Tensor:
    """How Pillow's box filter resizes a line of `side` pixels to `size`: (size, side)."""
    scale = side / size
    width = max(scale, 1.0)
    weights = torch.zeros(size, side)
    for row in range(size):
        middle = (row + 0.5) * scale
        for at in range(max(int(middle - width / 2 + 0.5), 0), min(int(middle + width / 2 + 0.5), side)):
            weights[row, at] = float(-0.5 < (at - middle + 0.5) / width <= 0.5)
    return weights / weights.sum(1, keepdim=True)


def replaced(here: Tensor, there: Tensor, size: int) -> Tensor:
    """Where each of `size` pixels comes from, after those at `here` took the values at `there`, one after the other.

    A pixel that was replaced earlier passes on where it came from: such chains are followed by doubling.
    """
    turn = torch.full((size,), len(here), device=here.device)
    turn[here] = torch.arange(len(here), device=here.device)
    old = torch.arange(size, 2 * size, device=here.device)[:, None].repeat(1, there.shape[1])
    earlier = turn[there] < torch.arange(len(here), device=here.device)[:, None]
    source = torch.cat([old, old])  # of new values, then of old ones
    source[here] = torch.where(earlier, there, there + size)
    while bool((source[:size] < size).any()):
        source = source.gather(0, source)
    return source[:size] - size


def plasma(count: int, side: int, decay: float, source: Generator) -> Tensor:
    """Height maps in [0, 1] by the diamond-square algorithm, (count, 1, side, side); the side is a power of two."""
    heights = torch.zeros(count, side, side, device=source.device)
    step, rough = side, 100.0

    def vary(total: Tensor) -> Tensor:
        return total / 4 + rough * uniform(total.shape, source, -rough, rough)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        heights[:, half::step, half::step] = vary(pairs + pairs.roll(-1, 2))
        middles, corners = heights[:, half::step, half::step], heights[:, ::step, ::step]
        across = middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)
        heights[:, ::step, half::step] = vary(across)
        down = middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)
        heights[:, half::step, ::step] = vary(down)
        step, rough = half, rough / decay
    heights = heights - heights.amin((1, 2), keepdim=True)
    return (heights / heights.amax((1, 2), keepdim=True))[:, None]
