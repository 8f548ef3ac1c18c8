"""Milliseconds from an image file to an answer, of checkpoints in each statistics mode: `benchmark.py defaults`.

The checkpoint that `serve`, `classify` and `train` use where none is named must be no slower, in its default mode, than
the one before it.
"""

import argparse
import statistics
from functools import partial
from typing import Any

from benchmarks.common import MACHINE, add_command, interleaved, make_image, ratio, save, show, timed
from bkn_zoo.modes import MODES

CHECKPOINTS = ["inception_v2_bkn.tiny_imagenet", "efficientnet_lite0_bkn.imagenet", "efficientnet_lite2_bkn.imagenet"]


def defaults(args: argparse.Namespace) -> None:
    from bkn_zoo import Classifier

    image = make_image(256)
    classifiers = {
        (name, precision): Classifier.from_pretrained(name, device="cpu", precision=precision)
        for name in args.checkpoints
        for precision in args.precisions
    }
    runs = {
        (*key, mode): partial(timed, partial(classifier, image, statistics=mode))
        for key, classifier in classifiers.items()
        for mode in MODES
    }
    times = interleaved(runs, args.rounds, warmup=1)
    first = args.checkpoints[0]
    rows = [
        {"checkpoint": name, "precision": precision, "statistics": mode}
        | {"default": mode == classifiers[name, precision].choose(), "ms": statistics.median(found)}
        | {"ratio_to_population": ratio(found, times[name, precision, "population"])}
        | {f"relative to {first}": ratio(found, times[first, precision, classifiers[first, precision].choose()])}
        for (name, precision, mode), found in times.items()
    ]
    save(args, rows, device="cpu")
    show(rows)


def add(commands: Any) -> None:
    command = add_command(commands, defaults, "defaults", "checkpoints in each mode, file to answer", 30, MACHINE)
    command.add_argument("--checkpoints", nargs="+", default=CHECKPOINTS)
    command.add_argument("--precisions", nargs="+", default=["f32", "auto"])
