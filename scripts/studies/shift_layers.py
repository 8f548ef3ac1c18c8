"""Which norms are surprised by a corruption, and what it gives to adapt some of them only.

    PYTHONPATH=scripts python -m studies.shift_layers --data DATA_FOLDER --images 64

measures the adaptive rule alone, with EfficientNet-Lite0 on photographs, within minutes on a CPU. Other networks are
measured with `studies.shift --layers` and `studies.shift_unlabelled`.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo import kernels
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.training.datasets import ArrayImages
from studies.shift_corruptions import MAIN
from studies.shift_evaluate import CLEAN, Bench, part
from studies.shift_rules import Adaptive, Rule, believing_by, mixed, norms

SEVERITY = 3
Make = Callable[[], Rule]
RULES: dict[str, Make] = {"mix, N = 9": lambda: mixed(9), "adaptive": lambda: Adaptive(0.8, plain=True)}


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
    for rule, make in measured.items():
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


def main(arguments: list[str]) -> None:
    from bkn_zoo.checkpoints.folder import from_pretrained
    from bkn_zoo.checkpoints.provenance import environment
    from bkn_zoo.publishing.results import write_record
    from studies.base import RESULTS, ROOT
    from studies.shift_photographs import photographs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the photographs")
    parser.add_argument("--images", type=int, default=64, help="test images, for each of 16 sets")
    parser.add_argument("--fitted", type=int, default=200, help="images that the rule is fitted on")
    parser.add_argument("--results", type=Path, default=RESULTS / "shift", help="where the record goes")
    args = parser.parse_args(arguments)
    name = "efficientnet_lite0_bkn.imagenet"
    model = from_pretrained(str(ROOT / "checkpoints" / name)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = dataclasses.replace(photographs(args.data), preprocessing=model.config.preprocessing)
    bench = Bench(model.requires_grad_(False), data, "population", fitted=args.fitted)
    with kernels.use("pytorch"):
        found = layer_study(bench, part(data.test, args.images, bench.seed), {"adaptive": RULES["adaptive"]})
    here = environment(0)
    here["command"] = here["command"].replace("python shift_layers.py", "python -m studies.shift_layers")
    about = {"name": f"layers.{name}", "dataset": "imagenet", "network": "EfficientNet-Lite0, ImageNet"}
    path = args.results / f"imagenet.layers.{name}.json"
    write_record(path, json.dumps({**about, "layers": found, **here}, separators=(",", ":")))


if __name__ == "__main__":
    main(sys.argv[1:])
