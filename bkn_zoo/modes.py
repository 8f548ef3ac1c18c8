"""The statistics modes, and the choice of one for a call. Plain Python, so that it can be imported without torch."""

from typing import NamedTuple

from bkn_zoo.errors import InputError, UnknownNameError

MODES = ("population", "sample", "expected")


class Statistics(NamedTuple):
    """The statistics that a forward pass normalizes with. The network passes them to every layer.

    Attributes:
        mode: "batch" in training; at inference one of `MODES`.
        group: images per statistics group ("batch"), or the group size in training ("expected"); None means the
            whole batch.
    """

    mode: str
    group: int | None = None


def check_mode(mode: str) -> None:
    """Refuse a statistics mode that does not exist."""
    if mode not in MODES:
        raise UnknownNameError(f"unknown statistics {mode!r}: choose one of {', '.join(MODES)}.")


def choose_statistics(
    training: bool, mode: Statistics | str | None, group: int | None, default: str = "population"
) -> Statistics:
    """The statistics for one call of a module in training or evaluation mode; those that are chosen already stay."""
    if isinstance(mode, Statistics):
        return mode
    if group is not None and (not isinstance(group, int) or group < 1):
        raise InputError(
            f"statistics_batch_size is {group!r}: choose a whole number of at least 1, or None for whole batches."
        )
    if training:
        if mode is not None:
            raise InputError(
                f"statistics={mode!r} is for inference, but the model is in training mode: call model.eval() first."
            )
        return Statistics("batch", group)
    mode = default if mode is None else mode
    check_mode(mode)
    if mode == "expected" and group is None:
        # One image hardly changes the statistics of a large batch, so the expected statistics are the population's.
        return Statistics("population")
    return Statistics(mode, group)
