"""The state of a training: network, optimizer and history; saved completely or not at all, and loaded to resume."""

import copy
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.checkpoints.files import replace_file
from bkn_zoo.checkpoints.provenance import processes
from bkn_zoo.errors import CheckpointError, InputError, NonFiniteLossError, TrainingError, counted
from bkn_zoo.fields import make
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.models import Network
from bkn_zoo.norms.batch_kalman import no_weight_decay
from bkn_zoo.training.recipes import Recipe

# Files of a run: a state to resume from, which a small file replaces when the training is finished; and its log
STATE, FINISHED, LOG = "state.pt", "finished.json", "log.jsonl"
# Fields of a recipe that fine-tuning derives from other options, such as freeze and gradient_batch
DERIVED = ("epochs", "statistics_batch_size")
REMEDY = "start again with a lower learning rate (resuming from the last saved state would diverge again)"


@dataclass
class Training:
    """Everything that changes during a training, and identifies it.

    `averaged` and `best` are weights (averaged, of the best epoch) if the recipe asks for them, `losses` those of the
    epoch in which the state was saved. `fingerprint` (of the data) and `init` (None: new weights) are empty if unknown.
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
    fingerprint: str = ""
    preprocessing: Preprocessing | None = None
    init: str | None = ""

    @property
    def result(self) -> Network:
        return self.model if self.averaged is None else self.averaged

    def keep_weights(self) -> None:
        self.best = {name: tensor.clone() for name, tensor in self.result.state_dict().items()}


def begin(recipe: Recipe, model: Network, device: torch.device) -> Training:
    """A training at its first step."""
    model = model.to(device).to(memory_format=torch.channels_last)
    model.statistics_batch_size = recipe.statistics_batch_size
    if recipe.freeze:
        # Norms, too: they neither use statistics of batches nor update running averages.
        model.eval()
        layers = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
        for layer in layers[: math.ceil(recipe.freeze * len(layers))]:
            layer.requires_grad_(layer is classifier(model))
    averaged = copy.deepcopy(model).eval().requires_grad_(False) if recipe.ema else None
    return Training(model, averaged, make_optimizer(model, recipe, device))


def classifier(model: Network) -> nn.Module:
    """The last layer with one output per class."""
    for layer in reversed(list(model.modules())):
        if getattr(layer, "out_features", getattr(layer, "out_channels", None)) == model.num_classes:
            return layer
    raise InputError(f"{model.name} has no separate layer for the classes: train all of it, without freeze.")


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Weight decay for convolutions and linear layers only; A, R and q have their own learning rate."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": recipe.weight_decay, "scale": 1.0},
        {"params": [], "weight_decay": 0.0, "scale": 1.0},
        {"params": [], "weight_decay": 0.0, "scale": recipe.kalman_lr},
    ]
    kalman = no_weight_decay(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[2 if name in kalman else 0 if parameter.ndim >= 2 else 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    # A learning rate on the device can change between replays of a CUDA graph, which may capture steps on a GPU.
    lr: Any = torch.zeros((), device=device)
    groups = [{**group, "lr": lr.clone()} for group in parameter_groups(model, recipe)]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=recipe.momentum, nesterov=True, fused=True)
    options: Any = {"betas": (recipe.momentum, 0.999), "fused": True, "capturable": device.type == "cuda"}
    adamw: Any = torch.optim.AdamW(groups, lr=lr, **options)
    adamw._warned_capturable_if_run_uncaptured = True  # no warning about the necessary steps before the capture
    return adamw


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """What an epoch has reached on the validation images, in its one mode."""
    (metrics,) = line["validation"].values()
    return metrics


def validation_loss(line: Mapping[str, Any]) -> float:
    """The validation loss of an epoch; infinite if it is not a number."""
    loss = metrics_of(line)["loss"]
    return math.inf if math.isnan(loss) else loss


def kept_line(history: list[dict[str, Any]], recipe: Recipe) -> dict[str, Any]:
    """The line of the epoch whose weights are kept: the last, or the last within a standard error of the best loss."""
    if recipe.keep == "last":
        return history[-1]
    lowest = min(history, key=validation_loss)
    error = metrics_of(lowest)["loss_error"]
    bound = validation_loss(lowest) + (0.0 if math.isnan(error) else error)
    return next(line for line in reversed(history) if validation_loss(line) <= bound)


def write_log(history: list[dict[str, Any]], folder: Path) -> None:
    """Write one line per epoch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in history))
    except OSError as error:
        told = f"{folder / LOG} could not be written ({error.strerror})"
        raise TrainingError(f"{told}: free disk space; the last saved state stays.") from error


def _identity(training: Training, recipe: Recipe) -> dict[str, Any]:
    """What says which training a file belongs to."""
    known = {"recipe": json.dumps(dataclasses.asdict(recipe)), "processes": processes(), "init": training.init}
    return known | {"fingerprint": training.fingerprint, "finished": training.finished, "step": training.step}


def save_state(training: Training, recipe: Recipe, folder: Path) -> None:
    """Write everything that resuming needs, completely or not at all."""
    for name, parameter in training.model.named_parameters():
        if not parameter.isfinite().all():
            raise NonFiniteLossError(f"{name} was not finite after step {training.step - 1}: {REMEDY}.")
    state = _identity(training, recipe) | {
        "seconds": training.seconds,
        "best": training.best,
        "losses": training.losses,
        "model": training.model.state_dict(),
        "averaged": training.averaged and training.averaged.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "history": json.dumps(training.history),
        "preprocessing": training.preprocessing and dataclasses.asdict(training.preprocessing),
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
    (folder / FINISHED).unlink(missing_ok=True)


def drop_state(training: Training, recipe: Recipe, folder: Path) -> None:
    """Replace the state of a finished training by a small file, so that it is still known which one it was."""
    replace_file(folder / FINISHED, json.dumps(_identity(training, recipe), indent=1) + "\n")
    (folder / STATE).unlink(missing_ok=True)


def _find_state(folder: Path) -> Path | None:
    return next((folder / name for name in (STATE, FINISHED) if (folder / name).is_file()), None)


def _read_state(path: Path, device: torch.device, mmap: bool = False) -> dict[str, Any]:
    """The content of a state; `mmap` does not read its tensors."""
    try:
        if path.name == FINISHED:
            state = json.loads(path.read_text())
        else:
            state = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
            state |= {"history": json.loads(state["history"])}
        for name in ("init", "fingerprint", "finished", "step", "processes"):
            state[name]
        # New fields have their defaults.
        return state | {"recipe": make(Recipe, json.loads(state["recipe"]))}
    except Exception as error:
        told = f"{path} cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        remedy = "check its permissions and the version of bkn_zoo, or remove it to start the training again"
        raise CheckpointError(f"{told}: {remedy}.") from None


def load_state(training: Training, recipe: Recipe, folder: Path, device: torch.device) -> bool:
    """Continue the training in a folder; refuse another one. Returns False if it is finished and left no state."""
    path = _find_state(folder)
    if path is None:
        told = f"{folder / STATE} does not exist, so there is no training to resume"
        raise CheckpointError(f"{told}: correct --output, or start without --resume.")
    state = _read_state(path, device)
    for _, sentence in _differences(state, training, recipe):
        raise CheckpointError(f"{path} belongs to a training {sentence}")
    if path.name == FINISHED:
        return False
    try:
        training.model.load_state_dict(state["model"])
        if training.averaged is not None:
            training.averaged.load_state_dict(state["averaged"])
        capturable = training.optimizer.defaults.get("capturable")
        training.optimizer.load_state_dict(state["optimizer"])
        # As this device needs it, not the one that saved the state. SGD has no such option.
        for group in training.optimizer.param_groups:
            group["capturable"] = capturable
        for name in ("step", "finished", "seconds", "best", "losses", "history"):
            setattr(training, name, state[name])
        if state["preprocessing"] is not None:
            training.preprocessing = Preprocessing(**state["preprocessing"])
    except (RuntimeError, ValueError, KeyError):
        told = f"{path} has tensors that do not fit {recipe.model}, perhaps for other classes"
        raise CheckpointError(f"{told}: resume with the same data.") from None
    return True


def replaces_finished(folder: Path, recipe: Recipe, training: Training) -> bool:
    """Whether there is a finished training with the same recipe, data and start. Refuse to replace any other."""
    path = _find_state(folder)
    if path is None:
        return False
    state = _read_state(path, torch.device("cpu"), mmap=True)
    changed = [name for name, _ in _differences(state, training, recipe) if name != "processes"]
    if state["finished"] and changed:
        told = f"{folder} contains another finished training ({changed[0]} differs)"
        raise InputError(f"{told}: choose another --name or --output, or remove the folder.")
    if state["step"] > 0 and path.name == STATE:
        told = f"{folder} contains a training that stopped at step {state['step']}"
        raise InputError(f"{told}: continue with --resume, or remove the folder to start again.")
    return state["finished"]


def _differences(state: dict[str, Any], training: Training, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """In what a state belongs to another training, and how to say that: first what determines fields of the recipe."""
    if "" not in (state["init"], training.init) and state["init"] != training.init:
        theirs, ours = (init or "new weights" for init in (state["init"], training.init))
        yield "checkpoint", f"that started from {theirs}, not {ours}: pass the same --checkpoint, or another --name."
    together = state["processes"]
    if together != processes():  # groups and augmentation differ between processes
        yield "processes", f"by {counted(together, 'process')}, not {processes()}: resume with as many."
    if "" not in (state["fingerprint"], training.fingerprint) and state["fingerprint"] != training.fingerprint:
        where = "on other images, or with some images in other classes"
        yield "data", f"{where}: resume with the same data, or pass another --name."
    before, now = (json.loads(json.dumps(dataclasses.asdict(each))) for each in (state["recipe"], recipe))
    for name in sorted(now, key=lambda name: name in DERIVED):
        if name not in ("graph", "compile") and before[name] != now[name]:
            yield name, f"with {name} = {before[name]!r}, not {now[name]!r}: pass the same options, or another --name."
