"""The command `bkn-zoo`: parser, exit codes and subcommands, which check their arguments before PyTorch's import."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NamedTuple

from bkn_zoo.checkpoints.files import check_file, check_folder
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.cli import options
from bkn_zoo.cli.classify import FAILED, classify
from bkn_zoo.cli.options import CHECKPOINT, announce, check_checkpoint
from bkn_zoo.cli.show import compare, info, list_here
from bkn_zoo.errors import BknZooError, CheckpointError, HubError, ImageError, InputError
from bkn_zoo.terminal import Parser, printable
from bkn_zoo.version import __version__

MISUSED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141  # exit codes; the last two are those of signals in a shell
LOG_LEVELS, LOG_VARIABLE = ("debug", "info", "warning", "error"), "BKN_ZOO_LOG_LEVEL"

DESCRIPTION = "Classify images with networks that use Batch Kalman Normalization; train, evaluate and serve them."
LIST = "Lists the local checkpoints; the first is the default."
EXAMPLES = """\
examples:
  bkn-zoo classify photo.jpg                               the five likeliest labels
  bkn-zoo classify photos/ --output out.csv                every image in a folder and its subfolders
  bkn-zoo compare photo.jpg                                the three statistics modes side by side
  bkn-zoo list                                             the local checkpoints
  bkn-zoo train photos/                                    fine-tune the default checkpoint on your images
  bkn-zoo serve --port 8000                                classify over HTTP, with a web page
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    if "_ARGCOMPLETE" in os.environ:
        complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be valid text
    return ended("bkn-zoo", lambda: _run_command(arguments))


def ended(name: str, run: Callable[[], int | None]) -> int:
    """Run a command or script and return its exit code. Errors print one sentence."""
    try:
        try:
            return run() or 0
        except BknZooError as error:
            print(f"{name}: {printable(error)}", file=sys.stderr)
            return FAILED if isinstance(error, ImageError | CheckpointError | HubError) else MISUSED
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # also a second Ctrl-C while it ends
        return INTERRUPTED
    except BrokenPipeError:
        # Let the interpreter's last flush succeed, although the reader of standard output is gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _run_command(arguments: list[str]) -> int | None:
    if level := os.environ.get(LOG_VARIABLE):
        if level not in LOG_LEVELS:
            raise InputError(f"{LOG_VARIABLE} is {level!r}: choose one of {', '.join(LOG_LEVELS)}.")
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("bkn_zoo").setLevel(level.upper())
    name, *words = arguments or [""]
    if name not in COMMANDS:
        # --help, --version, or an error.
        main_parser().read(arguments)
        return MISUSED
    command = COMMANDS[name]
    return command.run(words if command.raw else command.make_parser().read(words))


def main_parser() -> Parser:
    """The parser for the words before a command. Each command has its own parser."""
    found = Parser("bkn-zoo", usage="bkn-zoo [OPTION ...] COMMAND ...", description=DESCRIPTION, epilog=EXAMPLES)
    found.add_argument("--version", action="version", version=f"bkn-zoo {__version__}")
    listed = "\n".join(f"{name:<12}{command.text}" for name, command in COMMANDS.items())
    commands = found.add_argument_group("commands", f"{listed}\n\nbkn-zoo COMMAND --help describes its options")
    commands.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return found


def _check_and_evaluate(args: argparse.Namespace) -> None:
    args.data = args.folder or args.data
    if args.data is None:
        raise InputError("the folder of the data set is missing: run bkn-zoo evaluate CHECKPOINT FOLDER.")
    if args.engine == "eager" and args.precision != "f32":
        raise InputError("--precision needs a prepared network: omit --engine eager.")
    check_checkpoint(args.checkpoint)
    check_folder(args.data)
    announce(f"loading {args.checkpoint}")
    from bkn_zoo.cli.evaluate import evaluate_checkpoint

    evaluate_checkpoint(args)


def _export(args: argparse.Namespace) -> None:
    check_checkpoint(args.checkpoint)
    if args.output:
        check_file(args.output, ".onnx")
    announce(f"exporting {args.checkpoint} and comparing the outputs, which takes 10 seconds to a few minutes")
    from bkn_zoo.inference.export import export

    path = export(args.checkpoint, args.output, statistics=args.statistics)
    print(path)
    announce(f"{path.stat().st_size / 1e6:.1f} MB in {path.name}")


def _publish_folders(args: argparse.Namespace) -> None:
    if args.name and len(args.checkpoints) > 1:
        raise InputError("--name needs a single checkpoint: publish one at a time, or omit --name.")
    folders = [find(checkpoint) for checkpoint in args.checkpoints]
    announce(f"validating {', '.join(args.checkpoints)}")
    from bkn_zoo.publishing.publish import publish

    for folder in folders:
        repository = f"{args.namespace}/{args.name or folder.resolve().name}"
        publish(folder, repository, private=args.private, dry_run=args.dry_run)


def _serve(arguments: list[str]) -> int:
    try:
        return _service("command").serve_command(arguments)
    except ModuleNotFoundError as error:
        raise InputError(f"the service is not installed ({error}): run pip install 'bkn-zoo[serve]'.") from None


def _service(module: str) -> Any:
    """A module of the service, which is installed under another name than in a checkout."""
    try:
        return import_module(f"bkn_zoo_service.{module}")
    except ModuleNotFoundError as error:
        if error.name != "bkn_zoo_service":
            raise
        return import_module(f"service.{module}")


def complete() -> None:
    """Answer a shell that asks for completions (register-python-argcomplete bkn-zoo), and end the process."""
    import argcomplete

    words = os.environ["COMP_LINE"].split()
    root = argparse.ArgumentParser("bkn-zoo")
    root.add_argument("--version", action="store_true")
    commands = root.add_subparsers()
    for name, known in COMMANDS.items():
        # Only the parser that is needed, because some take half a second to import.
        parents = [known.make_parser()] if name in words else []
        command = commands.add_parser(name, parents=parents, add_help=False)
        for action in command._actions:
            if action.metavar == CHECKPOINT:
                vars(action)["completer"] = lambda **_: list_checkpoints()
    argcomplete.autocomplete(root, always_complete_options=False)


class Command(NamedTuple):
    """A command: a description, its parser, and what runs it with parsed arguments (or with words, if `raw`)."""

    text: str
    make_parser: Callable[[], Parser]
    run: Callable[..., int | None]
    raw: bool = False


COMMANDS = {
    "classify": Command("classify images", options.classify_parser, classify),
    "compare": Command("show the three statistics modes side by side", options.compare_parser, compare),
    "list": Command("list the local checkpoints", lambda: Parser("bkn-zoo list", description=LIST), list_here),
    "info": Command("describe a checkpoint, or list its classes", options.info_parser, info),
    "train": Command(
        "train a network by a recipe, or fine-tune one on your images",
        lambda: import_module("bkn_zoo.cli.train").train_parser(),
        lambda words: import_module("bkn_zoo.cli.train").run_training(words),
        raw=True,
    ),
    "evaluate": Command("measure a checkpoint on a data set", options.evaluate_parser, _check_and_evaluate),
    "export": Command("write a checkpoint for ONNX Runtime or OpenVINO", options.export_parser, _export),
    "publish": Command("publish checkpoints on the Hugging Face Hub", options.publish_parser, _publish_folders),
    "serve": Command("start the HTTP service", lambda: _service("settings").settings_parser(), _serve, raw=True),
}
