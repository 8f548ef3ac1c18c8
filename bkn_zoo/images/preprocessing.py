"""What preprocessing is: `bkn_zoo.images.transforms` does it, a checkpoint's config.json keeps it."""

from dataclasses import dataclass
from typing import Annotated

from bkn_zoo.fields import Rule, check_fields, one_of

MAX_SIDE = 4096
"""Of a network's input: many times what classifiers are trained at, and in float32 200 MB an image before any layer."""

Side = Annotated[int, Rule(lambda value: 1 <= value <= MAX_SIDE, f"a whole number of 1 to {MAX_SIDE}")]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the network's input.

    Attributes:
        size: height and width of the input.
        mean: per channel, subtracted from pixels in [0, 1].
        std: per channel, by which the difference is divided.
        native_size: height and width to which an image is brought first, where the training data had fewer pixels than
            the network's input; None means that it goes to `size` at once.
        interpolation: of every resize; one of `INTERPOLATIONS`.
        crop: side of the central square that is kept, relative to the shorter side of the image.
    """

    size: Side
    mean: Annotated[tuple[float, ...], Rule(lambda values: len(values) == 3, "three numbers")]
    std: Annotated[
        tuple[float, ...], Rule(lambda values: len(values) == 3 and min(values) > 0, "three positive numbers")
    ]
    native_size: Side | None = None
    interpolation: Annotated[str, one_of(*INTERPOLATIONS)] = "bilinear"
    crop: Annotated[float, Rule(lambda value: 0 < value <= 1, "a number above 0 and at most 1")] = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "preprocessing.")
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
