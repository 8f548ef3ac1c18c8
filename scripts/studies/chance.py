"""What may be chance: how far seeds scatter, and a difference between means with its interval and its verdict."""

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
UNSURE = 1.0  # points: between two single runs whose like was never repeated, less may be chance
SAME = 1.0  # points: things that differ by less are the same
ALIKE = 1e-3  # points: less than one image of ten thousand


@dataclass(frozen=True)
class Deviation:
    """Between the seeds of a setting's arms, and from how many degrees of freedom it is known."""

    value: float
    freedom: float


def typical(arms: Iterable[Sequence[float]]) -> Deviation | None:
    """Of arms, each with its seeds. The square is the geometric mean of their variances: some scatter widely.

    The logarithm of a variance from few seeds is too small on average, by as much as is known of the chi-squared
    distribution, and scatters by the trigamma function of half its degrees of freedom: those of the mean are as many
    as would let one variance scatter as little. Arms whose seeds are all alike, as of networks that learned nothing,
    are left out.
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
    """Where the trigamma function, which falls from infinity to zero, has a value."""
    low, high = 1e-3, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if polygamma(1, middle) > value else (low, middle)
    return low


def student(freedom: float) -> float:
    """Between two of the table, linear in the inverse of the degrees of freedom: too large, by two percent at most."""
    freedom = max(freedom, 1)
    few, many = max(each for each in T95 if each <= freedom), min(each for each in T95 if each >= freedom)
    share = 0.0 if few == many else (1 / few - 1 / freedom) / (1 / few - 1 / many)
    return T95[few] + share * (T95[many] - T95[few])


@dataclass(frozen=True)
class Difference:
    """Between two means, with its standard error where one is known, from some degrees of freedom."""

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
        """Whether a claim held that it is positive or, if `same`, that there is none."""
        if same:
            far = "did not hold" if abs(self.value) > self.margin else "undecided"
            said = "held" if abs(self.value) + self.margin <= SAME else far
        else:
            within = abs(self.value) <= self.margin
            said = "within chance" if within else "held" if self.value > 0 else "did not hold"
        return said if self.error is not None else f"{said} (one seed)"


def between(these: Sequence[float], those: Sequence[float], usual: Deviation | None = None) -> Difference:
    """The difference between the means of two arms, with degrees of freedom by Welch and Satterthwaite.

    Each has its own deviation or, where that is larger, the one that is usual: three seeds may be near to each other by
    chance. That runs of equal seeds see the same images in the same order is not made use of.
    """
    seeds, means = (len(these), len(those)), mean(these) - mean(those)
    if usual is None and min(seeds) < 2:
        return Difference(means, None, seeds)
    parts: list[tuple[float, float]] = []  # of the squared error, each with its degrees of freedom
    shared = 0.0  # what both owe to the usual deviation, which is one and not two
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
    """Of differences that were taken run by run."""
    error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    return Difference(mean(gaps), error, seeds, max(len(gaps) - 1, 1))


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Mean and, of several, the standard deviation."""
    values = list(values)
    if not values:
        return ""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
