"""CIFAR and Tiny ImageNet in their official layouts, decoded into memory."""

import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bkn_zoo.errors import ImageError, InputError
from bkn_zoo.images import Preprocessing, open_image
from bkn_zoo.progress import bar
from bkn_zoo.training.image_sets import MEAN_STD, ArrayImages, FileImages, Loaded
from bkn_zoo.training.interruption import leave_signals_to_parent

SOURCES = {
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "cifar100": "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    "tiny_imagenet": "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
}
"""Where the official archives are."""

CHUNK = 1000  # images decoded by a process at a time


def cifar(name: str, root: Path, size: int | None) -> Loaded:
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


def tiny_imagenet(name: str, root: Path, size: int | None) -> Loaded:
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
        decoded = (pool.map if len(chunks) > 1 else map)(_decode, chunks, [side] * len(chunks))
        with bar(len(images), "decoding images", "image") as done:
            for start, (values, readable) in zip(starts, decoded, strict=True):
                pixels[start : start + CHUNK] = torch.from_numpy(values)
                good[start : start + CHUNK] = torch.from_numpy(readable)
                done(len(values))
    images.report_broken((~good).nonzero().flatten().tolist())
    return ArrayImages(pixels[good], torch.tensor(images.labels, dtype=torch.long)[good])


def _decode(paths: list[Path], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, (images, 3, side, side), and a mask of the readable files."""
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
