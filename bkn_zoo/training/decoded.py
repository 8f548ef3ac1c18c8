"""A cache of decoded image files, in memory that the workers of a DataLoader share."""

import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_BYTES = 2**30  # per set of files; larger sets are not cached


class Squares:
    """The central squares of `count` files as bytes, filled as files are decoded.

    Forked processes share the memory. A spawned process gets an empty cache and decodes by itself.
    """

    def __init__(self, count: int, side: int) -> None:
        self.count, self.side = count, side
        self.pixels: Tensor | None = None
        size = 3 * side * side
        if 0 < count * (size + 1) <= MOST_BYTES:
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
