"""Options and checks that commands share. This module does not import PyTorch."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bkn_zoo.checkpoints.locate import is_folder, locate
from bkn_zoo.errors import InputError
from bkn_zoo.inference import PRECISIONS
from bkn_zoo.terminal import printable

CHECKPOINT = "CHECKPOINT"
"""The metavar of every argument that is a checkpoint. Shell completion offers checkpoint names for it."""

LONG_PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


def device(text: str) -> str:
    """The type of --device."""
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"device {text!r} is unknown: choose auto, cpu, cuda or cuda:NUMBER")
    return text


def add_checkpoint_option(parser: argparse.ArgumentParser, old: str) -> None:
    """Add the option --checkpoint, which also has its old name."""
    what = "a name, a folder or owner/repo on the Hub (default: the first of bkn-zoo list)"
    parser.add_argument("--checkpoint", old, dest="checkpoint", metavar=CHECKPOINT, help=what)


def add_device(parser: argparse.ArgumentParser) -> None:
    what = "auto, cpu, cuda or cuda:NUMBER (default: auto, a GPU if there is one)"
    parser.add_argument("--device", type=device, default="auto", metavar="DEVICE", help=what)


def add_precision(parser: argparse.ArgumentParser, choices: Sequence[str] = PRECISIONS, default: str = "auto") -> None:
    """Add the option --precision, which also accepts long names (float32)."""
    parser.add_argument(
        "--precision", type=lambda text: LONG_PRECISIONS.get(text, text), choices=choices, default=default,
        help=f"precision of the network (default: {default}{', the fastest here' if default == 'auto' else ''})",
    )  # fmt: skip


def check_checkpoint(name: str) -> None:
    """Refuse a name without a checkpoint. Names on the Hub are checked when they are loaded."""
    if is_folder(name) or "/" not in name:
        locate(name)


def check_folder(path: Path) -> None:
    """Refuse a data set that does not exist."""
    if not os.path.isdir(path):
        raise InputError(f"there is no folder {path}: pass the folder of the data set.")


def announce(text: str) -> None:
    """Print what happens before imports that take seconds."""
    print(f"bkn-zoo: {printable(text)}", file=sys.stderr, flush=True)
