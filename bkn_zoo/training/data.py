"""Batches of tensors on the device, from data sets.

Images in memory are augmented on the device, one batch at a time. Image files are read by a DataLoader, whose workers
send bytes: a quarter of what floats would take. A batch depends only on the seed, the epoch and its number, so an
interrupted training continues with the same batches. The host never waits for a GPU.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bkn_zoo.errors import ImageError, InputError
from bkn_zoo.images import Preprocessing, enlarge, normalize, open_image
from bkn_zoo.images.reading import resized_square
from bkn_zoo.training.augmentation import Batch, drawing_from, generator, mix, transforms, vary
from bkn_zoo.training.datasets import ArrayImages, Data, FileImages, Images, Squares
from bkn_zoo.training.interruption import leave_group
from bkn_zoo.training.recipes import Augmentation


class Runtime(NamedTuple):
    """How a training runs.

    Attributes:
        workers: processes that decode image files.
        quiet: whether nothing is printed.
    """

    device: torch.device
    workers: int = 0
    quiet: bool = False


def training_batches(
    data: Data, batch: int, epoch: int, seed: int, augmentation: Augmentation, device: torch.device,
    skip: int = 0, rank: int = 0, ranks: int = 1, workers: int = 0,
) -> Iterator[Batch]:  # fmt: skip
    """The augmented batches of one epoch, starting with number `skip`, for process `rank` of `ranks` processes.

    Images that do not fill a last batch are skipped in this epoch, so that every batch has the same groups.
    """
    order = torch.randperm(len(data.train), generator=generator("cpu", seed, epoch))
    count = len(order) // (batch * ranks)
    if not count:
        raise InputError(f"{len(data.train)} training images do not fill a batch of {batch * ranks}: make it smaller.")
    rows = order[: count * batch * ranks].view(count, ranks, batch)[skip:, rank]
    classes = torch.eye(len(data.label_names), device=device)
    if isinstance(data.train, ArrayImages):
        for number, chosen in enumerate(rows.to(data.train.images.device), start=skip):
            pixels = data.train.images[chosen].float() / 255
            source = generator(device, seed, epoch, number, rank)
            targets = classes[data.train.labels[chosen]]
            images = normalize(vary(pixels, augmentation, data.preprocessing, source), data.preprocessing)
            yield mix(images, targets, augmentation, seed, epoch, number, rank)
        return
    files = _Files(data.train, data.preprocessing, augmentation, seed, epoch)
    loader = DataLoader(
        files, batch_sampler=rows.tolist(), num_workers=workers, pin_memory=device.type == "cuda",
        worker_init_fn=leave_group,
    )  # fmt: skip
    for number, (pixels, labels, broken) in enumerate(loader, start=skip):
        data.train.report_broken(broken[broken >= 0].tolist(), data.label_names)
        targets = classes[labels.to(device, non_blocking=True)]
        images = _input(pixels.to(device, non_blocking=True), data.preprocessing)
        yield mix(images, targets, augmentation, seed, epoch, number, rank)


def evaluation_batches(
    data: Data, images: Images, batch: int, device: torch.device, workers: int = 0, strict: bool = False
) -> Iterator[Batch]:
    """All images in order, preprocessed as for inference.

    Unreadable files are left out. If `strict`, a class without a readable file is an error.
    """
    classes = torch.eye(len(data.label_names), device=device)
    if isinstance(images, ArrayImages):
        for start in range(0, len(images), batch):
            pixels = images.images[start : start + batch].to(device)
            labels = images.labels[start : start + batch].to(device)
            yield Batch(_input(pixels, data.preprocessing), classes[labels])
        return
    files = _Files(images, data.preprocessing)
    loader = DataLoader(files, batch_size=batch, num_workers=workers, worker_init_fn=leave_group)
    for pixels, labels, broken in loader:
        images.report_broken(broken[broken >= 0].tolist(), data.label_names if strict else None)
        good = broken < 0
        pixels, labels = pixels[good].to(device), labels[good].to(device)
        if len(labels):
            yield Batch(_input(pixels, data.preprocessing), classes[labels])


def _input(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """The input of the network for images (images, 3, side, side) of bytes, which may have the native size."""
    pixels = enlarge(pixels.float() / 255, preprocessing.size, preprocessing.interpolation)
    return normalize(pixels, preprocessing)


class _Files(Dataset[tuple[Tensor, int, int]]):
    """Decodes, crops and augments single files, to bytes. An unreadable file is replaced by the next readable one."""

    def __init__(
        self, images: FileImages, preprocessing: Preprocessing, augmentation: Augmentation | None = None,
        seed: int = 0, epoch: int = 0,
    ) -> None:  # fmt: skip
        self.images, self.preprocessing = images, preprocessing
        self.seed, self.epoch = seed, epoch
        self.whole = augmentation is not None and augmentation.scale < 1  # random crops need the whole image
        self.vary = None if augmentation is None else transforms(augmentation, preprocessing)
        self.side = preprocessing.native_size or preprocessing.size
        how = self.side, preprocessing.interpolation, preprocessing.crop
        if how not in images.squares:
            images.squares[how] = Squares(len(images), self.side)
        self.squares = images.squares[how]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int, int]:
        for step in range(len(self)):
            candidate = (row + step) % len(self)
            try:
                pixels = self._pixels(candidate, row)
            except ImageError:
                continue
            return pixels, self.images.labels[candidate], -1 if step == 0 else row
        raise InputError("none of the image files can be read: check the data folder.")

    def _pixels(self, candidate: int, row: int) -> Tensor:
        if self.vary is None:
            return self._square(candidate)
        image = open_image(self.images.paths[candidate]) if self.whole else self._square(candidate)
        with drawing_from(self.seed, self.epoch, row):
            return self.vary(image)

    def _square(self, candidate: int) -> Tensor:
        """The central square of a file, from the cache after the first epoch."""
        pixels = self.squares.get(candidate)
        if pixels is None:
            p = self.preprocessing
            square = resized_square(open_image(self.images.paths[candidate]), self.side, p.interpolation, p.crop)
            pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)
            self.squares.put(candidate, pixels)
        return pixels
