"""Sets of images, in memory or as files, and a data set with its splits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bkn_zoo.errors import ImageError, InputError
from bkn_zoo.images import Preprocessing, open_image
from bkn_zoo.progress import say
from bkn_zoo.training.decoded import Squares

MEAN_STD = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class ArrayImages:
    """Images in memory: bytes (images, 3, side, side) and labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> "ArrayImages":
        return ArrayImages(self.images[rows], self.labels[rows])

    def __add__(self, others: "ArrayImages") -> "ArrayImages":
        return ArrayImages(torch.cat([self.images, others.images]), torch.cat([self.labels, others.labels]))

    def to(self, device: torch.device) -> "ArrayImages":
        return ArrayImages(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class FileImages:
    """Image files: paths and labels, and a record of unreadable files.

    Attributes:
        unreadable: files that cannot be read.
        not_lost: classes with unreadable files that also have readable ones.
        squares: central squares that have been decoded, by size, interpolation and crop.
    """

    paths: list[Path]
    labels: list[int]
    unreadable: set[Path] = field(default_factory=set)
    not_lost: set[int] = field(default_factory=set)
    squares: dict[Any, Squares] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> "FileImages":
        chosen = rows.tolist()
        return FileImages([self.paths[i] for i in chosen], [self.labels[i] for i in chosen])

    def __add__(self, others: "FileImages") -> "FileImages":
        return FileImages(self.paths + others.paths, self.labels + others.labels)

    def to(self, device: torch.device) -> "FileImages":
        return self

    def report_broken(self, rows: list[int], names: Sequence[str] | None = None) -> None:
        """Report and count every unreadable file once.

        Args:
            names: names of the classes; a class without a readable file is refused.
        """
        for row in rows:
            path = self.paths[row]
            if path not in self.unreadable:
                self.unreadable.add(path)
                say(f"{path} cannot be read as an image and is left out ({len(self.unreadable)} so far)")
                if names is not None:
                    self._refuse_lost_class(self.labels[row], names)

    def _refuse_lost_class(self, label: int, names: Sequence[str]) -> None:
        if label in self.not_lost:
            return
        paths = [path for path, other in zip(self.paths, self.labels, strict=True) if other == label]
        if not any(map(_can_be_read, paths)):
            one = len(paths) == 1
            what = "the only image" if one else f"none of the {len(paths)} images"
            which = f"cannot be read ({paths[0]})" if one else f"can be read, such as {paths[0]}"
            raise InputError(
                f"{what} of {names[label]!r} {which}: replace {'it' if one else 'them'}, or remove the class."
            )
        self.not_lost.add(label)

    def say_left_out(self, kind: str) -> None:
        """At the end, report how many of these images could not be read."""
        if self.unreadable:
            images = f"{kind} images" if kind else "images"
            verb = "was" if len(self.unreadable) == 1 else "were"
            say(f"{len(self.unreadable)} of {len(self)} {images} could not be read, and {verb} left out")


def _can_be_read(path: Path) -> bool:
    try:
        open_image(path)
    except ImageError:
        return False
    return True


Images = ArrayImages | FileImages


@dataclass(frozen=True)
class Data:
    """A data set with its splits. Choices are made on `validation`; `test`, if any, gives the published accuracy.

    Attributes:
        held_out: whether the validation images are a share of the training images, and not a separate set.
    """

    name: str
    train: Images
    validation: Images
    test: Images | None
    label_names: list[str]
    preprocessing: Preprocessing
    held_out: bool = True

    def split(self, name: str) -> Images:
        """The images of a split: "train", "validation", "test" or "all"."""
        if name == "all":
            parts: list[Any] = [images for images in (self.train, self.validation, self.test) if images is not None]
            return sum(parts[1:], parts[0])
        images = getattr(self, name)
        if images is None:
            raise InputError("the data set has no test images: choose the validation images, or all.")
        return images

    def to(self, device: torch.device) -> "Data":
        splits = {name: getattr(self, name) for name in ("train", "validation", "test")}
        return replace(self, **{name: images and images.to(device) for name, images in splits.items()})


Loaded = tuple[Images, Images | None, Images | None, list[str], Preprocessing]
"""Training, validation and test images (None if there is no such set), labels and preprocessing."""
