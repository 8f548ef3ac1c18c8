"""Which norms are surprised by a corruption, and what it gives to adapt some of them only."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.training.datasets import ArrayImages
from studies.shift_corruptions import MAIN
from studies.shift_evaluate import CLEAN, Bench
from studies.shift_rules import Adaptive, Rule, believing_by, mixed, norms

SEVERITY = 3
RULES: dict[str, Callable[[], Rule]] = {"mix, N = 9": lambda: mixed(9), "adaptive": lambda: Adaptive(0.8, plain=True)}


def kinds(model: nn.Module) -> dict[str, list[RunningNorm]]:
    """Groups of norms: all, those after depthwise convolutions and the others, the lower and the upper half."""
    layers = norms(model)
    deep: list[RunningNorm] = []
    convolution: Any = None
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            convolution = module
        elif isinstance(module, RunningNorm) and convolution is not None and convolution.groups > 1:
            deep.append(module)
    middle = len(layers) // 2
    found = {"all": layers, "lower half": layers[:middle], "upper half": layers[middle:]}
    if deep:
        found |= {"depthwise": deep, "not depthwise": [layer for layer in layers if layer not in deep]}
    return found


def only(layers: list[RunningNorm], rule: Rule) -> Rule:
    """`rule` for these norms, population statistics for the others."""
    chosen, usual = set(layers), mixed(math.inf)

    def apply(layer: RunningNorm, images: Belief, prior: Belief | None) -> Belief:
        return (rule if layer in chosen else usual)(layer, images, prior)

    return apply


@torch.no_grad()
def layer_study(
    bench: Bench, images: ArrayImages, measured: Mapping[str, Callable[[], Rule]] = RULES
) -> dict[str, Any]:
    """Accuracy by rule, group of norms and set, at one severity, and the mean D of each group by set."""
    groups = kinds(bench.model)
    rules: dict[str, Rule] = {"population": mixed(math.inf)}
    for rule, make in RULES.items():
        for group, layers in groups.items():
            rules[f"{rule}, {group}"] = only(layers, make())
    for rule in rules.values():  # sets what the adaptive ones compare with
        predict(bench, rule, bench.training_images)
    accuracy: dict[str, dict[str, float]] = {name: {} for name in rules}
    surprise: dict[str, dict[str, float]] = {name: {} for name in groups}
    rows = {layer: row for row, layer in enumerate(bench.watch.layers)}
    for name in (CLEAN, *MAIN):
        given, labels = bench.given(images, name, 0 if name == CLEAN else SEVERITY)
        for rule_name, rule in rules.items():
            right = predict(bench, rule, given.images).argmax(1) == labels
            accuracy[rule_name][name] = round(100 * float(right.float().mean()), 1)
        with bench.autocast(), bench.watch.watching():
            bench.model(given.images, statistics="population")
        by_norm = bench.watch.by_norm().mean(1)
        for group, layers in groups.items():
            surprise[group][name] = round(float(by_norm[[rows[layer] for layer in layers]].mean()), 2)
    counts: Mapping[str, int] = {group: len(layers) for group, layers in groups.items()}
    return {"images": len(images), "severity": SEVERITY, "norms": counts, "accuracy": accuracy, "surprise": surprise}


def predict(bench: Bench, rule: Rule, images: Tensor) -> Tensor:
    with bench.autocast(), believing_by(bench.model, rule):
        return bench.model(images, statistics="sample")
