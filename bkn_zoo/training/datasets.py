"""Data sets by name: images in memory or as files, split into training, validation and test images."""

import hashlib
import mmap
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bkn_zoo.errors import ImageError, InputError
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

SOURCES = {
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "cifar100": "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    "tiny_imagenet": "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
}
"""Where the official archives are."""

SPLITS = (
    ("train", "training"),
    ("val", "valid", "validation", "dev"),
    ("test", "testing"),
    ("eval", "evaluation"),
)
"""Names of folders, in any case: training, validation, test, and one for whichever of the last two is missing."""


# Sets of images


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


class Squares:
    """A cache of the central squares of `count` files as bytes, filled as files are decoded.

    Forked processes share the memory. A spawned process gets an empty cache and decodes by itself.
    """

    def __init__(self, count: int, side: int) -> None:
        self.side = side
        self.pixels: Tensor | None = None
        size = 3 * side * side
        if 0 < count * (size + 1) <= CACHED_BYTES:
            values = torch.from_numpy(np.frombuffer(mmap.mmap(-1, count * (size + 1)), np.uint8))
            self.pixels, self.known = values[: count * size].view(count, 3, side, side), values[count * size :]

    def __reduce__(self) -> Any:
        return Squares, (0, self.side)

    def get(self, row: int) -> Tensor | None:
        """The square's bytes, which must not be changed; None if the file is not in the cache."""
        return None if self.pixels is None or not self.known[row] else self.pixels[row]

    def put(self, row: int, pixels: Tensor) -> None:
        """Store the bytes of a square."""
        if self.pixels is not None:
            self.pixels[row] = pixels
            self.known[row] = 1


@dataclass(frozen=True)
class FileImages:
    """Image files: paths and labels, and a record of unreadable files.

    Attributes:
        unreadable: files that cannot be read.
        squares: central squares that have been decoded, by size, interpolation and crop.
    """

    paths: list[Path]
    labels: list[int]
    unreadable: set[Path] = field(default_factory=set)
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
        paths = [path for path, other in zip(self.paths, self.labels, strict=True) if other == label]
        if not any(path not in self.unreadable and _can_be_read(path) for path in paths):
            one = len(paths) == 1
            what = "the only image" if one else f"none of the {len(paths)} images"
            which = f"cannot be read ({paths[0]})" if one else f"can be read, such as {paths[0]}"
            raise InputError(
                f"{what} of {names[label]!r} {which}: replace {'it' if one else 'them'}, or remove the class."
            )

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


# Data sets by name

Loaded = tuple[Images, Images | None, Images | None, list[str], Preprocessing]
"""Training, validation and test images (None if there is no such set), labels and preprocessing."""


def load_data(name: str, root: str | Path, size: int | None = None, validation: float | None = 0.1) -> Data:
    """A data set by name: "cifar10", "cifar100", "tiny_imagenet", or "folder" for a tree of image files.

    Args:
        name: the data set.
        root: the folder of the official files. For "folder", a folder with one subfolder per class; or such folders in
            `train` and `val` (or `valid`, `validation`, `dev`), which is then the test set; or in `train`, `val` and
            `test`. A folder `eval` counts as `val` or `test`, whichever is missing. Otherwise there is no test set.
        size: side of the network's input; by default that of the images, or 224 for files.
        validation: share of the training images to hold out for validation, if there is no such folder; for "folder",
            of each class. None holds out no images.
    """
    root = Path(root)
    loaders: dict[str, Callable[[str, Path, int | None], Loaded]] = {
        "cifar10": _cifar, "cifar100": _cifar, "tiny_imagenet": _tiny_imagenet, "folder": _tree,
    }  # fmt: skip
    if name not in loaders:
        raise InputError(f"unknown data set {name!r}: choose one of {', '.join(loaders)}.")
    _check_root(root)
    if validation is not None and not 0 < validation < 1:
        raise InputError(f"validation is {validation}: choose a share between 0 and 1.")
    everything, chosen, test, label_names, preprocessing = loaders[name](name, root, size)
    if chosen is not None:
        return Data(name, everything, chosen, test, label_names, preprocessing, held_out=False)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(VALIDATION_SEED))
    if validation is None:
        held = order[:0]
    elif name == "folder":  # may be small; the splits of the others are published with their results
        held = _some_of_each(order, torch.as_tensor(everything.labels), validation)
    else:
        held = order[: max(round(validation * len(everything)), 1)]
    if validation is not None and not 0 < len(held) < len(everything):
        raise InputError(f"{root} has too few images to hold out any for validation: add a second image to a class.")
    is_held = torch.zeros(len(everything), dtype=torch.bool).index_fill(0, held, True)
    train, chosen = (everything[rows.nonzero().flatten()] for rows in (~is_held, is_held))
    return Data(name, train, chosen, test, label_names, preprocessing)


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: pass the folder of the data set.")


def _some_of_each(order: Tensor, labels: Tensor, share: float) -> Tensor:
    """The first images of each class in this order: its share, at least one, but not the only one."""
    by_class = order[labels[order].argsort(stable=True)].split(labels.bincount().tolist())
    return torch.cat([rows[: min(max(round(share * len(rows)), 1), len(rows) - 1)] for rows in by_class])


def fingerprint(data: Data, root: Path) -> str:
    """A hash of names and labels that identifies the training and validation images.

    Args:
        root: the folder of the images, which may be moved.
    """
    digest = hashlib.sha256()
    for images in (data.train, data.validation):
        digest.update(f"{len(images)}\n".encode())
        if isinstance(images, FileImages):
            names = (str(path).removeprefix(str(root)).lstrip(os.sep) for path in images.paths)
            for name, label in zip(names, images.labels, strict=True):
                digest.update(f"{label} {name}\n".encode(errors="surrogateescape"))
        else:
            digest.update(images.labels.cpu().numpy().tobytes())
    return digest.hexdigest()


Decoded = TypeVar("Decoded")


def decoded_once(folder: Path, name: str, root: Path, decode: Callable[[], Decoded]) -> Decoded:
    """The result of `decode`, cached in a file in `folder`, which all processes map.

    Args:
        folder: folder of decoded images.
        name: name of the file, which contains everything that the images depend on except `root`.
        root: the folder of the image files.
        decode: reads the images; returns `Data`, or tensors in dictionaries and tuples.
    """
    path = folder / f"{name}.{zlib.crc32(str(root.resolve()).encode()):08x}.pt"
    if not path.exists():
        decoded = decode()
        folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(decoded, scratch)
        os.replace(scratch, path)
    with torch.serialization.safe_globals([Data, ArrayImages, Preprocessing]):  # so that loading runs no other code
        return torch.load(path, mmap=True, weights_only=True)


# Official layouts


def _cifar(name: str, root: Path, size: int | None) -> Loaded:
    """CIFAR-10 or CIFAR-100, the files of the Python version."""
    folder, train_files, test_file, meta, labels, names = {
        "cifar10": (
            "cifar-10-batches-py", [f"data_batch_{k}" for k in range(1, 6)], "test_batch", "batches.meta",
            b"labels", b"label_names",
        ),
        "cifar100": ("cifar-100-python", ["train"], "test", "meta", b"fine_labels", b"fine_label_names"),
    }[name]  # fmt: skip

    def read(file: str, *keys: bytes) -> list[Any]:
        path = root / folder / file
        if not path.is_file():
            raise InputError(f"{path} does not exist: unpack {SOURCES[name]} in {root}.")
        try:
            with path.open("rb") as stream:
                content = _CifarUnpickler(stream, encoding="bytes").load()
            return [content[key] for key in keys]
        except KeyError as error:
            raise InputError(f"{path} is not the official file (it lacks {error}): download it again.") from None
        except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, IndexError, TypeError) as error:
            raise InputError(f"{path} is not the official file ({error}): download it again.") from None

    def images(files: list[str]) -> ArrayImages:
        parts = [read(file, b"data", labels) for file in files]
        pixels = np.concatenate([data for data, _ in parts]).reshape(-1, 3, 32, 32)
        return ArrayImages(torch.from_numpy(pixels.copy()), torch.tensor([x for _, found in parts for x in found]))

    mean, std = MEAN_STD[name]
    preprocessing = Preprocessing(size=size or 32, native_size=32, mean=mean, std=std)
    label_names = [label.decode() for label in read(meta, names)[0]]
    return images(train_files), None, images([test_file]), label_names, preprocessing


class _CifarUnpickler(pickle.Unpickler):
    """Reads the official files, which are pickles, and refuses everything that they do not need."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy", "_reconstruct")}:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def _tiny_imagenet(name: str, root: Path, size: int | None) -> Loaded:
    """The folder tiny-imagenet-200 of the official archive; its annotated validation images are the test images."""
    for file in ("wnids.txt", "words.txt", "val/val_annotations.txt"):
        if not (root / file).is_file():
            raise InputError(
                f"{root / file} does not exist: unpack {SOURCES[name]}, and pass its folder tiny-imagenet-200."
            )
    identifiers = (root / "wnids.txt").read_text().split()
    number = {identifier: k for k, identifier in enumerate(identifiers)}
    words = dict(line.split("\t", 1) for line in (root / "words.txt").read_text().splitlines() if "\t" in line)
    train = [(path, number[w]) for w in identifiers for path in sorted((root / "train" / w / "images").glob("*.JPEG"))]
    test = []
    for line in (root / "val" / "val_annotations.txt").read_text().splitlines():
        file, identifier, *_ = [*line.split("\t"), ""]
        if identifier not in number:
            raise InputError(
                f"{root}/val/val_annotations.txt has {line!r}, a class that wnids.txt lacks: unpack the archive again."
            )
        test.append((root / "val" / "images" / file, number[identifier]))
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
    starts = range(0, len(images), CHUNK)
    chunks = [images.paths[start : start + CHUNK] for start in starts]
    # Processes, because threads would wait longer for Python's lock than decoding such small images takes.
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), initializer=leave_signals_to_parent) as pool:
        decoded = (pool.map if len(chunks) > 1 else map)(_decode_chunk, chunks, [side] * len(chunks))
        with bar(len(images), "decoding images", "image") as done:
            for start, (values, readable) in zip(starts, decoded, strict=True):
                pixels[start : start + CHUNK] = torch.from_numpy(values)
                good[start : start + CHUNK] = torch.from_numpy(readable)
                done(len(values))
    images.report_broken((~good).nonzero().flatten().tolist())
    return ArrayImages(pixels[good], torch.tensor(images.labels, dtype=torch.long)[good])


def _decode_chunk(paths: list[Path], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, (images, 3, side, side), and a mask of the readable files."""
    pixels = np.zeros((len(paths), 3, side, side), dtype=np.uint8)
    good = np.zeros(len(paths), dtype=bool)
    for k, path in enumerate(paths):
        try:
            image = open_image(path)
        except ImageError:
            continue
        if image.size == (side, side):
            pixels[k] = np.asarray(image).transpose(2, 0, 1)
            good[k] = True
    return pixels, good


# Trees of files: one folder per class, in one folder or in the folders of the splits


def _tree(name: str, root: Path, size: int | None) -> Loaded:
    """Your own images, or ImageNet: the files are listed now, and read when they are needed."""
    train_root, beside = _layout(root)
    label_names = [path.name for path in _folders(train_root)]
    if not label_names:
        raise InputError(f"{train_root} has no subfolders: create one per class, with its images.")
    if len(label_names) == 1:
        raise InputError(
            f"{train_root} has only one class, {label_names[0]!r}: pass the folder that has one subfolder per class."
        )
    for path in beside:
        more = [found.name for found in _folders(path) if found.name not in label_names and image_files(found)]
        if more:
            raise InputError(
                f"{path} has classes that {train_root} lacks ({', '.join(more)}): add them there, or remove them."
            )
    passed: Counter[str] = Counter()
    trained, *others = (_list_files(path, label_names, passed) for path in (train_root, *beside))
    if passed and speaks():
        say(passed_over(root, passed))
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 224, mean=mean, std=std)
    # A single set is the test set: validation images can be held out from training, but test images cannot.
    validation, tested = [None, None, *others][-2:]
    return trained, validation, tested, label_names, preprocessing


def keep_apart(root: Path, places: Mapping[str, Path]) -> None:
    """Refuse to write into the classes of a "folder", because the next training would read it as a class.

    Args:
        root: as in `load_data`.
        places: folders to write, by the options that name them.
    """
    train_root, beside = _layout(root)
    for classes in (train_root, *beside):
        for option, place in places.items():
            if classes.resolve() in place.resolve().parents:
                raise InputError(
                    f"{place} is inside {classes} and would become a class: choose a folder outside with {option}."
                )


def _layout(root: Path) -> tuple[Path, list[Path]]:
    """The folder of the training classes, and those of validation and test, if any."""
    _check_root(root)
    found = ([path for path in _folders(root) if path.name.lower() in names] for names in SPLITS)
    train, choices, test, evaluation = found
    # They must contain folders, because a class may be called train, and test images of competitions have no labels.
    train, test, evaluation = ([path for path in paths if _folders(path)] for paths in (train, test, evaluation))
    (choices if test else test).extend(evaluation)
    for paths in (train, choices, test) if train else ():
        if len(paths) > 1:
            raise InputError(f"{root} contains {' and '.join(path.name for path in paths)}: keep only one of them.")
    return (train[0], [*choices, *test]) if train else (root, [])


def _folders(root: Path) -> list[Path]:
    """The subfolders of a folder by name, without hidden ones and those that macOS adds to archives."""
    found = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX")))
    return sorted(found, key=lambda path: path.name)


def _list_files(root: Path, label_names: list[str], passed: Counter[str]) -> FileImages:
    paths, labels = [], []
    for label, label_name in enumerate(label_names):
        others: Counter[str] = Counter()
        found = image_files(root / label_name, others)
        passed.update(others)
        if not found:
            why = f" ({passed_over(root / label_name, others)})" if others else ""
            raise InputError(f"{root / label_name} contains no images{why}: add some, or remove the class.")
        paths += [Path(name) for name in found]
        labels += [label] * len(found)
    return FileImages(paths, labels)
