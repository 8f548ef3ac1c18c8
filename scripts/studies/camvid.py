"""CamVid for studies of dense tasks: the split of SegNet's tutorial, augmented batches, class weights and the mean IoU.

The folder has train, val and test, and the classes of the pixels in trainannot, valannot and testannot. Images are
uint8 tensors of (images, 3, height, width).
"""

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from bkn_zoo.images import SUFFIXES, Preprocessing, normalize, open_image
from bkn_zoo.training.augmentation import generator
from studies.decoded import decoded_once

CLASSES, VOID = 11, 255
FILE_VOID = 11  # the class of pixels without a class in the files
PREPROCESSING = Preprocessing(1, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
SMALLEST = 0.25  # part of an image's area that a training image may show
VARIED = 60  # images augmented at a time: on a GPU, the number of launches is the cost
QUALITY = 90  # of packed images

Images = tuple[Tensor, Tensor]
"""Images, and the classes of their pixels."""


def files(root: Path) -> dict[str, list[Path]]:
    """The images of each split; those to train on in an order that depends on the names of the files alone."""
    found = {
        split: sorted(path for path in (root / folder).glob("*") if path.suffix.lower() in SUFFIXES)
        for split, folder in {"train": "train", "validation": "val", "test": "test"}.items()
    }
    found["train"].sort(key=lambda path: zlib.crc32(f"{path.parent.name}/{path.stem}".encode()))
    return found


def mask(path: Path) -> Path:
    """The file with the classes of an image's pixels."""
    return path.parent.with_name(f"{path.parent.name}annot") / f"{path.stem}.png"


def pixels_of(path: Path) -> Tensor:
    return torch.from_numpy(np.array(open_image(path))).permute(2, 0, 1).contiguous()


def classes_of(path: Path) -> Tensor:
    classes = torch.from_numpy(np.array(Image.open(mask(path))))
    return torch.where(classes == FILE_VOID, VOID, classes).byte()


def load(root: Path, cache: Path, device: torch.device) -> dict[str, Images]:
    """All images by split, decoded once into a file that all processes map."""

    def read() -> dict[str, Images]:
        with ThreadPoolExecutor() as pool:
            return {
                split: (torch.stack([*pool.map(pixels_of, paths)]), torch.stack([*pool.map(classes_of, paths)]))
                for split, paths in files(root).items()
            }

    found = decoded_once(cache, "camvid", root, read)
    return {split: (images.to(device), labels.to(device)) for split, (images, labels) in found.items()}


def pack(root: Path, target: Path) -> None:
    """Copy the data set with its photographs as WebP, in the same layout."""

    def save(path: Path) -> None:
        place, classes = (target / each.relative_to(root) for each in (path.with_suffix(".webp"), mask(path)))
        for each in (place, classes):
            each.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels_of(path).permute(1, 2, 0).numpy()).save(place, quality=QUALITY)
        Image.open(mask(path)).convert("L").save(classes, optimize=True)

    with ThreadPoolExecutor() as pool:
        list(pool.map(save, [path for paths in files(root).values() for path in paths]))


def as_input(images: Tensor) -> Tensor:
    """Whole images, as they are evaluated."""
    return normalize(images.float() / 255, PREPROCESSING)


def training_batches(train: Images, batch: int, steps: int, seed: int, size: Sequence[int]) -> Iterator[Images]:
    """So many augmented batches, epoch after epoch, of images of this height and width."""
    (images, labels), number, epoch = train, 0, 0
    while True:
        order = torch.randperm(len(labels), generator=generator("cpu", seed, epoch)).to(images.device)
        for rows in order[: len(order) - len(order) % batch].split(VARIED // batch * batch):
            source = generator(images.device, seed, epoch, number)
            pixels, targets = vary_scene(images[rows].float() / 255, labels[rows], size, source)
            for part in zip(pixels.split(batch), targets.split(batch), strict=True):
                if number == steps:
                    return
                yield part
                number += 1
        epoch += 1


def vary_scene(pixels: Tensor, labels: Tensor, size: Sequence[int], source: torch.Generator) -> Images:
    """A random part of each image and of its classes, mirrored or not, with another brightness and contrast."""
    count, device = len(pixels), pixels.device
    zoom, mirror, across, down, *tint = torch.rand((6, count), generator=source, device=device)
    side = (SMALLEST + zoom * (1 - SMALLEST)).sqrt()
    none, room = torch.zeros_like(side), 1 - side
    rows = [side * torch.where(mirror < 0.5, -1, 1), none, (2 * across - 1) * room, none, side, (2 * down - 1) * room]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), [count, 3, *size], align_corners=False)
    pixels = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    classes = F.grid_sample(labels[:, None].float(), grid, "nearest", "reflection", align_corners=False)
    brightness, contrast = ((0.8 + 0.4 * part).view(-1, 1, 1, 1) for part in tint)
    middle = pixels.mean((1, 2, 3), keepdim=True)
    pixels = ((pixels - middle) * contrast + middle * brightness).clamp(0, 1)
    return normalize(pixels, PREPROCESSING), classes[:, 0].long()


def class_weights(labels: Tensor, balance: float = 0.5) -> Tensor:
    """Weights for the loss: (median frequency of the classes / frequency of a class) to the power `balance`."""
    counts = torch.stack([(labels == each).sum() for each in range(CLASSES)]).float()
    return (counts.median() / counts) ** balance


def mean_iou(predicted: Tensor, labels: Tensor) -> float:
    """Mean over the classes of intersection over union, in percent, counted over all images; void does not count."""
    seen = labels != VOID
    classes = int(max(labels[seen].max(), predicted.max())) + 1
    pairs = labels[seen].long() * classes + predicted[seen].long()
    counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes).double()
    both = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - both
    return 100 * (both[union > 0] / union[union > 0]).mean().item()
