"""The report of a conversion."""

from dataclasses import dataclass

from bkn_zoo.errors import few_names


@dataclass(frozen=True)
class NormRow:
    """One norm of the network, or one of its calls if there are several."""

    norm: str
    # The norms whose beliefs it receives, with the number of their channels that it uses.
    priors: dict[str, int]
    # The shapes of the blocks of A.
    transition: tuple[tuple[int, ...], ...]
    note: str  # why it has no prior, or why it is unchanged

    @property
    def left(self) -> bool:
        """Whether the norm is unchanged."""
        return self.note.startswith("left: ")


@dataclass(frozen=True)
class Report:
    """The converted norms in the order of their calls, then unchanged ones; guesses about operations without a rule."""

    rows: tuple[NormRow, ...]
    guesses: tuple[str, ...]
    parameters_before: int
    parameters_after: int
    start: str = ""  # the gain that training starts with, and the statistics mode at inference

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
