"""The options of all commands except `train` and `serve`, and checks that commands share. PyTorch is not imported."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bkn_zoo.checkpoints.locate import is_folder, locate
from bkn_zoo.inference import ENGINES, PRECISIONS
from bkn_zoo.modes import MODES
from bkn_zoo.terminal import Parser, printable

# The metavar of every argument that is a checkpoint. Shell completion offers checkpoint names for it
CHECKPOINT = "CHECKPOINT"
NAMED = "a name, a folder or owner/repo on the Hub"
FIRST = f"{NAMED} (default: the first of bkn-zoo list)"
STATISTICS = "statistics that normalize an image (default: the checkpoint's choice)"

CLASSIFY = """\
Classifies images.

    bkn-zoo classify cat.jpg dog.png --top-k 3
    bkn-zoo classify photos/ --checkpoint ./my_network --statistics sample --format json
    bkn-zoo classify 'photos/**/*.jpg' --output out.csv
    curl https://example.org/cat.jpg | bkn-zoo classify -

With --output, the command resumes after an interruption, and a .jsonl file can be extended by further images.
Images that cannot be read are listed at the end. The exit code is 1 if one was an argument, or if none could be read.
"""
COMPARE = """\
Shows the three statistics modes side by side, with the time of the network alone (the median of five runs).

    bkn-zoo compare photo.jpg --checkpoint inception_v2_bkn.tiny_imagenet
"""
INFO = "Describes a checkpoint, such as bkn-zoo info inception_v2_bkn.tiny_imagenet."
EVALUATE = """\
Measures a checkpoint on a data set, in each statistics mode: top-1 with its 95 % interval, top-5, calibration error.

    bkn-zoo evaluate inception_cifar_bkn.cifar10 CIFAR_FOLDER
    bkn-zoo evaluate runs/NAME/NAME FOLDER_OF_CLASSES --output accuracy.json --report pictures
    bkn-zoo evaluate runs/NAME/NAME OTHER_FOLDER_OF_CLASSES --split all              # not used in training

--output writes the results to a file, with the command and the hardware. --report writes into a folder: confusion.png
(which classes are confused), mistakes.png (the most confident wrong answers) and classes.csv (images, precision and
recall of each class). They use the checkpoint's default statistics mode, unless --statistics excludes it.
"""
EXPORT = """\
Writes a checkpoint as an ONNX file, and compares the outputs of both.

    bkn-zoo export ./my_network --statistics sample --output my_network.onnx
"""
PUBLISH = """\
Publishes checkpoints on the Hugging Face Hub, each as NAMESPACE/NAME_OF_THE_FOLDER, in one commit.

    bkn-zoo publish runs/NAME/NAME --namespace me --dry-run                  # only validate

Each folder is validated first: it must load, reproduce its golden outputs, and agree with its card (to publish another
card, use `bkn_zoo.push_to_hub`). The token is that of `hf auth login` or of HF_TOKEN. A dry run works offline.
"""


def check_checkpoint(name: str) -> None:
    """Refuse a name without a checkpoint. Names on the Hub are checked when they are loaded."""
    if is_folder(name) or "/" not in name:
        locate(name)


def announce(text: str) -> None:
    """Print a line on standard error, such as what happens before imports that take seconds."""
    print(f"bkn-zoo: {printable(text)}", file=sys.stderr, flush=True)


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


def add_device(parser: Parser) -> None:
    what = "auto, cpu, cuda or cuda:NUMBER (default: auto, a GPU if there is one)"
    parser.add_argument("--device", default="auto", metavar="DEVICE", help=what)


def add_reading(parser: Parser) -> None:
    """Options of commands that read data sets."""
    what = "a .csv or .jsonl file with file, label and perhaps split: train, val, test (default: by subfolders)"
    parser.add_argument("--labels", type=Path, metavar="FILE", help=what)
    add_device(parser)
    what = "processes that decode image files (default: 0, decode in this process)"
    parser.add_argument("--workers", type=whole_number(0), default=0, metavar="N", help=what)


def _add_precision(parser: Parser, choices: Sequence[str] = PRECISIONS, default: str = "auto") -> None:
    what = f"precision of the network (default: {default}{', the fastest here' if default == 'auto' else ''})"
    parser.add_argument("--precision", choices=choices, default=default, help=what)


def _add_classifier(parser: Parser) -> None:
    parser.add_argument("--checkpoint", "--model", dest="checkpoint", metavar=CHECKPOINT, help=FIRST)
    parser.add_argument("--top-k", type=whole_number(1), default=5, metavar="K", help="labels to show (default: 5)")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="what runs the network (default: auto)")
    _add_precision(parser)
    add_device(parser)


def classify_parser() -> Parser:
    parser = Parser("bkn-zoo classify", description=CLASSIFY)
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER", help="images, folders, patterns; - is stdin")
    _add_classifier(parser)
    parser.add_argument("--statistics", choices=MODES, help=STATISTICS)
    parser.add_argument("--format", choices=("table", "json", "jsonl", "csv"), help="default: FILE's suffix, or table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to this .jsonl, .json or .csv file")
    return parser


def compare_parser() -> Parser:
    parser = Parser("bkn-zoo compare", description=COMPARE)
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER", help="images, folders or patterns")
    _add_classifier(parser)
    return parser


def info_parser() -> Parser:
    parser = Parser("bkn-zoo info", description=INFO)
    parser.add_argument("checkpoint", nargs="?", metavar=CHECKPOINT, help=FIRST)
    parser.add_argument("--classes", action="store_true", help="list only its classes, one per line")
    text = "json also has its training, its files and the options of its norms (default: %(default)s)"
    parser.add_argument("--format", choices=("table", "json"), default="table", help=text)
    return parser


def evaluate_parser() -> Parser:
    parser = Parser("bkn-zoo evaluate", description=EVALUATE)
    parser.add_argument("checkpoint", metavar=CHECKPOINT, help=NAMED)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the folder of the data set")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the same, as an option")
    parser.add_argument("--dataset", help="the kind of data set (default: that of the checkpoint's training)")
    what = "images to use; all: if the training used none of them (default: test, or validation where there are none)"
    parser.add_argument("--split", choices=["validation", "test", "all"], help=what)
    parser.add_argument("--statistics", nargs="+", choices=MODES, default=list(MODES), help="default: all three")
    what = "what runs the network (default: auto, the fastest here; eager is the unchanged PyTorch network)"
    parser.add_argument("--engine", choices=["eager", *ENGINES], default="auto", help=what)
    _add_precision(parser, [name for name in PRECISIONS if name != "auto"], "f32")
    parser.add_argument("--batch-size", type=whole_number(1), metavar="N", help="default: 500 images; CPU: 16")
    add_reading(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON to this file")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write pictures and a table of classes here")
    return parser


def export_parser() -> Parser:
    parser = Parser("bkn-zoo export", description=EXPORT)
    parser.add_argument("checkpoint", metavar=CHECKPOINT, help=NAMED)
    parser.add_argument("--statistics", choices=MODES, help=STATISTICS)
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: CHECKPOINT.STATISTICS.onnx, here")
    return parser


def publish_parser() -> Parser:
    parser = Parser("bkn-zoo publish", description=PUBLISH)
    parser.add_argument("checkpoints", nargs="+", metavar=CHECKPOINT, help="a name or a folder")
    parser.add_argument("--namespace", required=True, help="the user or organization to publish under")
    parser.add_argument("--name", help="name of the repository, for a single checkpoint (default: that of the folder)")
    parser.add_argument("--private", action="store_true", help="make new repositories private")
    parser.add_argument("--dry-run", action="store_true", help="validate and list the files; publish nothing")
    return parser
