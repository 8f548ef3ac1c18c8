"""What all benchmarks share: contestants that take turns, networks and images to measure, and the record."""

import argparse
import io
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

import bkn_zoo
from bkn_zoo.checkpoints.card import table
from bkn_zoo.checkpoints.provenance import write_results
from bkn_zoo.norms.running import RunningNorm

ROOT = Path(__file__).resolve().parents[2]
MACHINE = platform.machine()

Key = TypeVar("Key")
Result = TypeVar("Result")


class Contestant(NamedTuple):
    row: dict[str, Any]
    step: Callable[..., object]


def interleaved(runs: dict[Key, Callable[[], Result]], rounds: int, warmup: int = 0) -> dict[Key, list[Result]]:
    """The results of all runs, which take turns, round after round. Those of the first `warmup` rounds are dropped."""
    found: dict[Key, list[Result]] = {key: [] for key in runs}
    for number in range(warmup + rounds):
        for key, run in runs.items():
            result = run()
            if number >= warmup:
                found[key].append(result)
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def timed(step: Callable[[], object], steps: int = 1) -> float:
    """Milliseconds per step, over `steps` of them."""
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def add_command(commands: Any, run: Callable[..., None], name: str, about: str, rounds: int, suffix: str = "") -> Any:
    """A subcommand with the options that all have. Its record is results/benchmark_NAME[.SUFFIX].json."""
    command = commands.add_parser(name, help=about)
    command.add_argument("--rounds", type=int, default=rounds)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--output", type=Path, default=record(name, suffix))
    command.set_defaults(run=run)
    return command


def record(name: str, suffix: str = "") -> Path:
    return ROOT / "results" / ".".join(filter(None, (f"benchmark_{name.replace('-', '_')}", suffix, "json")))


def save(args: argparse.Namespace, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write the record of the rows measured so far."""
    write_results(args.output, rows, args.seed, rounds=args.rounds, date=date.today().isoformat(), **facts)


def show(rows: list[dict[str, Any]], columns: Sequence[str] = ()) -> None:
    """Print the rows; without columns, all fields of the first."""
    print(table(rows, [name for name in columns or rows[0] if any(name in row for row in rows)]), flush=True)


def make_image(side: int) -> bytes:
    """A JPEG with as much detail as a photograph has."""
    coarse = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def photographs(size: int) -> torch.Tensor:
    """Four random images, each with a brightness and a contrast of its own, as photographs have."""
    return torch.randn(4, 3, 1, 1) + (0.5 + torch.rand(4, 3, 1, 1)) * torch.randn(4, 3, size, size)


@torch.no_grad()
def calibrated(name: str, images: torch.Tensor, **options: Any) -> bkn_zoo.Network:
    """An untrained network that remembers statistics of images, in evaluation mode."""
    model = bkn_zoo.create_model(name, **options).to(images.device)
    model.statistics_batch_size = 2
    norms = [module for module in model.modules() if isinstance(module, RunningNorm)]
    for share in (1.0, 0.5):
        for norm in norms:
            norm.momentum = share
        model(images + torch.randn_like(images))
    for name, parameter in model.named_parameters():
        if "transition" in name and not parameter.any():  # as of a converted network: a trained one has values there
            parameter.normal_(0, 0.1 / parameter.shape[-1] ** 0.5)
    return model.eval()
