"""Statistics of seeds: their deviation, and differences between means with interval and verdict."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev

import torch

# Student's t, two-sided, by degrees of freedom.
T95 = {
    1: 12.71, 1.12: 9.90, 1.25: 8.04, 1.5: 6.02, 2: 4.30, 2.5: 3.57, 3: 3.18, 4: 2.78, 6: 2.45, 10: 2.23, 20: 2.09,
    math.inf: 1.96,
}  # fmt: skip
UNSURE = 1.0  # points; between single runs without repetitions, a smaller difference may be chance
SAME = 1.0  # points; a smaller difference counts as none
ALIKE = 1e-3  # points; less than one image of ten thousand


@dataclass(frozen=True)
class Deviation:
    """The standard deviation between the seeds of a setting's arms, with its degrees of freedom."""

    value: float
    freedom: float


def typical(arms: Iterable[Sequence[float]]) -> Deviation | None:
    """The typical deviation of arms, from the geometric mean of their variances, because some vary widely.

    The logarithm of a variance from few seeds is too small on average. The bias follows from the chi-squared
    distribution and is corrected. Its variance is the trigamma function of half its degrees of freedom. The degrees of
    freedom of the mean are those of a single variance with the same spread. Arms whose seeds are all equal, such as
    networks that learned nothing, are left out.
    """
    known = [(stdev(top1), len(top1) - 1) for top1 in arms if len(top1) > 1]
    known = [(own, n) for own, n in known if own > ALIKE]
    if not known:
        return None
    logs = [2 * math.log(own) + math.log(n / 2) - polygamma(0, n / 2) for own, n in known]
    scatter = sum(polygamma(1, n / 2) for _, n in known) / len(known) ** 2
    return Deviation(math.exp(mean(logs) / 2), 2 * _inverse_trigamma(scatter))


@cache
def polygamma(order: int, value: float) -> float:
    return float(torch.special.polygamma(order, torch.tensor(value, dtype=torch.float64)))


@cache
def _inverse_trigamma(value: float) -> float:
    """The inverse of the trigamma function, which falls from infinity to zero."""
    low, high = 1e-3, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if polygamma(1, middle) > value else (low, middle)
    return low


def student(freedom: float) -> float:
    """Student's t, interpolated in the inverse of the degrees of freedom; at most two percent too large."""
    freedom = max(freedom, 1)
    few, many = max(each for each in T95 if each <= freedom), min(each for each in T95 if each >= freedom)
    share = 0.0 if few == many else (1 / few - 1 / freedom) / (1 / few - 1 / many)
    return T95[few] + share * (T95[many] - T95[few])


@dataclass(frozen=True)
class Difference:
    """A difference between two means, with its standard error, if known, and degrees of freedom."""

    value: float
    error: float | None
    seeds: tuple[int, int]
    freedom: float = 1

    def __str__(self) -> str:
        return f"{self.value:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    @property
    def margin(self) -> float:
        """Half of its 95 % interval."""
        if self.error is None:
            return UNSURE
        return student(self.freedom) * self.error

    def verdict(self, same: bool = False) -> str:
        """Whether the claim held that the difference is positive or, with `same`, that there is none."""
        if same:
            far = "did not hold" if abs(self.value) > self.margin else "undecided"
            said = "held" if abs(self.value) + self.margin <= SAME else far
        else:
            within = abs(self.value) <= self.margin
            said = "within chance" if within else "held" if self.value > 0 else "did not hold"
        return said if self.error is not None else f"{said} (one seed)"


def between(these: Sequence[float], those: Sequence[float], usual: Deviation | None = None) -> Difference:
    """The difference between the means of two arms, with degrees of freedom by Welch and Satterthwaite.

    Each arm has its own deviation or the usual one, whichever is larger, because three seeds may be close to each other
    by chance. Pairs of runs with the same seed are not treated as paired.
    """
    seeds, means = (len(these), len(those)), mean(these) - mean(those)
    if usual is None and min(seeds) < 2:
        return Difference(means, None, seeds)
    parts: list[tuple[float, float]] = []  # terms of the squared error, each with its degrees of freedom
    shared = 0.0  # the part of both arms that comes from the usual deviation, a single estimate
    for values in (these, those):
        own = stdev(values) if len(values) > 1 else 0.0
        if usual and usual.value >= own:
            shared += usual.value**2 / len(values)
        else:
            parts.append((own**2 / len(values), len(values) - 1))
    parts += [(shared, usual.freedom)] if usual else []
    square = sum(part for part, _ in parts)
    freedom = square**2 / sum(part**2 / known for part, known in parts) if square else sum(seeds) - 2
    return Difference(means, square**0.5, seeds, freedom)


def mean_of(gaps: Sequence[float], seeds: tuple[int, int]) -> Difference:
    """The mean of differences that were computed run by run."""
    error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    return Difference(mean(gaps), error, seeds, max(len(gaps) - 1, 1))


def spread(values: Iterable[float], digits: int = 2) -> str:
    """The mean and, for several values, the standard deviation."""
    values = list(values)
    if not values:
        return ""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
