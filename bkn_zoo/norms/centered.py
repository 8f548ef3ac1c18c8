"""Centers of BKN layers in a network, and the classes of such layers in pickles of earlier versions."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from bkn_zoo.norms.batch_kalman import BatchKalmanNorm, BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d


def take_centers(model: nn.Module, names: Iterable[str]) -> None:
    """Add centers to the layers for which the names of stored tensors contain one."""
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind == "center":
            try:
                norm = model.get_submodule(layer)
            except AttributeError:
                continue  # the comparison of names reports it
            if isinstance(norm, BatchKalmanNorm):
                norm.take_center()


def earlier(kind: type[BatchKalmanNorm]) -> type[BatchKalmanNorm]:
    """A class in pickles of earlier versions. Its layers become layers of `kind` when they are loaded."""

    class Earlier(kind):  # type: ignore[misc,valid-type]
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state | {"centered": True})
            self.__class__ = kind  # type: ignore[assignment]

    return Earlier


Centered1d, Centered2d, Centered3d = map(earlier, (BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d))
