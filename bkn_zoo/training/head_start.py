"""The first phase of fine-tuning: fits a classifier on features of the frozen network, which are computed once."""

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.models import Network
from bkn_zoo.norms.running import left_in_its_modes
from bkn_zoo.progress import bar, speaks
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data
from bkn_zoo.training.evaluation import batch_size, evaluate, measure, shown
from bkn_zoo.training.image_sets import Images
from bkn_zoo.training.pace import shown as duration
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import Training, best_mode, classifier, validation_loss

FEATURES = "features of the frozen network"
DECAYS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Weight decays of the logistic regression. One is chosen on the validation images."""


def start_classifier(
    training: Training, recipe: Recipe, data: Data, device: torch.device, workers: int = 0, quiet: bool = False,
    keep: bool = False,
) -> None:  # fmt: skip
    """Fit the classifier, and add its accuracy to the history as epoch 0.

    The features use the network's default statistics and images without augmentation.

    Args:
        keep: leave the classifier as it is, since it came with the checkpoint for the same classes.
    """
    started = time.monotonic()
    layer = classifier(training.model)
    line: dict[str, Any] = {"epoch": 0, "step": 0, "loss": None, "images_per_s": 0.0}
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
        if isinstance(layer, nn.Linear) and not keep:
            train, validation = (
                _features(training.model, layer, data, images, device, workers, quiet)
                for images in (data.train, data.validation)
            )
            line["images_per_s"] = (len(data.train) + len(data.validation)) / (time.monotonic() - started)
            with torch.autocast(device.type, enabled=False):
                weight, bias, line["loss"] = _fit(layer, train, validation)
            for network in (training.model, training.result):  # the same network, unless weights are averaged
                _put(classifier(network), weight, bias)
        batches = evaluation_batches(data, data.validation, batch_size(device), device, workers)
        what = None if quiet else "validation"
        line["validation"] = evaluate(training.result, batches, what=what, total=len(data.validation))
    training.seconds = line["seconds"] = time.monotonic() - started
    training.history.append(line)
    if recipe.keep == "best":
        training.best = {name: tensor.clone() for name, tensor in training.result.state_dict().items()}
    if speaks() and not quiet:
        mode = best_mode(line["validation"])
        told = f"validation loss {validation_loss(line):.4g}, top-1 {shown(line['validation'][mode])}"
        print(f"classifier on the frozen network: {told}, after {duration(line['seconds'])}", flush=True)


@torch.no_grad()
def _features(
    model: Network, layer: nn.Module, data: Data, images: Images, device: torch.device, workers: int, quiet: bool
) -> tuple[Tensor, Tensor]:
    """The inputs of the classifier, and the labels."""
    features: list[Tensor] = []
    labels: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].float()))
    progress = nullcontext(lambda more: None) if quiet else bar(len(images), FEATURES, "image", lines=True)
    with left_in_its_modes(model), progress as done:
        model.eval()
        for batch in evaluation_batches(data, images, batch_size(device), device, workers):
            model(batch.images.contiguous(memory_format=torch.channels_last))
            labels.append(batch.targets.argmax(1))
            done(len(batch.images))
    hook.remove()
    return torch.cat(features), torch.cat(labels)


def _fit(
    start: nn.Linear, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, float]:
    """Weights, bias and training loss of the logistic regression with the lowest loss on the validation images.

    Weight decay pulls towards the weights that it starts from: zero, or those of a checkpoint that knows the classes.
    """
    # One scale for all features: a feature that hardly varies here may vary in other images, and must not get a large
    # weight.
    mean, std = train[0].mean(0), train[0].std(0).mean().clamp_min(1e-6)
    found = []
    for decay in DECAYS:
        layer = nn.Linear(start.in_features, start.out_features, device=mean.device)
        with torch.no_grad():
            layer.weight.copy_(start.weight * std)
            layer.bias.copy_(start.weight.float() @ mean + (0.0 if start.bias is None else start.bias))
        loss = _descend(layer, (train[0] - mean) / std, train[1], decay)
        weight = layer.weight.detach() / std
        bias = layer.bias.detach() - weight @ mean
        metrics = measure(F.linear(validation[0], weight, bias), validation[1])
        found.append((metrics["loss"], weight, bias, loss))
    _, weight, bias, loss = min(found, key=lambda each: each[0])
    return weight, bias, loss


def _descend(layer: nn.Linear, features: Tensor, labels: Tensor, decay: float) -> float:
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")
    start = layer.weight.detach().clone()

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(features), labels) + decay / 2 * (layer.weight - start).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return F.cross_entropy(layer(features), labels).item()


@torch.no_grad()
def _put(layer: nn.Module, weight: Tensor, bias: Tensor) -> None:
    assert isinstance(layer, nn.Linear)
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(bias)
