"""What a network is trained and evaluated on at a time."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Preprocessed images and, per image, the probability of each class (a row of zeros and a one where unmixed)."""

    images: Tensor
    targets: Tensor
