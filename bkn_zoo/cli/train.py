"""`bkn-zoo train`: from its options, one for each field of a recipe, to a plan (without PyTorch) and a checkpoint."""

import argparse
import dataclasses
import json
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bkn_zoo.checkpoints.files import check_folder
from bkn_zoo.checkpoints.hub import check_reachable, check_repository
from bkn_zoo.cli.options import CHECKPOINT, add_reading
from bkn_zoo.fields import attributes_of, wanted
from bkn_zoo.modes import MODES
from bkn_zoo.progress import speaks
from bkn_zoo.terminal import Parser, with_dashes
from bkn_zoo.training.interruption import Stopped
from bkn_zoo.training.plan import CPU_FREEZE, FINE_TUNING, FROM_SCRATCH, TrainingPlan, plan_training
from bkn_zoo.training.recipes import Augmentation, Recipe, find_recipe

if TYPE_CHECKING:
    from bkn_zoo.training.finish import TrainingResult

DESCRIPTION = """\
Trains a network by a recipe, or fine-tunes one on your images; writes a checkpoint and a record of the run.

    bkn-zoo train FOLDER_OF_CLASSES                                          # fine-tune the default checkpoint
    bkn-zoo train FOLDER_OF_CLASSES --checkpoint torchvision:resnet50        # the same, from torchvision's weights
    bkn-zoo train FOLDER_OF_CLASSES --model inception_cifar_bkn --size 32    # new weights, trained from scratch
    bkn-zoo train recipes/inception_cifar_bkn.cifar10.toml CIFAR_FOLDER
    bkn-zoo train recipes/... FOLDER --resume                                # continue after an interruption
    torchrun --nproc-per-node=8 --no-python bkn-zoo train recipes/... FOLDER                     # several GPUs

Options override fields of the recipe, and become part of the run's name unless --name is given. The output folder,
runs/NAME, holds the checkpoint (a folder with the run's name), curves.png, classes.csv, log.jsonl, state.pt until the
training is finished, and results/runs/NAME.json, the record. Test images are used once, at the end.

Ctrl-C saves the state, prints how to resume and stops; a second Ctrl-C stops at once. --resume needs the same options
and as many processes; on the same hardware and versions the weights are identical to those without an interruption.
"""

FIELDS = {name: text for name, text in attributes_of(Recipe).items() if name not in ("augmentation", "norm_options")}
# What each field of a recipe means
AUGMENTATION = attributes_of(Augmentation)
NORM_OPTIONS = "--norm-options."
# Other defaults of fields, shown by --help
WITHOUT_RECIPE: dict[str, dict[str, Any]] = {
    "to fine-tune": FINE_TUNING | {"statistics_batch_size": "the checkpoint's", "freeze": f"{CPU_FREEZE} on a CPU"},
    "new weights without a recipe": FROM_SCRATCH,
}
# Fields that are true or false. Their options need no value
ALONE = [field.name for field in dataclasses.fields(Recipe) if bool in (field.type, *get_args(field.type))]
OTHER_NAMES = {
    "gradient_batch": ("--batch-size", "--gradient-batch"),
    "statistics_batch_size": ("--statistics-batch-size", "--statistics-batch"),
}


def train_parser() -> Parser:
    parser = Parser("bkn-zoo train", usage="bkn-zoo train [RECIPE] FOLDER [OPTION ...]", description=DESCRIPTION)
    what = "a recipe (a file, or the name of one in recipes/), which may be left out, and the folder of the data set"
    parser.add_argument("sources", nargs="*", metavar="[RECIPE] FOLDER", help=what)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the folder of the data set, as an option")
    what = "the start: a name, a folder, owner/repo on the Hub, torchvision:NAME or timm:NAME (default: "
    what += "without a recipe the first of bkn-zoo list, otherwise new weights)"
    parser.add_argument("--checkpoint", "--init", dest="checkpoint", metavar=CHECKPOINT, help=what)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the run (default: runs/NAME)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="of the record (default: OUTPUT/results/runs)")
    what = "of the run and its checkpoint (default: the recipe's, or the network's and the folder's; and overrides)"
    parser.add_argument("--name", help=what)
    parser.add_argument("--publish", metavar="NAMESPACE", help="publish it on the Hub as NAMESPACE/NAME (default: no)")
    parser.add_argument("--private", action="store_true", help="make a repository that --publish creates private")
    parser.add_argument("--license", metavar="ID", help="that the card names, as the Hub writes it (default: none)")
    parser.add_argument("--log", choices=["tensorboard"], help="write there, too (default: log.jsonl only)")
    what = "statistics modes to measure and to choose from, which takes time (default: all three)"
    parser.add_argument("--statistics", nargs="+", choices=MODES, default=MODES, help=what)
    parser.add_argument("--resume", action="store_true", help="continue the training in the output folder")
    add_reading(parser)
    fields = parser.add_argument_group("fields of the recipe")
    for field in dataclasses.fields(Recipe):
        if field.name in FIELDS:
            names = OTHER_NAMES.get(field.name, (f"--{field.name.replace('_', '-')}",))
            alone: dict[str, Any] = {"nargs": "?", "const": "true"} if field.name in ALONE else {}
            fields.add_argument(*names, dest=field.name, metavar="VALUE", help=_help(field, FIELDS), **alone)
    tables = parser.add_argument_group("tables of the recipe")
    for field in dataclasses.fields(Augmentation):
        tables.add_argument(f"--augmentation.{field.name}", metavar="VALUE", help=_help(field, AUGMENTATION))
    what = "an option of the network's norms, as bkn_zoo.create_model takes it (default: the network's own)"
    tables.add_argument(f"{NORM_OPTIONS}NAME", metavar="VALUE", help=what)
    return parser


def _help(field: "dataclasses.Field[Any]", texts: dict[str, str]) -> str:
    """The help of a field: its meaning, its values and its default."""
    default = "the recipe's" if field.default is dataclasses.MISSING else str(field.default)
    name = field.name if texts is FIELDS else f"augmentation.{field.name}"
    for kind, values in WITHOUT_RECIPE.items():
        default += f"; {kind}: {values[name]}" if name in values else ""
    return f"{texts[field.name]}; {wanted(field.type)} (default: {default})".replace("%", "%%")


def parse_training(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the fields of the recipe that they override."""
    parser = train_parser()
    # Options of norms are taken out first: argparse would take the value of one that it does not know for the recipe.
    found, rest, words = {}, [], iter(arguments)
    for word in words:
        if with_dashes(word).startswith(NORM_OPTIONS):
            name, equals, value = word.removeprefix("--").partition("=")
            found[name.replace("-", "_")] = value if equals else next(words, "")
        else:
            rest.append(word)
    args = parser.read(rest)
    sources = [*args.sources, *([str(args.data)] if args.data else [])]
    if not sources:
        parser.error("the folder of the data set is missing: run bkn-zoo train FOLDER")
    if len(sources) > 2:
        parser.error(f"unrecognized arguments: {' '.join(sources[1:-1])}")
    args.recipe, args.data = Path(sources[0]) if len(sources) == 2 else None, Path(sources[-1])
    if find_recipe(args.data).is_file():
        parser.error(f"{args.data} is a recipe: add the folder of the data set")
    if args.private and not args.publish:
        parser.error("--private is for --publish")
    for name in (*FIELDS, *(f"augmentation.{name}" for name in AUGMENTATION)):
        if getattr(args, name) is not None:
            found[name] = getattr(args, name)
    for name, value in found.items():
        if not value:  # perhaps a variable of the shell that is not set
            parser.error(f"--{name.replace('_', '-')} needs a value")
    return args, {name: literal(value) for name, value in found.items()}


def literal(text: str) -> Any:
    """A number, true, false or null as such; all else is a string."""
    json_text = text.lower() if text.lower() in ("true", "false") else "null" if text == "None" else text
    # The latter for what JSON does not know as a number, such as .5.
    for read in (json.loads, float):
        with suppress(ValueError):
            return read(json_text)
    return text


def run_training(arguments: list[str]) -> None:
    args, overrides = parse_training(arguments)
    names = ("name", "output", "results", "device", "resume", "workers", "license", "statistics", "labels", "log")
    options = {name: getattr(args, name) for name in names}
    plan = None
    try:
        plan = plan_training(args.recipe, args.data, overrides, init=args.checkpoint, **options)
        check_folder(args.data)
        repository = f"{args.publish}/{plan.name}"
        if args.publish:  # refused now, not after hours of training
            check_repository(repository)
            check_reachable(repository)
        # Before seconds of imports.
        plan.introduce()
        from bkn_zoo.training import run

        result = run.carry_out(plan)
        if result.record:  # that of the first process
            report(result, plan)
        if result.record and args.publish:
            from bkn_zoo.publishing.publish import publish

            publish(result.folder, repository, private=args.private)
    except (KeyboardInterrupt, Stopped) as error:
        if speaks():
            print(f"\n{_how_to_continue(error, plan, arguments)}", file=sys.stderr)
        # As a shell reports a process that a signal ended.
        raise SystemExit(128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)) from None


def report(result: "TrainingResult", plan: TrainingPlan) -> None:
    """Print the accuracy, and where the checkpoint is."""
    from bkn_zoo.training.evaluation import show_top1

    record = result.record
    for mode, metrics in record["test"].items():
        chosen = ", chosen on the validation images" if mode == record["chosen_statistics"] else ""
        print(f"{record['test_images']}, {mode}: top-1 {show_top1(metrics)}{chosen}")
    if record["test_images"] == "validation":
        why = "has no val or test, so the accuracy is that of the validation images, which also made choices"
        print(f"{plan.data} {why}: it is slightly optimistic")
    folder = shlex.quote(str(result.folder))
    print(f"saved to {folder}; try it with: bkn-zoo classify PHOTO --checkpoint {folder}")


def _how_to_continue(error: BaseException, plan: TrainingPlan | None, arguments: list[str]) -> str:
    """What to do after an interruption."""
    begin = "stopped before the first step: begin again with the same command"
    # An interrupted import of PyTorch cannot be repeated.
    if plan is None or "bkn_zoo.training.run" not in sys.modules:
        return begin
    from bkn_zoo.checkpoints.provenance import launched
    from bkn_zoo.training.state import STATE

    if not (plan.output / STATE).exists():
        return begin
    what = str(error).partition(";")[0] if isinstance(error, Stopped) else "stopped at once"
    command = shlex.join(launched(["bkn-zoo", "train", *arguments]))
    return f"{what}; continue with:\n{command}{'' if plan.resume else ' --resume'}"
