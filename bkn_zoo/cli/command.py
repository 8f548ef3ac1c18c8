"""What `bkn-zoo` does: classify images, compare the statistics modes, look at checkpoints; and whom else it calls."""

import argparse
import json
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG, reading
from bkn_zoo.checkpoints.locate import find, list_checkpoints, locate
from bkn_zoo.cli.checks import whole_number
from bkn_zoo.cli.classify import FAILED, FORMATS, classify, load
from bkn_zoo.errors import BknZooError, CheckpointError, HubError, ImageError, InputError
from bkn_zoo.inference import ENGINES, PRECISIONS
from bkn_zoo.modes import MODES
from bkn_zoo.terminal import printable
from bkn_zoo.version import __version__

MISUSED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141  # exit codes; the last two as a shell reports signals
TIMED_RUNS = 5
LOG_LEVELS, LOG_VARIABLE = ("debug", "info", "warning", "error"), "BKN_ZOO_LOG_LEVEL"

DESCRIPTION = "Classify images with networks that choose whose statistics normalize them."
EXAMPLES = """\
examples:
  bkn-zoo classify photo.jpg                               the five likeliest labels
  bkn-zoo classify photos/ --format csv --output out.csv   every image in a folder and in those within it
  bkn-zoo compare photo.jpg                                the three statistics modes side by side
  bkn-zoo list                                             the checkpoints that are here
  bkn-zoo serve --port 8000                                the same over HTTP, with a page to try it on
"""
CLASSIFY_EXAMPLES = """\
examples:
  bkn-zoo classify cat.jpg dog.png --top-k 3
  bkn-zoo classify photos/ --model ./my_network --statistics sample --format json
  bkn-zoo classify photos/ --format csv --output out.csv
  bkn-zoo classify photos/ --format csv --output out.csv --ray

Stopped at any moment, one with --output goes on where it was when it is given again: no image is in FILE twice, and
those that are there already are not looked at again. --ray takes all machines of a Ray cluster: see docs/ray.md.

Images that cannot be used are named on stderr at the end. The exit code is 1 if such a one was named in the command, or
if no image could be used, or with --strict if any could not; otherwise 0.
"""
COMPARE_EXAMPLES = """\
example:
  bkn-zoo compare photo.jpg --model inception_v2_bkn.tiny_imagenet

The times are those of the network alone: the median of five runs after a first one that prepares it.
"""
INFO_EXAMPLES = """\
examples:
  bkn-zoo info inception_v2_bkn.tiny_imagenet
  bkn-zoo info ./my_network --format json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be valid text
    return ended("bkn-zoo", lambda: _run(arguments))


def ended(name: str, run: Callable[[], int | None]) -> int:
    """The exit code of a command or a script of this name, whose end is silent but for a sentence about an error."""
    try:
        return _ended(name, run)
    except KeyboardInterrupt:  # a second one, while it ended
        return INTERRUPTED


def _ended(name: str, run: Callable[[], int | None]) -> int:
    try:
        code = run() or 0
    except BknZooError as error:
        print(f"{name}: {printable(error)}", file=sys.stderr)
        code = FAILED if isinstance(error, ImageError | CheckpointError | HubError) else MISUSED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit):  # of a print, or after --help, say; or of something else, which is told
        if _is_read():
            raise
        return PIPE_CLOSED
    return code if _is_read() else PIPE_CLOSED


def _is_read() -> bool:
    """Whether there is still someone who reads what is printed."""
    try:
        sys.stdout.flush()
        if not _is_broken(sys.stdout):
            return True
    except BrokenPipeError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush succeeds
    return False


def _is_broken(stream: TextIO) -> bool:
    """Whether it is a pipe without a reader: what could not be written is lost, and a flush would not notice."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no such thing on this system, no file, or a closed one
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: list[str]) -> int:
    arguments = _set_log_level(arguments)
    if arguments and arguments[0] in OTHERS:
        return OTHERS[arguments[0]](arguments[1:])
    args = _parser().parse_args(arguments)
    code: int = args.run(args)
    return code


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    what = f"what to log, before the command: {', '.join(LOG_LEVELS)} (default: {LOG_VARIABLE}, or warning)"
    parser.add_argument("--log-level", choices=LOG_LEVELS, metavar="LEVEL", help=what)


def _set_log_level(arguments: list[str]) -> list[str]:
    """Obey --log-level where it stands before the command, or the variable; returns what follows it.

    The variable is set for the processes of the service, too.
    """
    if arguments and arguments[0].partition("=")[0] == "--log-level":
        parser, end = _Parser(prog="bkn-zoo", add_help=False), 1 if "=" in arguments[0] else 2
        _add_log_level(parser)
        os.environ[LOG_VARIABLE] = parser.parse_args(arguments[:end]).log_level
        arguments = arguments[end:]
    level = os.environ.get(LOG_VARIABLE)
    if level:
        if level not in LOG_LEVELS:
            raise InputError(f"{LOG_VARIABLE} is {level!r}: choose one of {', '.join(LOG_LEVELS)}.")
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("bkn_zoo").setLevel(level.upper())
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="bkn-zoo", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"bkn-zoo {__version__}")
    _add_log_level(parser)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str = ""
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
        command.set_defaults(run=run)
        return command

    images = add("classify", classify, "say what is on images", CLASSIFY_EXAMPLES)
    images.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_FOLDER", help="images, and folders of them")
    images.add_argument(
        "--statistics", choices=MODES, help="what normalizes an image (default: the checkpoint's choice)"
    )
    images.add_argument("--format", choices=FORMATS, default="table", help="default: %(default)s")
    images.add_argument(
        "--output", type=Path, metavar="FILE", help="for csv or json; one that is begun is gone on with"
    )
    images.add_argument("--strict", action="store_true", help="exit with 1 if any image could not be used")
    images.add_argument("--ray", action="store_true", help="by all machines of the Ray cluster that RAY_ADDRESS names")
    compare = add("compare", _compare, "show the three statistics modes side by side", COMPARE_EXAMPLES)
    compare.add_argument("image", type=Path, metavar="IMAGE", help="an image file")
    for command in (images, compare):
        command.add_argument(
            "--model", metavar="NAME", help="a checkpoint: a name, a folder or owner/repo (default: the best here)"
        )
        command.add_argument(
            "--top-k", type=whole_number(1), default=5, metavar="K", help="labels to show (default: 5)"
        )
        command.add_argument("--engine", choices=ENGINES, default="auto", help="what runs the network (default: auto)")
        command.add_argument(
            "--precision", choices=PRECISIONS, default="auto", help="that it runs in (default: auto, the hardware's)"
        )
        command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add("list", _list, "list the checkpoints that are here")
    info = add("info", _info, "describe a checkpoint", INFO_EXAMPLES)
    info.add_argument("name", metavar="NAME", help="a checkpoint: a name, a folder or owner/repo")
    info.add_argument("--format", choices=("table", "json"), default="table", help="default: %(default)s")
    for name, text in OTHERS_HELP.items():
        commands.add_parser(name, help=f"{text} (bkn-zoo {name} --help lists its options)")
    return parser


class _Parser(argparse.ArgumentParser):
    """Keeps the line breaks of examples; its commands are of the same kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)


def _compare(args: argparse.Namespace) -> int:
    classifier = load(args)
    image = classifier.prepare(args.image)[None]
    columns = []
    for mode in MODES:
        scores = classifier.scores(image, mode)[0]  # the first call prepares the network for the mode
        seconds = median(_seconds(partial(classifier.scores, image, mode)) for _ in range(TIMED_RUNS))
        chosen = " (default)" if mode == classifier.choose() else ""
        best = classifier.best(scores, args.top_k)
        columns.append([f"{mode}{chosen}", f"{seconds * 1e3:.1f} ms", *(f"{p.score:.4f}  {p.label}" for p in best)])
    how = f"{classifier.engine_name} in {classifier.engine.precision} on {classifier.device}"
    print(printable(f"{args.image}, by {classifier.name} with {how}"))
    _print_columns(list(zip(*columns, strict=True)))
    return 0


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _list(args: argparse.Namespace) -> int:
    rows, code = [("name", "architecture", "classes", "data", "statistics", "top-1 (%)")], 0
    for name in list_checkpoints():
        try:
            config = Config.read(find(name) / CONFIG)
        except CheckpointError as error:
            print(f"bkn-zoo: {printable(error)}", file=sys.stderr)
            code = FAILED
            continue
        mode = config.default_statistics
        top1 = config.accuracy.get(mode, {}).get("top1")
        shown = "-" if top1 is None else f"{top1:.1f}"
        rows.append((name, config.architecture, str(config.num_classes), _dataset(config), mode, shown))
    if len(rows) > 1:
        _print_columns(rows)
    elif code == 0:
        remedy = "put some into the folder that BKN_ZOO_CHECKPOINTS names, or use one on the Hub (owner/repo)"
        print(f"bkn-zoo: there are no checkpoints here: {remedy}.", file=sys.stderr)
    return code


def _dataset(config: Config) -> str:
    return str(config.recipe.get("dataset", "-"))


def _info(args: argparse.Namespace) -> int:
    from bkn_zoo.checkpoints.folder import load

    location = locate(args.name)
    model = load(location)
    config: Config = model.config
    with reading():
        size = sum(file.stat().st_size for file in location.folder.iterdir())
    facts = {
        "name": args.name,
        "revision": location.revision,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes_on_disk": size,
        **asdict(config),
    }
    if args.format == "json":
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    labels = config.label_names or ("-",)
    facts |= {"parameters": f"{facts['parameters']:,}", "bytes_on_disk": f"{facts['bytes_on_disk']:,}"}
    facts |= {"label_names": ", ".join(labels[:5]) + (", ..." if len(labels) > 5 else "")}
    _print_columns([row for name, value in facts.items() for row in _rows(name, value)])
    return 0


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _rows(f"{name}.{key}", inner)
    else:
        yield name, "-" if value is None else str(value)


def _serve(arguments: list[str]) -> int:
    for name in ("bkn_zoo_service", "service"):  # as it is installed, and as it stands in a checkout
        try:
            code: int = import_module(f"{name}.__main__").main(arguments)
            _is_read()  # who read its address may be gone since, which says nothing of how it ended
            return code
        except ModuleNotFoundError as error:
            missing = error
            if error.name != name:
                break
    raise InputError(f"the service is not installed ({missing}): run pip install 'bkn-zoo[serve]'.") from None


def _train(arguments: list[str]) -> int:
    from bkn_zoo.cli.train import main

    main(arguments, "bkn-zoo train")
    return 0


def _evaluate(arguments: list[str]) -> int:
    from bkn_zoo.cli.evaluate import main

    main(arguments, "bkn-zoo evaluate")
    return 0


def _export(arguments: list[str]) -> int:
    from bkn_zoo.cli.export import main

    main(arguments, "bkn-zoo export")
    return 0


def _publish(arguments: list[str]) -> int:
    from bkn_zoo.cli.publish import main

    main(arguments, "bkn-zoo publish")
    return 0


OTHERS = {"train": _train, "evaluate": _evaluate, "export": _export, "publish": _publish, "serve": _serve}
"""Commands that read their options themselves."""

OTHERS_HELP = {
    "train": "train a network by a recipe, or on images of one's own",
    "evaluate": "measure a checkpoint on a data set",
    "export": "write a checkpoint for ONNX Runtime or OpenVINO",
    "publish": "publish checkpoints on the Hugging Face Hub",
    "serve": "start the HTTP service",
}
