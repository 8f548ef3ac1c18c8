"""Trains a network by a recipe, and leaves a checkpoint folder and a record of the run.

    bkn-zoo train recipes/inception_cifar_bkn.cifar10.toml --data CIFAR_FOLDER
    bkn-zoo train recipes/... --data ... --resume                            # go on after an interruption
    bkn-zoo train --data FOLDER_OF_CLASSES                                   # fine-tune the default checkpoint
    bkn-zoo train --data FOLDER_OF_CLASSES --init CHECKPOINT                 # the same with another
    bkn-zoo train --data FOLDER_OF_CLASSES --init torchvision:resnet50       # the same, from torchvision's weights
    torchrun --nproc-per-node=8 scripts/train.py recipes/... --data ...      # many GPUs, from a checkout

Every field of a recipe can be overridden, as in --epochs 5 --augmentation.cutmix 1.0 --norm_options.warmup 100
--statistics_batch None (whole batches); what is overridden becomes part of the run's name, unless --name gives one. The
output folder, runs/NAME, holds state.pt and log.jsonl while the training runs, and at the end curves.png, the record of
the run in results/runs/, and the checkpoint, a folder with the run's name; a run that the zoo shows puts its record
into the repository's own with --results results/runs. The statistics mode is chosen on the validation images; the test
images are used once, at the end, on the weights as they are stored.

Ctrl-C saves, says how to go on and stops; once more, it stops at once. The state is saved every few minutes, too, and
after epochs, though not more than twice a minute. --resume takes the same command once more, with as many processes,
and on the same hardware and versions ends with the very same weights as if nothing had happened. For that, cuDNN is
held to algorithms that repeat their results, and chooses them by rule rather than by a race, which another process
might decide otherwise.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bkn_zoo.checkpoints.config import Config, norm_of
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.folder import from_pretrained, save_pretrained
from bkn_zoo.checkpoints.hub import check_reachable, check_repository
from bkn_zoo.checkpoints.locate import is_folder, locate
from bkn_zoo.cli.checks import lock, make_folder, whole_number
from bkn_zoo.conversion.libraries import from_library, of_library, preprocessing_of
from bkn_zoo.create import create_model
from bkn_zoo.errors import CheckpointError, HubError, InputError
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.inference.classifier import default_checkpoint
from bkn_zoo.inference.engines import check_device, keep_to_quota
from bkn_zoo.models import Network
from bkn_zoo.norms.baselines import BatchRenorm2d
from bkn_zoo.norms.variants import BatchKalmanVariant2d
from bkn_zoo.progress import speaks, waiting
from bkn_zoo.publishing.pictures import draw_curves
from bkn_zoo.publishing.publish import card_of, publish
from bkn_zoo.publishing.results import environment, launched, machines
from bkn_zoo.training.comparisons import layers, recalibrated
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, FileImages, fingerprint, keep_apart, load_data
from bkn_zoo.training.evaluation import batch_size, evaluate, shown
from bkn_zoo.training.interruption import Stopped, handled
from bkn_zoo.training.loop import fit, further_images, images_at_a_time, local_batch
from bkn_zoo.training.recipes import Recipe, read_recipe
from bkn_zoo.training.state import (
    LOG,
    STATE,
    Training,
    TrainingError,
    begin,
    classifier,
    find_state,
    kept_line,
    load_state,
    refuse_to_replace,
)

FINE_TUNING = {
    "dataset": "folder", "epochs": 5, "gradient_batch": 16, "statistics_batch": 1, "lr": 0.003, "precision": "float32",
    "keep": "best", "augmentation.crop": 0.1,
}  # fmt: skip
"""Where there is no recipe; a checkpoint to start from and the number of images change some of it."""

LEAST_STEPS = 400
"""Of a fine-tuning: a few images are passed more often."""

MOST_EPOCHS = 100
"""For that: of a handful of images an epoch is a single step, and a validation that takes half as long."""

NAME = re.compile(r"[^\W_][\w.=-]*")
"""Of a run: its folder's, the service's for its checkpoint, and its repository's."""

STATISTICS_BATCHES = 64
"""Of training images, or as many as there are, for the statistics of averaged weights."""

ACCURACY = ("top1", "top1_low", "top1_high", "top5", "ece")
"""What config.json says of it."""

LIBRARY_SIZE = 224
"""Of images for a library's network, unless the command says otherwise."""


def parse(arguments: list[str], prog: str | None = None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the fields of the recipe that they override."""
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, help="a file of recipes/")
    parser.add_argument("--data", required=True, type=Path, help="the folder that holds the data set")
    parser.add_argument(
        "--init",
        help="a checkpoint to start from, torchvision:NAME or timm:NAME; its classifier is kept for the same classes",
    )
    parser.add_argument("--output", type=Path, help="default: runs/NAME")
    parser.add_argument("--results", type=Path, help="for the record; default: results/runs of the output folder")
    parser.add_argument("--name", help="of the run and its checkpoint; default: the recipe's, and what is overridden")
    parser.add_argument(
        "--publish", metavar="NAMESPACE", help="at the end, publish the checkpoint on the Hub as NAMESPACE/NAME"
    )
    parser.add_argument("--private", action="store_true", help="make the repository private, if --publish creates it")
    parser.add_argument("--resume", action="store_true", help="go on with the training in the output folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
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
        if not word.startswith(("--augmentation.", "--norm_options.")):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        dotted[name] = value if equals else next(words, "")
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


def start() -> str:
    """The checkpoint to start from where none is named."""
    try:
        name = default_checkpoint()
    except CheckpointError:
        raise InputError(
            "there is nothing to train: add --init CHECKPOINT (a folder, or owner/repo on the Hub) to start from one, "
            "--model NAME for new weights, or a recipe."
        ) from None
    if speaks():
        print(f"starting from {name}, since nothing else was named by --init, --model or a recipe")
    return name


class Origin(NamedTuple):
    """What a training starts from: its name for others, to whom a path says nothing; its config, if it has one."""

    name: str
    config: Config | None
    preprocessing: Preprocessing | None


def origin(init: str) -> Origin:
    if of_library(init):
        return Origin(init, None, preprocessing_of(init, LIBRARY_SIZE))
    location = locate(init)
    config = Config.read(location.folder / CONFIG)
    name = location.folder.resolve().name if is_folder(init) else init
    if location.revision is not None:
        name = f"{init.partition('@')[0]}@{location.revision}"
    return Origin(name, config, config.preprocessing)


def like(source: Origin, model: str | None) -> dict[str, Any]:
    """The fields of the recipe that a checkpoint to start from decides, unless they are given, as `model` may be."""
    config = source.config
    if config is None:
        return {"model": source.name, "size": LIBRARY_SIZE, "statistics_batch": None}
    size = {"size": config.preprocessing.size} if config.preprocessing else {}
    options = {f"norm_options.{name}": value for name, value in config.norm_options.items()}
    same = model in (None, config.architecture)
    groups = {"statistics_batch": config.statistics_batch_size}
    return {"model": config.architecture, **groups, **size, **(options if same else {})}


def fitted(recipe: Recipe, images: int, given: Mapping[str, Any]) -> Recipe:
    """With batches that so many images fill, in groups that divide them, and enough steps; but for what is given."""
    batch = min(recipe.gradient_batch, 1 << images.bit_length() - 1)
    batch = recipe.gradient_batch if "gradient_batch" in given else batch
    fields: dict[str, Any] = {"gradient_batch": batch}
    enough = math.ceil(LEAST_STEPS / max(images // batch, 1))
    fields["epochs"] = max(recipe.epochs, min(enough, MOST_EPOCHS))
    if recipe.statistics_batch is not None:
        fields["statistics_batch"] = math.gcd(recipe.statistics_batch, batch)
    return dataclasses.replace(recipe, **{name: value for name, value in fields.items() if name not in given})


def described(recipe: Recipe, data: Data) -> str:
    """What is trained on, and how, in a line."""
    images = (
        f"{len(data.train)} images of {len(data.label_names)} classes, {len(data.validation)} more to choose by"
        + ("" if data.test is None else f" and {len(data.test)} to test by")
    )
    p = data.preprocessing
    mean, std = (" ".join(f"{value:g}" for value in values) for values in (p.mean, p.std))
    groups = recipe.statistics_batch or images_at_a_time(recipe)
    return (
        f"{images}; {p.size} px ({p.interpolation}), mean {mean}, std {std}; epochs: {recipe.epochs}, batches of "
        f"{recipe.gradient_batch} in groups of {groups}"
    )


def build(recipe: Recipe, init: str | None, label_names: list[str]) -> Network:
    model = create_model(recipe.model, len(label_names), **recipe.norm_options)
    if init is not None:
        source = from_library(init, pretrained=True) if of_library(init) else from_pretrained(init)
        weights = source.state_dict()
        known = source.config is not None and source.config.label_names
        fresh = set() if known and list(known) == label_names else _classifier(source, model)
        with torch.no_grad():
            for name in fresh:  # no class before another, and no noise for what is below to follow
                model.get_parameter(name).zero_()
        model.default_statistics = source.default_statistics
        try:
            kept = {name: tensor for name, tensor in weights.items() if name not in fresh}
            missing, extra = model.load_state_dict(kept, strict=False)
        except RuntimeError:  # a tensor of another shape
            missing, extra = [], list(weights)
        if extra or set(missing) - fresh:
            raise InputError(
                f"{init} is a {source.name}, whose weights do not fit {recipe.model}: choose its own model and options."
            )
    return model


def _classifier(source: Network, model: Network) -> set[str]:
    """The tensors that differ in nothing but the number of classes; where that is equal, the last layer's."""
    if source.num_classes == model.num_classes:
        last = {id(tensor) for tensor in classifier(model).parameters()}
        return {name for name, tensor in model.named_parameters() if id(tensor) in last}
    own = model.state_dict()
    return {
        name
        for name, tensor in source.state_dict().items()
        if name in own
        and (tensor.shape[:1], own[name].shape[:1]) == ((source.num_classes,), (model.num_classes,))
        and tensor.shape[1:] == own[name].shape[1:]
    }


def run_name(args: argparse.Namespace, overrides: dict[str, Any], recipe: Recipe) -> str:
    """One that no other recipe's run has, so that a twin does not take the place of the run it is compared with."""
    if args.name:
        if not NAME.fullmatch(args.name) or args.name == "results":
            raise InputError(
                f"a run cannot be called {args.name!r}: give it a name of letters, digits and -_.= that begins with a "
                "letter or digit, and is not results."
            )
        return args.name
    told = dict(overrides)
    if args.recipe is None:
        name = f"{recipe.model}.{args.data.resolve().name}"
        told.pop("model", None)
    else:
        name = args.recipe.stem
    name += "".join(f"-{field}_{value}" for field, value in sorted(told.items()))
    return re.sub(r"[^\w.-]+", "_", name)


def with_statistics_anew(
    model: Network, recipe: Recipe, data: Data, device: torch.device, workers: int
) -> tuple[Network, dict[str, dict[str, float]]] | None:
    """A copy with running averages of its own weights' statistics, and how good it is on the validation images.

    Averaged weights have averaged running averages, which are of weights further and further back. None where a norm
    has none, or normalizes by them in training, too.
    """
    if recipe.freeze or not layers(model) or any(isinstance(layer, BatchRenorm2d) for layer in layers(model)):
        return None
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
        with waiting("taking the statistics of the averaged weights"):
            model = recalibrated(model, further_images(recipe, data, device, STATISTICS_BATCHES, workers))
        batches = evaluation_batches(data, data.validation, batch_size(device), device, workers)
        return model, evaluate(model, batches, what="validation", total=len(data.validation))


def top1(metrics: Mapping[str, Mapping[str, float]]) -> float:
    """In the best mode."""
    return max(each["top1"] for each in metrics.values())


def finish(
    training: Training, recipe: Recipe, data: Data, args: argparse.Namespace, name: str, init: str | None
) -> None:
    """Choose the statistics mode on the validation images, save, measure what is stored, and record the run.

    Args:
        init: what the training started from, as others may know it.
    """
    device = torch.device(args.device)
    model = training.result
    if training.best is not None:
        model.load_state_dict(training.best)
    kept = kept_line(training.history, recipe)
    validation, anew = kept["validation"], None
    if recipe.ema:
        anew = with_statistics_anew(model.to(device), recipe, data, device, args.workers)
    if anew is not None and top1(anew[1]) > top1(validation):
        model, validation = anew
    statistics_anew = validation is not kept["validation"]
    model = model.cpu()
    best = max(validation, key=lambda mode: validation[mode]["top1"])
    split, images = ("validation", data.validation) if data.test is None else ("test", data.test)
    training_facts = {
        "name": name,
        "recipe": json.loads(json.dumps(dataclasses.asdict(recipe))),
        "init": init,
        "test_images": split,
        "epochs": len(training.history),
        "kept_epoch": kept["epoch"],
        "statistics_anew": statistics_anew,
        "validation_split": _validation_split(data),
    }
    about: dict[str, Any] = {
        "label_names": data.label_names,
        "preprocessing": data.preprocessing,
        "default_statistics": best,
        "training": {**training_facts, **environment(recipe.seed)},
    }
    folder = args.output / name

    def measure(stored: Network) -> tuple[dict[str, dict[str, float]], str]:
        """The accuracy of what is stored, and the card that says so, from the record of the run."""
        stored = stored.to(device).to(memory_format=torch.channels_last)
        batches = evaluation_batches(data, images, batch_size(device), device, args.workers)
        test = evaluate(stored, batches, what=f"measuring the {split} images", total=len(images))
        record = {
            "name": name, "model": recipe.model, "norm": norm_of(recipe.model), "dataset": recipe.dataset,
            "gradient_batch": recipe.gradient_batch, "statistics_batch": recipe.statistics_batch, "seed": recipe.seed,
            "epochs": len(training.history), "seconds": training.seconds, "chosen_statistics": best, "test": test,
            "test_images": split, "kept_epoch": kept["epoch"], "validation": validation,
            "validation_anew": None if anew is None else anew[1], "statistics_anew": statistics_anew,
            "curve": training.history, "data_sha256": training.fingerprint, "recipe": dataclasses.asdict(recipe),
            **environment(recipe.seed),
        }  # fmt: skip
        (args.results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        for mode, metrics in test.items():
            chosen = ", chosen on the validation images" if mode == best else ""
            print(f"{split}, {mode}: top-1 {shown(metrics)}{chosen}")
        if split == "validation":
            missing = f"{args.data} has no val or test"
            print(f"there are no test images, by which to know how much the choices flatter it: {missing}")
        accuracy = {mode: {k: round(metrics[k], 3) for k in ACCURACY} for mode, metrics in test.items()}
        return accuracy, card_of(dataclasses.replace(stored.config, accuracy=accuracy), name, args.results.parent)

    save_pretrained(model, folder, **about, measure=measure)
    with waiting("drawing curves.png"):
        draw_curves(args.output / "curves.png", training.history, kept["epoch"], name)
    for kind, part in (("training", data.train), ("validation", data.validation), ("test", data.test)):
        if isinstance(part, FileImages):
            part.say_left_out(kind)
    if any(isinstance(layer, BatchKalmanVariant2d) for layer in model.modules()):
        print(f"saved to {folder}: a variant for ablations, which engines run with population statistics only")
    else:
        print(f"saved to {folder}; try it with: bkn-zoo serve --models {shlex.quote(str(folder))}")
    if args.publish:
        try:
            publish(folder, name, args.publish, args.results.parent, private=args.private)
        except HubError as error:
            where = ["--namespace", args.publish, "--results", str(args.results.parent)]
            private = ["--private"] if args.private else []
            command = shlex.join(["bkn-zoo", "publish", str(folder), *where, *private])
            raise type(error)(f"{error} The checkpoint is saved: publish it with {command}") from None


def _validation_split(data: Data) -> str:
    """Where the validation images come from: what `evaluate` has to know to find them again."""
    if not data.held_out:
        return "its own"
    return "of each class" if data.name == "folder" else "of all"


def main(arguments: list[str], prog: str | None = None) -> None:
    args, overrides = parse(arguments, prog)
    interrupted = ending = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        if not ending:
            raise KeyboardInterrupt

    with handled(interrupt, signal.SIGINT):
        try:
            train(args, overrides)
        except BaseException as error:
            ending = True  # how to go on is said, if Ctrl-C comes once more or not
            # Libraries make errors of their own of a KeyboardInterrupt that comes while they work.
            if not interrupted and not isinstance(error, KeyboardInterrupt | Stopped):
                raise
            if speaks():
                command = shlex.join(launched([*(prog or "scripts/train.py").split(), *arguments]))
                print(f"\n{_how_to_go_on(error, command, args)}", file=sys.stderr)
            # As a shell reports a process that a signal ended.
            raise SystemExit(128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)) from None


def _how_to_go_on(error: BaseException, command: str, args: argparse.Namespace) -> str:
    saved = None if args.output is None else _stamp(args.output / STATE)
    if saved is None or (not args.resume and saved == getattr(args, "found", saved)):  # none, or an earlier training's
        return "stopped before the first step: begin again with the same command"
    what = (
        str(error).partition(";")[0]
        if isinstance(error, Stopped)
        else "stopped at once, and the last saved state stays"
    )
    if machines() > 1:  # whose torchrun was also told how they meet
        return f"{what}; go on with the same torchrun command{'' if args.resume else ' and --resume'}, on each machine"
    return f"{what}; go on with:\n{command}{'' if args.resume else ' --resume'}"


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes whenever a file is written; None where there is none."""
    try:
        return path.stat().st_ino, path.stat().st_mtime_ns
    except OSError:
        return None


def train(args: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """From the options to the checkpoint."""
    given = overrides
    if args.recipe is None:
        args.init = args.init or (None if args.model else start())
    source = origin(args.init) if args.init else None
    if args.recipe is None:
        overrides = FINE_TUNING | (like(source, args.model) if source else {}) | given
    recipe = read_recipe(args.recipe, overrides)
    name = run_name(args, given, recipe)
    args.output = args.output or Path("runs") / name
    args.found = _stamp(args.output / STATE)
    args.results = args.results or args.output / "results" / "runs"
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    check_device(args.device)
    keep_to_quota()
    torch.manual_seed(recipe.seed)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    if args.publish:  # now, rather than after hours of training
        if args.results.resolve().name != "runs":
            raise InputError(
                f"the record of what is published is in a folder called runs: --results {args.results}/runs."
            )
        check_repository(f"{args.publish}/{name}")
        check_reachable(f"{args.publish}/{name}")
    if args.recipe is not None or "statistics_batch" in given:  # before anything is decoded; `fitted` mends its own
        local_batch(recipe)
    if recipe.dataset == "folder":
        keep_apart(args.data, {"--output": args.output / name, "--results": args.results / name})
    if args.resume:
        find_state(args.output)
    with alone(args.output):
        make_folder(args.results)
        carry_out(args, given, recipe, name, source)
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A folder for a training, made where there is none, that no other uses at the same time."""
    make_folder(folder)
    if not speaks():  # the first process holds it for all, and is the one that writes
        yield
        return
    try:
        file = (folder / LOG).open("ab")
    except OSError as error:
        raise InputError(f"{folder / LOG} cannot be written ({error.strerror}): choose another --output.") from None
    with file:
        lock(file, f"another training uses {folder}: wait for its end, or choose another --name or --output.")
        yield


def _stop(number: int, frame: Any) -> None:
    """Of a signal that would else end the process at once, and leave what is half-written."""
    raise Stopped(number, "stopped before all results were written; go on with --resume")


def carry_out(
    args: argparse.Namespace, given: Mapping[str, Any], recipe: Recipe, name: str, source: Origin | None
) -> None:
    """From what was found to be in order to the checkpoint.

    Args:
        given: fields of the recipe, by the command.
        name: of the run.
    """
    device = torch.device(args.device)
    data = load_data(recipe.dataset, args.data, recipe.size, recipe.validation).to(device)
    if args.recipe is None:
        recipe = fitted(recipe, len(data.train), given)
    with waiting(f"preparing {recipe.model}"):
        training = begin(recipe, build(recipe, args.init, data.label_names), device)
    training.data = str(args.data.resolve())
    training.images = [len(data.train), len(data.validation)]
    training.label_names = list(data.label_names)
    training.fingerprint = fingerprint(data, args.data)
    training.preprocessing = data.preprocessing
    if source and source.preprocessing:  # what its weights were trained with; the size is the recipe's
        p = source.preprocessing
        training.preprocessing = dataclasses.replace(
            data.preprocessing, mean=p.mean, std=p.std, interpolation=p.interpolation
        )
    # A folder by its whole path: what is there now, from wherever the command is given.
    training.init = str(Path(args.init).resolve()) if args.init and Path(args.init).exists() else args.init
    if args.resume:
        load_state(training, recipe, args.output, device, data.held_out)
    else:
        refuse_to_replace(args.output, recipe, training)
    # A state without is of a version that took the data set's own, whatever it started from.
    data = dataclasses.replace(data, preprocessing=training.preprocessing or data.preprocessing)
    training.preprocessing = data.preprocessing
    if args.recipe is None and speaks():
        print(described(recipe, data))
    fit(training, recipe, data, args.output, device, args.save_minutes, args.workers)
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            with handled(_stop, signal.SIGTERM):
                finish(training, recipe, data, args, name, source and source.name)
        except OSError as error:
            raise TrainingError(
                f"the results could not be written ({error}): make room, and repeat the command with --resume."
            ) from error
        except CheckpointError as error:  # which says what to do first
            raise CheckpointError(f"{error} The training is saved: then repeat the command with --resume.") from error
