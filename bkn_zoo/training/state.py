"""The state of a training: saved completely or not at all, and loaded to resume."""

import copy
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.checkpoints.provenance import processes
from bkn_zoo.errors import CheckpointError, InputError, NonFiniteLossError, TrainingError, counted
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.models import Network
from bkn_zoo.training.optimizer import make_optimizer
from bkn_zoo.training.recipes import Recipe

STATE, LOG = "state.pt", "log.jsonl"
SAVED = (
    "model", "averaged", "best", "optimizer", "step", "finished", "seconds", "losses", "history", "data", "images",
    "label_names", "fingerprint", "preprocessing", "init", "processes", "recipe",
)  # fmt: skip
"""The fields of a saved state."""

DERIVED = ("epochs", "statistics_batch")
"""Fields of a recipe that fine-tuning derives from other options, such as freeze and gradient_batch."""

REMEDY = "start again with a lower learning rate (resuming from the last saved state would diverge again)"


@dataclass
class Training:
    """Everything that changes during a training, and identifies it.

    Attributes:
        averaged: the exponential moving average of the weights, if the recipe has one.
        best: the tensors of the best epoch, if the recipe keeps them.
        seconds: time of all steps and of the validation after each epoch.
        losses: losses of the current epoch when the state was saved.
        history: one line per epoch.
        data: the folder of the images, which identifies the training; empty if unknown.
        images: number of training and validation images, which must not change; None if unknown.
        label_names: names of the classes, which must not change; None if unknown.
        fingerprint: hash of the images' names and labels (`datasets.fingerprint`); empty if unknown.
        preprocessing: preprocessing of the images, if known.
        init: the checkpoint that it started from, which identifies it, too; None for new weights, empty if unknown.
    """

    model: Network
    averaged: Network | None
    optimizer: torch.optim.Optimizer
    step: int = 0
    finished: bool = False
    seconds: float = 0.0
    best: dict[str, Tensor] | None = None
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    history: list[dict[str, Any]] = field(default_factory=list)
    data: str = ""
    images: list[int] | None = None
    label_names: list[str] | None = None
    fingerprint: str = ""
    preprocessing: Preprocessing | None = None
    init: str | None = ""

    @property
    def result(self) -> Network:
        return self.model if self.averaged is None else self.averaged


def begin(recipe: Recipe, model: Network, device: torch.device) -> Training:
    model = model.to(device).to(memory_format=torch.channels_last)
    model.statistics_batch_size = recipe.statistics_batch
    if recipe.freeze:
        model.eval()  # norms, too: they neither use statistics of batches nor update running averages
        for layer in frozen_layers(model, recipe.freeze):
            layer.requires_grad_(False)
    averaged = copy.deepcopy(model).eval().requires_grad_(False) if recipe.ema else None
    return Training(model, averaged, make_optimizer(model, recipe, device))


def classifier(model: Network) -> nn.Module:
    """The last layer with one output per class."""
    for layer in reversed(list(model.modules())):
        if getattr(layer, "out_features", getattr(layer, "out_channels", None)) == model.num_classes:
            return layer
    raise InputError(f"{model.name} has no separate layer for the classes: train all of it, without freeze.")


def frozen_layers(model: Network, share: float) -> list[nn.Module]:
    """The first layers of a network, as a share of all layers with parameters, without the classifier."""
    layers = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    last = classifier(model)
    return [layer for layer in layers[: math.ceil(share * len(layers))] if layer is not last]


def best_mode(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """The statistics mode with the highest top-1; if several are equal, the one with the lowest loss."""
    return max(metrics, key=lambda mode: (metrics[mode]["top1"], -metrics[mode]["loss"]))


def validation_loss(line: Mapping[str, Any]) -> float:
    """The validation loss of an epoch in its best mode; infinite if it is not a number."""
    loss = line["validation"][best_mode(line["validation"])]["loss"]
    return math.inf if math.isnan(loss) else loss


def best_line(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of the last epoch whose validation loss is within a standard error of the lowest.

    With few images, smaller differences are chance. Among equally good epochs, the last had the lowest learning rate.
    """
    lowest = min(history, key=validation_loss)
    error = lowest["validation"][best_mode(lowest["validation"])].get("loss_error", 0.0)  # none in older states
    bound = validation_loss(lowest) + (0.0 if math.isnan(error) else error)
    return next(line for line in reversed(history) if validation_loss(line) <= bound)


def kept_line(history: list[dict[str, Any]], recipe: Recipe) -> dict[str, Any]:
    """The line of the epoch whose weights are kept."""
    return best_line(history) if recipe.keep == "best" else history[-1]


def save_state(training: Training, recipe: Recipe, folder: Path) -> None:
    """Write everything that resuming needs, completely or not at all."""
    for name, parameter in training.model.named_parameters():
        if not parameter.isfinite().all():
            raise NonFiniteLossError(f"{name} was not finite after step {training.step - 1}: {REMEDY}.")
    state = {
        "model": training.model.state_dict(),
        "averaged": None if training.averaged is None else training.averaged.state_dict(),
        "best": training.best,
        "optimizer": training.optimizer.state_dict(),
        "step": training.step,
        "finished": training.finished,
        "seconds": training.seconds,
        "losses": training.losses,
        "history": json.dumps(training.history),
        "data": training.data,
        "images": training.images,
        "label_names": training.label_names,
        "fingerprint": training.fingerprint,
        "preprocessing": None if training.preprocessing is None else dataclasses.asdict(training.preprocessing),
        "init": training.init,
        "processes": processes(),
        "recipe": json.dumps(dataclasses.asdict(recipe)),
    }
    scratch = folder / f".{STATE}.tmp"
    try:
        with scratch.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, folder / STATE)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        stays = "; the last one stays" if (folder / STATE).exists() else ""
        raise TrainingError(f"{folder / STATE} could not be written ({error}): free disk space{stays}.") from error
    finally:
        scratch.unlink(missing_ok=True)


def write_log(history: list[dict[str, Any]], folder: Path) -> None:
    """Write one line per epoch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in history))
    except OSError as error:
        raise TrainingError(
            f"{folder / LOG} could not be written ({error.strerror}): free disk space; the last saved state stays."
        ) from error


def find_state(folder: Path) -> Path:
    """The file of the training in a folder."""
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist, so there is no training to resume: correct --output, or start without --resume."
        )
    return path


def load_state(training: Training, recipe: Recipe, folder: Path, device: torch.device) -> None:
    """Continue the training in a folder, with its preprocessing; refuse one of another recipe, data or start."""
    path = find_state(folder)
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        if missing := [name for name in SAVED if name not in state]:
            raise KeyError(missing[0])
        theirs, ours = json.loads(state["recipe"]), json.loads(json.dumps(dataclasses.asdict(recipe)))
        changed = _changed(theirs, recipe)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read ({reason}): remove it, and start the training again.") from None
    _check_same(path, state, training)  # first, because start and images determine some fields of the recipe
    if changed:
        name = changed[0]
        raise CheckpointError(
            f"{path} belongs to a training with {name} = {theirs[name]!r}, not {ours[name]!r}: pass the same "
            "options, or another --name."
        )
    try:
        training.model.load_state_dict(state["model"])
        if training.averaged is not None:
            training.averaged.load_state_dict(state["averaged"])
        here = [group.get("capturable") for group in training.optimizer.param_groups]
        training.optimizer.load_state_dict(state["optimizer"])
        for group, capturable in zip(training.optimizer.param_groups, here, strict=True):
            if capturable is not None:  # depends on the device, not on the training
                group["capturable"] = capturable
    except (RuntimeError, ValueError, KeyError):
        raise CheckpointError(
            f"{path} has tensors that do not fit {recipe.model}, perhaps for other classes: resume with the same data."
        ) from None
    training.step, training.seconds = state["step"], state["seconds"]
    training.finished, training.best = state["finished"], state["best"]
    training.losses = state["losses"]
    training.history = json.loads(state["history"])
    if state["preprocessing"] is not None:
        training.preprocessing = Preprocessing(**state["preprocessing"])


def _check_same(path: Path, state: dict[str, Any], training: Training) -> None:
    """Refuse a state from another start, another number of processes or other data."""
    if _other_init(state, training):
        raise CheckpointError(
            f"{path} belongs to a training that started from {_named(state['init'])}, not {_named(training.init)}: "
            "pass the same --checkpoint, or another --name."
        )
    together = state["processes"]
    if together != processes():  # groups and augmentation differ between processes
        how = counted(together, "process")
        resume = "without torchrun" if together == 1 else f"by torchrun, with {together} in all"
        raise CheckpointError(f"{path} belongs to a training by {how}, not {processes()}: resume {resume}.")
    if None not in (state["images"], training.images) and state["images"] != training.images:
        (train, chosen), (now, chosen_now) = state["images"], training.images or []
        raise CheckpointError(
            f"{path} belongs to a training on {counted(train, 'image')} with {chosen} for validation, not {now} and "
            f"{chosen_now}: resume with the same data."
        )
    # With fewer or more classes, tensors differ, too.
    for old, new in zip(state["label_names"] or [], training.label_names or [], strict=False):
        if old != new:
            raise CheckpointError(
                f"{path} belongs to a training with a class {old!r}, not {new!r}: resume with the same data, or use "
                "another --name."
            )
    if _other_images(state, training):
        raise CheckpointError(
            f"{path} belongs to a training on other images, or with some images in other classes: resume with the same "
            "data, or pass another --name."
        )


def replaces_finished(folder: Path, recipe: Recipe, training: Training) -> bool:
    """Whether there is a finished training with the same recipe, data and start. Refuse to replace any other."""
    try:
        state = torch.load(folder / STATE, mmap=True, weights_only=True)
        begun, finished = state["step"] > 0, state["finished"]
        changed = [  # the start and the images first, because they determine some fields of the recipe
            *(["checkpoint"] if _other_init(state, training) else []),
            *(["data"] if state["data"] != training.data or _other_images(state, training) else []),
            *_changed(json.loads(state["recipe"]), recipe),
        ]
    except Exception:  # no state, or none that can be resumed
        return False
    if finished and changed:
        raise InputError(
            f"{folder} contains another finished training ({changed[0]} differs): choose another --name or "
            "--output, or remove the folder."
        )
    if begun and not finished:
        raise InputError(
            f"{folder} contains a training that stopped at step {state['step']}: continue with --resume, or remove the "
            "folder to start again."
        )
    return finished


def _other_init(state: dict[str, Any], training: Training) -> bool:
    """Whether a state started from another checkpoint, as far as known."""
    return "" not in (state["init"], training.init) and state["init"] != training.init


def _other_images(state: dict[str, Any], training: Training) -> bool:
    """Whether a state was trained on other images, as far as known."""
    return "" not in (state["fingerprint"], training.fingerprint) and state["fingerprint"] != training.fingerprint


def _named(init: str | None) -> str:
    return init or "new weights"


def _changed(theirs: dict[str, Any], recipe: Recipe) -> list[str]:
    """The fields in which the recipe of a state differs; last those that may only follow from the others."""
    ours = json.loads(json.dumps(dataclasses.asdict(recipe)))
    changed = [name for name in ours if name not in ("graph", "compile") and ours[name] != theirs[name]]
    return sorted(changed, key=lambda name: name in DERIVED)
