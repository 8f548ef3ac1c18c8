"""What learning A, R and q without labels gives a trained network under shift.

    export PYTHONPATH=scripts
    python -m studies.shift_unlabelled --data DATA_FOLDER --seeds 0 1 2 --jobs 6 --minutes 8

For each seed, a ResNet18 with batch normalization is trained on CIFAR, plainly and with jittered images. It is
converted, and its Kalman parameters learn from unlabelled images, jittered, what the network says of the same images
without jitter: with the transition A and with A held at zero. The control learns batch normalization's scales and
shifts in the same way. One JSON record per network goes to --results.
"""

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.checkpoints.provenance import environment
from bkn_zoo.conversion import convert
from bkn_zoo.conversion.learning import learn_statistics, relative_error
from bkn_zoo.images import normalize, per_channel
from bkn_zoo.publishing.results import write_record
from bkn_zoo.training.augmentation import generator
from bkn_zoo.training.capture import captured
from bkn_zoo.training.data import training_batches
from bkn_zoo.training.datasets import Data, load_data
from bkn_zoo.training.recipes import Augmentation
from studies.shift import ROOT, device_of
from studies.shift_evaluate import Bench, Method, evaluate, part
from studies.shift_layers import layer_study
from studies.shift_rules import mixed, norms

BATCH = 256
SIZES = (100, 1000, 10_000)
MIX = 4.0


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18(classes: int, width: int = 64) -> nn.Module:
    """The usual one for CIFAR: a first convolution of 3x3, and no pooling after it."""
    stages, inputs = [], width
    for stage in range(4):
        for number in range(2):
            outputs = width * 2**stage
            stages.append(Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes),
    )  # fmt: skip


def jittered(images: Tensor, data: Data, source: torch.Generator) -> Tensor:
    """Preprocessed images with other brightness, contrast and saturation; then noise, blur or neither."""
    mean, std = (per_channel(values, images.device) for values in (data.preprocessing.mean, data.preprocessing.std))
    pixels = images * std + mean
    draws = torch.rand((6, len(images), 1, 1, 1), generator=source, device=images.device)
    brightness, contrast, saturation = 1 + 0.6 * (2 * draws[:3] - 1)
    middle = pixels.mean((1, 2, 3), keepdim=True)
    pixels = (middle + (pixels - middle) * contrast) * brightness
    grey = pixels.mean(1, keepdim=True)
    pixels = (grey + (pixels - grey) * saturation).clamp(0, 1)
    noise = torch.randn(pixels.shape, generator=source, device=images.device) * 0.15 * draws[3]
    soft = F.avg_pool2d(pixels, 3, 1, 1, count_include_pad=False)
    kind = draws[4]
    blurred = torch.where(kind < 2 / 3, torch.lerp(pixels, soft, draws[5]), pixels)
    pixels = torch.where(kind < 1 / 3, pixels + noise, blurred)
    return normalize(pixels.clamp(0, 1), data.preprocessing).contiguous(memory_format=torch.channels_last)


def train(data: Data, augmented: bool, seed: int, epochs: int, width: int, device: torch.device) -> nn.Module:
    """A ResNet18 with batch normalization."""
    torch.manual_seed(seed)
    model = resnet18(len(data.label_names), width).to(device).to(memory_format=torch.channels_last).train()
    lr = torch.zeros((), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    source = generator(device, seed, 99)
    half = device.type == "cuda"

    def step(images: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            loss = F.cross_entropy(model(images).float(), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    replay = captured(step)
    batch = min(BATCH, len(data.train))
    steps, done = epochs * (len(data.train) // batch), 0
    for epoch in range(epochs):
        for images, targets in training_batches(data, batch, epoch, seed, Augmentation(crop=0.125), device):
            images = images.contiguous(memory_format=torch.channels_last)
            share = done / steps
            lr_now = 0.2 * min(share / 0.2, (1 - share) / 0.8)
            optimizer.param_groups[0]["lr"].fill_(lr_now)
            replay(jittered(images, data, source) if augmented else images, targets)
            done += 1
    return model.eval().requires_grad_(False)


def batches(data: Data, size: int, seed: int, device: torch.device) -> list[Tensor]:
    """`size` training images without their labels."""
    pixels = part(data.train, size, seed).images.to(device).float() / 255
    images = normalize(pixels, data.preprocessing).contiguous(memory_format=torch.channels_last)
    return list(images.split(min(BATCH // 2, size)))


def learn_scales(model: nn.Module, images: list[Tensor], epochs: int, jitter: Callable[[Tensor], Tensor]) -> nn.Module:
    """The control: batch normalization's scales and shifts learn as the Kalman parameters do, and nothing else."""
    student = copy.deepcopy(model).eval().requires_grad_(False)
    learned = [p for layer in student.modules() if isinstance(layer, nn.BatchNorm2d) for p in layer.parameters()]
    for parameter in learned:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(learned, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: (1 + math.cos(math.pi * epoch / epochs)) / 2)
    for _ in range(epochs):
        for batch in images:
            with torch.no_grad():
                target = model(batch)
            loss = relative_error(student(jitter(batch)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return student.requires_grad_(False)


Run = Callable[[Tensor], Tensor]
"""From preprocessed images to logits."""


def arms(model: nn.Module, data: Data, args: argparse.Namespace, device: torch.device) -> dict[str, Run]:
    """What was learned on so many images, by name."""
    found: dict[str, Run] = {}
    source = generator(device, args.seed, 98)

    def jitter(images: Tensor) -> Tensor:
        return jittered(images, data, source)

    for size in args.sizes:
        images = batches(data, size, args.seed, device)
        epochs = max(args.steps // len(images), 1)
        for name, link in (("A, R and q", True), ("R and q, A = 0", False)):
            network = convert(model)
            learn_statistics(network, images, epochs=epochs, link=link, jitter=jitter)
            network = network.eval().requires_grad_(False)
            found[f"{name}, {size} images"] = lambda x, network=network: network(x, statistics="sample")
        found[f"scales and shifts, {size} images"] = learn_scales(model, images, epochs, jitter)
        print(f"{size} images learned", flush=True)
    return found


def measure(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    device = device_of(args)
    torch.backends.cudnn.benchmark = True
    data = load_data(args.dataset, args.data, None, 0.1).to(device)
    model = train(data, args.augmented, args.seed, args.epochs, args.width, device)
    trained = time.monotonic() - begun
    print(f"trained, {trained:.0f} s", flush=True)
    learned = arms(model, data, args, device)
    network: Any = convert(model).eval()
    bench = Bench(network, data, "population", fitted=args.fitted)
    bench.methods = [method for method in bench.methods if method.name == "population"]
    bench.methods.append(bench.by_rule(f"mix, N = {MIX:g}", mixed(MIX)))
    for name, run in learned.items():
        bench.methods.append(Method(name, lambda given, run=run: run(given.images)))
    bench.tune(part(data.validation, args.tuning, 0))
    layers = None if args.augmented else layer_study(bench, part(data.test, args.chunk, bench.seed))
    here = environment(args.seed)
    here["command"] = here["command"].replace("python shift_unlabelled.py", "python -m studies.shift_unlabelled")
    name = f"{args.dataset}.unlabelled.{'jitter' if args.augmented else 'plain'}.seed={args.seed}"

    def save(images: int) -> None:
        record = {
            "name": name, "dataset": args.dataset, "network": "ResNet18", "augmented": args.augmented,
            "network_seed": args.seed, "epochs": args.epochs, "steps": args.steps, "norms": len(norms(network)),
            "images": images, "training_seconds": round(trained, 1), "seconds": round(time.monotonic() - begun, 1),
            **bench.result(), "layers": layers, **here,
        }  # fmt: skip
        write_record(args.results / f"{name}.json", json.dumps(record, separators=(",", ":")))
        print(f"{name}: {images} images, {time.monotonic() - begun:.0f} s", flush=True)

    deadline = begun + args.seconds
    evaluate({name: bench}, data.test, None, args.images, args.chunk, deadline, save)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--dataset", choices=["cifar10", "cifar100"], default="cifar10")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="unlabelled images")
    parser.add_argument("--steps", type=int, default=400, help="of learning without labels")
    parser.add_argument("--images", type=int, default=10_000, help="test images, at most")
    parser.add_argument("--chunk", type=int, default=800, help="test images between two records")
    parser.add_argument("--tuning", type=int, default=1000, help="validation images that rules are tuned on")
    parser.add_argument("--fitted", type=int, default=1000, help="training images that rules are fitted on")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after as many")
    parser.add_argument("--device", default=None, help="default: cuda where there is one")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "shift", help="where records go")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # processes that this one starts
    parser.add_argument("--augmented", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_all(args: argparse.Namespace, arguments: list[str]) -> int:
    """A process for each network; returns how many failed."""
    deadline = time.monotonic() + 60 * args.minutes
    waiting = [(seed, more) for more in ([], ["--augmented"]) for seed in args.seeds]
    running: list[subprocess.Popen[bytes]] = []
    failed = 0
    while (waiting or running) and time.monotonic() < deadline:
        failed += sum(process.poll() not in (None, 0) for process in running)
        running = [process for process in running if process.poll() is None]
        while waiting and len(running) < args.jobs:
            seed, more = waiting.pop(0)
            left = str(max(deadline - time.monotonic() - 5, 1.0))
            words = [*arguments, "--seed", str(seed), *more, "--seconds", left]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"} if args.jobs > 1 else None
            command = [sys.executable, "-m", "studies.shift_unlabelled", *words]
            running.append(subprocess.Popen(command, env=environment))
        time.sleep(0.2)
    for process in running:
        process.terminate()
    return failed + len(running) + len(waiting)


def main() -> None:
    args = parse(sys.argv[1:])
    if args.seed is not None:
        measure(args)
    else:
        sys.exit(1 if run_all(args, sys.argv[1:]) else 0)


if __name__ == "__main__":
    main()
