"""Data sets on disk, in their official layouts, and how each is split.

Small ones (CIFAR, Tiny-ImageNet) are decoded into memory; of trees of image files (ImageNet, one's own) the files are
listed.
"""

import hashlib
import os
import pickle
import signal
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

VALIDATION_SEED = 2018  # the split is the same for every run, whatever the run's own seed
CHUNK = 1000  # images that a process decodes at a time

SPLITS = (
    ("train", "training"),
    ("val", "valid", "validation", "dev"),
    ("test", "testing"),
    ("eval", "evaluation"),
)
"""Names of folders, in any case: to train on, to choose by, to test by, and either of these, whichever is missing."""

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

    def __add__(self, others: "ArrayImages") -> "ArrayImages":
        return ArrayImages(torch.cat([self.images, others.images]), torch.cat([self.labels, others.labels]))

    def to(self, device: torch.device) -> "ArrayImages":
        return ArrayImages(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class FileImages:
    """A data set of image files: paths and labels, and what turned out about them.

    Attributes:
        unreadable: files that cannot be read.
        not_lost: classes that have such files, and others.
    """

    paths: list[Path]
    labels: list[int]
    unreadable: set[Path] = field(default_factory=set)
    not_lost: set[int] = field(default_factory=set)

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
        """Name and count every unreadable file once, however many epochs meet it.

        Args:
            names: of the classes, to refuse one of which no file can be read.
        """
        for row in rows:
            path = self.paths[row]
            if path not in self.unreadable:
                self.unreadable.add(path)
                say(f"{path} cannot be read as an image: it is left out ({len(self.unreadable)} so far)")
                if names is not None:
                    self._refuse_lost_class(self.labels[row], names)

    def _refuse_lost_class(self, label: int, names: Sequence[str]) -> None:
        if label in self.not_lost:
            return
        paths = [path for path, other in zip(self.paths, self.labels, strict=True) if other == label]
        if not any(map(_can_be_read, paths)):
            raise InputError(
                f"none of the {len(paths)} images of {names[label]!r} can be read, such as {paths[0]}: replace them, "
                "or remove the class."
            )
        self.not_lost.add(label)

    def say_left_out(self, kind: str) -> None:
        """In the end: how many of these images, all of this kind if any, could not be read."""
        if self.unreadable:
            images = f"{kind} images" if kind else "images"
            say(f"{len(self.unreadable)} of {len(self)} {images} could not be read, and were left out")


def _can_be_read(path: Path) -> bool:
    try:
        open_image(path)
    except ImageError:
        return False
    return True


Images = ArrayImages | FileImages


@dataclass(frozen=True)
class Data:
    """A data set, split: choices are made on `validation`, and `test`, if any, is for the number that is published.

    Attributes:
        held_out: whether the validation images are a share of the training images, rather than a set of their own.
    """

    name: str
    train: Images
    validation: Images
    test: Images | None
    label_names: list[str]
    preprocessing: Preprocessing
    held_out: bool = True

    def split(self, name: str) -> Images:
        """By name: "train", "validation", "test" or "all" of them."""
        if name == "all":
            parts: list[Any] = [images for images in (self.train, self.validation, self.test) if images is not None]
            return sum(parts[1:], parts[0])
        images = getattr(self, name)
        if images is None:
            raise InputError("the data have no test images of their own: measure the validation images, or all.")
        return images

    def to(self, device: torch.device) -> "Data":
        splits = {name: getattr(self, name) for name in ("train", "validation", "test")}
        return replace(self, **{name: images and images.to(device) for name, images in splits.items()})


Decoded = TypeVar("Decoded")


def decoded_once(folder: Path, name: str, root: Path, decode: Callable[[], Decoded]) -> Decoded:
    """What `decode` gives, from a file in `folder` that is written if it is not there, and that all processes map.

    Args:
        folder: where decoded images are kept.
        name: of these, which says all that they depend on beside `root`.
        root: the folder of the image files.
        decode: reads them: `Data`, or tensors in dictionaries and tuples.
    """
    path = folder / f"{name}.{zlib.crc32(str(root.resolve()).encode()):08x}.pt"
    if not path.exists():
        decoded = decode()
        folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(decoded, scratch)
        os.replace(scratch, path)
    with torch.serialization.safe_globals([Data, ArrayImages, Preprocessing]):  # so that nothing else in it is run
        return torch.load(path, mmap=True, weights_only=True)


Loaded = tuple[Images, Images | None, Images | None, list[str], Preprocessing]
"""Images to train on, and for validation and test, None where there are none of their own; labels; preprocessing."""

Loader = Callable[[str, Path, int | None], Loaded]


def load_data(name: str, root: str | Path, size: int | None = None, validation: float | None = 0.1) -> Data:
    """A data set by name: "cifar10", "cifar100", "tiny_imagenet", or "folder" for a tree of image files.

    Args:
        name: which.
        root: the folder that holds the official files. For "folder", one with a folder per class in it, or in its
            `train` and `val` (or `valid`, `validation`, `dev`), which is then the test set; or in `train`, `val` and
            `test`. `eval` is whichever of the two is missing. Without any of these there is no test set.
        size: side of the network's input; by default the images' own, or 224 for files.
        validation: share of the training images that is set apart for choices, where no folder is; of a "folder", of
            each class. None sets none apart.
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
    _check_root(root)
    if validation is not None and not 0 < validation < 1:
        raise InputError(f"validation is {validation}, but must be a share between 0 and 1.")
    everything, chosen, test, label_names, preprocessing = loaders[name](name, root, size)
    if chosen is not None:
        return Data(name, everything, chosen, test, label_names, preprocessing, held_out=False)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(VALIDATION_SEED))
    if validation is None:
        held = order[:0]
    elif name == "folder":  # may be small; the splits of the others were published with their figures
        held = _some_of_each(order, torch.as_tensor(everything.labels), validation)
    else:
        held = order[: max(round(validation * len(everything)), 1)]
    if validation is not None and not 0 < len(held) < len(everything):
        raise InputError(
            f"{root} holds too few images to set any apart for validation: add a second one of some class."
        )
    is_held = torch.zeros(len(everything), dtype=torch.bool).index_fill(0, held, True)
    train, chosen = (everything[rows.nonzero().flatten()] for rows in (~is_held, is_held))
    return Data(name, train, chosen, test, label_names, preprocessing)


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: name the one that holds the data set.")


def _some_of_each(order: Tensor, labels: Tensor, share: float) -> Tensor:
    """The first of each class in this order, as many as its share but at least one; an only one is not taken."""
    by_class = order[labels[order].argsort(stable=True)].split(labels.bincount().tolist())
    return torch.cat([rows[: min(max(round(share * len(rows)), 1), len(rows) - 1)] for rows in by_class])


def _cifar(name: str, root: Path, size: int | None) -> Loaded:
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
            raise InputError(f"{path} does not exist: put the official files of {name} (python version) there.")
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
    """Reads the official files, which are pickles, and refuses whatever those do not need."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy", "_reconstruct")}:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _tiny_imagenet(name: str, root: Path, size: int | None) -> Loaded:
    for file in ("wnids.txt", "words.txt", "val/val_annotations.txt"):
        if not (root / file).is_file():
            raise InputError(
                f"{root / file} does not exist: name the folder tiny-imagenet-200 of the official archive."
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
                f"{root}/val/val_annotations.txt has {line!r}, of no class in wnids.txt: unpack the archive again."
            )
        test.append((root / "val" / "images" / file, number[identifier]))
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 64, native_size=64, mean=mean, std=std)
    # The first of the synonyms; all of them where two classes share the first.
    first = [words.get(w, w).split(",")[0] for w in identifiers]
    label_names = [words.get(w, w) if first.count(n) > 1 else n for w, n in zip(identifiers, first, strict=True)]
    return _decode_all(train, 64), None, _decode_all(test, 64), label_names, preprocessing


def _decode_all(files: list[tuple[Path, int]], side: int) -> ArrayImages:
    """Images of side x side; those that cannot be read, or are of another size, are reported and left out."""
    images = FileImages([path for path, _ in files], [label for _, label in files])
    pixels = torch.empty(len(images), 3, side, side, dtype=torch.uint8)
    good = torch.zeros(len(images), dtype=torch.bool)
    starts = range(0, len(images), CHUNK)
    chunks = [images.paths[start : start + CHUNK] for start in starts]
    # Processes, since threads spend more time on waiting for Python's lock than the decoding of so small images takes.
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), initializer=leave_signals_to_parent) as pool:
        decoded = (pool.map if len(chunks) > 1 else map)(_decode, chunks, [side] * len(chunks))
        with bar(len(images), "decoding images", "image") as done:
            for start, (values, readable) in zip(starts, decoded, strict=True):
                pixels[start : start + CHUNK] = torch.from_numpy(values)
                good[start : start + CHUNK] = torch.from_numpy(readable)
                done(len(values))
    images.report_broken((~good).nonzero().flatten().tolist())
    return ArrayImages(pixels[good], torch.tensor(images.labels, dtype=torch.long)[good])


def leave_signals_to_parent(_: int = 0) -> None:
    """For a process that helps another: Ctrl-C goes to both, and the other says when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_group(_: int = 0) -> None:
    """For one that ends by itself once the other is gone: no signal to the other's whole group reaches it."""
    leave_signals_to_parent()
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)


def _decode(paths: list[Path], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, (images, 3, side, side), and which of the files could be read."""
    pixels = np.zeros((len(paths), side, side, 3), dtype=np.uint8)
    good = np.zeros(len(paths), dtype=bool)
    for k, path in enumerate(paths):
        try:
            image = open_image(path)
        except ImageError:
            continue
        if image.size == (side, side):
            pixels[k] = np.asarray(image)
            good[k] = True
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), good


def fingerprint(data: Data, root: Path) -> str:
    """A hash of names and labels, by which to know other images to train on, or to choose by, from these.

    Args:
        root: the folder that they were loaded from, which may move.
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


def keep_apart(root: Path, places: Mapping[str, Path]) -> None:
    """Refuse to write among the classes of a "folder", one of which it would be the next time that they are read.

    Args:
        root: as `load_data` takes it.
        places: folders that are to be written, by the options that name them.
    """
    train_root, beside = _layout(root)
    for classes in (train_root, *beside):
        for option, place in places.items():
            if classes.resolve() in place.resolve().parents:
                raise InputError(
                    f"{place} is among the classes of {classes}, and would be taken for one: name a place outside of "
                    f"it with {option}."
                )


def _layout(root: Path) -> tuple[Path, list[Path]]:
    """The folder of the classes to train on, and those to choose by and to test by, if there are any."""
    _check_root(root)
    found = ([path for path in _folders(root) if path.name.lower() in names] for names in SPLITS)
    train, choices, test, evaluation = found
    # Folders within, since a class may be called train, too; and images to test by may have no labels, as those of
    # competitions.
    train, test, evaluation = ([path for path in paths if _folders(path)] for paths in (train, test, evaluation))
    (choices if test else test).extend(evaluation)
    for paths in (train, choices, test) if train else ():
        if len(paths) > 1:
            raise InputError(f"{root} holds {' and '.join(path.name for path in paths)}: leave one of them.")
    return (train[0], [*choices, *test]) if train else (root, [])


def _folder(name: str, root: Path, size: int | None) -> Loaded:
    train_root, beside = _layout(root)
    label_names = [path.name for path in _folders(train_root)]
    if not label_names:
        raise InputError(f"{train_root} holds no folders: make one per class, with its images in it.")
    if len(label_names) == 1:
        raise InputError(
            f"{train_root} holds one class only, {label_names[0]!r}: name the folder that has one for each class in it."
        )
    for path in beside:
        more = [found.name for found in _folders(path) if found.name not in label_names and image_files(found)]
        if more:
            raise InputError(
                f"{path} holds classes that {train_root} lacks ({', '.join(more)}): add them there, or remove them."
            )
    passed: Counter[str] = Counter()
    trained, *others = (_list_files(path, label_names, passed) for path in (train_root, *beside))
    if passed and speaks():
        say(passed_over(root, passed))
    mean, std = MEAN_STD["imagenet"]
    preprocessing = Preprocessing(size=size or 224, mean=mean, std=std)
    # One set is to test on: choices can be made on images held out, and what is published cannot be measured there.
    validation, tested = [None, None, *others][-2:]
    return trained, validation, tested, label_names, preprocessing


def _folders(root: Path) -> list[Path]:
    """Those in a folder, by name, but for the hidden ones and what macOS leaves in archives."""
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
            raise InputError(f"{root / label_name} holds no images{why}: add some, or remove the class.")
        paths += [Path(name) for name in found]
        labels += [label] * len(found)
    return FileImages(paths, labels)
