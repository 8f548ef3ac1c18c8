"""What preprocessing is: `bkn_zoo.images` does it, a checkpoint's config.json keeps it."""

from dataclasses import dataclass

from bkn_zoo.fields import check, check_choice, is_count, is_number

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
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    native_size: int | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("size", "native_size"):
            value = getattr(self, name)
            optional = value is None and name == "native_size"
            check(optional or is_count(value), f"preprocessing.{name}", value, "a whole number of at least 1")
        for name in ("mean", "std"):
            value = getattr(self, name)
            valid = isinstance(value, list | tuple) and len(value) == 3 and all(map(is_number, value))
            check(valid, f"preprocessing.{name}", value, "three numbers")
            object.__setattr__(self, name, tuple(map(float, value)))
        check(min(self.std) > 0, "preprocessing.std", self.std, "positive")
        check_choice("preprocessing.interpolation", self.interpolation, INTERPOLATIONS)
