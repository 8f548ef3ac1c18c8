"""Trains a network with a recipe and publishes it on the Hugging Face Hub, by one command.

    python scripts/train.py recipes/inception_cifar_bkn.cifar10.toml --data CIFAR_FOLDER --push-to-hub me/my-network
    torchrun --nproc-per-node=8 scripts/train.py recipes/resnet101_bkn.imagenet.toml --data IMAGENET --set epochs=30

It calls `bkn_zoo.train`, then `bkn_zoo.push_to_hub`. `bkn-zoo train` in a shell also fine-tunes without a recipe.
"""

import argparse
import sys
from typing import Any

import bkn_zoo
from bkn_zoo.checkpoints.card import checkpoint_card
from bkn_zoo.checkpoints.folder import write_card
from bkn_zoo.checkpoints.hub import check_reachable, check_repository
from bkn_zoo.cli import ended
from bkn_zoo.cli.train import literal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a TOML file, or the name of one in recipes/")
    parser.add_argument("--data", required=True, help="folder of the data set")
    parser.add_argument("--init", help="checkpoint to start from (default: new weights)")
    parser.add_argument("--name", help="of the run and its checkpoint (default: the recipe's, with what is set)")
    parser.add_argument("--output", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--results", help="folder of the record (default: results/runs in the output folder)")
    parser.add_argument("--device", help="default: a GPU if available")
    parser.add_argument("--workers", type=int, default=0, help="processes that decode image files (default: 0)")
    parser.add_argument("--resume", action="store_true", help="continue the training in the output folder")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the recipe")
    parser.add_argument("--license", help="that the model card names, such as mit (default: none)")
    parser.add_argument("--push-to-hub", metavar="OWNER/REPO", help="where to publish the checkpoint at the end")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    options = vars(parser.parse_args())
    overrides = dict[str, Any](word.partition("=")[::2] for word in options.pop("set"))
    repository, private = options.pop("push_to_hub"), options.pop("private")
    if repository:  # refused now, not after hours of training
        check_repository(repository)
        check_reachable(repository)
    result = bkn_zoo.train(**options, **{field: literal(value) for field, value in overrides.items()})
    if not result.record:  # only the first process has it
        return
    print(f"saved to {result.folder}")
    if repository:
        config, record = result.model.config, result.record
        card = checkpoint_card(config, record["name"], record, address=repository, license=options["license"])
        write_card(result.folder, card)
        published = bkn_zoo.push_to_hub(result.folder, repository, private=private)
        print(f"published as {repository}@{published.commit}")


if __name__ == "__main__":
    sys.exit(ended("train.py", main))
