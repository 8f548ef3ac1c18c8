"""Scores how unusual images are for a network, from the statistics of its layers, without labels."""

import math
import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.inference.folding import FoldedNorm, ImageNorm, observe_fast, prepare
from bkn_zoo.models import Network
from bkn_zoo.modes import choose_statistics
from bkn_zoo.norms.baselines import GroupNorm2d
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.running import RunningNorm

FEWEST = 20
"""Smallest number of usual images. The score has as many steps as half of them."""
BATCH = 16
EPS = 1e-5  # added to variances, as norms do
SMALLEST = 1e-12  # lower bound of variances over usual images


class _EnoughError(Exception):
    """Ends a pass through the network."""


class Drift:
    """Computes a score from 0 to 1 for each image: the share of usual images that are less unusual.

    For each norm of the lowest quarter of the network, D is the mean over channels of (m - c)^2 / v, where m is the
    mean of the image's channel before the norm, and c and v are the mean and the variance of m over usual images. The
    same is computed for logarithms of variances. The distance of an image is the average of D over these norms. The
    other norms add little, cost most, and are not run. One half of the usual images determines c and v. The other half
    gives the distances to compare with, so the scores of further usual images are uniform from 0 to 1. The network runs
    in its default mode, in PyTorch and float32, in addition to any engine.

    A single score says little: monitor the mean of many (docs/shift.md). Threads may share a `Drift`.

    Args:
        model: the network; it is copied.
        usual: 20 or more typical images, better some hundreds, preprocessed, each (3, height, width).
        device: the device to run on.
    """

    def __init__(self, model: Network, usual: Iterable[Tensor], device: torch.device | str = "cpu") -> None:
        statistics = choose_statistics(False, None, model.statistics_batch_size, model.default_statistics)
        self.statistics, self.device = statistics, torch.device(device)
        self._network = prepare(model, statistics).to(self.device).to(memory_format=torch.channels_last)
        kinds = (FoldedNorm, ImageNorm, RunningNorm, GroupNorm2d)
        norms = [module for module in self._network.modules() if isinstance(module, kinds)]
        for norm in norms:
            norm.register_forward_pre_hook(self._look)
        self._looks = math.ceil(len(norms) / 4)
        self._seen: list[Belief] = []
        self._lock = threading.Lock()
        waiting = iter(usual)
        values = [self._observed(torch.stack(batch)) for batch in iter(lambda: list(islice(waiting, BATCH)), [])]
        count = sum(map(len, values))
        if count < FEWEST:
            raise InputError(f"{count} usual images are too few: pass {FEWEST} or more.")
        every = torch.cat(values)
        spread, self._center = torch.var_mean(every[::2], dim=0, correction=0)
        widths = torch.tensor([observed.mean.shape[1] for observed in self._seen], device=self.device)
        # All norms have the same weight, independent of their width.
        shares = (1 / widths).repeat_interleave(widths) / (2 * len(widths))
        self._weight = shares.repeat(2) / spread.clamp_min(SMALLEST)
        self._usual = self._distance(every[1::2]).sort().values

    def __call__(self, images: Tensor) -> Tensor:
        """The score of each image, on the CPU, for preprocessed images, (images, 3, height, width)."""
        distance = self._distance(self._observed(images))
        return torch.searchsorted(self._usual, distance).div(len(self._usual)).cpu()

    def _observed(self, images: Tensor) -> Tensor:
        """The means of the channels of all norms, then the logarithms of their variances, (images, 2 * channels)."""
        with self._lock, torch.inference_mode():
            self._seen = []
            placed = images.to(self.device, torch.float32, memory_format=torch.channels_last)
            with suppress(_EnoughError):
                self._network(placed, statistics=self.statistics)
            means, variances = (torch.cat(rows, 1) for rows in zip(*self._seen, strict=True))
            return torch.cat([means, torch.log(variances + EPS)], 1)

    def _look(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self._seen.append(observe_fast(args[0]))
        if len(self._seen) == self._looks:
            raise _EnoughError

    def _distance(self, values: Tensor) -> Tensor:
        return ((values - self._center).square() * self._weight).sum(1)
