"""Trains a network by a recipe, or fine-tunes one on your images; writes a checkpoint and a record of the run.

    bkn-zoo train recipes/inception_cifar_bkn.cifar10.toml --data CIFAR_FOLDER
    bkn-zoo train recipes/... --data ... --resume                            # continue after an interruption
    bkn-zoo train --data FOLDER_OF_CLASSES                                   # fine-tune the default checkpoint
    bkn-zoo train --data FOLDER_OF_CLASSES --init CHECKPOINT                 # the same with another
    bkn-zoo train --data FOLDER_OF_CLASSES --init torchvision:resnet50       # the same, from torchvision's weights
    torchrun --nproc-per-node=8 --no-python bkn-zoo train recipes/... --data ...                 # several GPUs

Options override fields of the recipe: --epochs 5 --augmentation.cutmix 1.0 --norm_options.warmup 100
--statistics_batch None (whole batches). Overrides become part of the run's name, unless --name is given. The output
folder, runs/NAME, holds the checkpoint (a folder with the run's name), curves.png, log.jsonl, state.pt and
results/runs/NAME.json, the record. The statistics mode is chosen on the validation images; the test images are used
once, at the end, on the weights as they are stored.

Ctrl-C saves the state, prints how to resume and stops; a second Ctrl-C stops at once. The state is also saved every
few minutes. --resume needs the same options and as many processes; on the same hardware and versions the weights are
identical to those without an interruption.
"""

import argparse
import dataclasses
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from bkn_zoo.checkpoints.hub import check_reachable, check_repository
from bkn_zoo.checkpoints.provenance import launched, machines
from bkn_zoo.cli.checks import whole_number
from bkn_zoo.cores import default_device
from bkn_zoo.errors import HubError, InputError
from bkn_zoo.progress import speaks
from bkn_zoo.publishing.publish import card_of, publish
from bkn_zoo.training.evaluation import shown
from bkn_zoo.training.finish import TrainingResult
from bkn_zoo.training.interruption import Stopped, handled
from bkn_zoo.training.plan import Plan, make_plan
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.run import carry_out
from bkn_zoo.training.state import STATE


def parse(arguments: list[str], prog: str = "bkn-zoo train") -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the fields of the recipe that they override."""
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, help="a recipe file, or the name of one in recipes/")
    parser.add_argument("--data", required=True, type=Path, help="the folder that holds the data set")
    parser.add_argument(
        "--init",
        help="a checkpoint to start from, torchvision:NAME or timm:NAME; its classifier is kept for the same classes",
    )
    parser.add_argument("--output", type=Path, help="default: runs/NAME")
    parser.add_argument("--results", type=Path, help="for the record; default: results/runs of the output folder")
    parser.add_argument("--name", help="of the run and its checkpoint; default: the recipe's, and what is overridden")
    parser.add_argument("--publish", metavar="NAMESPACE", help="in the end, publish it on the Hub as NAMESPACE/NAME")
    parser.add_argument("--private", action="store_true", help="make the repository private, if --publish creates it")
    parser.add_argument("--resume", action="store_true", help="continue the training in the output folder")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--workers", type=whole_number(0), default=0, help="processes that decode image files")
    parser.add_argument("--save-minutes", type=float, default=5.0)
    fields = parser.add_argument_group("fields of the recipe")
    for field in dataclasses.fields(Recipe):
        if field.name not in ("augmentation", "norm_options"):
            # What is true or false may be named alone.
            alone: dict[str, Any] = {"nargs": "?", "const": "true"} if field.type is bool else {}
            fields.add_argument(f"--{field.name}", metavar="VALUE", **alone)
    # Taken out first: argparse would take the value of an option that it does not know for the recipe.
    dotted, rest, words = {}, [], iter(arguments)
    for word in words:
        if word.startswith(("--augmentation.", "--norm_options.")):
            name, equals, value = word.removeprefix("--").partition("=")
            dotted[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    args = parser.parse_args(rest)
    if args.private and not args.publish:
        parser.error("--private is for --publish")
    fields_given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Recipe)}
    overrides = {name: value for name, value in (fields_given | dotted).items() if value is not None}
    for name, value in overrides.items():
        if not value:  # perhaps a variable of the shell that is not set
            parser.error(f"--{name} needs a value")
    return args, {name: literal(value) for name, value in overrides.items()}


def literal(text: str) -> Any:
    """A number, true, false or null as such; all else is a string."""
    json_text = text.lower() if text.lower() in ("true", "false") else "null" if text == "None" else text
    for read in (json.loads, int, float):  # the latter two for what JSON does not know as a number: 01, .5
        try:
            return read(json_text)
        except ValueError:
            continue
    return text


def main(arguments: list[str], prog: str = "bkn-zoo train") -> None:
    args, overrides = parse(arguments, prog)
    plan: Plan | None = None
    found: Stamp = None
    interrupted = ending = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        if not ending:
            raise KeyboardInterrupt

    with handled(interrupt, signal.SIGINT):
        try:
            plan = planned(args, overrides)
            found = stamp(plan)
            result = carry_out(plan)
            if result.record:  # that of the first process
                report(result, plan)
                if args.publish:
                    publish_result(result, plan, args)
        except BaseException as error:
            ending = True  # how to go on is said, if Ctrl-C comes once more or not
            # Libraries make errors of their own of a KeyboardInterrupt that comes while they work.
            if not interrupted and not isinstance(error, KeyboardInterrupt | Stopped):
                raise
            if speaks():
                command = shlex.join(launched([*prog.split(), *arguments]))
                print(f"\n{how_to_go_on(error, command, plan, found)}", file=sys.stderr)
            # As a shell reports a process that a signal ended.
            raise SystemExit(128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)) from None


def planned(args: argparse.Namespace, overrides: dict[str, Any]) -> Plan:
    """From the options; a publication that cannot succeed is refused now, not after hours of training."""
    names = ("init", "name", "output", "results", "device", "resume", "workers", "save_minutes")
    options = {name: getattr(args, name) for name in names}
    plan = make_plan(args.recipe, args.data, overrides, **options, card=card_of)
    if args.publish:
        if plan.results.resolve().name != "runs":
            raise InputError(
                f"the record of what is published is in a folder called runs: --results {plan.results}/runs."
            )
        check_repository(f"{args.publish}/{plan.name}")
        check_reachable(f"{args.publish}/{plan.name}")
    return plan


def report(result: TrainingResult, plan: Plan) -> None:
    """Print the accuracy, and where the checkpoint is."""
    record, folder = result.record, result.folder
    split = record["test_images"]
    for mode, metrics in record["test"].items():
        chosen = ", chosen on the validation images" if mode == record["chosen_statistics"] else ""
        print(f"{split}, {mode}: top-1 {shown(metrics)}{chosen}")
    if split == "validation":
        missing = f"{plan.data} has no val or test"
        print(f"there are no test images, by which to know how much the choices flatter it: {missing}")
    print(f"saved to {folder}; try it with: bkn-zoo serve --models {shlex.quote(str(folder))}")


def publish_result(result: TrainingResult, plan: Plan, args: argparse.Namespace) -> None:
    results = plan.results.parent
    try:
        publish(result.folder, plan.name, args.publish, results, private=args.private)
    except HubError as error:
        where = ["--namespace", args.publish, "--results", str(results)]
        private = ["--private"] if args.private else []
        command = shlex.join(["bkn-zoo", "publish", str(result.folder), *where, *private])
        raise type(error)(f"{error} The checkpoint is saved: publish it with {command}") from None


Stamp = tuple[int, int] | None
"""Of a saved state: changes whenever it is written; None where there is none."""


def stamp(plan: Plan) -> Stamp:
    try:
        status = (plan.output / STATE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def how_to_go_on(error: BaseException, command: str, plan: Plan | None, found: Stamp) -> str:
    """What to do after an interruption; `found` is the stamp of the state from before this training."""
    saved = plan and stamp(plan)
    if plan is None or saved is None or (not plan.resume and saved == found):  # none, or that of an earlier training
        return "stopped before the first step: begin again with the same command"
    stopped = "stopped at once, and the last saved state stays"
    what = str(error).partition(";")[0] if isinstance(error, Stopped) else stopped
    if machines() > 1:  # whose torchrun was also told how they meet
        return f"{what}; go on with the same torchrun command{'' if plan.resume else ' and --resume'}, on each machine"
    return f"{what}; go on with:\n{command}{'' if plan.resume else ' --resume'}"
