"""Measures on the published checkpoints what newer trainings measure themselves.

`recalibrated`: validation accuracy with recomputed running averages (docs/runs.md). `evalnorm`: test accuracy by
EvalNorm's rule (Singh & Shrivastava 2019), shown in docs/results.md and in the model cards. DATA contains the official
folders of the data sets, as for `replication`. Nothing is published.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.modes import MODES
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import load_data
from bkn_zoo.training.evaluation import batch_size, evaluate
from bkn_zoo.training.loop import further_images
from bkn_zoo.training.recipes import read_recipe
from studies.base import OFFICIAL, RESULTS, ROOT, Record, Run, Study, device
from studies.rules import evalnorm, observing_by, recalibrated

QUESTIONS = ("recalibrated", "evalnorm")
BATCHES = 64  # of training images


@dataclass(frozen=True)
class Question(Run):
    """One measurement of one checkpoint."""

    asked: str
    checkpoint: str
    dataset: str

    @property
    def groups(self) -> tuple[str, ...]:
        return self.asked, self.checkpoint

    @property
    def data(self) -> str:
        return OFFICIAL.get(self.dataset, "")


class Published(Study):
    name = "published"
    results = plots = RESULTS

    def planned(self, records: Mapping[str, Record], changes: Mapping[str, Any]) -> list[Run]:
        found: list[Run] = []
        for folder in sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json")):
            config = Config.read(folder / "config.json")
            if not config.recipe:  # imported, not trained here
                continue
            recipe = read_recipe(None, config.recipe)
            found += [
                Question(f"{asked}/{folder.name}", recipe.seed, asked, folder.name, recipe.dataset)
                for asked in QUESTIONS
            ]
        return found

    def records(self, folder: Path) -> dict[str, Record]:
        paths = [path for asked in QUESTIONS for path in sorted((folder / asked).glob("*.json"))]
        return {f"{path.parent.name}/{path.stem}": json.loads(path.read_text()) for path in paths}

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        assert isinstance(run, Question)
        where, model = device(args), from_pretrained(run.checkpoint)
        model = model.to(where).to(memory_format=torch.channels_last)
        recipe = read_recipe(None, {**model.config.recipe, **args.changes})
        root = args.data if run.dataset.startswith("cifar") else args.data / run.data
        data = load_data(recipe.dataset, root, recipe.size, recipe.validation)

        def measured(network: Any, images: Any, *modes: str) -> dict[str, dict[str, float]]:
            return evaluate(network, evaluation_batches(data, images, batch_size(where), where), modes or MODES)

        passed = further_images(recipe, data, where, BATCHES)
        if run.asked == "evalnorm":
            with observing_by(model, evalnorm(model, passed)):
                rows: list[dict[str, Any]] = [measured(model, data.test, "expected")["expected"]]
        else:
            stored, anew = measured(model, data.validation), measured(recalibrated(model, passed), data.validation)
            rows = [{"statistics": m, "stored": stored[m]["top1"], "anew": anew[m]["top1"]} for m in stored]
        about = {
            "checkpoint": Path(run.checkpoint).name,
            "default_statistics": model.default_statistics,
            "batches": BATCHES,
        }
        return {**about, "images": len(data.validation), "rows": rows}


STUDY = Published()
