"""Measures how far images are from a network's population, from which the best gain of each norm follows.

Each norm of a pretrained network estimates the mean of its input. Let V be the variance of the images' means around
the mean of their domain, and T the squared distance between the domain's mean and the population's, both in units of
the population's variance plus eps and averaged over channels. Then the expected squared error of the estimate is

    frozen BN, which uses the population's mean                      T
    BN, which uses the mean of a group of n images                   V/n
    BKN, which uses (1 - q) of the first and q of the second         (1 - q)^2 T + q^2 V/n

The last is smallest at Q(n) = nT / (nT + V), where it is the product of the first two divided by their sum. It is below
the smaller of them, but at least half of it, and close to half only if T is close to V/n. The positions of one image
are not independent samples, so only the means of whole images count.

Each norm removes a share of a deviation and passes the rest to the norm above. After L norms with a gain of q each, (1
- q)^L of it is left, which should be 1 - Q. So the gain of a norm is 1 - (1 - Q)^(1/L), where L is the number of norms
on the longest path through the network.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bkn_zoo.conversion.record import Links
from bkn_zoo.errors import InputError
from bkn_zoo.models.network import BeliefNetwork
from bkn_zoo.modes import Statistics
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.recalibration import images_of
from bkn_zoo.norms.running import left_in_its_modes
from bkn_zoo.norms.statistics import observe


class Shift(NamedTuple):
    """Statistics of the images at one norm, in units of its population variance plus eps, averaged over channels.

    Attributes:
        shift: T, the squared distance between a domain's mean and the population's, averaged over domains.
        between: the variance of the domains' means around their own mean. This is T after AdaBN on these images, and 0
            with one domain.
        spread: V, the variance of the images' means around their domain's mean.
        images: number of images.
        path: L, the number of norms on the longest path through the network.
    """

    shift: float
    between: float
    spread: float
    images: int
    path: int = 1

    def share(self, group: int, adapted: bool = False) -> float:
        """Q, the share of a group's deviation to remove in total, for the original network or after AdaBN."""
        shift = self.between if adapted else self.shift
        return group * shift / (group * shift + self.spread) if shift > 0 else 0.0

    def gain(self, group: int, adapted: bool = False) -> float:
        """The gain q with which the norms on a path remove this share together."""
        return 1 - (1 - self.share(group, adapted)) ** (1 / self.path)


class _Deviations:
    """Sums of the differences between images' means and the population mean over one domain, per channel."""

    def __init__(self) -> None:
        self.images = 0
        self.sum: Any = 0.0
        self.squares: Any = 0.0

    def add(self, deviations: Tensor) -> None:
        self.images += len(deviations)
        self.sum = self.sum + deviations.sum(0)
        self.squares = self.squares + deviations.square().sum(0)

    @property
    def mean(self) -> Tensor:
        return self.sum / self.images

    def scatter(self) -> float:
        """The summed squared deviations from the domain's mean, averaged over channels."""
        return float((self.squares - self.sum * self.mean).mean())


@torch.no_grad()
def measure_shift(model: nn.Module, images: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Shift]:
    """Measure T and V of every BKN norm of a network, with `population` statistics.

    Args:
        model: a network from `bkn_zoo.convert`, or with a converted part, or a `_bkn` network of the zoo.
        images: batches of a few hundred unlabelled images, or tuples that begin with them, such as a DataLoader; or a
            dict from the names of several domains to such batches.

    Returns:
        The measurements by the name of the norm. Norms whose rows could not be assigned to images are missing.
    """
    domains = images if isinstance(images, Mapping) else {"images": images}
    norms = {name: m for name, m in model.named_modules() if isinstance(m, BatchKalmanNorm) and m.has_averages}
    if not norms:
        raise InputError("this network has no BKN norm to measure: pass a network from bkn_zoo.convert.")
    path = 0
    seen = {}
    for name, batches in domains.items():
        seen[name], length = _watch(model, norms, batches)
        path = max(path, length)
    for name, deviations in seen.items():
        if min((each.images for each in deviations.values()), default=0) < 2:
            raise InputError(f"{name} has fewer than two images to measure: pass a few hundred.")
    common = [name for name in norms if all(name in deviations for deviations in seen.values())]
    return {name: _shift([deviations[name] for deviations in seen.values()], path) for name in common}


def _watch(model: nn.Module, norms: dict[str, Any], batches: Iterable[Any]) -> tuple[dict[str, _Deviations], int]:
    """The sums of all norms over a domain's images, and the number of norms on the longest path."""
    found: dict[str, _Deviations] = {}
    count, path = 0, _longest_path([norm.link for norm in norms.values() if norm.link is not None])

    def before(name: str) -> Any:
        def hook(norm: Any, args: tuple[Any, ...]) -> None:
            x = args[0]
            if x.shape[0] == count:
                scale = torch.rsqrt(norm.running_var + norm.eps)
                deviations = (observe(x).mean - norm.running_mean) * scale
                found.setdefault(name, _Deviations()).add(deviations.double().cpu())

        return hook

    def after(norm: Any, args: tuple[Any, ...], result: Any) -> Any:
        """Count the norms below in place of beliefs, which population statistics do not need."""
        nonlocal path
        if norm.link is not None:
            return None
        length = 1 if args[1] is None else 1 + int(args[1].mean.max())
        path = max(path, length)
        counted = torch.full((1, norm.num_features), float(length), device=result[0].device)
        return result[0], Belief(counted, counted)

    hooks = [norm.register_forward_pre_hook(before(name)) for name, norm in norms.items()]
    hooks += [norm.register_forward_hook(after) for norm in norms.values()]
    device = next(model.parameters()).device
    try:
        with left_in_its_modes(model), by_statistics(model, Statistics("population")):
            model.eval()
            for batch in batches:
                images = images_of(batch)
                count = len(images)
                model(images.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    return found, path


def _longest_path(places: list[Links]) -> int:
    """The number of norms on the longest path of a converted network."""
    below = {place.key: place.sources() for place in places}
    lengths: dict[str, int] = {}
    for key in TopologicalSorter(below).static_order():
        lengths[key] = 1 + max((lengths[source] for source in below.get(key, ())), default=0)
    return max(lengths.values(), default=0)


@contextmanager
def by_statistics(model: nn.Module, statistics: Statistics) -> Iterator[None]:
    """Set the default statistics of calls of networks of the zoo and converted ones."""
    parts = [part for part in model.modules() if isinstance(part, BeliefNetwork)]
    before = [(part.default_statistics, part.statistics_batch_size) for part in parts]
    try:
        for part in parts:
            part.default_statistics = statistics.mode
            part.statistics_batch_size = statistics.group or part.statistics_batch_size
        yield
    finally:
        for part, (mode, group) in zip(parts, before, strict=True):
            part.default_statistics, part.statistics_batch_size = mode, group


def _shift(domains: list[_Deviations], path: int) -> Shift:
    images = sum(domain.images for domain in domains)
    spread = sum(domain.scatter() for domain in domains) / (images - len(domains))
    # The mean of a domain has an error of V/N, which makes the squared distances too large.
    unrest = sum(spread / domain.images for domain in domains) / len(domains)
    means = torch.stack([domain.mean for domain in domains])
    shift = max(float(means.square().mean()) - unrest, 0.0)
    between = max(float(means.var(0).mean()) - unrest, 0.0) if len(domains) > 1 else 0.0
    return Shift(shift, between, spread, images, path)


def group_of(model: nn.Module, group: int | None) -> int:
    """Images per statistics group: as given, or as in the network, or one, as in `sample`."""
    if group is None:
        sizes = (getattr(part, "statistics_batch_size", None) for part in model.modules())
        group = next((size for size in sizes if size is not None), 1)
    if type(group) is not int or group < 1:
        raise InputError(f"a statistics group cannot have {group!r} images: choose a whole number of at least 1.")
    return group
