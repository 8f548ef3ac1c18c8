"""Measures a checkpoint on a data set, in each statistics mode: top-1 with its 95 % interval, top-5, calibration error.

    bkn-zoo evaluate inception_cifar_bkn.cifar10 --data CIFAR_FOLDER
    bkn-zoo evaluate inception_cifar_bkn.cifar10 --data CIFAR_FOLDER --engine openvino      # faster on a CPU
    bkn-zoo evaluate runs/NAME/NAME --data FOLDER_OF_CLASSES --output accuracy.json --report pictures
    bkn-zoo evaluate runs/NAME/NAME --data OTHER_FOLDER_OF_CLASSES --split all               # none of it seen before

Where --output names a file, the figures go there too, with the command and the machine. Where --report names a folder,
two pictures go there: confusion.png (what is taken for what) and mistakes.png (the images of which it was surest, and
wrong), in the checkpoint's own statistics mode unless --statistics leaves that out.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

from bkn_zoo.checkpoints.files import make_folder
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.cli.checks import whole_number
from bkn_zoo.cores import check_device, default_device, keep_to_quota
from bkn_zoo.errors import InputError
from bkn_zoo.inference import ENGINES, PRECISIONS
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.models import Network
from bkn_zoo.norms import MODES
from bkn_zoo.progress import waiting
from bkn_zoo.publishing.pictures import check_matplotlib, draw
from bkn_zoo.publishing.results import table, write_results
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, FileImages, load_data
from bkn_zoo.training.evaluation import batch_size, measure, predict
from bkn_zoo.training.tree import keep_apart


def main(arguments: list[str], prog: str = "bkn-zoo evaluate") -> None:
    args = parse(arguments, prog)
    check_device(args.device)
    keep_to_quota()
    model = from_pretrained(args.checkpoint).to(args.device).to(memory_format=torch.channels_last)
    dataset = args.dataset or model.config.recipe.get("dataset", "folder")
    make_places(args, dataset)
    data = read_data(args, model, dataset)
    split = args.split or ("validation" if data.test is None else "test")
    unknown = data.held_out and model.config.training.get("validation_split") != "of each class"
    if split == "validation" and dataset == "folder" and unknown:
        raise InputError(
            f"{args.checkpoint} does not say which images its training held out: measure it on a folder that it has "
            "not seen, with --split all."
        )
    images, device = data.split(split), torch.device(args.device)
    batches = evaluation_batches(data, images, args.batch or batch_size(device), device, args.workers, strict=True)
    run = model if args.engine == "eager" else create_engine(model, args.engine, args.device, args.precision)
    logits, labels = predict(run, batches, args.statistics, "evaluating", len(images))
    rows = [{"statistics": mode, "images": len(labels), **measure(outputs, labels)} for mode, outputs in logits.items()]
    print(f"{described(split, data, model)} of {args.data}; top1 with its 95 % interval (Wilson)\n")
    print(table(rows, list(rows[0])))
    if isinstance(images, FileImages):
        images.say_left_out("" if split == "all" else split)
    if args.output:
        about = {"checkpoint": Path(args.checkpoint).name, "engine": args.engine, "precision": args.precision}
        try:
            write_results(args.output, rows, split=split, **about)
        except OSError as error:
            raise InputError(f"{args.output} cannot be written ({error.strerror}): name another file.") from None
    if args.report:
        mode = model.default_statistics if model.default_statistics in logits else args.statistics[0]
        title = f"{Path(args.checkpoint).name}, {split} images, {mode} statistics"
        with waiting("drawing"):
            paths = draw(args.report, images, logits[mode], labels, data.label_names, title)
        for path in paths:
            print(path)


def parse(arguments: list[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a name or a folder")
    parser.add_argument("--data", required=True, type=Path, help="the folder that holds the data set")
    parser.add_argument("--dataset", help="default: the one that the checkpoint was trained on")
    parser.add_argument(
        "--split", choices=["validation", "test", "all"],
        help="default: the test images or, of a folder without any, the validation images that the training held out; "
        "all is for a folder that the training did not see",
    )  # fmt: skip
    parser.add_argument("--statistics", nargs="+", choices=MODES, default=list(MODES))
    named, exact = ([name for name in choices if name != "auto"] for choices in (ENGINES, PRECISIONS))  # for the record
    parser.add_argument(
        "--engine", choices=["eager", *named], default="eager", help="the network as it is, or prepared"
    )
    parser.add_argument("--precision", choices=exact, default="f32", help="of a prepared network")
    parser.add_argument("--batch", type=whole_number(1), help="images at a time; default: 500, or 16 on a CPU")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--workers", type=whole_number(0), default=0)
    parser.add_argument("--output", type=Path, help="a JSON file for the figures, the command and the machine")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="for pictures of what went wrong")
    args = parser.parse_args(arguments)
    if args.engine == "eager" and args.precision != "f32":
        raise InputError("--precision is for a prepared network: add --engine torch or --engine openvino.")
    return args


def make_places(args: argparse.Namespace, dataset: str) -> None:
    """Create the folders of --output and --report, or refuse them now rather than after the evaluation."""
    folders = {"--report": args.report} if args.report else {}
    if args.output and not os.path.exists(args.output):
        folders["--output"] = args.output.parent
    if dataset == "folder":
        keep_apart(args.data, folders)
    if args.report:
        check_matplotlib()
    for folder in folders.values():
        make_folder(folder)
    if args.output and os.path.isdir(args.output):
        raise InputError(f"--output {args.output} is a folder: name a file in it.")


def read_data(args: argparse.Namespace, model: Network, dataset: str) -> Data:
    """The data set, preprocessed and split as the checkpoint says; its classes must be the checkpoint's."""
    preprocessing = model.config.preprocessing
    # The same share as in training, so that what was held out then is held out now.
    share = None if args.split == "all" else model.config.recipe.get("validation", 0.1)
    data = load_data(dataset, args.data, preprocessing and preprocessing.size, share)
    if len(data.label_names) != model.num_classes:
        raise InputError(f"{args.data} has {len(data.label_names)} classes, but {args.checkpoint} {model.num_classes}.")
    for theirs, ours in zip(data.label_names, model.config.label_names or data.label_names, strict=True):
        if theirs != ours:
            raise InputError(f"{args.data} has {theirs!r} for {ours!r} of {args.checkpoint}: name the classes alike.")
    return replace(data, preprocessing=preprocessing or data.preprocessing)


def described(split: str, data: Data, model: Network) -> str:
    if split == "validation" and data.held_out:
        return (
            f"the {model.config.recipe.get('validation', 0.1):.0%} of images that a training on this folder holds out "
            "to choose by (--split all if it was trained on another)"
        )
    return "all images" if split == "all" else f"the {split} images"
