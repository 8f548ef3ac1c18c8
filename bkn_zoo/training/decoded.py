"""Squares of image files, decoded once and kept in memory that the processes of a loader share."""

import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_BYTES = 2**30  # that a split may take


class Squares:
    """The central squares of so many files, in bytes, as far as they have been decoded.

    The memory is shared with processes that are forked afterwards. One that is spawned gets a copy without any, and
    decodes for itself; so does every process where the squares would take more than `MOST_BYTES`.
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
        """Pixels in [0, 1]; None if the file has not been decoded yet."""
        return None if self.pixels is None or not self.known[row] else self.pixels[row].float().div_(255)

    def put(self, row: int, pixels: Tensor) -> None:
        """Keep pixels in [0, 1], which are whole numbers of 255ths."""
        if self.pixels is not None:
            self.pixels[row] = pixels.mul(255).round_().byte()
            self.known[row] = 1
