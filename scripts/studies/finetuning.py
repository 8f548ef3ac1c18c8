"""Compares the defaults of fine-tuning with other choices, on small parts of public data sets: docs/finetuning.md.

DATA is the folder that --pack writes (some 70 megabytes) from a folder with imagewoof2-320, imagenette2-320,
tiny-imagenet-200 and PACS. Each run calls `bkn_zoo.fine_tune` with the fields of its arm, on 20 images of each
class; the seed selects them. All runs of a set are tested on the same images.

    taskset -c 0,1 python scripts/study.py finetuning --data DATA --device cpu

The arms of `rivals` in finetuning.toml share a time limit, so nothing else may run on these cores.
"""

import argparse
import dataclasses
import json
import shlex
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F

import bkn_zoo
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, load_data
from bkn_zoo.training.evaluation import measure_accuracy as measure
from bkn_zoo.training.state import classifier
from studies.base import DOCS, RESULTS, Record, Run, Study, device
from studies.finetuning_data import SEEDS, pack, tree_of
from studies.finetuning_loop import timm_loop
from studies.stats import spread

PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CHECKPOINT, SETS, ARMS, RIVALS = PLAN["checkpoint"], PLAN["sets"], PLAN["arms"], PLAN["rivals"]
SMALL = RESULTS / "small_folder.json"
"""Of scripts/small_folder.py."""

PROBE, ORIGINAL = "linear probe", "original head"
NOT_RUN = "not run yet"
UNKNOWN = "does not know them"
KEPT = ("epochs", "kept_epoch", "gradient_batch", "statistics_batch", "chosen_statistics", "seconds", "test_images")
"""Fields copied from the record of the training."""


@dataclass(frozen=True, kw_only=True)
class FineTuning(Run):
    arm: str


def planned(dataset: str, arm: str, seed: int) -> FineTuning:
    name = f"{CHECKPOINT.partition('.')[0]}.{dataset}.{arm.replace(' ', '_')}.seed={seed}"
    return FineTuning(name, seed, (dataset, arm), dataset, f"{dataset}, {arm}", arm=arm)


class Defaults(Study):
    name = "finetuning"
    results = RESULTS / "finetune"

    def planned(self, changes: Mapping[str, Any]) -> list[Run]:
        return [
            planned(dataset, arm, seed)
            for arm in ARMS
            for dataset in SETS
            for seed in (SEEDS if arm != ORIGINAL else (0,))  # it is not trained
        ]

    def pack(self, args: argparse.Namespace) -> None:
        pack(args.data, args.pack, CHECKPOINT)

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        assert isinstance(run, FineTuning)
        memory = Path("/dev/shm")  # for states, which nobody will need
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
            data, started = tree_of(args.data / run.data, run.seed, Path(scratch)), time.monotonic()
            cpu = time.process_time()
            if run.arm in (PROBE, ORIGINAL):
                found = probe(data, device(args), restricted=run.arm == ORIGINAL)
            elif run.arm in RIVALS["timm"]:
                found = timm_loop(folder(data), from_pretrained(CHECKPOINT), ARMS[run.arm]["lr"], run.seed)
            else:
                found = fine_tune(data, ARMS[run.arm] | args.changes, run.seed, device(args), Path(scratch))
        about = {"dataset": run.data, "arm": run.arm, "checkpoint": CHECKPOINT, "device": device(args).type}
        taken = {"whole_seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu}
        return {**about, **found, **{name: round(value, 1) for name, value in taken.items()}}

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.render import frame

        small = json.loads(SMALL.read_text())["rows"]
        found = list(records.values())
        tables = {"study": study_rows(found), "small": small_folders(small)}
        return {
            DOCS / "finetuning.md": {name: frame(rows) for name, rows in tables.items()},
            RESULTS / "tables" / "finetuning": {"rivals": frame(rival_rows(found))},
        }


STUDY = Defaults()


def fine_tune(data: Path, changes: Mapping[str, Any], seed: int, device: torch.device, scratch: Path) -> dict[str, Any]:
    """One training, with the same call that a user makes."""
    fields = {**({"graph": True} if device.type == "cuda" else {}), **changes}
    found = bkn_zoo.fine_tune(
        data, init=CHECKPOINT, name="run", output=scratch / "out", device=device, seed=seed, **fields
    ).record
    chosen = ["--checkpoint", CHECKPOINT, "--seed", str(seed), "--device", device.type, "--name", "run"]
    chosen += options(fields)
    validation = [max(m["top1"] for m in line["validation"].values()) for line in found["curve"]]
    return {
        "options": options(changes),
        "trained_by": shlex.join(["bkn-zoo", "train", data.name, *chosen]),
        **{name: found[name] for name in KEPT},
        "validation_loss": round(found["validation"][found["chosen_statistics"]]["loss"], 4),
        "test": {mode: _rounded(metrics) for mode, metrics in found["test"].items()},
        "validation": [round(top1, 2) for top1 in validation],
    }


def options(fields: Mapping[str, Any]) -> list[str]:
    """The options of the equivalent command."""
    return [
        word
        for name, value in fields.items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]


def _rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in metrics.items()}


def folder(data: Path) -> Data:
    """The images of a run, with the pixels that fine-tuning uses: the checkpoint's, of the whole central square."""
    pixels = from_pretrained(CHECKPOINT).config.preprocessing
    return dataclasses.replace(
        load_data("folder", data, pixels.size), preprocessing=dataclasses.replace(pixels, crop=1.0)
    )


def probe(data: Path, device: torch.device, restricted: bool) -> dict[str, Any]:
    """The checkpoint's own features and its default statistics, with another classifier, or with its own.

    The classifier is a logistic regression whose weight decay is chosen on the validation images, of those that
    fine-tuning holds out; or the checkpoint's own, restricted to the classes that both know.
    """
    model = from_pretrained(CHECKPOINT).to(device)
    found = folder(data)
    assert found.test is not None
    features: list[torch.Tensor] = []
    classifier(model).register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))

    @torch.no_grad()
    def of(images: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, logits and labels."""
        features.clear()
        logits, labels = [], []
        for batch in evaluation_batches(found, images, 250, device):
            logits.append(model(batch.images))
            labels.append(batch.targets.argmax(1))
        return tuple(torch.cat(parts).cpu().clone() for parts in (features, logits, labels))  # type: ignore[return-value]

    mode = model.default_statistics
    _, logits, labels = tested = of(found.test)
    if restricted:
        known = model.config.label_names
        if not set(found.label_names) <= set(known):
            return {"reason": "the checkpoint does not know these classes"}
        columns = [known.index(name) for name in found.label_names]
        return {"chosen_statistics": mode, "test": {mode: _rounded(measure(logits[:, columns], labels))}}
    train, validation = of(found.train), of(found.validation)
    fits = {decay: logistic_regression(train[0], train[2], decay) for decay in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)}
    decay = min(fits, key=lambda decay: measure(fits[decay](validation[0]), validation[2])["loss"])
    return {
        "chosen_statistics": mode,
        "weight_decay": decay,
        "test": {mode: _rounded(measure(fits[decay](tested[0]).detach(), labels))},
    }


def logistic_regression(features: Any, labels: Any, decay: float) -> Any:
    """A classifier of features, which it takes to mean 0 and variance 1 first."""
    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    classes = int(labels.max()) + 1
    layer = torch.nn.Linear(features.shape[1], classes)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer((features - mean) / std), labels) + decay / 2 * layer.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return lambda others: layer((others - mean) / std)


def top1(record: Record) -> float:
    """On the test images, by the statistics that were chosen without them."""
    return record["test"][record["chosen_statistics"]]["top1"]


def study_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """A row for each arm, a column for each data set: the mean over seeds, ± their deviation, and CPU minutes."""

    def cell(arm: str, dataset: str) -> str:
        found = _runs(records, arm, dataset)
        values = [top1(record) for record in found if "test" in record]
        if not values:
            return UNKNOWN if found else NOT_RUN
        few = "" if len(values) == len(SEEDS) or arm == ORIGINAL else f" ({len(values)} of {len(SEEDS)} seeds)"
        cpu = [record["cpu_seconds"] / 60 for record in found if record.get("device") == "cpu"]
        return spread(values, 1) + few + (f"; {mean(cpu):.1f} min" if cpu else "")

    return [
        {"arm": arm, "options": f"`{' '.join(options(fields))}`" if fields else ""}
        | {shown: cell(arm, dataset) for dataset, shown in SETS.items()}
        for arm, fields in ARMS.items()
        if "lr" not in fields
    ]


def rival_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """A row for each way to fine-tune, with the learning rate of the lowest validation loss, and its seconds."""

    def cell(arms: Sequence[str], dataset: str) -> str:
        runs = [found for arm in arms if len(found := _runs(records, arm, dataset)) == len(SEEDS)]
        if len(runs) < len(arms):
            return NOT_RUN
        best = min(runs, key=lambda found: mean(record.get("validation_loss", 0.0) for record in found))
        seconds = mean(record.get("seconds") or record["whole_seconds"] for record in best)
        lr = ARMS[best[0]["arm"]].get("lr")
        return f"{spread(map(top1, best), 1)}; {f'lr {lr:g}; ' if lr else ''}{seconds:.0f} s"

    return [
        {"by": way} | {shown: cell(arms, dataset) for dataset, shown in SETS.items()} for way, arms in RIVALS.items()
    ]


def _runs(records: Sequence[Record], arm: str, dataset: str) -> list[Record]:
    return [
        each for each in records if (each["checkpoint"], each["arm"], each["dataset"]) == (CHECKPOINT, arm, dataset)
    ]


def small_folders(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each run on 300 images in five classes."""
    names = SETS | PLAN["small"]
    return [
        {
            "images of": names[row["set"]], "seed": row["seed"], "processor": row["hardware"],
            "seconds": round(row["seconds"]), "epochs": row["epochs"], "defaults": f"{row['test']['top1']:.1f}",
            "linear probe": f"{row['linear_probe']['top1']:.1f}",
        }
        for row in rows
    ]  # fmt: skip
