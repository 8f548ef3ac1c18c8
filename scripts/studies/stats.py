"""Statistics of seeds: their deviation, and differences between means with interval and verdict.

scipy is imported where it is used, because the machines that train may lack it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev

AHEAD = {"held": "ahead", "did not hold": "behind", "within chance": "within chance"}
"""How pages say a verdict on a lead."""

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
    from scipy.special import digamma, polygamma

    known = [(stdev(top1), len(top1) - 1) for top1 in arms if len(top1) > 1]
    known = [(own, n) for own, n in known if own > ALIKE]
    if not known:
        return None
    logs = [2 * math.log(own) + math.log(n / 2) - digamma(n / 2) for own, n in known]
    scatter = sum(float(polygamma(1, n / 2)) for _, n in known) / len(known) ** 2
    return Deviation(math.exp(mean(logs) / 2), 2 * inverse_trigamma(scatter))


def typical_of_pairs(pairs: Sequence[Sequence[float]], arms: int) -> Deviation | None:
    """The typical deviation of differences between this many arms, paired by seed.

    Differences that share an arm are not independent: the degrees of freedom are those of as many as have none in
    common, half as many as there are arms.
    """
    found = typical(pairs)
    return found and Deviation(found.value, found.freedom * min(1.0, arms / 2 / len(pairs)))


@cache
def inverse_trigamma(value: float) -> float:
    """The argument at which the trigamma function, which falls from infinity to zero, has this value."""
    from scipy.optimize import brentq
    from scipy.special import polygamma

    return float(brentq(lambda x: float(polygamma(1, x)) - value, 1e-3, 1e6))


@cache
def student(freedom: float) -> float:
    """Student's t of a 95 % interval; one degree of freedom at least."""
    from scipy.stats import t

    return float(t.ppf(0.975, max(freedom, 1)))


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
        return math.inf if self.error is None else student(self.freedom) * self.error

    def verdict(self, same: bool = False) -> str:
        """Whether the claim held that the difference is positive or, with `same`, that there is none."""
        if self.error is None:
            return "one seed"
        if same:
            far = "did not hold" if abs(self.value) > self.margin else "undecided"
            return "held" if abs(self.value) + self.margin <= SAME else far
        within = abs(self.value) <= self.margin
        return "within chance" if within else "held" if self.value > 0 else "did not hold"


def between(these: Sequence[float], those: Sequence[float], usual: Deviation | None = None) -> Difference:
    """The difference between the means of two arms, with degrees of freedom by Welch and Satterthwaite.

    Each arm has its own deviation or the usual one, whichever is larger, because three seeds may be close to each other
    by chance. Pairs of runs with the same seed are not treated as paired: see `gaps`.
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


def gaps(these: Mapping[int, float], those: Mapping[int, float]) -> list[float]:
    """The differences of runs with the same seed, from results by seed."""
    return [these[seed] - those[seed] for seed in sorted(these.keys() & those.keys())]


def mean_of(gaps: Sequence[float], seeds: tuple[int, int] | None = None, usual: Deviation | None = None) -> Difference:
    """The mean of differences run by run, with their own deviation or the usual one, whichever is larger."""
    own, freedom = (stdev(gaps) if len(gaps) > 1 else None), max(len(gaps) - 1.0, 1.0)
    if usual and usual.value >= (own or 0.0):
        own, freedom = usual.value, usual.freedom
    return Difference(mean(gaps), None if own is None else own / len(gaps) ** 0.5, seeds or (len(gaps),) * 2, freedom)


def spread(values: Iterable[float], digits: int = 2) -> str:
    """The mean and, for several values, the standard deviation."""
    values = list(values)
    if not values:
        return ""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
