"""The start of a training: the first weights, and the first phase of fine-tuning, a classifier on fixed features."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.checkpoints.builders import build_network, of_library
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.conversion.libraries import from_library
from bkn_zoo.errors import InputError
from bkn_zoo.models import Network
from bkn_zoo.models.network import check_standardized
from bkn_zoo.progress import waiting
from bkn_zoo.training.data import Runtime
from bkn_zoo.training.datasets import Data, Images, class_weights, fingerprint
from bkn_zoo.training.evaluation import logits_on, measure_accuracy, show_top1
from bkn_zoo.training.loop import validate_epoch
from bkn_zoo.training.plan import TrainingPlan
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import Training, begin, classifier, metrics_of
from bkn_zoo.training.step import autocast

# Weight decays of the logistic regression. One is chosen on the validation images
DECAYS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
# A validation loss that is close to 0
PERFECT = 0.01


def start(plan: TrainingPlan, recipe: Recipe, data: Data, device: torch.device) -> Training:
    """A training at its first step, with everything that identifies it."""
    source = plan.source
    with waiting(f"preparing {recipe.model}"):
        training = begin(recipe, first_network(recipe, source and source.init, data.label_names), device)
    training.fingerprint = fingerprint(data, plan.data, listed=plan.labels is not None)
    # It must not depend on the working directory.
    training.init = source and (str(Path(source.init).resolve()) if Path(source.init).exists() else source.init)
    # That of its weights, with the recipe's size.
    p = (source and source.preprocessing) or data.preprocessing
    looks: dict[str, Any] = {"mean": p.mean, "std": p.std, "interpolation": p.interpolation}
    training.preprocessing = dataclasses.replace(data.preprocessing, **looks)
    return training


def first_network(recipe: Recipe, init: str | None, label_names: list[str]) -> Network:
    """The recipe's network, with the weights of `init` if there is one, and its classifier for known classes."""
    model = build_network(recipe.model, len(label_names), **recipe.norm_options)
    if init is None:
        # After training with single images, `population` does not work.
        if recipe.statistics_batch_size == 1 and not recipe.freeze:
            model.default_statistics = "sample"
        return model
    source = from_library(init, pretrained=True) if of_library(init) else from_pretrained(init)
    check_standardized(model, source.standardized_weights)
    weights = source.state_dict()
    known = list((source.config and source.config.label_names) or ())
    fresh = set() if known == label_names else _classifier_names(source, model)
    rows = [known.index(name) for name in label_names] if set(label_names) <= set(known) else None
    for name in fresh:  # zero, so that no class is preferred, and no noise reaches the layers below
        model.get_parameter(name).data = weights[name][rows] if rows else torch.zeros_like(model.get_parameter(name))
    model.default_statistics = source.default_statistics
    try:
        kept = {name: tensor for name, tensor in weights.items() if name not in fresh}
        missing, extra = model.load_state_dict(kept, strict=False)
    except RuntimeError:  # a tensor has another shape
        missing, extra = [], list(weights)
    if extra or set(missing) - fresh:
        told = f"{init} is a {source.name}, whose weights do not fit {recipe.model}"
        raise InputError(f"{told}: use the same model and options.")
    return model


def _classifier_names(source: Network, model: Network) -> set[str]:
    """The tensors that differ only in the number of classes; if it is equal, those of the last layer."""
    if source.num_classes == model.num_classes:
        last = {id(tensor) for tensor in classifier(model).parameters()}
        return {name for name, tensor in model.named_parameters() if id(tensor) in last}
    own, ours = model.state_dict(), [model.num_classes]
    theirs = {name: list(tensor.shape) for name, tensor in source.state_dict().items() if name in own}
    sized = {name: ours + shape[1:] for name, shape in theirs.items() if shape[:1] == [source.num_classes]}
    return {name for name, shape in sized.items() if list(own[name].shape) == shape}


def start_classifier(training: Training, recipe: Recipe, data: Data, runtime: Runtime, keep: bool = False) -> None:
    """Fit the classifier on images without augmentation, unless `keep`; add its accuracy to the history as epoch 0."""
    started = time.monotonic()
    layer = classifier(training.model)
    line: dict[str, Any] = {"epoch": 0, "step": 0, "loss": None, "images_per_s": 0.0}
    with autocast(recipe, runtime.device):
        if isinstance(layer, nn.Linear) and not keep:
            both = (data.train, data.validation)
            train, validation = (_features(training.model, data, images, runtime) for images in both)
            line["images_per_s"] = (len(data.train) + len(data.validation)) / (time.monotonic() - started)
            with torch.autocast(runtime.device.type, enabled=False), torch.no_grad():
                weights = class_weights(data).to(runtime.device) if recipe.balance else None
                weight, bias, line["loss"] = fit_classifier(layer, train, validation, weights)
                for network in (training.model, training.result):  # the same network, unless weights are averaged
                    last: Any = classifier(network)
                    last.weight.copy_(weight)
                    if last.bias is not None:
                        last.bias.copy_(bias)
        line["validation"] = validate_epoch(training, recipe, data, runtime)
    training.seconds = line["seconds"] = time.monotonic() - started
    training.history.append(line)
    if recipe.keep == "best":
        training.keep_weights()
    metrics = metrics_of(line)
    # Nothing is left to improve that these images could show.
    training.finished = recipe.keep == "best" and metrics["top1"] == 100 and metrics["loss"] < PERFECT
    if not runtime.quiet:
        told = f"validation loss {metrics['loss']:.4g}, top-1 {show_top1(metrics)}, after {line['seconds']:.0f} s"
        done = "; stopped, because fine-tuning cannot improve that" if training.finished and recipe.epochs else ""
        print(f"classifier on the frozen network: {told}{done}", flush=True)


def _features(model: Network, data: Data, images: Images, runtime: Runtime) -> tuple[Tensor, Tensor]:
    """The inputs of the classifier, and the labels."""
    features: list[Tensor] = []
    hook = classifier(model).register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].float()))
    _, labels = logits_on(model, data, images, runtime, "features of the frozen network", [model.default_statistics])
    hook.remove()
    # Copies, because tensors of inference mode have no gradients.
    return torch.cat(features), labels.clone()


def fit_classifier(
    start: nn.Linear, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], weights: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """Weights, bias and loss of the logistic regression, with `weights` of classes, that is best in validation."""
    # One scale for all: a feature that hardly varies here may vary in other images, and must not get a large weight.
    mean, std = train[0].mean(0), train[0].std(0).mean().clamp_min(1e-6)
    found = []
    for decay in DECAYS:
        layer = nn.Linear(start.in_features, start.out_features, device=mean.device)
        with torch.no_grad():
            layer.weight.copy_(start.weight * std)
            layer.bias.copy_(start.weight.float() @ mean + (0.0 if start.bias is None else start.bias))
        loss = _descend(layer, (train[0] - mean) / std, train[1], decay, weights)
        weight = layer.weight.detach() / std
        bias = layer.bias.detach() - weight @ mean
        metrics = measure_accuracy(F.linear(validation[0], weight, bias), validation[1])
        found.append((metrics["loss"], weight, bias, loss))
    _, weight, bias, loss = min(found, key=lambda each: each[0])
    return weight, bias, loss


@torch.enable_grad()
def _descend(layer: nn.Linear, features: Tensor, labels: Tensor, decay: float, weights: Tensor | None) -> float:
    """Minimize; the decay pulls towards the weights that it starts from."""
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")
    start = layer.weight.detach().clone()

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(features), labels, weights) + decay / 2 * (layer.weight - start).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return F.cross_entropy(layer(features), labels, weights).item()
