"""The start of a training: the network with its first weights, and the first phase of fine-tuning.

That phase fits a classifier on features of the frozen network, which are computed once.
"""

import dataclasses
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.checkpoints.builders import build_network, of_library
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.conversion.libraries import from_library
from bkn_zoo.errors import InputError
from bkn_zoo.models import Network
from bkn_zoo.norms.running import left_in_its_modes
from bkn_zoo.progress import bar, waiting
from bkn_zoo.training.data import Runtime, evaluation_batches
from bkn_zoo.training.datasets import Data, Images, fingerprint
from bkn_zoo.training.evaluation import batch_size, evaluate_on, measure_accuracy, show_top1
from bkn_zoo.training.plan import TrainingPlan
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import Training, begin, best_mode, classifier, validation_loss
from bkn_zoo.training.step import autocast

DECAYS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Weight decays of the logistic regression. One is chosen on the validation images."""


def start(plan: TrainingPlan, recipe: Recipe, data: Data, device: torch.device) -> Training:
    """A training at its first step, with everything that identifies it."""
    source = plan.source
    with waiting(f"preparing {recipe.model}"):
        training = begin(recipe, first_network(recipe, source and source.init, data.label_names), device)
    training.fingerprint = fingerprint(data, plan.data)
    training.init = source and source.key
    training.preprocessing = data.preprocessing
    if source and source.preprocessing:  # the preprocessing of its weights, with the recipe's size
        p = source.preprocessing
        training.preprocessing = dataclasses.replace(
            data.preprocessing, mean=p.mean, std=p.std, interpolation=p.interpolation
        )
    return training


def first_network(recipe: Recipe, init: str | None, label_names: list[str]) -> Network:
    """The recipe's network for these classes, with the weights of `init` if there is one.

    The classifier of `init` is kept if its classes have the same names. If it knows all classes, among others, its rows
    for these are kept. Otherwise the classifier starts at zero.
    """
    model = build_network(recipe.model, len(label_names), **recipe.norm_options)
    if init is None:
        return model
    source = from_library(init, pretrained=True) if of_library(init) else from_pretrained(init)
    weights = source.state_dict()
    known = list((source.config and source.config.label_names) or ())
    fresh = set() if known == label_names else _classifier_names(source, model)
    rows = [known.index(name) for name in label_names] if set(label_names) <= set(known) else None
    with torch.no_grad():
        for name in fresh:
            if rows is not None:
                model.get_parameter(name).copy_(weights[name][rows])
            else:  # zero, so that no class is preferred, and no noise reaches the layers below
                model.get_parameter(name).zero_()
    model.default_statistics = source.default_statistics
    try:
        kept = {name: tensor for name, tensor in weights.items() if name not in fresh}
        missing, extra = model.load_state_dict(kept, strict=False)
    except RuntimeError:  # a tensor has another shape
        missing, extra = [], list(weights)
    if extra or set(missing) - fresh:
        raise InputError(
            f"{init} is a {source.name}, whose weights do not fit {recipe.model}: use the same model and options."
        )
    return model


def _classifier_names(source: Network, model: Network) -> set[str]:
    """The tensors that differ only in the number of classes; if it is equal, those of the last layer."""
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


def start_classifier(training: Training, recipe: Recipe, data: Data, runtime: Runtime, keep: bool = False) -> None:
    """Fit the classifier, and add its accuracy to the history as epoch 0.

    The features use the network's default statistics and images without augmentation.

    Args:
        keep: leave the classifier as it is, since it came with the checkpoint for the same classes.
    """
    started = time.monotonic()
    layer = classifier(training.model)
    line: dict[str, Any] = {"epoch": 0, "step": 0, "loss": None, "images_per_s": 0.0}
    with autocast(recipe, runtime.device):
        if isinstance(layer, nn.Linear) and not keep:
            train, validation = (
                _features(training.model, layer, data, images, runtime) for images in (data.train, data.validation)
            )
            line["images_per_s"] = (len(data.train) + len(data.validation)) / (time.monotonic() - started)
            with torch.autocast(runtime.device.type, enabled=False), torch.no_grad():
                weight, bias, line["loss"] = fit_classifier(layer, train, validation)
                for network in (training.model, training.result):  # the same network, unless weights are averaged
                    last: Any = classifier(network)
                    last.weight.copy_(weight)
                    if last.bias is not None:
                        last.bias.copy_(bias)
        line["validation"] = evaluate_on(training.result, data, data.validation, runtime, "validation")
    training.seconds = line["seconds"] = time.monotonic() - started
    training.history.append(line)
    if recipe.keep == "best":
        training.keep_weights()
    if not runtime.quiet:
        top1 = show_top1(line["validation"][best_mode(line["validation"])])
        told = f"validation loss {validation_loss(line):.4g}, top-1 {top1}, after {line['seconds']:.0f} s"
        print(f"classifier on the frozen network: {told}", flush=True)


@torch.no_grad()
def _features(
    model: Network, layer: nn.Module, data: Data, images: Images, runtime: Runtime
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The inputs of the classifier, and the labels."""
    features: list[Tensor] = []
    labels: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].float()))
    what = "features of the frozen network"
    progress = nullcontext(lambda more: None) if runtime.quiet else bar(len(images), what, "image", lines=True)
    with left_in_its_modes(model), progress as done:
        model.eval()
        device = runtime.device
        for batch in evaluation_batches(data, images, batch_size(device), device, runtime.workers):
            model(batch.images.contiguous(memory_format=torch.channels_last))
            labels.append(batch.targets.argmax(1))
            done(len(batch.images))
    hook.remove()
    return torch.cat(features), torch.cat(labels)


def fit_classifier(
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
        metrics = measure_accuracy(F.linear(validation[0], weight, bias), validation[1])
        found.append((metrics["loss"], weight, bias, loss))
    _, weight, bias, loss = min(found, key=lambda each: each[0])
    return weight, bias, loss


@torch.enable_grad()
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
