"""The report of a conversion."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NormRow:
    """One norm of the network, or one of its calls if there are several.

    Attributes:
        priors: the norms whose beliefs it receives, with the number of their channels that it uses.
        transition: the shapes of the blocks of A; none for a first layer and for an unchanged norm.
        note: why it has no prior, or why it is unchanged.
    """

    norm: str
    priors: dict[str, int]
    transition: tuple[tuple[int, ...], ...]
    note: str

    @property
    def left(self) -> bool:
        """Whether the norm is unchanged."""
        return self.note.startswith("left: ")


Row = NormRow
"""Its name in pickles of earlier versions."""


@dataclass(frozen=True)
class Report:
    """The report of a conversion, for `print(converted.report)`.

    Attributes:
        rows: the converted norms in the order of their calls, then the unchanged ones.
        guesses: operations without a rule, and what was assumed.
        start: the gain that training starts with, and the statistics mode at inference.
    """

    rows: tuple[NormRow, ...]
    guesses: tuple[str, ...]
    parameters_before: int
    parameters_after: int
    start: str = ""

    def __str__(self) -> str:
        table = [("norm", "prior (channels)", "A")]
        for row in self.rows:
            prior = few_names(tuple(f"{name} ({count})" for name, count in row.priors.items())) or row.note
            shapes = " + ".join(" x ".join(map(str, shape)) for shape in row.transition)
            table.append((row.norm, prior, shapes))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        lines += [f"guess: {guess}" for guess in self.guesses]
        share = self.parameters_after / max(self.parameters_before, 1) - 1
        lines.append(f"parameters: {self.parameters_before:,} before, {self.parameters_after:,} after (+{share:.1%})")
        lines.append(f"start: {self.start}")
        return "\n".join(lines)


def few_names(names: Sequence[str]) -> str:
    """The first three names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
