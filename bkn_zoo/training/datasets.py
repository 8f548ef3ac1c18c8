"""Data sets by name: images in memory or as files, split into training, validation and test images."""

import csv
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bkn_zoo.checkpoints.files import check_folder
from bkn_zoo.cores import usable_cores
from bkn_zoo.errors import ImageError, InputError, counted, did_you_mean
from bkn_zoo.images import Preprocessing, image_files, open_image, passed_over
from bkn_zoo.progress import bar, say, speaks
from bkn_zoo.training.interruption import leave_signals_to_parent

VALIDATION_SEED = 2018  # the split is the same for every run, independent of its seed
CACHED_BYTES = 2**30  # per set of files; larger sets are not cached
CHUNK = 1000  # images decoded by a process at a time

MEAN_STD = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

TINY_IMAGENET = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
# Names of folders, in any case
SPLITS = (("train", "training"), ("val", "valid", "validation", "dev", "eval"), ("test", "testing"))


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


@dataclass(frozen=True)
class FileImages:
    """Image files, those that cannot be read, and the decoded squares of a set that fits into memory."""

    paths: list[Path]
    labels: list[int]
    unreadable: set[Path] = field(default_factory=set)
    squares: dict[Any, Tensor] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> "FileImages":
        chosen = rows.tolist()
        return FileImages([self.paths[i] for i in chosen], [self.labels[i] for i in chosen])

    def __add__(self, others: "FileImages") -> "FileImages":
        return FileImages(self.paths + others.paths, self.labels + others.labels)

    def report_broken(self, rows: list[int]) -> None:
        """Report and count every unreadable file once."""
        for path in (self.paths[row] for row in rows):
            if path not in self.unreadable:
                self.unreadable.add(path)
                say(f"{path} cannot be read as an image and is left out ({len(self.unreadable)} so far)")


Images = ArrayImages | FileImages


@dataclass(frozen=True)
class Data:
    """A data set with its splits. If `held_out`, the validation images are a share of the training images."""

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
        moved: dict[str, Any] = {}
        for name in ("train", "validation", "test"):
            if isinstance(images := getattr(self, name), ArrayImages):
                moved[name] = ArrayImages(images.images.to(device), images.labels.to(device))
        return replace(self, **moved)


# Training, validation and test images (None if there is no such set), labels and preprocessing
Loaded = tuple[Images, Images | None, Images | None, list[str], Preprocessing]


def load_data(
    name: str,
    root: str | Path,
    size: int | None = None,
    validation: float | None = 0.1,
    labels: Path | None = None,
    label_names: Sequence[str] = (),
) -> Data:
    """A data set by name: "cifar10", "cifar100", "tiny_imagenet", or "folder" for a tree of image files.

    Args:
        root: the folder of the official files. For "folder", a folder with one subfolder per class; or such folders in
            `train` and `val`, which is then the test set; or in `train`, `val` and `test`.
        validation: share of the training images (for "folder", of each class) to hold out if there is no such folder.
        labels: for "folder", a CSV or JSON Lines file that lists files, labels and splits, in place of subfolders.
        label_names: the classes that it may use; by default those of its training images.
    """
    root = Path(root)
    loaders: dict[str, Callable[[str, Path, int | None], Loaded]] = {
        "cifar10": _cifar, "cifar100": _cifar, "tiny_imagenet": _tiny_imagenet, "folder": _tree,
    }  # fmt: skip
    if name not in loaders:
        raise InputError(f"unknown data set {name!r}: choose one of {', '.join(loaders)}.")
    if labels and name != "folder":
        raise InputError(f"--labels is for folders of images, not for {name}: omit it, or add --dataset folder.")
    check_folder(root)
    loaded = _listed(labels, root, size, label_names) if labels else loaders[name](name, root, size)
    everything, chosen, test, names, preprocessing = loaded
    # A file of labels for test images only.
    if chosen is None and not len(everything):
        chosen = everything
    if chosen is not None:
        return Data(name, everything, chosen, test, names, preprocessing, held_out=False)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(VALIDATION_SEED))
    if validation is None:
        held = order[:0]
    elif name == "folder":
        # It may be small: a share of each class, at least one image, but not the only one.
        labelled = torch.as_tensor(everything.labels)
        by_class = order[labelled[order].argsort(stable=True)].split(labelled.bincount().tolist())
        held = torch.cat([rows[: min(max(round(validation * len(rows)), 1), len(rows) - 1)] for rows in by_class])
    else:
        held = order[: max(round(validation * len(everything)), 1)]
    if validation is not None and not 0 < len(held) < len(everything):
        raise InputError(f"{root} has too few images to hold out any for validation: add a second image to a class.")
    is_held = torch.zeros(len(everything), dtype=torch.bool).index_fill(0, held, True)
    train, chosen = (everything[rows.nonzero().flatten()] for rows in (~is_held, is_held))
    return Data(name, train, chosen, test, names, preprocessing)


def class_weights(data: Data) -> Tensor:
    """The weight of an image of each class with which all classes count the same; the mean over all images is 1."""
    counts = torch.as_tensor(data.train.labels).bincount(minlength=len(data.label_names))
    return counts.sum() / (len(counts) * counts.clamp_min(1))


def fingerprint(data: Data, root: Path, listed: bool = False) -> str:
    """A hash of labels and paths below `root`, and of class names where a file of labels has `listed` the images."""
    digest = hashlib.sha256("\n".join(data.label_names).encode() if listed else b"")
    for images in (data.train, data.validation):
        digest.update(f"{len(images)}\n".encode())
        if isinstance(images, FileImages):
            names = (str(path).removeprefix(str(root)).lstrip(os.sep) for path in images.paths)
            for name, label in zip(names, images.labels, strict=True):
                digest.update(f"{label} {name}\n".encode(errors="surrogateescape"))
        else:
            digest.update(images.labels.cpu().numpy().tobytes())
    return digest.hexdigest()


def _cifar(name: str, root: Path, size: int | None) -> Loaded:
    """CIFAR-10 or CIFAR-100, the files of the Python version. They are pickles; torchvision compares their hashes."""
    from torchvision.datasets import CIFAR10, CIFAR100

    kind = CIFAR10 if name == "cifar10" else CIFAR100
    try:
        trained, tested = (kind(root, train=part) for part in (True, False))
    except (RuntimeError, OSError):
        folder = root / kind.base_folder
        raise InputError(f"{folder} lacks official files, or they differ: unpack {kind.url} in {root}.") from None
    train, test = (
        ArrayImages(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in (trained, tested)
    )
    mean, std = MEAN_STD[name]
    preprocessing = Preprocessing(size=size or 32, native_size=32, mean=mean, std=std)
    return train, None, test, list(trained.classes), preprocessing


def _tiny_imagenet(name: str, root: Path, size: int | None) -> Loaded:
    """The folder tiny-imagenet-200 of the official archive; its annotated validation images are the test images."""
    if not (root / "wnids.txt").is_file():
        raise InputError(f"{root}/wnids.txt does not exist: unpack {TINY_IMAGENET}, and pass its folder.")
    identifiers = (root / "wnids.txt").read_text().split()
    number = {identifier: k for k, identifier in enumerate(identifiers)}
    words = dict(line.split("\t", 1) for line in (root / "words.txt").read_text().splitlines() if "\t" in line)
    train = [(path, number[w]) for w in identifiers for path in sorted((root / "train" / w / "images").glob("*.JPEG"))]
    rows = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    test = [(root / "val" / "images" / file, number[identifier]) for file, identifier, *_ in rows]
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 64, native_size=64, mean=mean, std=std)
    # The first of the synonyms, or all of them if two classes share the first.
    first = [words.get(w, w).split(",")[0] for w in identifiers]
    label_names = [words.get(w, w) if first.count(n) > 1 else n for w, n in zip(identifiers, first, strict=True)]
    return _decode_all(train, 64), None, _decode_all(test, 64), label_names, preprocessing


def _decode_all(files: list[tuple[Path, int]], side: int) -> ArrayImages:
    """Images of side x side. Unreadable images, and those of another size, are reported and left out."""
    images = FileImages([path for path, _ in files], [label for _, label in files])
    pixels = torch.empty(len(images), 3, side, side, dtype=torch.uint8)
    good = torch.zeros(len(images), dtype=torch.bool)
    # Processes, because threads would wait longer for Python's lock than decoding such small images takes.
    pool = ProcessPoolExecutor(min(16, usable_cores()), initializer=leave_signals_to_parent)
    with pool, bar(len(images), "decoding images", "image") as done:
        decode = map if len(images) <= CHUNK else partial(pool.map, chunksize=CHUNK)
        for row, found in enumerate(decode(_decode, images.paths, repeat(side))):
            if found is not None:
                pixels[row], good[row] = torch.from_numpy(found), True
            done(1)
    images.report_broken((~good).nonzero().flatten().tolist())
    return ArrayImages(pixels[good], torch.tensor(images.labels, dtype=torch.long)[good])


def _decode(path: Path, side: int) -> np.ndarray | None:
    """Pixels (3, side, side), or None."""
    try:
        image = open_image(path)
    except ImageError:
        return None
    return np.asarray(image).transpose(2, 0, 1).copy() if image.size == (side, side) else None


def _tree(name: str, root: Path, size: int | None) -> Loaded:
    """Your own images, or ImageNet: the files are listed now, and read when they are needed."""
    train_root, beside = _layout(root)
    label_names = [path.name for path in _folders(train_root)]
    if not label_names:
        raise InputError(f"{train_root} has no subfolders: create one per class, with its images.")
    if len(label_names) == 1:
        told = f"{train_root} has only one class, {label_names[0]!r}"
        raise InputError(f"{told}: pass the folder that has one subfolder per class.")
    for path in beside:
        more = [found.name for found in _folders(path) if found.name not in label_names and image_files(found)]
        if more:
            told = f"{path} has classes that {train_root} lacks ({', '.join(more)})"
            raise InputError(f"{told}: add them there, or remove them.")
    passed: Counter[str] = Counter()
    splits = [_list_files(path, label_names, passed) for path in (train_root, *beside)]
    if passed and speaks():
        say(passed_over(root, passed))
    return _loaded(splits, label_names, size)


def _loaded(splits: Sequence[list[tuple[str, Path]]], label_names: list[str], size: int | None) -> Loaded:
    """Data from the labels and paths of each split, of which the first is for training."""
    index = {name: k for k, name in enumerate(label_names)}
    trained, *others = (FileImages([path for _, path in rows], [index[name] for name, _ in rows]) for rows in splits)
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 224, mean=mean, std=std)
    # A single set is the test set: validation images can be held out from training, but test images cannot.
    validation, tested = [None, None, *others][-2:]
    return trained, validation, tested, label_names, preprocessing


def _listed(file: Path, root: Path, size: int | None, known: Sequence[str]) -> Loaded:
    """Images of a folder with the labels and splits of a file, in the order of a folder with subfolders."""
    splits: tuple[list[tuple[str, Path]], ...] = ([], [], [])
    numbers: dict[Path, int] = {}
    for number, row in enumerate(_rows(file), start=1):
        name, label = str(row.get("file") or row.get("file_name") or ""), row.get("label")
        label, split = "" if label is None else str(label), str(row.get("split") or "train").lower()
        which = next((k for k, names in enumerate(SPLITS) if split in names), None)
        inside = os.path.relpath(os.path.abspath(root / name), os.path.abspath(root))
        path, wrong = root / inside, ""
        if not name or not label:
            wrong = "has no file (or file_name) and label: add these columns"
        elif inside.split(os.sep)[0] == os.pardir:
            wrong = f"names {name}, which is outside {root}: move the image there"
        elif path in numbers:
            wrong = f"names {name} again, after row {numbers[path]}: remove one of them"
        elif not path.is_file():
            wrong = f"names {path}, which does not exist: correct the path, which is relative to the data folder"
        elif which is None:
            wrong = f"has the split {split!r}: use train, val or test"
        if wrong or which is None:
            raise InputError(f"{file}: row {number} {wrong}.")
        numbers[path] = number
        splits[which].append((label, path))
    names = list(known) or sorted({label for label, _ in splits[0]})
    if len(names) < 2:
        raise InputError(f"{file} has training images of {counted(len(names), 'class')}: add rows of others.")
    index = {name: k for k, name in enumerate(names)}
    for label, path in (row for rows in splits for row in rows if row[0] not in index):
        close = did_you_mean(label, names)
        raise InputError(f"{file}: row {numbers[path]} has the unknown class {label!r}{close}: correct or remove it.")
    first, *others = (sorted(rows, key=lambda row: (index[row[0]], row[1].parts)) for rows in splits)
    return _loaded([first, *filter(None, others)], names, size)


def _rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a CSV or JSON Lines file."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            if file.suffix.lower() == ".csv":
                return list(csv.DictReader(lines))
            return [dict(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file} cannot be read as CSV or JSON Lines ({reason}): correct --labels.") from None


def keep_apart(root: Path, places: Mapping[str, Path]) -> None:
    """Refuse to write `places`, by options, into the classes of a "folder": the next training would read a class."""
    train_root, beside = _layout(root)
    for classes, (option, place) in product((train_root, *beside), places.items()):
        if classes.resolve() in place.resolve().parents:
            told = f"{place} is inside {classes} and would become a class"
            raise InputError(f"{told}: choose a folder outside with {option}.")


def _layout(root: Path) -> tuple[Path, list[Path]]:
    """The folder of the training classes, and those of validation and test, if any."""
    # They must contain folders, because a class may be called train, and test images of competitions have no labels.
    train, choices, test = (
        [path for path in _folders(root) if path.name.lower() in names and _folders(path)] for names in SPLITS
    )
    for paths in (train, choices, test) if train else ():
        if len(paths) > 1:
            raise InputError(f"{root} contains {' and '.join(path.name for path in paths)}: keep only one of them.")
    return (train[0], [*choices, *test]) if train else (root, [])


def _folders(root: Path) -> list[Path]:
    """The subfolders of a folder by name, without hidden ones and those that macOS adds to archives."""
    found = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX")))
    return sorted(found, key=lambda path: path.name)


def _list_files(root: Path, label_names: list[str], passed: Counter[str]) -> list[tuple[str, Path]]:
    rows = []
    for label in label_names:
        others: Counter[str] = Counter()
        found = image_files(root / label, others)
        passed.update(others)
        if not found:
            why = f" ({passed_over(root / label, others)})" if others else ""
            raise InputError(f"{root / label} contains no images{why}: add some, or remove the class.")
        rows += [(label, Path(name)) for name in found]
    return rows
