"""`bkn-zoo evaluate`: the accuracy of a checkpoint on a data set, in each statistics mode."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bkn_zoo.checkpoints.card import table
from bkn_zoo.checkpoints.files import make_folder
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.cores import check_device, default_device, keep_to_quota
from bkn_zoo.errors import InputError
from bkn_zoo.inference.engines import create_engine, too_large_for_f16
from bkn_zoo.models import Network
from bkn_zoo.progress import waiting
from bkn_zoo.publishing.pictures import check_matplotlib, draw
from bkn_zoo.publishing.results import write_results
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, FileImages, keep_apart, load_data
from bkn_zoo.training.evaluation import batch_size, compute_logits, measure_accuracy


def evaluate_checkpoint(args: argparse.Namespace) -> None:
    """Measure and print the accuracy, and write files as the options say."""
    args.device = default_device() if args.device == "auto" else args.device
    check_device(args.device)
    keep_to_quota()
    model = from_pretrained(args.checkpoint).to(args.device).to(memory_format=torch.channels_last)
    network: Any = model
    if args.engine != "eager":
        network = create_engine(model, args.engine, args.device, args.precision)
        args.engine = network.name  # for the record
    args.statistics = measurable(model, args.statistics, args.engine, args.precision)
    dataset = args.dataset or model.config.recipe.get("dataset", "folder")
    make_places(args, dataset)
    data = read_data(args, model, dataset)
    split = args.split or ("validation" if data.test is None else "test")
    unknown = data.held_out and model.config.training.get("validation_split") != "of each class"
    if split == "validation" and dataset == "folder" and unknown:
        raise InputError(
            f"{args.checkpoint} does not record which images its training held out: use a folder of images that "
            "it was not trained on, with --split all."
        )
    images, device = data.split(split), torch.device(args.device)
    batches = evaluation_batches(data, images, args.batch_size or batch_size(device), device, args.workers, strict=True)
    logits, labels = compute_logits(network, batches, args.statistics, "evaluating", len(images))
    rows = [
        {"statistics": mode, "images": len(labels), **measure_accuracy(outputs, labels)}
        for mode, outputs in logits.items()
    ]
    print(f"{described(split, data, model)} of {args.data}; top1 with its 95 % interval (Wilson)\n")
    print(table(rows, list(rows[0])))
    if isinstance(images, FileImages):
        images.say_left_out("" if split == "all" else split)
    if args.output:
        about = {"checkpoint": Path(args.checkpoint).name, "engine": args.engine, "precision": args.precision}
        try:
            write_results(args.output, rows, split=split, **about)
        except OSError as error:
            raise InputError(f"{args.output} cannot be written ({error.strerror}): choose another file.") from None
    if args.report:
        mode = model.default_statistics if model.default_statistics in logits else next(iter(logits))
        title = f"{Path(args.checkpoint).name}, {split} images, {mode} statistics"
        with waiting("drawing"):
            paths = draw(args.report, images, logits[mode], labels, data.label_names, title)
        for path in paths:
            print(path)


def measurable(model: Network, modes: Sequence[str], engine: str, precision: str) -> list[str]:
    """The modes that the engine supports in this precision. Prints why it does not support others; an error if none."""
    limited = engine == "openvino" and precision == "f16"
    wrong = {mode: where for mode in modes if limited and (where := too_large_for_f16(model, mode))}
    if wrong:
        why = (
            f"{' and '.join(wrong)} cannot run in f16 with OpenVINO, because means or variances at "
            f"{next(iter(wrong.values()))} are too large: measure with --precision f32 or --engine torch."
        )
        if len(wrong) == len(set(modes)):
            raise InputError(why)
        print(f"bkn-zoo: {why}", file=sys.stderr, flush=True)
    return [mode for mode in modes if mode not in wrong]


def make_places(args: argparse.Namespace, dataset: str) -> None:
    """Create the folders of --output and --report, so that errors come before the evaluation."""
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
        raise InputError(f"--output {args.output} is a folder: choose a file in it.")


def read_data(args: argparse.Namespace, model: Network, dataset: str) -> Data:
    """The data set with the preprocessing and split of the checkpoint. The classes must be the same."""
    preprocessing = model.config.preprocessing
    # The same share as in training, so that the same images are held out.
    share = None if args.split == "all" else model.config.recipe.get("validation", 0.1)
    data = load_data(dataset, args.data, preprocessing and preprocessing.size, share)
    kind = [] if dataset == "folder" else ["--dataset", dataset]
    tune = shlex.join(["bkn-zoo", "train", str(args.data), *kind, "--checkpoint", args.checkpoint])
    if len(data.label_names) != model.num_classes:
        raise InputError(
            f"{args.data} has {len(data.label_names)} classes, but {args.checkpoint} has {model.num_classes}: "
            f"choose the data set that it was trained on, or fine-tune it with {tune}"
        )
    for theirs, ours in zip(data.label_names, model.config.label_names or data.label_names, strict=True):
        if theirs != ours:
            raise InputError(
                f"{args.data} has {theirs!r} where {args.checkpoint} has {ours!r}: use the same names of classes, or "
                f"fine-tune it with {tune}"
            )
    return replace(data, preprocessing=preprocessing or data.preprocessing)


def described(split: str, data: Data, model: Network) -> str:
    if split == "validation" and data.held_out:
        return (
            f"the {model.config.recipe.get('validation', 0.1):.0%} of images that a training on this folder holds out "
            "(use --split all if it was trained on another folder)"
        )
    return "all images" if split == "all" else f"the {split} images"
