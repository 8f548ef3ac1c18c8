"""`bkn-zoo list`, `info` and `compare`: tables about checkpoints and about one image."""

import argparse
import json
import math
import sys
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG, files_of_weights, open_regular, reading, weights_file
from bkn_zoo.checkpoints.locate import default_checkpoint, find, list_checkpoints, locate, usable_checkpoints
from bkn_zoo.cli.classify import FAILED, STDIN, find_images, load_classifier
from bkn_zoo.cli.options import announce
from bkn_zoo.errors import CheckpointError, ImageError
from bkn_zoo.modes import MODES
from bkn_zoo.terminal import printable

TIMED_RUNS = 5
# What `info` leaves out of its table
ONLY_JSON = ("format_version", "norm_options", "training", "versions", "sha256")
# Tensors of norms that are not parameters
BUFFERS = ("running_mean", "running_var", "image_mean", "image_var", "image_spread", "num_batches_tracked")


def compare(args: argparse.Namespace) -> None:
    """Print the likeliest labels of images in each statistics mode, with the time of the network."""
    failures: dict[str, str] = {}
    names = list(find_images(args.paths, failures))
    if failures:
        raise ImageError(next(iter(failures.values())))
    classifier = load_classifier(args)
    for number, name in enumerate(names):
        print(end="\n" if number else "")
        image = classifier.prepare(sys.stdin.buffer.read() if name == STDIN else name)[None]
        columns = []
        for mode in MODES:
            # The first call prepares the network for this mode.
            scores = classifier.scores(image, mode)[0]
            seconds = median(timeit.repeat(partial(classifier.scores, image, mode), number=1, repeat=TIMED_RUNS))
            chosen = " (default)" if mode == classifier.choose() else ""
            spent = f"{seconds * 1e3:.1f} ms in {classifier.engine.precision_at(mode)}"
            best = classifier.best(scores, args.top_k)
            columns.append([f"{mode}{chosen}", spent, *(f"{p.score:.4f}  {p.label}" for p in best)])
        print(printable(f"{name}, by {classifier.name} with {classifier.engine_name} on {classifier.device}"))
        _print_columns(list(zip(*columns, strict=True)))


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def list_here(args: argparse.Namespace) -> int:
    """Print all local checkpoints in order of preference. The first is the default."""
    rows, code = [("name", "architecture", "classes", "data", "statistics", "top-1 (%)")], 0
    names, marks = list_checkpoints(), dict[str, str]()
    try:
        usable = usable_checkpoints()
    except CheckpointError:
        usable = []
    for name in [*usable, *(name for name in names if name not in usable)]:
        try:
            config = Config.read(find(name) / CONFIG)
        except CheckpointError as error:
            announce(str(error))
            code = FAILED
            continue
        accuracy = config.top1
        shown = "-" if accuracy is None else f"{accuracy:.1f}"
        if accuracy is not None and (where := config.measured_on):
            shown += f" {marks.setdefault(where, '*' * (len(marks) + 1))}"
        data, marked = str(config.dataset or "-"), f"{name} (default)" if name in usable[:1] else name
        rows.append((marked, config.architecture, str(config.num_classes), data, config.default_statistics, shown))
    if len(rows) > 1:
        _print_columns(rows)
        for where, mark in marks.items():
            print(printable(f"{mark} not on the test images of its data set, but on {where}"))
    elif code == 0:
        remedy = "set BKN_ZOO_CHECKPOINTS to a folder of checkpoints, or use one on the Hub (owner/repo)"
        announce(f"there are no local checkpoints: {remedy}.")
    return code


def info(args: argparse.Namespace) -> None:
    """Print what a user needs to know about a checkpoint, its whole config as JSON, or only its classes."""
    args.checkpoint = args.checkpoint or default_checkpoint()
    location = locate(args.checkpoint)
    config = Config.read(location.folder / CONFIG)
    if args.classes:
        if config.label_names is None:
            told = f"{args.checkpoint} has {config.num_classes} classes without names"
            raise CheckpointError(f"{told}: save it with label_names.")
        print("\n".join(map(printable, config.label_names)))
        return
    with reading():
        parameters = sum(map(_parameters, files_of_weights(weights_file(location.folder))))
        size = sum(file.stat().st_size for file in location.folder.iterdir())
    facts: dict[str, Any] = {"name": args.checkpoint, "revision": location.revision}
    facts |= {"parameters": parameters, "bytes_on_disk": size, **asdict(config)}
    if args.format == "json":
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    labels = config.label_names or ("-",)
    facts |= {"parameters": f"{parameters:,}", "bytes_on_disk": f"{size:,}"}
    facts |= {"label_names": ", ".join(labels[:5]) + (", ... (all with --classes)" if len(labels) > 5 else "")}
    shown = {name: value for name, value in facts.items() if name not in ONLY_JSON}
    if where := config.measured_on:
        shown["accuracy measured on"] = where
    _print_columns([row for name, value in shown.items() for row in _table_rows(name, value)])


def _parameters(file: Path) -> int:
    """The number of parameters in a file of weights, from its header."""
    with open_regular(file) as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    tensors = {name: about["shape"] for name, about in header.items() if name != "__metadata__"}
    return sum(math.prod(shape) for name, shape in tensors.items() if not name.endswith(BUFFERS))


def _table_rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _table_rows(f"{name}.{key}", inner)
    else:
        values = value if isinstance(value, list | tuple) else [value]
        yield name, ", ".join("-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
