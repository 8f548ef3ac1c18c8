"""Images per second from JPEG files to batches on the device: `benchmark.py loading`.

Our loader in its first epoch, in later ones, which find squares decoded, and with random crops, which decode in each
epoch; timm's loader; nvJPEG on a GPU, which only decodes and resizes whole files; and a training step on images that
are there already, captured on a GPU.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.io import decode_jpeg, read_file

import bkn_zoo
from benchmarks.common import MACHINE, add_command, interleaved, record, save, show, synchronize
from benchmarks.train import graphed, shared_pool, training_step
from bkn_zoo.cores import usable_cores
from bkn_zoo.training.data import training_batches
from bkn_zoo.training.datasets import load_data
from bkn_zoo.training.recipes import Augmentation

SHIFTS, CROPS = Augmentation(crop=0.1, flip=True), Augmentation(scale=0.5, flip=True)


def write_photographs(folder: Path, count: int, side: int) -> None:
    """JPEG files in two classes, a fifth larger than `side`, as smooth and as noisy as photographs."""

    def write(number: int) -> None:
        shape, source = (round(1.2 * side), round(1.5 * side)), torch.Generator().manual_seed(number)
        coarse = F.interpolate(torch.rand(1, 3, 8, 8, generator=source), shape, mode="bicubic")[0]
        pixels = (255 * (coarse + 0.05 * torch.randn(3, *shape, generator=source)).clamp(0, 1)).byte()
        path = folder / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path, quality=90)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count)))


def ours(
    folder: Path, side: int, batch: int, device: torch.device, workers: int, augmentation: Augmentation = SHIFTS
) -> Callable[[], int]:
    data, epochs = load_data("folder", folder, size=side, validation=0.1), itertools.count()

    def epoch() -> int:
        batches = training_batches(data, batch, next(epochs), 0, augmentation, device, workers=workers)
        return sum(len(each.images) for each in batches)

    return epoch


def timms(folder: Path, side: int, batch: int, device: torch.device, workers: int) -> Callable[[], int]:
    from timm.data import create_loader
    from timm.data.dataset import ImageDataset

    loader = create_loader(
        ImageDataset(str(folder)), (3, side, side), batch, is_training=True, num_workers=workers, scale=(0.9, 1.0),
        color_jitter=None, device=device, use_prefetcher=device.type == "cuda", persistent_workers=False,
    )  # fmt: skip
    return lambda: sum(len(images.to(device)) for images, _ in loader)


def decoded_on_gpu(folder: Path, side: int, batch: int) -> Callable[[], int]:
    paths = sorted(map(str, folder.rglob("*.jpg")))

    def epoch() -> int:
        for start in range(0, len(paths), batch):
            images = decode_jpeg([read_file(path) for path in paths[start : start + batch]], device="cuda")
            torch.stack([F.interpolate(image[None].float(), (side, side), mode="bilinear")[0] for image in images])
        return len(paths)

    return epoch


def decodes_on_gpu(folder: Path) -> bool:
    try:
        decode_jpeg([read_file(str(next(folder.rglob("*.jpg"))))], device="cuda")
    except RuntimeError as error:
        print(f"nvJPEG is left out: {error}", flush=True)
        return False
    return True


def steps(network: str, side: int, batch: int, device: torch.device, count: int) -> Callable[[], int]:
    model = bkn_zoo.create_model(network, 10).to(device, memory_format=torch.channels_last)
    model.statistics_batch_size = 4
    images = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    step = training_step(model, "eager", images, torch.zeros(batch, dtype=torch.long, device=device))
    if device.type == "cuda":
        step()
        step = graphed(step)

    def epoch() -> int:
        for _ in range(count):
            step()
        return count * batch

    return epoch


def race(folder: Path, side: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Images per second of all ways, in turns."""
    device = torch.device(args.device)
    files = folder, side, args.batch
    write_photographs(folder, args.images, side)
    our_files = *files, device, args.workers
    ways = {
        "ours, first epoch": lambda: ours(*our_files)(),
        "ours, later epochs": ours(*our_files),
        "ours, random crops": ours(*our_files, CROPS),
        "timm": timms(*files, device, args.workers),
        f"training step of {args.network}": steps(args.network, side, args.batch, device, args.steps),
    }
    if device.type == "cuda" and decodes_on_gpu(folder):
        ways["nvJPEG, decoding alone"] = decoded_on_gpu(*files)
    # The first round fills caches, and chooses kernels.
    rates = interleaved({way: partial(rate, epoch) for way, epoch in ways.items()}, args.rounds, warmup=1)
    return [{"size": side, "way": way, "images_per_s": statistics.median(found)} for way, found in rates.items()]


def rate(epoch: Callable[[], int]) -> float:
    """Images per second."""
    synchronize()
    begun = time.perf_counter()
    count = epoch()
    synchronize()
    return count / (time.perf_counter() - begun)


def loading(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("device 'cuda' is not available: choose cpu.")
    if args.device == "cuda" and args.output == record("loading", MACHINE):
        args.output = record("loading", "cuda")
    rows: list[dict[str, Any]] = []
    for side in args.sizes:
        # That of the size before has gone with its graphs.
        shared_pool.cache_clear()
        with tempfile.TemporaryDirectory() as scratch:
            rows += race(Path(scratch), side, args)
        settings = {"images": args.images, "batch": args.batch, "workers": args.workers}
        save(args, rows, device=args.device, **settings)
        show(rows)


def add(commands: Any) -> None:
    command = add_command(commands, loading, "loading", "images per second from files, beside timm", 3, MACHINE)
    command.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 224])
    command.add_argument("--images", type=int, default=1024)
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--workers", type=int, default=usable_cores())
    command.add_argument("--network", default="inception_v2_bkn")
    command.add_argument("--steps", type=int, default=10)
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
