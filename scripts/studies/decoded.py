"""Decoded images of a data set in a file, which all processes of a study map."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from bkn_zoo.images import Preprocessing
from bkn_zoo.training.datasets import ArrayImages, Data

Decoded = TypeVar("Decoded")


def decoded_once(folder: Path, name: str, root: Path, decode: Callable[[], Decoded]) -> Decoded:
    """The result of `decode`, `Data` or tensors, from a file in `folder` if it is there.

    Args:
        name: name of the file, which contains everything that the images depend on except `root`, their folder.
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
