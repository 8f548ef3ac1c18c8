"""The preprocessing settings, which config.json stores and `bkn_zoo.images.transforms` applies."""

from dataclasses import dataclass
from typing import Annotated, Any

from bkn_zoo.fields import Rule, check_fields, one_of

MAX_SIDE = 4096
"""Largest side of a network's input. It is many times the usual size, and needs 200 MB per image in float32."""

Side = Annotated[int, Rule(lambda value: 1 <= value <= MAX_SIDE, f"a whole number of 1 to {MAX_SIDE}")]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """How an image is turned into the network's input.

    Attributes:
        size: height and width of the input.
        mean: subtracted from pixels in [0, 1], per channel.
        std: divides the result, per channel.
        native_size: height and width to which an image is resized first, if the training images were smaller than the
            network's input; None: images are resized to `size` directly.
        interpolation: method of every resize; one of `INTERPOLATIONS`.
        crop: side of the central square, relative to the shorter side of the image.
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

    @property
    def square(self) -> dict[str, Any]:
        """How `resized_square` cuts and resizes an image first."""
        return {"size": self.native_size or self.size, "interpolation": self.interpolation, "crop": self.crop}
