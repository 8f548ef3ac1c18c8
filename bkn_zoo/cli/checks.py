"""What a command can find out before its work begins, rather than after hours."""

from pathlib import Path

import torch

from bkn_zoo.errors import InputError


def check_device(device: str) -> None:
    """Refuse one that PyTorch does not know or find."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        there = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise InputError(f"--device {device} is nothing that PyTorch finds here: choose from {there}.") from None


def make_folder(folder: Path) -> None:
    """Make one that results are to go to, and those above."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made for the results ({error.strerror}): name another place.") from None
