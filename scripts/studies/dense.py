"""Trains a U-Net for CamVid from random weights with one image per batch: results/tables/dense/.

DATA contains the folder CamVid of SegNet's tutorial, or a copy of it by --pack. The plan is in dense.toml. The first
command tunes the learning rate of each arm. The second one reads it from the records of the first:

    python scripts/study.py dense --data DATA --jobs 12 --only tuned
    python scripts/study.py dense --data DATA --jobs 12 --only final
"""

import argparse
import copy
import math
import time
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bkn_zoo
from bkn_zoo.conversion import Converted
from bkn_zoo.errors import InputError
from bkn_zoo.modes import MODES
from bkn_zoo.norms.standardized import standardize_convolutions
from bkn_zoo.training.capture import captured
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import make_optimizer
from bkn_zoo.training.step import autocast, learning_rate
from studies.base import RESULTS, Record, Run, Study, device
from studies.camvid import CLASSES, VOID, Images, as_input, class_weights, load, mean_iou, pack, training_batches
from studies.stats import gaps, mean_of, spread

Plan = Mapping[str, Any]
PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ARMS = {
    "bn": "BN", "gn": "GroupNorm, standardized", "evonorm": "EvoNorm-S0", "bkn": "BKN", "bkns": "BKN, standardized",
}  # fmt: skip
CHECKS = 4  # validations of a run, the last one at its end


@dataclass(frozen=True, kw_only=True)
class Training(Run):
    arm: str
    lr: float | None = None  # None: the rate that the arm's tuned runs choose


class Dense(Study):
    name = "dense"
    results = RESULTS / "dense"

    def planned(self, changes: Mapping[str, Any]) -> list[Training]:
        plan = PLAN | dict(changes)

        def run(stage: str, arm: str, rest: str, seed: int, lr: float | None = None) -> Training:
            like = f"{stage}.{arm}"
            return Training(f"{like}.{rest}", seed, (stage, like), "CamVid", like, plan[stage], arm=arm, lr=lr)

        tuned = [run("tuned", arm, f"lr={lr:g}", 0, lr) for arm in plan["arms"] for lr in plan["rates"]]
        return tuned + [run("final", arm, f"seed={seed}", seed) for seed in plan["seeds"] for arm in plan["arms"]]

    def prepare(self, runs: Sequence[Run], args: argparse.Namespace) -> None:
        if runs:
            load(args.data / "CamVid", args.output, torch.device("cpu"))

    def pack(self, args: argparse.Namespace) -> None:
        pack(args.data / "CamVid", args.pack / "CamVid")

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        assert isinstance(run, Training)
        where, plan, lr = device(args), PLAN | args.changes, run.lr or self.chosen_rate(run.arm, args)
        recipe = Recipe(run.arm, "camvid", run.epochs, 1, 1, lr=lr, seed=run.seed, **plan["recipe"])
        torch.manual_seed(run.seed)
        model = network(run.arm, plan).to(where).to(memory_format=torch.channels_last)
        found = trained(model, recipe, plan, load(args.data / "CamVid", args.output, where))
        gain = {n: round(p.sigmoid().mean().item(), 3) for n, p in model.named_parameters() if n.endswith("raw_gain")}
        size = sum(parameter.numel() for parameter in model.parameters())
        about = {"arm": run.arm, "stage": run.groups[0], "lr": lr, "epochs": run.epochs, "parameters": size}
        return {**about, **found, "gain": gain, "plan": plan}

    def chosen_rate(self, arm: str, args: argparse.Namespace) -> float:
        """The tuned learning rate of an arm with the best result on validation images."""
        records = self.records(args.results or self.results)
        tuned = [run for run in self.planned(args.changes) if run.arm == arm and run.lr is not None]
        if missing := [run.name for run in tuned if run.name not in records]:
            raise InputError(f"{arm} has no learning rate without {', '.join(missing)}: train --only tuned first.")
        runs = [records[run.name] for run in tuned]
        return max(runs, key=lambda record: max(record["validation"].values(), default=-math.inf))["lr"]

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.render import frame

        finals = {arm: found for arm in ARMS if (found := of_arm(records, arm))}
        if not finals:
            return {}
        tables = {"results": frame(result_rows(finals)), "differences": frame(difference_rows(finals))}
        return {RESULTS / "tables" / self.name: tables}


STUDY = Dense()


class UNet(nn.Module):
    """Features of five scales, from coarse to fine: upsample, concatenate with the next, two convolutions."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        import timm

        self.encoder: Any = timm.create_model(plan["encoder"], features_only=True, layers=plan["layers"])
        *finer, channels = self.encoder.feature_info.channels()
        self.decoder = nn.ModuleList()
        for skip, width in zip([*reversed(finer), 0], plan["widths"], strict=True):
            self.decoder.append(nn.Sequential(conv_norm_relu(channels + skip, width), conv_norm_relu(width, width)))
            channels = width
        self.head = nn.Conv2d(channels, CLASSES, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        *finer, x = self.encoder(images)
        *blocks, last = self.decoder
        for block, skip in zip(blocks, reversed(finer), strict=True):
            x = block(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], 1))
        return self.head(last(F.interpolate(x, size=images.shape[-2:])))


def conv_norm_relu(channels: int, width: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(OrderedDict(conv=conv, bn1=nn.BatchNorm2d(width), act1=nn.ReLU(inplace=True)))


def batch_norms(model: nn.Module) -> dict[str, nn.BatchNorm2d]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}


def network(arm: str, plan: Plan) -> nn.Module:
    """The network of an arm. With the same random state, convolutions have the same initial weights in all arms."""
    from timm.layers import EvoNorm2dS0

    model: nn.Module = UNet(plan)
    for name, norm in batch_norms(model).items():
        norm.momentum = plan["momentum"]
        channels = norm.num_features
        if arm == "gn":
            model.set_submodule(name, nn.GroupNorm(channels // 8, channels))
        if arm == "evonorm":
            # Norms with other names come before a residual sum; there, EvoNorm is a scale and a shift.
            activates = name.endswith("bn1")
            model.set_submodule(name, EvoNorm2dS0(channels, groups=math.gcd(32, channels), apply_act=activates))
            if activates:
                model.set_submodule(name.removesuffix("bn1") + "act1", nn.Identity())
        # The last scale of a residual branch starts at zero.
        model.get_submodule(name).weight.data.copy_(norm.weight.data)  # type: ignore[operator, union-attr]
    if arm == "gn":
        standardize_convolutions(model, {name for name, _ in model.named_modules()} - {"head"})
    if arm.startswith("bkn"):
        example = torch.randn(2, 3, 64, 64)
        return bkn_zoo.convert(model, example=example, statistics_batch_size=1, start="scratch", **plan["arms"][arm])
    return model


def make_step(model: nn.Module, recipe: Recipe, weights: Tensor) -> Callable[..., Tensor]:
    """A step on images, the classes of their pixels and the learning rate; returns the loss."""
    optimizer, parameters = make_optimizer(model, recipe, weights.device), list(model.parameters())

    def step(images: Tensor, labels: Tensor, rate: Tensor) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"].copy_(rate * group["scale"])
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(outputs_of(model, recipe, images).float(), labels, weights, ignore_index=VOID)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=True)
        optimizer.step()
        return loss.detach()

    return step


def outputs_of(call: Callable[..., Tensor], recipe: Recipe, images: Tensor) -> Tensor:
    # Without autocast's cache, which a CUDA graph must not share with what runs outside of it.
    with autocast(recipe, images.device, cache_enabled=False):
        return call(images.contiguous(memory_format=torch.channels_last))


def trained(model: nn.Module, recipe: Recipe, plan: Plan, found: Mapping[str, Images]) -> dict[str, Any]:
    """Train a network, and measure it on validation and test images. A training with an infinite loss ends early."""
    labels, begun = found["train"][1], time.monotonic()
    steps, where = recipe.epochs * len(labels), labels.device
    rates = torch.tensor([learning_rate(recipe, number, steps) for number in range(steps)], device=where)
    step = captured(make_step(model, recipe, class_weights(labels, plan["balance"]).to(where)), plan["eager_steps"])
    losses: list[Tensor] = []
    result: dict[str, Any] = {"curve": []}
    for number, batch in enumerate(training_batches(found["train"], 1, steps, recipe.seed, plan["size"]), start=1):
        losses.append(step(*batch, rates[number - 1]))
        if number * CHECKS // steps > (number - 1) * CHECKS // steps:
            # Python waits for the GPU only here.
            loss = torch.stack(losses).mean().item()
            if not math.isfinite(loss):
                return result | {"validation": {}, "failed": f"the loss was {loss} before step {number}"}
            losses.clear()
            result["validation"] = measured(model, recipe, plan, found["validation"])
            result["curve"].append({"step": number, "loss": round(loss, 4), "validation": result["validation"]})
    result["seconds"] = round(time.monotonic() - begun, 1)
    return result | {"test": measured(model, recipe, plan, found["test"])}


@torch.no_grad()
def measured(model: nn.Module, recipe: Recipe, plan: Plan, found: Images) -> dict[str, float]:
    """The mean IoU by statistics mode, on whole images, one at a time."""
    images, labels = found
    model.eval()
    calls: dict[str, Callable[..., Tensor]] = {mode: partial(model, statistics=mode) for mode in MODES}
    if not isinstance(model, Converted):
        calls = {"population": model, "sample": copy.deepcopy(model)} if recipe.model == "bn" else {"sample": model}
    if recipe.model == "bn":
        for norm in batch_norms(calls["sample"]).values():  # type: ignore[arg-type]
            # Without running averages, a batch norm uses the statistics of the image.
            norm.running_mean = norm.running_var = None
    result = {}
    for mode, call in calls.items():
        predict = captured(partial(outputs_of, call, recipe), plan["eager_steps"])
        predicted = torch.cat([predict(as_input(image)).argmax(1).byte() for image in images.split(1)])
        result[mode] = round(mean_iou(predicted, labels), 3)
    model.train()
    return result


def of_arm(records: Mapping[str, Record], arm: str) -> list[Record]:
    """The final runs of an arm, without those that diverged."""
    return [run for run in records.values() if (run["arm"], run["stage"]) == (arm, "final") and "test" in run]


def by_seed(runs: Sequence[Record], mode: str = "", split: str = "test") -> dict[int, float]:
    """Results in a mode, or else in the one with the best mean over seeds on validation images."""
    return {run["seed"]: run[split][mode or chosen_mode(runs)] for run in runs}


def chosen_mode(runs: Sequence[Record]) -> str:
    return max(runs[0]["test"], key=lambda mode: mean(by_seed(runs, mode, "validation").values()))


def result_rows(finals: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    return [
        {
            "arm": ARMS[arm], "statistics": mode, "chosen": "yes" if mode == chosen_mode(runs) else "no",
            "mean IoU (%)": spread(by_seed(runs, mode).values()),
            "on validation images": spread(by_seed(runs, mode, "validation").values()),
            "learning rate": f"{runs[0]['lr']:g}", "seeds": len(runs),
            "seconds": round(mean(run["seconds"] for run in runs)),
        }
        for arm, runs in finals.items() for mode in runs[0]["test"]
    ]  # fmt: skip


def difference_rows(finals: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    """Standardized BKN less each other arm, each in its chosen mode, paired by seed."""
    values = {arm: by_seed(runs) for arm, runs in finals.items()}
    pairs = {ARMS[arm]: gaps(values.get("bkns", {}), those) for arm, those in values.items() if arm != "bkns"}
    found = {arm: mean_of(each) for arm, each in pairs.items() if each}
    return [
        {"against": arm, "points": str(gap), "95 % interval": f"± {gap.margin:.2f}", "better": gap.verdict()}
        for arm, gap in found.items()
    ]
