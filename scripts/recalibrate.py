"""Asks published checkpoints whether they were better with running averages taken anew, by their final weights.

python scripts/recalibrate.py inception_cifar_bkn.cifar10 inception_cifar_bkn.cifar100 --data CIFAR_FOLDER
python scripts/recalibrate.py inception_v2_bkn.tiny_imagenet --data tiny-imagenet-200 --batches 16 --statistics expected

On the validation images of each one's recipe, in float32 on a CPU; test images are not looked at. Trainings ask this
by themselves now; these checkpoints are older. What was found goes to results/recalibrated/, a file for each, and
docs/runs.md says it. Nothing is published.
"""

import argparse
import sys
from pathlib import Path

import torch

from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.cli import ended
from bkn_zoo.models import Network
from bkn_zoo.modes import MODES
from bkn_zoo.publishing.results import write_results
from bkn_zoo.training.comparisons import recalibrated
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, load_data
from bkn_zoo.training.evaluation import batch_size, evaluate
from bkn_zoo.training.loop import further_images
from bkn_zoo.training.recipes import read_recipe

RESULTS = Path(__file__).resolve().parent.parent / "results" / "recalibrated"
CPU = torch.device("cpu")


def top1(model: Network, data: Data, modes: list[str]) -> dict[str, float]:
    batches = evaluation_batches(data, data.validation, batch_size(CPU), CPU)
    return {mode: metrics["top1"] for mode, metrics in evaluate(model, batches, modes).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="names or folders, all of the data in one folder")
    parser.add_argument("--data", required=True, type=Path, help="the folder that holds the data set")
    parser.add_argument("--batches", type=int, default=64, help="gradient batches of training images, for the averages")
    parser.add_argument("--statistics", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    for name in args.checkpoints:
        model = from_pretrained(name).to(memory_format=torch.channels_last)
        recipe = read_recipe(None, model.config.recipe)
        data = load_data(recipe.dataset, args.data, recipe.size, recipe.validation)
        stored = top1(model, data, args.statistics)
        fresh = recalibrated(model, further_images(recipe, data, CPU, args.batches))
        anew = top1(fresh, data, args.statistics)
        rows = [{"statistics": mode, "stored": stored[mode], "anew": anew[mode]} for mode in args.statistics]
        name = Path(name).name
        about = {"checkpoint": name, "default_statistics": model.default_statistics, "batches": args.batches}
        write_results(RESULTS / f"{name}.json", rows, recipe.seed, images=len(data.validation), **about)
        print(name, rows, flush=True)


if __name__ == "__main__":
    sys.exit(ended("recalibrate.py", main))
