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
    # After an interruption, batches are augmented together with the same others as before.
    first = skip // together * together
    rows = order[: count * batch * ranks].view(count, ranks, batch)[first:, rank]
    if isinstance(data.train, FileImages):
        crops = (augmentation.scale, seed, epoch) if augmentation.scale < 1 else None
        files = _Files(data.train, data.preprocessing, crops)
        found = _read(files, workers, batch_sampler=rows.tolist(), pin_memory=device.type == "cuda")
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
        found = _read(_Files(images, data.preprocessing), workers, keep_all=False, batch_size=batch)
    for pixels, labels in found:
        # Images may have the native size of their data set.
        pixels = enlarge(pixels.to(device).float() / 255, data.preprocessing.size, data.preprocessing.interpolation)
        yield Batch(normalize(pixels, data.preprocessing), classes[labels.to(device)])


def _read(files: "_Files", workers: int, keep_all: bool = True, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of files; those that could not be read were replaced by others, which are kept or not."""
    workers = 0 if files.decoded() else workers
    loader = DataLoader(files, num_workers=workers, worker_init_fn=leave_group, **options)
    try:
        for pixels, labels, wanted, rows in loader:
            good = rows == wanted
            files.images.report_broken(wanted[~good].tolist())
            files.keep(rows.tolist(), pixels)
            if keep_all or good.all():
                yield pixels, labels
            elif good.any():
                yield pixels[good], labels[good]
    except InputError:  # that of another process contains its traceback
        raise InputError("none of the image files can be read: check the data folder.") from None


class _Files(Dataset[tuple[Tensor, int, int, int]]):
    """Decodes single files, to bytes. An unreadable file is replaced by the next readable one.

    Squares of a set that fits into memory are kept until the training ends, also those that other processes decoded.
    """

    def __init__(self, images: FileImages, preprocessing: Preprocessing, crops: Crops | None = None) -> None:
        self.images, self.preprocessing, self.crops = images, preprocessing, crops
        self.side = preprocessing.native_size or preprocessing.size
        self.keeps = crops is None and 3 * self.side**2 * len(images) <= CACHED_BYTES

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, wanted: int) -> tuple[Tensor, int, int, int]:
        for step in range(len(self)):
            row = (wanted + step) % len(self)
            try:
                return self._pixels(row, wanted), self.images.labels[row], wanted, row
            except ImageError:
                continue
        raise InputError("no image file can be read")

    def decoded(self) -> bool:
        """Whether all images are kept, but unreadable ones."""
        readable = (row for row, path in enumerate(self.images.paths) if path not in self.images.unreadable)
        return self.keeps and all(self._key(row) in self.images.squares for row in readable)

    def keep(self, rows: list[int], pixels: Tensor) -> None:
        """Keep the squares of these rows, if all fit."""
        for key, square in zip(map(self._key, rows), pixels, strict=True):
            if self.keeps and key not in self.images.squares:
                # A copy, because processes share little memory, and a part would keep its whole batch. NumPy's, because
                # PyTorch's threads would wait busily, which takes time from the processes that decode.
                self.images.squares[key] = torch.from_numpy(square.numpy().copy())

    def __getstate__(self) -> dict[str, Any]:
        """Other processes decode what is missing, and get no copy of the rest where they are not forked."""
        return {**vars(self), "images": replace(self.images, squares={})}

    def _key(self, row: int) -> tuple[int, int, str, float]:
        return row, self.side, self.preprocessing.interpolation, self.preprocessing.crop

    def _pixels(self, row: int, wanted: int) -> Tensor:
        if self.keeps and self._key(row) in self.images.squares:
            return self.images.squares[self._key(row)]
        p, file = self.preprocessing, open_file(self.images.paths[row])
        if self.crops is None:
            image = resized_square(open_image(file), self.side, p.interpolation, p.crop)
        else:
            image = resized_box(file, random_box(upright_size(file), *self.crops, wanted), self.side)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)
