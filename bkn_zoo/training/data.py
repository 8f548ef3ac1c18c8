"""Batches of tensors on the device, which depend only on the seed, the epoch and their number."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bkn_zoo.errors import ImageError, InputError
from bkn_zoo.images import Preprocessing, enlarge, normalize, open_image
from bkn_zoo.images.reading import open_file, resized_box, resized_square, upright_size
from bkn_zoo.modes import MODES
from bkn_zoo.training.augmentation import Batch, apply_policy, generator, mix, random_box, vary
from bkn_zoo.training.datasets import CACHED_BYTES, ArrayImages, Data, FileImages, Images
from bkn_zoo.training.interruption import leave_group
from bkn_zoo.training.recipes import Augmentation

# The smallest share of the area, the seed and the epoch of random crops
Crops = tuple[float, int, int]
# Images in memory augmented at a time: with small batches, launches take longer than the work
VARIED = 64


class Runtime(NamedTuple):
    """How a training runs: `workers` decode files, `quiet` prints nothing, `modes` are measured, `log` is a logger."""

    device: torch.device
    workers: int = 0
    quiet: bool = False
    modes: Sequence[str] = MODES
    log: str | None = None


def training_batches(
    data: Data, batch: int, epoch: int, seed: int, augmentation: Augmentation, device: torch.device,
    skip: int = 0, rank: int = 0, ranks: int = 1, workers: int = 0,
) -> Iterator[Batch]:  # fmt: skip
    """The full, augmented batches of one epoch, starting with number `skip`, for process `rank` of `ranks`."""
    order = torch.randperm(len(data.train), generator=generator("cpu", seed, epoch))
    count = len(order) // (batch * ranks)
    classes = torch.eye(len(data.label_names), device=device)
    varied, together = augmentation, max(VARIED // batch, 1)
    if isinstance(data.train, FileImages):
        # Random crops are taken from the whole files.
        varied, together = replace(augmentation, scale=1.0), 1
    # Batches are augmented in the same company after an interruption.
    first = skip // together * together
    rows = order[: count * batch * ranks].view(count, ranks, batch)[first:, rank]
    if isinstance(data.train, FileImages):
        crops = (augmentation.scale, seed, epoch) if augmentation.scale < 1 else None
        loader = DataLoader(
            _Files(data.train, data.preprocessing, crops), batch_sampler=rows.tolist(), num_workers=workers,
            pin_memory=device.type == "cuda", worker_init_fn=leave_group,
        )  # fmt: skip
        found = _read(loader, data.train)
    else:
        several = (chosen.flatten() for chosen in rows.to(data.train.images.device).split(together))
        found = ((data.train.images[chosen], data.train.labels[chosen]) for chosen in several)
    for number, (pixels, labels) in zip(range(first, count, together), found, strict=True):
        pixels = pixels.to(device, non_blocking=True)
        if augmentation.policy:
            pixels = apply_policy(pixels, augmentation.policy, seed, epoch, number, rank, 1)
        pixels = pixels.float() / 255
        targets = classes[labels.to(device, non_blocking=True)]
        source = generator(device, seed, epoch, number, rank)
        images = normalize(vary(pixels, varied, data.preprocessing, source), data.preprocessing)
        parts = zip(images.split(batch), targets.split(batch), strict=True)
        for own, part in enumerate(parts, start=number):
            if own >= skip:
                yield mix(*part, augmentation, seed, epoch, own, rank)


def evaluation_batches(
    data: Data, images: Images, batch: int, device: torch.device, workers: int = 0
) -> Iterator[Batch]:  # fmt: skip
    """All images in order, preprocessed as for inference. Unreadable files are left out."""
    classes = torch.eye(len(data.label_names), device=device)
    if isinstance(images, ArrayImages):
        found: Any = zip(images.images.split(batch), images.labels.split(batch), strict=True)
    else:
        files = _Files(images, data.preprocessing)
        loader = DataLoader(files, batch_size=batch, num_workers=workers, worker_init_fn=leave_group)
        found = _read(loader, images, keep_all=False)
    for pixels, labels in found:
        # Images may have the native size of their data set.
        pixels = enlarge(pixels.to(device).float() / 255, data.preprocessing.size, data.preprocessing.interpolation)
        yield Batch(normalize(pixels, data.preprocessing), classes[labels.to(device)])


def _read(loader: Any, images: FileImages, keep_all: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of files; those that could not be read were replaced by others, which are kept or not."""
    for pixels, labels, broken in loader:
        images.report_broken(broken[broken >= 0].tolist())
        good = broken < 0
        if keep_all or good.all():
            yield pixels, labels
        elif good.any():
            yield pixels[good], labels[good]


class _Files(Dataset[tuple[Tensor, int, int]]):
    """Decodes single files, to bytes. An unreadable file is replaced by the next readable one."""

    def __init__(self, images: FileImages, preprocessing: Preprocessing, crops: Crops | None = None) -> None:
        self.images, self.preprocessing, self.crops = images, preprocessing, crops
        self.side = preprocessing.native_size or preprocessing.size
        self.keep = 3 * self.side**2 * len(images) <= CACHED_BYTES

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
        p = self.preprocessing
        key = candidate, self.side, p.interpolation, p.crop
        if self.crops is None and key in self.images.squares:
            return self.images.squares[key]
        file = open_file(self.images.paths[candidate])
        if self.crops is None:
            image = resized_square(open_image(file), self.side, p.interpolation, p.crop)
        else:
            image = resized_box(file, random_box(upright_size(file), *self.crops, row), self.side)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if self.keep and self.crops is None:  # until the training ends; in a worker, until the epoch does
            self.images.squares[key] = pixels
        return pixels
