"""A batch of images and labels."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Preprocessed images and, per image, the probability of each class (zeros and a one without mixing)."""

    images: Tensor
    targets: Tensor
