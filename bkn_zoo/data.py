"""Data sets on disk -> batches of tensors on the device.

Small data sets (CIFAR, Tiny-ImageNet) live on the device as bytes and are augmented there, a batch at a time. Trees of
image files (ImageNet, one's own) stream through a DataLoader. Either way a batch depends on nothing but the seed, the
epoch and its number, so that a training that was interrupted goes on with the very same batches.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bkn_zoo.augmentation import Augmentation, Batch, generator, mix, vary
from bkn_zoo.config import Preprocessing
from bkn_zoo.errors import InputError

VALIDATION_SEED = 2018  # the split is the same for every run, whatever the run's own seed
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow raises on a bad file
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}

MEAN_STD = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class ArrayImages:
    """A data set in memory: bytes (images, 3, side, side) and labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> "ArrayImages":
        return ArrayImages(self.images[rows], self.labels[rows])

    def to(self, device: torch.device) -> "ArrayImages":
        return ArrayImages(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class FileImages:
    """A data set of image files: paths and labels, and which of the files turned out to be unreadable."""

    paths: list[Path]
    labels: list[int]
    unreadable: set[Path] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> "FileImages":
        chosen = rows.tolist()
        return FileImages([self.paths[i] for i in chosen], [self.labels[i] for i in chosen])

    def to(self, device: torch.device) -> "FileImages":
        return self


Images = ArrayImages | FileImages


@dataclass(frozen=True)
class Data:
    """A data set, split: choices are made on `validation`, and `test` is for the number that is published."""

    name: str
    train: Images
    validation: Images
    test: Images
    label_names: list[str]
    preprocessing: Preprocessing

    def to(self, device: torch.device) -> "Data":
        splits = {name: getattr(self, name).to(device) for name in ("train", "validation", "test")}
        return replace(self, **splits)


Loader = Callable[[str, Path, int | None], tuple[Images, Images | None, list[str], Preprocessing]]


def load_data(name: str, root: str | Path, size: int | None = None, validation: float = 0.1) -> Data:
    """A data set by name: "cifar10", "cifar100", "tiny_imagenet", or "folder" for a tree of image files.

    Args:
        name: which.
        root: the folder that holds the official files. For "folder", one with a folder per class in it, or in its
            `train` and `val` (which is then the test set).
        size: side of the network's input; by default the images' own, or 224 for files.
        validation: share of the training images that is set apart for choices.
    """
    root = Path(root)
    loaders: dict[str, Loader] = {
        "cifar10": _cifar,
        "cifar100": _cifar,
        "tiny_imagenet": _tiny_imagenet,
        "folder": _folder,
    }
    if name not in loaders:
        raise InputError(f"unknown data set {name!r}: choose one of {', '.join(loaders)}.")
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: name the one that holds the data set.")
    if not 0 < validation < 1:
        raise InputError(f"validation is {validation}, but must be a share between 0 and 1.")
    everything, test, label_names, preprocessing = loaders[name](name, root, size)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(VALIDATION_SEED))
    held_out = max(round(validation * len(everything)), 1)
    if held_out >= len(everything):
        raise InputError(f"{root} holds too few images to set any apart for validation: add some.")
    held, kept = order[:held_out].sort().values, order[held_out:].sort().values
    train, chosen = everything[kept], everything[held]
    return Data(name, train, chosen, chosen if test is None else test, label_names, preprocessing)


def _cifar(name: str, root: Path, size: int | None) -> tuple[ArrayImages, ArrayImages, list[str], Preprocessing]:
    folder, train_files, test_file, meta, labels, names = {
        "cifar10": (
            "cifar-10-batches-py", [f"data_batch_{k}" for k in range(1, 6)], "test_batch", "batches.meta",
            b"labels", b"label_names",
        ),
        "cifar100": ("cifar-100-python", ["train"], "test", "meta", b"fine_labels", b"fine_label_names"),
    }[name]  # fmt: skip

    def read(file: str) -> dict[bytes, Any]:
        path = root / folder / file
        if not path.is_file():
            raise InputError(f"{path} does not exist: put the official files of {name} (python version) there.")
        try:
            with path.open("rb") as stream:
                return _CifarUnpickler(stream, encoding="bytes").load()
        except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, IndexError, TypeError) as error:
            raise InputError(f"{path} is not the official file ({error}): download it again.") from None

    def images(files: list[str]) -> ArrayImages:
        parts = [read(file) for file in files]
        pixels = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
        return ArrayImages(torch.from_numpy(pixels.copy()), torch.tensor([x for part in parts for x in part[labels]]))

    mean, std = MEAN_STD[name]
    preprocessing = Preprocessing(size=size or 32, native_size=32, mean=mean, std=std)
    label_names = [label.decode() for label in read(meta)[names]]
    return images(train_files), images([test_file]), label_names, preprocessing


class _CifarUnpickler(pickle.Unpickler):
    """Reads the official files, which are pickles, and refuses whatever those do not need."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy", "_reconstruct")}:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _tiny_imagenet(
    name: str, root: Path, size: int | None
) -> tuple[ArrayImages, ArrayImages, list[str], Preprocessing]:
    for file in ("wnids.txt", "words.txt", "val/val_annotations.txt"):
        if not (root / file).is_file():
            raise InputError(
                f"{root / file} does not exist: name the folder tiny-imagenet-200 of the official archive."
            )
    identifiers = (root / "wnids.txt").read_text().split()
    number = {identifier: k for k, identifier in enumerate(identifiers)}
    words = dict(line.split("\t", 1) for line in (root / "words.txt").read_text().splitlines() if "\t" in line)
    train = [(path, number[w]) for w in identifiers for path in sorted((root / "train" / w / "images").glob("*.JPEG"))]
    rows = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    test = [(root / "val" / "images" / row[0], number[row[1]]) for row in rows]
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 64, native_size=64, mean=mean, std=std)
    label_names = [words.get(w, w).split(",")[0] for w in identifiers]
    return _decode_all(train, 64), _decode_all(test, 64), label_names, preprocessing


def _decode_all(files: list[tuple[Path, int]], side: int) -> ArrayImages:
    pixels = torch.empty(len(files), 3, side, side, dtype=torch.uint8)

    def decode(k: int) -> bool:
        try:
            with Image.open(files[k][0]) as image:
                pixels[k] = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        except (*UNREADABLE, RuntimeError):  # torch's word for an image of another size
            return False
        return True

    with ThreadPoolExecutor() as pool:
        good = torch.tensor(list(pool.map(decode, range(len(files)))), dtype=torch.bool)
    every = FileImages([path for path, _ in files], [label for _, label in files])
    _report_broken(every, (~good).nonzero().flatten())
    return ArrayImages(pixels[good], torch.tensor(every.labels)[good])


def _folder(name: str, root: Path, size: int | None) -> tuple[FileImages, FileImages | None, list[str], Preprocessing]:
    # Folders within `train`, since a class may be called that, too.
    has_split = (root / "train").is_dir() and any(path.is_dir() for path in (root / "train").iterdir())
    train_root = root / "train" if has_split else root
    label_names = sorted(path.name for path in train_root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not label_names:
        raise InputError(f"{train_root} holds no folders: make one per class, with its images in it.")
    test_root = next((root / split for split in ("val", "test") if (root / split).is_dir()), None)
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 224, mean=mean, std=std)
    test = _list_files(test_root, label_names) if has_split and test_root is not None else None
    return _list_files(train_root, label_names), test, label_names, preprocessing


def _list_files(root: Path, label_names: list[str]) -> FileImages:
    paths, labels = [], []
    for label, label_name in enumerate(label_names):
        found = sorted(p for p in (root / label_name).rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
        if not found:
            raise InputError(f"{root / label_name} holds no images: add some, or remove the class.")
        paths += found
        labels += [label] * len(found)
    return FileImages(paths, labels)


def training_batches(
    data: Data, batch: int, epoch: int, seed: int, augmentation: Augmentation, device: torch.device,
    skip: int = 0, rank: int = 0, ranks: int = 1, workers: int = 0,
) -> Iterator[Batch]:  # fmt: skip
    """The augmented batches of one epoch from number `skip` on; of `ranks` processes, those of process `rank`.

    Images that do not fill a last batch sit the epoch out, so that every batch splits into the same groups.
    """
    order = torch.randperm(len(data.train), generator=generator("cpu", seed, epoch))
    count = len(order) // (batch * ranks)
    if not count:
        raise InputError(f"{len(data.train)} training images do not fill a batch of {batch * ranks}: make it smaller.")
    rows = order[: count * batch * ranks].view(count, ranks, batch)[skip:, rank]
    classes = len(data.label_names)
    if isinstance(data.train, ArrayImages):
        for number, chosen in enumerate(rows.to(data.train.images.device), start=skip):
            pixels = data.train.images[chosen].float() / 255
            source = generator(device, seed, epoch, number, rank)
            targets = F.one_hot(data.train.labels[chosen], classes).float()
            images = normalize(vary(pixels, augmentation, data.preprocessing, source), data.preprocessing)
            yield mix(images, targets, augmentation, source)
        return
    files = _Files(data.train, data.preprocessing, augmentation, seed, epoch)
    loader = DataLoader(files, batch_sampler=rows.tolist(), num_workers=workers, pin_memory=device.type == "cuda")
    for number, (pixels, labels, broken) in enumerate(loader, start=skip):
        _report_broken(data.train, broken)
        source = generator(device, seed, epoch, number, rank)
        targets = F.one_hot(labels, classes).float().to(device)
        images = normalize(pixels.to(device, non_blocking=True), data.preprocessing)
        yield mix(images, targets, augmentation, source)


def evaluation_batches(
    data: Data, images: Images, batch: int, device: torch.device, workers: int = 0
) -> Iterator[Batch]:
    """All images in order, as inference would preprocess them."""
    classes = len(data.label_names)
    if isinstance(images, ArrayImages):
        for start in range(0, len(images), batch):
            pixels = images.images[start : start + batch].to(device).float() / 255
            labels = images.labels[start : start + batch].to(device)
            pixels = _resize(pixels, data.preprocessing.size)
            yield Batch(normalize(pixels, data.preprocessing), F.one_hot(labels, classes).float())
        return
    loader = DataLoader(_Files(images, data.preprocessing), batch_size=batch, num_workers=workers)
    for pixels, labels, broken in loader:
        _report_broken(images, broken)
        good = broken < 0
        pixels, labels = pixels[good].to(device), labels[good].to(device)
        yield Batch(normalize(pixels, data.preprocessing), F.one_hot(labels, classes).float())


def _report_broken(images: FileImages, broken: Tensor) -> None:
    """Name and count every unreadable file once, however many epochs meet it."""
    for row in broken[broken >= 0].tolist():
        path = images.paths[row]
        if path not in images.unreadable:
            images.unreadable.add(path)
            count = f"{len(images.unreadable)} so far"
            warnings.warn(f"{path} cannot be read as an image: it is left out ({count})", RuntimeWarning, stacklevel=3)


class _Files(Dataset[tuple[Tensor, int, int]]):
    """Decodes, crops and varies single files; a file that cannot be read gives way to the next that can."""

    def __init__(
        self, images: FileImages, preprocessing: Preprocessing, augmentation: Augmentation | None = None,
        seed: int = 0, epoch: int = 0,
    ) -> None:  # fmt: skip
        self.images, self.preprocessing, self.augmentation = images, preprocessing, augmentation
        self.seed, self.epoch = seed, epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int, int]:
        for step in range(len(self)):
            candidate = (row + step) % len(self)
            try:
                with Image.open(self.images.paths[candidate]) as image:
                    pixels = self._square(image.convert("RGB"))
            except UNREADABLE:
                continue
            if self.augmentation is not None:
                source = generator("cpu", self.seed, self.epoch, row)
                pixels = vary(pixels[None], self.augmentation, self.preprocessing, source)[0]
            else:
                pixels = _resize(pixels[None], self.preprocessing.size)[0]
            return pixels, self.images.labels[candidate], -1 if step == 0 else row
        raise InputError("none of the image files can be read: check the data folder.")

    def _square(self, image: Image.Image) -> Tensor:
        """The central square, at the network's size (a little larger where training will crop or turn it)."""
        size = self.preprocessing.native_size or self.preprocessing.size
        resampled = self.augmentation is not None and (self.augmentation.scale < 1 or self.augmentation.rotate)
        if resampled and self.preprocessing.native_size is None:
            size = round(size * 8 / 7)
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        square = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        return torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 255


def _resize(pixels: Tensor, size: int) -> Tensor:
    if pixels.shape[-1] == size:
        return pixels
    return F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    mean = torch.tensor(preprocessing.mean, device=pixels.device).view(1, 3, 1, 1)
    std = torch.tensor(preprocessing.std, device=pixels.device).view(1, 3, 1, 1)
    return (pixels - mean) / std
