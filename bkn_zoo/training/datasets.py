"""Data sets by name, split into training, validation and test images."""

import hashlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from bkn_zoo.errors import InputError
from bkn_zoo.images import Preprocessing
from bkn_zoo.training.image_sets import ArrayImages, Data, FileImages, Images, Loaded
from bkn_zoo.training.official import cifar, tiny_imagenet
from bkn_zoo.training.tree import check_root, tree

__all__ = ["ArrayImages", "Data", "FileImages", "Images", "decoded_once", "fingerprint", "load_data"]

VALIDATION_SEED = 2018  # the split is the same for every run, independent of its seed

Loader = Callable[[str, Path, int | None], Loaded]


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
    loaders: dict[str, Loader] = {
        "cifar10": cifar,
        "cifar100": cifar,
        "tiny_imagenet": tiny_imagenet,
        "folder": tree,
    }
    if name not in loaders:
        raise InputError(f"unknown data set {name!r}: choose one of {', '.join(loaders)}.")
    check_root(root)
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
