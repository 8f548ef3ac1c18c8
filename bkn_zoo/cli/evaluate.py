"""`bkn-zoo evaluate`: the accuracy of a checkpoint on a data set, in each statistics mode."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bkn_zoo.checkpoints.card import table
from bkn_zoo.checkpoints.files import make_folder
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.checkpoints.provenance import write_results
from bkn_zoo.cores import check_device, default_device, keep_to_quota
from bkn_zoo.errors import InputError
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.models import Network
from bkn_zoo.progress import waiting
from bkn_zoo.publishing.pictures import check_matplotlib, draw
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, load_data
from bkn_zoo.training.evaluation import batch_size, compute_logits, measure_accuracy, measure_classes, write_classes


def evaluate_checkpoint(args: argparse.Namespace) -> None:
    """Measure and print the accuracy, and write files as the options say."""
    args.device = default_device() if args.device == "auto" else args.device
    check_device(args.device)
    keep_to_quota()
    if args.report:
        check_matplotlib()
    # Errors come before the evaluation.
    for folder in filter(None, (args.report, args.output and args.output.parent)):
        make_folder(folder)
    if args.output and args.output.is_dir():
        raise InputError(f"--output {args.output} is a folder: choose a file in it.")
    model = from_pretrained(args.checkpoint).to(args.device).to(memory_format=torch.channels_last)
    network: Any = model
    if args.engine != "eager":
        network = create_engine(model, args.engine, args.device, args.precision)
        args.engine = network.name  # for the record
    data = read_data(args, model)
    split = args.split or ("validation" if data.test is None else "test")
    unknown = data.held_out and model.config.training.get("validation_split") != "of each class"
    if split == "validation" and data.name == "folder" and unknown:
        told = f"{args.checkpoint} does not record which images its training held out"
        raise InputError(f"{told}: use a folder of images that it was not trained on, with --split all.")
    images, device = data.split(split), torch.device(args.device)
    batches = evaluation_batches(data, images, args.batch_size or batch_size(device), device, args.workers)
    logits, labels = compute_logits(network, batches, args.statistics, "evaluating", len(images))
    count = {"images": len(labels)}
    rows = [{"statistics": mode} | count | measure_accuracy(outputs, labels) for mode, outputs in logits.items()]
    which = "all images" if split == "all" else f"the {split} images"
    if split == "validation" and data.held_out:
        every = sum(len(part) for part in (data.train, data.validation))
        which = (
            f"{len(images)} of {every} images, those that a training on this folder holds out (add --split all if "
            f"{args.checkpoint} was trained on other images)"
        )
    print(f"{which} of {args.data}; top1 with its 95 % interval (Wilson)\n")
    print(table(rows, list(rows[0])))
    mode = model.default_statistics if model.default_statistics in logits else next(iter(logits))
    classes = measure_classes(logits[mode], labels, data.label_names)
    if args.output:
        about = {"checkpoint": Path(args.checkpoint).name, "engine": args.engine, "precision": args.precision}
        write_results(args.output, rows, device=device, split=split, classes=classes, **about)
    if args.report:
        write_classes(args.report / "classes.csv", classes)
        title = f"{Path(args.checkpoint).name}, {split} images, {mode} statistics"
        with waiting("drawing"):
            paths = draw(args.report, images, logits[mode], labels, data.label_names, title)
        print(*paths, args.report / "classes.csv", sep="\n")


def read_data(args: argparse.Namespace, model: Network) -> Data:
    """The data set with the preprocessing and split of the checkpoint. The classes must be the same."""
    dataset = args.dataset or model.config.recipe.get("dataset", "folder")
    preprocessing = model.config.preprocessing
    # The same share as in training, so that the same images are held out.
    share = None if args.split == "all" else model.config.recipe.get("validation", 0.1)
    names = model.config.label_names or ()
    data = load_data(dataset, args.data, preprocessing and preprocessing.size, share, args.labels, names)
    ours, name = model.config.label_names or data.label_names, args.checkpoint
    wrong = next((f"{a!r} where {name} has {b!r}" for a, b in zip(data.label_names, ours, strict=False) if a != b), "")
    if len(data.label_names) != model.num_classes:
        wrong = f"{len(data.label_names)} classes, but {name} has {model.num_classes}"
    if wrong:
        kind = [] if dataset == "folder" else ["--dataset", dataset]
        tune = shlex.join(["bkn-zoo", "train", str(args.data), *kind, "--checkpoint", name])
        raise InputError(f"{args.data} has {wrong}: use the classes of its training, or fine-tune it with {tune}")
    return replace(data, preprocessing=preprocessing or data.preprocessing)
