"""The options of `bkn-zoo train`: its own, and one for each field of a recipe. Nothing here imports PyTorch."""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any, get_args

from bkn_zoo.cli.options import add_workers
from bkn_zoo.cli.parser import CHECKPOINT, add_device
from bkn_zoo.fields import attributes_of, wanted
from bkn_zoo.terminal import Parser, with_dashes
from bkn_zoo.training.plan import CPU_FREEZE, FINE_TUNING, FROM_SCRATCH
from bkn_zoo.training.recipes import Augmentation, Recipe, find_recipe

DESCRIPTION = """\
Trains a network by a recipe, or fine-tunes one on your images; writes a checkpoint and a record of the run.

    bkn-zoo train FOLDER_OF_CLASSES                                          # fine-tune the default checkpoint
    bkn-zoo train FOLDER_OF_CLASSES --checkpoint CHECKPOINT                  # the same with another
    bkn-zoo train FOLDER_OF_CLASSES --checkpoint torchvision:resnet50        # the same, from torchvision's weights
    bkn-zoo train FOLDER_OF_CLASSES --model inception_cifar_bkn --size 32    # new weights, trained from scratch
    bkn-zoo train recipes/inception_cifar_bkn.cifar10.toml CIFAR_FOLDER
    bkn-zoo train recipes/... FOLDER --resume                                # continue after an interruption
    torchrun --nproc-per-node=8 --no-python bkn-zoo train recipes/... FOLDER                     # several GPUs

Options override fields of the recipe: --epochs 5 --augmentation.cutmix 1.0 --norm-options.warmup 100
--statistics-batch-size None (whole batches). Overrides become part of the run's name, unless --name is given. The
output folder, runs/NAME, holds the checkpoint (a folder with the run's name), curves.png, log.jsonl, state.pt and
results/runs/NAME.json, the record. The statistics mode is chosen on the validation images; the test images are used
once, at the end, with the stored weights.

Ctrl-C saves the state, prints how to resume and stops; a second Ctrl-C stops at once. The state is also saved every
few minutes. --resume needs the same options and as many processes; on the same hardware and versions the weights are
identical to those without an interruption.
"""

FIELDS = {name: text for name, text in attributes_of(Recipe).items() if name not in ("augmentation", "norm_options")}
AUGMENTATION = attributes_of(Augmentation)
"""What each field of a recipe means."""

TABLES = ("--augmentation.", "--norm-options.")
WITHOUT_RECIPE: dict[str, dict[str, Any]] = {
    "to fine-tune": FINE_TUNING | {"statistics_batch_size": "the checkpoint's", "freeze": f"{CPU_FREEZE} on a CPU"},
    "new weights without a recipe": FROM_SCRATCH,
}
"""Other defaults of fields, shown by --help."""

ALONE = [field.name for field in dataclasses.fields(Recipe) if bool in (field.type, *get_args(field.type))]
"""Fields that are true or false. Their options need no value."""

OTHER_NAMES = {
    "gradient_batch": ("--batch-size", "--gradient-batch"),
    "statistics_batch_size": ("--statistics-batch-size", "--statistics-batch"),
}


def train_parser(prog: str = "bkn-zoo train") -> Parser:
    parser = Parser(prog, usage=f"{prog} [RECIPE] FOLDER [OPTION ...]", description=DESCRIPTION)
    what = "a recipe (a file, or the name of one in recipes/), which may be left out, and the folder of the data set"
    parser.add_argument("sources", nargs="*", metavar="[RECIPE] FOLDER", help=what)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the folder of the data set, as an option")
    parser.add_argument(
        "--checkpoint", "--init", dest="checkpoint", metavar=CHECKPOINT,
        help="what to start from: a name, a folder, owner/repo on the Hub, torchvision:NAME or timm:NAME; its "
        "classifier is kept for the same classes (default: without a recipe the first of bkn-zoo list, or new weights)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the run (default: runs/NAME)")
    what = "for the record (default: results/runs of the output folder)"
    parser.add_argument("--results", type=Path, metavar="FOLDER", help=what)
    what = "of the run and its checkpoint (default: the recipe's, or the network's and the folder's; and overrides)"
    parser.add_argument("--name", help=what)
    what = "at the end, publish it on the Hub as NAMESPACE/NAME (default: do not publish)"
    parser.add_argument("--publish", metavar="NAMESPACE", help=what)
    parser.add_argument("--private", action="store_true", help="make a repository that --publish creates private")
    what = "the licence that the checkpoint's card names, an identifier of the Hub such as mit (default: none)"
    parser.add_argument("--license", metavar="ID", help=what)
    parser.add_argument("--resume", action="store_true", help="continue the training in the output folder")
    add_device(parser)
    add_workers(parser)
    what = "minutes between saved states (default: 5)"
    parser.add_argument("--save-minutes", type=float, default=5.0, metavar="N", help=what)
    fields = parser.add_argument_group("fields of the recipe")
    for field in dataclasses.fields(Recipe):
        if field.name in FIELDS:
            names = OTHER_NAMES.get(field.name, (f"--{field.name.replace('_', '-')}",))
            alone: dict[str, Any] = {"nargs": "?", "const": "true"} if field.name in ALONE else {}
            what = _option_help(field, FIELDS[field.name])
            fields.add_argument(*names, dest=field.name, metavar="VALUE", help=what, **alone)
    tables = parser.add_argument_group("tables of the recipe")  # for help only: `parse_training` takes them out
    for field in dataclasses.fields(Augmentation):
        what = _option_help(field, AUGMENTATION[field.name], "augmentation.")
        tables.add_argument(f"{TABLES[0]}{field.name}", metavar="VALUE", help=what)
    what = "an option of the network's norms, as bkn_zoo.create_model takes it (default: the network's own)"
    tables.add_argument(f"{TABLES[1]}NAME", metavar="VALUE", help=what)
    return parser


def _option_help(field: "dataclasses.Field[Any]", text: str, table: str = "") -> str:
    """The help of a field: its meaning, its values and its default."""
    missing = field.default is dataclasses.MISSING
    default = "the recipe's" if missing else str(field.default)
    name = f"{table}{field.name}"
    for kind, values in WITHOUT_RECIPE.items():
        if name in values:
            default += f"; {kind}: {values[name]}"
    return f"{text}; {wanted(field.type)} (default: {default})".replace("%", "%%")


def parse_training(arguments: list[str], prog: str = "bkn-zoo train") -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the fields of the recipe that they override."""
    parser = train_parser(prog)
    # Taken out first: argparse would take the value of an option that it does not know for the recipe.
    dotted, rest, words = {}, [], iter(arguments)
    for word in words:
        if with_dashes(word).startswith(TABLES):
            name, equals, value = word.removeprefix("--").partition("=")
            dotted[name.replace("-", "_")] = value if equals else next(words, "")
        else:
            rest.append(word)
    args = parser.read(rest)
    _give_back_sources(args)
    _take_sources(parser, args)
    if args.private and not args.publish:
        parser.error("--private is for --publish")
    overrides = {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None} | dotted
    for name, value in overrides.items():
        if not value:  # perhaps a variable of the shell that is not set
            parser.error(f"--{name.replace('_', '-')} needs a value")
    return args, {name: literal(value) for name, value in overrides.items()}


def _give_back_sources(args: argparse.Namespace) -> None:
    """Move a recipe or folder that argparse took for the value of an option without one, as in --freeze FOLDER."""
    for name in ALONE:
        value = getattr(args, name)
        is_value = not value or not isinstance(literal(value), str)
        if not is_value and (find_recipe(value).exists() or not (args.sources or args.data)):
            args.sources.append(value)
            setattr(args, name, "true")


def _take_sources(parser: Parser, args: argparse.Namespace) -> None:
    """Set `data` and `recipe` from the positional arguments: [RECIPE] FOLDER, or RECIPE with --data."""
    words: list[str] = args.sources
    if args.data is None and words:
        folder = next((word for word in reversed(words) if os.path.isdir(word)), words[-1])
        if not os.path.isdir(folder) and find_recipe(folder).is_file():
            parser.error(f"{folder} is a recipe: add the folder of the data set")
        words = [word for word in words if word != folder]
        args.data = Path(folder)
    if args.data is None:
        parser.error("the folder of the data set is missing: run bkn-zoo train FOLDER")
    if len(words) > 1:
        parser.error(f"unrecognized arguments: {' '.join(words[1:])}")
    args.recipe = Path(words[0]) if words else None


def literal(text: str) -> Any:
    """A number, true, false or null as such; all else is a string."""
    json_text = text.lower() if text.lower() in ("true", "false") else "null" if text == "None" else text
    for read in (json.loads, int, float):  # the latter two for what JSON does not know as a number: 01, .5
        try:
            return read(json_text)
        except ValueError:
            continue
    return text
