"""Compares BKN with standardized weights and its rivals for single images: docs/results.md.

DATA contains the official folders of the data sets, as for the study `replication`. The plan is in standardized.toml.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import studies.rivals  # noqa: F401, registers norms
from bkn_zoo.errors import CheckpointError, NonFiniteLossError
from bkn_zoo.modes import MODES
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.evaluation import evaluate
from bkn_zoo.training.loop import fit
from bkn_zoo.training.state import STATE, begin, load_state
from studies.base import RESULTS, Record, Run, device
from studies.replication import Replication, load, rounded
from studies.replication_plan import Plan, Training, read_plan
from studies.variants import create_variant

PLAN = Path(__file__).with_name("standardized.toml")


class Standardized(Replication):
    name = "standardized"
    results, plots = RESULTS / "standardized", RESULTS / "plots"

    @cached_property
    def plan(self) -> Plan:
        return read_plan(PLAN)

    def planned(self, records: Mapping[str, Record], changes: Mapping[str, Any]) -> list[Training]:
        return (read_plan(PLAN, overrides=changes) if changes else self.plan).runs()

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        assert isinstance(run, Training)
        return train(run, args.data, args.output, args.output / self.name / run.name, device(args))

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, str]]:
        return {}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        return {}


STUDY = Standardized()


def train(run: Training, root: Path, cache: Path, folder: Path, device: torch.device) -> dict[str, Any]:
    """Train, or resume a training, then measure. Keeps the weights in the folder. Returns the record."""
    recipe = run.recipe
    torch.manual_seed(recipe.seed)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    data = load(recipe, root, cache)
    if run.every > 1:
        data = dataclasses.replace(data, train=data.train[torch.arange(0, len(data.train), run.every)])
    data = data.to(device)
    model = create_variant(recipe.model, len(data.label_names), run.width, **recipe.norm_options)
    training = begin(recipe, model, device)
    if (folder / STATE).exists():
        try:
            load_state(training, recipe, folder, device)
        except CheckpointError as error:
            print(f"{error} The training starts again.")
    record: dict[str, Any] = {
        "model": recipe.model, "norm": recipe.model.rpartition("_")[2], "dataset": recipe.dataset,
        "gradient_batch": recipe.gradient_batch, "statistics_batch": recipe.statistics_batch, "epochs": recipe.epochs,
        "width": run.width, "every": run.every,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
    }  # fmt: skip
    try:
        fit(training, recipe, data, folder, device, save_minutes=2.0, quiet=True)
        network = training.result
        for name, images in (("validation", data.validation), ("test", data.test)):
            record[name] = rounded(evaluate(network, evaluation_batches(data, images, 500, device), MODES))
        record["chosen_statistics"] = max(MODES, key=lambda mode: record["validation"][mode]["top1"])
        gains = {name: value for name, value in network.named_parameters() if name.endswith("raw_gain")}
        record["gain"] = {name: round(torch.sigmoid(raw).mean().item(), 3) for name, raw in gains.items()}
        torch.save({name: value.half() if value.ndim > 1 else value for name, value in network.state_dict().items()},
                   folder / "weights.pt")  # fmt: skip
    except NonFiniteLossError as error:
        record["failed"] = str(error).partition(":")[0]
    (folder / STATE).unlink(missing_ok=True)
    curve = [
        {"epoch": line["epoch"], "step": line["step"], "loss": round(line["loss"], 4)}
        | {"top1": {mode: round(metrics["top1"], 4) for mode, metrics in line["validation"].items()}}
        for line in training.history
    ]
    return {**record, "seconds": round(training.seconds, 1), "curve": curve, "recipe": dataclasses.asdict(recipe)}
