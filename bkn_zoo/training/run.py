"""The Python API of training, `train` and `fine_tune`, and the order of a training."""

import dataclasses
import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bkn_zoo.checkpoints.files import lock, make_folder
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.cores import check_device, default_device, keep_to_quota
from bkn_zoo.errors import CheckpointError, TrainingError
from bkn_zoo.modes import MODES
from bkn_zoo.training.data import Runtime
from bkn_zoo.training.datasets import Data, class_weights, keep_apart, load_data
from bkn_zoo.training.finish import TrainingResult, finish_training
from bkn_zoo.training.interruption import Stopped, handled
from bkn_zoo.training.loop import fit, images_at_a_time, local_batch
from bkn_zoo.training.plan import TrainingPlan, adapted, plan_training
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.start import start, start_classifier
from bkn_zoo.training.state import LOG, Training, load_state, replaces_finished


def train(
    recipe: str | os.PathLike[str] | Recipe | None,
    data: str | os.PathLike[str],
    *,
    init: str | os.PathLike[str] | None = None,
    name: str | None = None,
    output: str | os.PathLike[str] | None = None,
    results: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    resume: bool = False,
    workers: int = 0,
    quiet: bool = False,
    license: str | None = None,
    statistics: Sequence[str] = MODES,
    labels: str | os.PathLike[str] | None = None,
    log: str | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train a network with a recipe, and write its checkpoint, state, log and record to the output folder.

    Ctrl-C and SIGTERM save the state after the current step and raise `SystemExit`. `resume=True` continues from there,
    with the same result as without the interruption. If started by torchrun, all processes train together, and only the
    first one returns a record. Errors mention options of `bkn-zoo train`: `--name` is `name` here.

    Args:
        recipe: a TOML file, the name of a recipe in recipes/ of a checkout, or a `Recipe`; None is `fine_tune`.
        init: a checkpoint to start from (a name, a folder or "owner/repo"), "torchvision:NAME" or "timm:NAME"; its
            classifier is kept for the same classes. By default new weights.
        name: name of the run and its checkpoint; by default that of the recipe with the overrides.
        output: folder of the run; by default runs/NAME. The checkpoint is in its subfolder NAME.
        results: folder of the record; by default results/runs in the output folder.
        workers: processes that decode image files.
        license: the licence that the checkpoint's card names, such as "mit"; by default none.
        statistics: the statistics modes to measure and to choose from; each takes time.
        labels: a CSV or JSON Lines file with file (relative to `data`), label and perhaps split, instead of subfolders.
        log: "tensorboard" also writes what log.jsonl has for TensorBoard, to the subfolder tensorboard.
        overrides: fields of the recipe, such as `epochs=5` or `augmentation={"cutmix": 1.0}`.

    Raises:
        TrainingError: it diverged (`NonFiniteLossError`), or cannot continue, as with a full disk.
    """
    plan = plan_training(
        recipe, data, overrides, init=init, name=name, output=output, results=results, device=device, resume=resume,
        workers=workers, quiet=quiet, license=license, statistics=statistics, labels=labels, log=log,
    )  # fmt: skip
    plan.introduce()
    return carry_out(plan)


def fine_tune(data: str | os.PathLike[str], **options: Any) -> TrainingResult:
    """Train a pretrained network on your own images, without a recipe; `options` are arguments of `train`.

    Batch size, group size and the number of epochs depend on the checkpoint and the number of images. Without `init`,
    training starts from the default checkpoint, or with `model="resnet101_bkn"` from new weights and other defaults.
    """
    return train(None, data, **options)


def carry_out(plan: TrainingPlan) -> TrainingResult:
    """Train as planned."""
    plan = dataclasses.replace(plan, device=default_device() if plan.device == "auto" else plan.device)
    # The processes of torchrun train together.
    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        dist.init_process_group("cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo")
    if joined and plan.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    check_device(plan.device)
    if plan.device == "cpu" and plan.recipe.precision == "bfloat16" and not _cpu_supports_bfloat16():
        plan.say("this CPU does not support bfloat16: training in float32")  # it would be slow and print warnings
        plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, precision="float32"))
    keep_to_quota()
    torch.manual_seed(plan.recipe.seed)
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        runtime = Runtime(torch.device(plan.device), plan.workers, plan.quiet, plan.statistics, plan.log)
        result = _train_as_planned(plan, runtime)
    finally:
        cudnn.benchmark, cudnn.deterministic = before
    if joined:
        dist.destroy_process_group()
    return result


def _train_as_planned(plan: TrainingPlan, runtime: Runtime) -> TrainingResult:
    recipe, device, rank = plan.recipe, runtime.device, dist.get_rank() if dist.is_initialized() else 0
    data = load_data(recipe.dataset, plan.data, recipe.size, recipe.validation, plan.labels).to(device)
    if recipe.dataset == "folder" and plan.labels is None:
        keep_apart(plan.data, {"--output": plan.folder, "--results": plan.record})
    if plan.fine_tuning:
        recipe = adapted(recipe, len(data.train), plan.given, plan.source is not None, device.type == "cpu")
    local_batch(recipe, data)
    training = start(plan, recipe, data, device)
    if plan.resume and not load_state(training, recipe, plan.output, device):
        done = f"the training in {plan.output} is finished"
        if not plan.record.is_file():
            raise CheckpointError(f"{done}, but its record {plan.record} is missing: pass the same --results as then.")
        plan.say(done)
        stored = from_pretrained(plan.folder).to(device).to(memory_format=torch.channels_last)
        return TrainingResult(stored, {} if rank else json.loads(plan.record.read_text()), plan.folder)
    make_folder(plan.output)
    with (plan.output / LOG).open("ab") as log:
        if rank == 0:
            lock(log, f"another training is running in {plan.output}: wait until it ends, or choose another --name.")
        return _train_in_folder(plan, recipe, data, training, runtime, rank)


def _train_in_folder(
    plan: TrainingPlan, recipe: Recipe, data: Data, training: Training, runtime: Runtime, rank: int
) -> TrainingResult:
    def stop(number: int, frame: Any) -> None:
        raise Stopped(number, "stopped before all results were written; continue with --resume")

    if not plan.resume and replaces_finished(plan.output, recipe, training):
        plan.say(f"{plan.output} contains a finished training with the same images and options: this one replaces it")
    make_folder(plan.record.parent)
    data = dataclasses.replace(data, preprocessing=training.preprocessing or data.preprocessing)
    if plan.fine_tuning:
        plan.say(_summary(recipe, data))
    if recipe.balance:
        counts, weights = Counter(torch.as_tensor(data.train.labels).tolist()), class_weights(data)
        told = (f"{name} {counts[k]:,} (weight {weights[k]:.3g})" for k, name in enumerate(data.label_names))
        plan.say(f"images per class: {', '.join(told)}")
    if plan.fine_tuning and plan.source and not training.history:
        config = plan.source.config
        same_classes = config is not None and list(config.label_names or ()) == data.label_names
        start_classifier(training, recipe, data, runtime, keep=same_classes)
    fit(training, recipe, data, plan.output, runtime)
    if training.best is not None:
        training.result.load_state_dict(training.best)
    if rank:
        return TrainingResult(training.result.eval(), {}, plan.folder)
    try:
        with handled(stop, signal.SIGTERM):
            return finish_training(training, recipe, data, plan, runtime)
    except OSError as error:
        remedy = "free disk space, and repeat the command with --resume"
        raise TrainingError(f"the results could not be written ({error}): {remedy}.") from error
    except CheckpointError as error:  # its message says what to do first
        raise CheckpointError(f"{error} The training is saved: then repeat the command with --resume.") from error


def _cpu_supports_bfloat16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # PyTorch was built without oneDNN
        return False


def _summary(recipe: Recipe, data: Data) -> str:
    """One line about the data and the settings."""
    p, how = data.preprocessing, f"statistics groups of {recipe.statistics_batch_size or images_at_a_time(recipe)}"
    if recipe.freeze:
        how = f"the first {recipe.freeze:.0%} of the layers frozen" if recipe.freeze is not True else "classifier only"
    return (
        f"{len(data.train)} images of {len(data.label_names)} classes, {len(data.validation)} more for validation"
        f"{'' if data.test is None else f' and {len(data.test)} for testing'}; {p.size} px ({p.interpolation}); "
        f"epochs: {recipe.epochs}, batches of {recipe.gradient_batch}, {how}"
    )
