"""From an RGB image to the network's input, exactly as a checkpoint's config says."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.images.reading import resized_square


def preprocess(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """An RGB image as the network takes it, (3, size, size)."""
    p = preprocessing
    square = central_square(image, p.native_size or p.size, p.interpolation, p.crop)
    pixels = enlarge(square[None], p.size, p.interpolation)
    return normalize(pixels, p)[0].contiguous()


def central_square(image: Image.Image, size: int, interpolation: str = "bilinear", crop: float = 1.0) -> Tensor:
    """The largest square in the middle of an RGB image, or a part of it, resized; (3, size, size), in [0, 1]."""
    square = resized_square(image, size, interpolation, crop)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).float().div_(255)


def enlarge(pixels: Tensor, size: int, interpolation: str = "bilinear") -> Tensor:
    """Images (images, 3, side, side) from the size that they were brought to, to that of the network's input."""
    if pixels.shape[-1] == size:
        return pixels
    align_corners = None if interpolation == "nearest" else False
    # Where pixels become more, there is nothing to smooth: the same but for rounding, in half of the time on a CPU.
    faster = interpolation == "bilinear" and size > pixels.shape[-1] and pixels.is_cpu
    return F.interpolate(pixels, size=(size, size), mode=interpolation, align_corners=align_corners, antialias=faster)


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Images (images, 3, height, width) in [0, 1], by the mean and deviation of the config."""
    mean, std = (per_channel(values, pixels.device) for values in (preprocessing.mean, preprocessing.std))
    return (pixels - mean).div_(std)


@lru_cache
@torch.inference_mode(False)  # it may be asked for first while a network is evaluated
def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Mean or std as (1, 3, 1, 1). Kept, since the host waits for all that a GPU has to do before it copies there."""
    return torch.tensor(values, device=device).view(1, 3, 1, 1)
