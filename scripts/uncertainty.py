"""Measures when a checkpoint should doubt its answer, and how often images of unknown classes pass.

    python scripts/uncertainty.py --data DATA      # then scripts/report.py

The threshold `uncertain_below` of each statistics mode is the probability that 95 % of the right answers on held-out
images reach. They are 500 test images, by which no choice was made, or for ImageNet the half of the sample images that
nothing was learned from. A checkpoint without thresholds gets them. Images of unknown classes are those of the other
CIFAR set, without vehicles on roads, which both sets have, and for larger images the photographs of DATA/unknown.
DATA has cifar, tiny-imagenet-200, imagenet-sample-images and unknown.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from imagenet_data import sample_images
from PIL import Image
from torch import Tensor, nn

import bkn_zoo
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.cli import ended
from bkn_zoo.cores import default_device
from bkn_zoo.images import SUFFIXES, open_image, preprocess
from bkn_zoo.models import Network
from bkn_zoo.modes import MODES
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.progress import bar
from bkn_zoo.publishing.results import write_results
from bkn_zoo.training.datasets import load_data
from bkn_zoo.training.evaluation import RIGHT_ABOVE, uncertain_below

ROOT = Path(__file__).resolve().parent.parent
IMAGES = 500
BATCH = 20
UNKNOWN = "photographs of giraffes and polyps"
ON_ROADS = {"automobile", "truck", "bus", "pickup_truck", "streetcar", "tractor", "tank"}

Picture = Callable[[], Image.Image]
Pictures = list[tuple[Picture, int]]


def some(pictures: Pictures) -> Pictures:
    return random.Random(0).sample(pictures, min(IMAGES, len(pictures)))


def cifar(name: str, root: Path, without: frozenset[str] = frozenset()) -> Pictures:
    """Test images of classes that are not among those to leave out."""
    data = load_data(name, root)
    assert data.test is not None
    found = zip(data.test.images, data.test.labels.tolist(), strict=True)  # type: ignore[union-attr]
    return some([
        (partial(Image.fromarray, pixels.permute(1, 2, 0).numpy()), label)
        for pixels, label in found
        if data.label_names[label] not in without
    ])  # fmt: skip


def tiny_imagenet(root: Path) -> Pictures:
    """The annotated validation images, which are the test images of its checkpoints."""
    number = {name: k for k, name in enumerate((root / "wnids.txt").read_text().split())}
    lines = (root / "val" / "val_annotations.txt").read_text().splitlines()
    rows = [line.split("\t")[:2] for line in lines]
    return some([(partial(open_image, root / "val" / "images" / file), number[name]) for file, name in rows])


def pictures(config: Config, data: Path) -> tuple[Pictures, Pictures, str]:
    """Held-out images of a checkpoint's classes, images of others, and what these show."""
    dataset = config.recipe.get("dataset", "imagenet")
    if dataset.startswith("cifar"):
        other = "cifar10" if dataset == "cifar100" else "cifar100"
        known, unknown = cifar(dataset, data / "cifar"), cifar(other, data / "cifar", frozenset(ON_ROADS))
        return known, unknown, f"of {other.replace('cifar', 'CIFAR-')}, without vehicles on roads"
    paths = sorted(path for path in (data / "unknown").iterdir() if path.suffix.lower() in SUFFIXES)
    others: Pictures = [(partial(open_image, path), -1) for path in paths]
    if dataset == "tiny_imagenet":
        return tiny_imagenet(data / "tiny-imagenet-200"), others, UNKNOWN
    held = sample_images(data / "imagenet-sample-images", "hold")
    return [(partial(open_image, path), label) for path, label in held], others, UNKNOWN


@torch.inference_mode()
def outputs(model: Network, images: Pictures, what: str) -> tuple[dict[str, Tensor], Tensor]:
    """The logits in each mode, and how far the images' statistics are from the population's."""
    device = next(model.parameters()).device
    distances: list[Tensor] = []
    norms = [module for module in model.modules() if isinstance(module, RunningNorm)]
    logits: dict[str, list[Tensor]] = {mode: [] for mode in MODES}
    far: list[Tensor] = []
    with bar(len(images), what, "image", lines=True) as done:
        for start in range(0, len(images), BATCH):
            some_of = images[start : start + BATCH]
            x = torch.stack([preprocess(picture(), model.config.preprocessing) for picture, _ in some_of]).to(device)
            hooks = [norm.register_forward_pre_hook(partial(_measure, distances)) for norm in norms]
            logits["population"].append(model(x, statistics="population"))
            for hook in hooks:
                hook.remove()
            far.append(torch.stack(distances).mean(0))
            distances.clear()
            for mode in MODES[1:]:
                logits[mode].append(model(x, statistics=mode))
            done(len(some_of))
    return {mode: torch.cat(rows).cpu() for mode, rows in logits.items()}, torch.cat(far).cpu()


def _measure(distances: list[Tensor], norm: nn.Module, inputs: Sequence[Any]) -> None:
    """How many deviations of a channel an image's mean is from the population's: the mean square over the channels."""
    assert isinstance(norm, RunningNorm)
    innovation = inputs[0].mean((2, 3)) - norm.running_mean
    distances.append((innovation.square() / (norm.running_var + norm.eps)).mean(1))


def measured(folder: Path, data: Path) -> dict[str, Any]:
    """The thresholds of a checkpoint, and the share of images of unknown classes that pass by each score."""
    model = bkn_zoo.from_pretrained(folder).to(default_device())
    known, unknown, shown = pictures(model.config, data)
    labels = torch.tensor([label for _, label in known])
    ours, theirs = outputs(model, known, folder.name), outputs(model, unknown, "unknown classes")
    mode = model.default_statistics
    scores: dict[str, Callable[[tuple[dict[str, Tensor], Tensor]], Tensor]] = {
        "maximum probability": lambda found: found[0][mode].softmax(1).amax(1),
        "energy": lambda found: found[0][mode].logsumexp(1),
        "distance of statistics": lambda found: -found[1],
    }
    right = ours[0][mode].argmax(1) == labels
    passing = {}
    for name, score in scores.items():
        threshold = torch.quantile(score(ours)[right], 1 - RIGHT_ABOVE)
        passing[name] = round(100 * (score(theirs) >= threshold).float().mean().item(), 1)
    return {
        "checkpoint": folder.name,
        "statistics": mode,
        "images": len(known),
        "uncertain_below": {mode: uncertain_below(logits, labels) for mode, logits in ours[0].items()},
        "unknown": shown,
        "unknown_images": len(unknown),
        "passing": passing,
    }


def keep(folder: Path, thresholds: dict[str, float]) -> None:
    """Write them to a config that has none; all else in it stays as it is."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    if not fields.get("uncertain_below"):
        path.write_text(json.dumps({**fields, "uncertain_below": thresholds}, indent=2) + "\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the sets to measure on")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these checkpoints; keep the other rows")
    args = parser.parse_args(arguments)
    path = ROOT / "results" / "uncertainty.json"
    rows = {row["checkpoint"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for folder in sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json")):
        if not args.only or folder.name in args.only:
            rows[folder.name] = measured(folder, args.data)
            keep(folder, rows[folder.name]["uncertain_below"])
            write_results(path, [rows[name] for name in sorted(rows)], 0)
    return 0


if __name__ == "__main__":
    sys.exit(ended("uncertainty.py", partial(main, sys.argv[1:])))
