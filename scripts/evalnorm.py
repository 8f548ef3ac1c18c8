"""Asks published checkpoints for their accuracy by EvalNorm's rule (Singh & Shrivastava 2019), which is not a mode.

python scripts/evalnorm.py inception_cifar_bkn.cifar10 inception_cifar_bkn.cifar100 --data CIFAR_FOLDER
python scripts/evalnorm.py inception_v2_bkn.tiny_imagenet --data tiny-imagenet-200 --batches 16

Its shares are fitted to training images, the accuracy is that on the test images, in float32 on a CPU. The trainings of
reproduce.py ask this by themselves; these checkpoints are older. What was found goes to results/evalnorm/, a file for
each, and docs/results.md and the cards take it for the networks' own.
"""

import argparse
import sys
from pathlib import Path

import torch

from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.cli import ended
from bkn_zoo.publishing.results import write_results
from bkn_zoo.training.comparisons import evalnorm, observing_by
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import load_data
from bkn_zoo.training.evaluation import batch_size, evaluate
from bkn_zoo.training.loop import further_images
from bkn_zoo.training.recipes import read_recipe

RESULTS = Path(__file__).resolve().parent.parent / "results" / "evalnorm"
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="names or folders, all of the data in one folder")
    parser.add_argument("--data", required=True, type=Path, help="the folder that holds the data set")
    parser.add_argument("--batches", type=int, default=64, help="gradient batches of training images, for the shares")
    args = parser.parse_args()
    for name in args.checkpoints:
        model = from_pretrained(name).to(memory_format=torch.channels_last)
        recipe = read_recipe(None, model.config.recipe)
        data = load_data(recipe.dataset, args.data, recipe.size, recipe.validation)
        with observing_by(model, evalnorm(model, further_images(recipe, data, CPU, args.batches))):
            batches = evaluation_batches(data, data.test, batch_size(CPU), CPU)
            rows = [evaluate(model, batches, ["expected"])["expected"]]
        name = Path(name).name
        write_results(RESULTS / f"{name}.json", rows, recipe.seed, checkpoint=name, batches=args.batches)
        print(name, rows, flush=True)


if __name__ == "__main__":
    sys.exit(ended("evalnorm.py", main))
