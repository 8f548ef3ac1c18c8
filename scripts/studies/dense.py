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

PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ARMS = {
    "bn": "BN", "gn": "GroupNorm, standardized", "evonorm": "EvoNorm-S0", "bkn": "BKN", "bkns": "BKN, standardized",
}  # fmt: skip
DATA = "CamVid"
CHECKS = 4  # validations of a run, the last one at its end
METRIC = "mean IoU (%)"


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
            groups, like = (stage, arm, f"{stage}.{arm}"), f"{stage}.{arm}"
            return Training(f"{stage}.{arm}.{rest}", seed, groups, DATA, like, plan[stage], arm=arm, lr=lr)

        tuned = [run("tuned", arm, f"lr={lr:g}", 0, lr) for arm in plan["arms"] for lr in plan["rates"]]
        return tuned + [run("final", arm, f"seed={seed}", seed) for seed in plan["seeds"] for arm in plan["arms"]]

    def prepare(self, runs: Sequence[Run], args: argparse.Namespace) -> None:
        if runs:
            load(args.data / DATA, args.output, torch.device("cpu"))

    def pack(self, args: argparse.Namespace) -> None:
        pack(args.data / DATA, args.pack / DATA)

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        assert isinstance(run, Training)
        where, plan = device(args), PLAN | args.changes
        lr = run.lr or self.chosen_rate(run.arm, args)
        recipe = Recipe(run.arm, "camvid", run.epochs, 1, 1, lr=lr, seed=run.seed, **plan["recipe"])
        torch.manual_seed(run.seed)
        model = network(run.arm, plan).to(where).to(memory_format=torch.channels_last)
        found = trained(model, recipe, plan, load(args.data / DATA, args.output, where), run.lr is None)
        gain = {n: round(p.sigmoid().mean().item(), 3) for n, p in model.named_parameters() if n.endswith("raw_gain")}
        about = {"arm": run.arm, "stage": run.groups[0], "lr": lr, "epochs": run.epochs}
        return {**about, "parameters": sum(p.numel() for p in model.parameters()), **found, "gain": gain, "plan": plan}

    def chosen_rate(self, arm: str, args: argparse.Namespace) -> float:
        """The tuned learning rate of an arm with the best result on validation images."""
        records = self.records(args.results or self.results)
        tuned = [run for run in self.planned(args.changes) if run.arm == arm and run.lr is not None]
        if missing := [run.name for run in tuned if run.name not in records]:
            raise InputError(f"{arm} has no learning rate without {', '.join(missing)}: train --only tuned first.")
        return max((records[run.name] for run in tuned), key=validated)["lr"]

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.render import frame

        tables = {"results": result_rows(records), "differences": difference_rows(records), "rates": rate_rows(records)}
        return {RESULTS / "tables" / self.name: {name: frame(rows) for name, rows in tables.items() if rows}}


STUDY = Dense()


class UNet(nn.Module):
    """Features of five scales, from coarse to fine: upsample, concatenate with the next, two convolutions."""

    def __init__(self, encoder: str, layers: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        import timm

        self.encoder: Any = timm.create_model(encoder, pretrained=False, features_only=True, layers=tuple(layers))
        *finer, channels = self.encoder.feature_info.channels()
        self.decoder = nn.ModuleList()
        for skip, width in zip([*reversed(finer), 0], widths, strict=True):
            first, second = conv_norm_relu(channels + skip, width), conv_norm_relu(width, width)
            self.decoder.append(nn.Sequential(first, second))
            channels = width
        self.head = nn.Conv2d(channels, CLASSES, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        *finer, x = self.encoder(images)
        for block, skip in zip(self.decoder, [*reversed(finer), None], strict=True):
            x = F.interpolate(x, size=(images if skip is None else skip).shape[-2:])
            x = block(x if skip is None else torch.cat([x, skip], 1))
        return self.head(x)


def conv_norm_relu(channels: int, width: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(OrderedDict(conv=conv, bn1=nn.BatchNorm2d(width), act1=nn.ReLU(inplace=True)))


def network(arm: str, plan: Mapping[str, Any]) -> nn.Module:
    """The network of an arm. With the same random state, convolutions have the same initial weights in all arms."""
    model: nn.Module = UNet(plan["encoder"], plan["layers"], plan["widths"])
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    for norm in norms.values():
        norm.momentum = plan["momentum"]
    if arm.startswith("bkn"):
        return bkn_zoo.convert(model, example=torch.randn(2, 3, 64, 64), statistics_batch_size=1, **plan["arms"][arm])
    if arm == "bn":
        return model
    for name, norm in norms.items():
        new: Any = nn.GroupNorm(norm.num_features // 8, norm.num_features)
        if arm == "evonorm":
            new = evonorm(model, name, norm.num_features)
        # Some scales start at zero: those of the last norm in a residual branch.
        new.weight.data.copy_(norm.weight.data)
        model.set_submodule(name, new)
    if arm == "gn":
        standardize_convolutions(model, {name for name, _ in model.named_modules()} - {"head"})
    return model


def evonorm(model: nn.Module, name: str, channels: int) -> nn.Module:
    """EvoNorm-S0 in place of a batch norm and of the ReLU after it, if there is one."""
    from timm.layers import EvoNorm2dS0

    # Other names are those of norms before a residual sum.
    activates = name.rpartition(".")[2] == "bn1"
    if activates:
        model.set_submodule(name.removesuffix("bn1") + "act1", nn.Identity())
    return EvoNorm2dS0(channels, groups=math.gcd(32, channels), apply_act=activates)


def make_step(model: nn.Module, recipe: Recipe, weights: Tensor) -> Callable[..., Tensor]:
    """A step on images, the classes of their pixels and the learning rate; returns the loss."""
    where = weights.device
    optimizer, parameters = make_optimizer(model, recipe, where), list(model.parameters())

    def step(images: Tensor, labels: Tensor, rate: Tensor) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"].copy_(rate * group["scale"])
        optimizer.zero_grad(set_to_none=True)
        with autocast(recipe, where, cache_enabled=False):
            outputs = model(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(outputs.float(), labels, weights, ignore_index=VOID)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=True)
        optimizer.step()
        return loss.detach()

    return step


def trained(
    model: nn.Module, recipe: Recipe, plan: Mapping[str, Any], found: Mapping[str, Images], test: bool
) -> dict[str, Any]:
    """Train a network. Returns its results by statistics mode, the curve and the seconds of the training."""
    images, labels = found["train"]
    steps, where = recipe.epochs * len(labels), labels.device
    rates = torch.tensor([learning_rate(recipe, number, steps) for number in range(steps)], device=where)
    step = make_step(model, recipe, class_weights(labels, plan["balance"]).to(where))
    step = captured(step) if plan["graph"] else step
    checks = {steps * number // CHECKS for number in range(1, CHECKS + 1)}
    curve: list[dict[str, Any]] = []
    losses: list[Tensor] = []
    begun = time.monotonic()
    batches = training_batches((images, labels), 1, steps, recipe.seed, plan["size"])
    for number, batch in enumerate(batches, start=1):
        losses.append(step(*batch, rates[number - 1]))
        if number in checks:
            # The only point at which Python waits for the GPU.
            loss = torch.stack(losses).mean().item()
            if not math.isfinite(loss):
                return {"failed": "the loss was not finite", "validation": {}, "curve": curve}
            losses.clear()
            validation = measured(model, recipe, plan, found["validation"])
            curve.append({"step": number, "loss": round(loss, 4), "validation": validation})
    seconds = round(time.monotonic() - begun, 1)
    result = {"validation": curve[-1]["validation"], "seconds": seconds, "curve": curve}
    return result | ({"test": measured(model, recipe, plan, found["test"])} if test else {})


@torch.no_grad()
def measured(model: nn.Module, recipe: Recipe, plan: Mapping[str, Any], found: Images) -> dict[str, float]:
    """The mean IoU by statistics mode, on whole images, one at a time."""
    images, labels = found
    model.eval()
    # GroupNorm and EvoNorm have no population statistics.
    modes: Sequence[str] = MODES if isinstance(model, Converted) else ("sample",)
    networks = {mode: (model, {"statistics": mode} if isinstance(model, Converted) else {}) for mode in modes}
    if recipe.model == "bn":
        networks = {"population": (model, {}), "sample": (with_own_statistics(model), {})}
    result = {}
    for mode, (chosen, options) in networks.items():

        def predicted(image: Tensor, chosen: nn.Module = chosen, options: Any = options) -> Tensor:
            with autocast(recipe, image.device, cache_enabled=False):
                return chosen(image.contiguous(memory_format=torch.channels_last), **options).argmax(1).byte()

        predict = captured(predicted) if plan["graph"] else predicted
        result[mode] = round(mean_iou(torch.cat([predict(as_input(each)) for each in images.split(1)]), labels), 3)
    model.train()
    return result


def with_own_statistics(model: nn.Module) -> nn.Module:
    """A copy whose batch norms use the statistics of the image at inference."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None
    return model


def validated(record: Record) -> float:
    return max(record["validation"].values(), default=-math.inf)


def finals(records: Mapping[str, Record], arm: str) -> list[Record]:
    """The final runs of an arm, by seed; without those that diverged."""
    found = [each for each in records.values() if (each["arm"], each["stage"]) == (arm, "final") and "test" in each]
    return sorted(found, key=lambda record: record["seed"])


def by_seed(runs: Sequence[Record], mode: str, split: str = "test") -> dict[int, float]:
    return {run["seed"]: run[split][mode] for run in runs}


def chosen_mode(runs: Sequence[Record]) -> str:
    """The mode with the best mean over seeds on the validation images."""
    return max(runs[0]["validation"], key=lambda mode: mean(by_seed(runs, mode, "validation").values()))


def result_rows(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    return [
        {
            "arm": title, "statistics": mode, "chosen": "yes" if mode == chosen_mode(runs) else "no",
            METRIC: spread(by_seed(runs, mode).values()),
            "validation": spread(by_seed(runs, mode, "validation").values()),
            "learning rate": f"{runs[0]['lr']:g}", "seeds": len(runs),
            "seconds": round(mean(run["seconds"] for run in runs)),
        }
        for arm, title in ARMS.items() if (runs := finals(records, arm)) for mode in runs[0]["test"]
    ]  # fmt: skip


def difference_rows(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Standardized BKN less each other arm, each in its chosen mode, paired by seed."""
    runs = {arm: found for arm in ARMS if (found := finals(records, arm))}
    values = {arm: by_seed(each, chosen_mode(each)) for arm, each in runs.items()}
    ours = values.pop("bkns", {})
    pairs = {arm: each for arm, those in values.items() if (each := gaps(ours, those))}
    found = {arm: mean_of(each) for arm, each in pairs.items()}
    return [
        {"against": ARMS[arm], "points": str(each), "margin of 95 %": f"{each.margin:.2f}", "ahead": each.verdict()}
        for arm, each in found.items()
    ]


def rate_rows(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """The best mean IoU of tuned runs on validation images, by learning rate."""
    tuned = sorted((each for each in records.values() if each["stage"] == "tuned"), key=lambda each: each["lr"])
    rows: dict[str, dict[str, Any]] = {arm: {"arm": title} for arm, title in ARMS.items()}
    for each in tuned:
        rows[each["arm"]][f"{each['lr']:g}"] = round(validated(each), 2) if each["validation"] else "diverged"
    return list(rows.values()) if tuned else []
