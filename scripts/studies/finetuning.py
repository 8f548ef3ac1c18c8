"""Compares the defaults of fine-tuning with other choices, on small parts of public data sets: docs/finetuning.md.

DATA is the folder that --pack writes (some 70 megabytes) from a folder with imagewoof2-320, imagenette2-320,
tiny-imagenet-200 and PACS. Each run calls `bkn_zoo.fine_tune` with the fields of its arm, on 20 images of each
class; the seed selects them. All runs of a set are tested on the same images.

    taskset -c 0,1 python scripts/study.py finetuning --data DATA --device cpu   # twice

The first call tunes the learning rate of the loop of timm with one seed, and the second trains its other seeds. Both
read results/finetune/, so do not pass --results. That loop has a time limit: nothing else may run on these cores.
"""

import argparse
import dataclasses
import json
import shlex
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F

import bkn_zoo
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.modes import MODES
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, load_data
from bkn_zoo.training.evaluation import compute_logits
from bkn_zoo.training.evaluation import measure_accuracy as measure
from bkn_zoo.training.state import classifier
from studies.base import DOCS, RESULTS, Record, Run, Study, device
from studies.finetuning_data import SEEDS, pack, tree_of
from studies.finetuning_loop import timm_loop
from studies.stats import spread

PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CHECKPOINT, SETS, ARMS = PLAN["checkpoint"], PLAN["sets"], PLAN["arms"]
TUNED = [arm for arm, fields in ARMS.items() if "lr" in fields]
"""Learning rates of the loop of timm, of which one is chosen for each set."""
SMALL = RESULTS / "small_folder.json"
"""Of scripts/small_folder.py."""

PROBE, ORIGINAL = "linear probe", "original head"
NOT_RUN = "not run yet"
UNKNOWN = "does not know them"
KEPT = ("epochs", "kept_epoch", "gradient_batch", "statistics_batch", "chosen_statistics")
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
        records = list(self.records(self.results).values())
        return [
            planned(dataset, arm, seed) for arm in ARMS for dataset in SETS for seed in _seeds(arm, dataset, records)
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
            elif run.arm in TUNED:
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
        tables = {"rivals": rival_rows(found), "study": study_rows(found), "small": small_folders(small)}
        return {DOCS / "finetuning.md": {name: frame(rows) for name, rows in tables.items()}}


STUDY = Defaults()


def _seeds(arm: str, dataset: str, records: Sequence[Record]) -> Iterable[int]:
    """One for the original head, which is not trained, and for learning rates other than the best."""
    if arm in TUNED and arm not in _rates(dataset, records):
        return ()
    return SEEDS if arm not in (ORIGINAL, *TUNED) or arm == tuned(dataset, records) else SEEDS[:1]


def tuned(dataset: str, records: Sequence[Record]) -> str | None:
    """The learning rate of timm with the lowest validation loss with the first seed; None while runs are missing."""
    return _best(_rates(dataset, records), dataset, records)


def _rates(dataset: str, records: Sequence[Record]) -> list[str]:
    """The two middle rates, and the one beyond the better of them."""
    lowest, *middle, highest = TUNED
    further = {middle[0]: [lowest], middle[1]: [highest], None: []}
    return middle + further[_best(middle, dataset, records)]


def _best(arms: Sequence[str], dataset: str, records: Sequence[Record]) -> str | None:
    """The arm with the lowest validation loss with the first seed; None if one was not run."""
    runs = [each for arm in arms for each in _runs(records, arm, dataset) if each["seed"] == SEEDS[0]]
    return min(runs, key=lambda run: run["validation_loss"])["arm"] if len(runs) == len(arms) else None


def fine_tune(data: Path, changes: Mapping[str, Any], seed: int, device: torch.device, scratch: Path) -> dict[str, Any]:
    """One training, with the same call that a user makes; then its test, by the engine that a user would choose."""
    fields = {**({"graph": True} if device.type == "cuda" else {}), **changes}
    started = time.monotonic()
    result = bkn_zoo.fine_tune(
        data / "train", init=CHECKPOINT, name="run", output=scratch / "out", device=device, seed=seed, **fields
    )
    seconds = time.monotonic() - started
    found, tested = result.record, folder(data)
    batches = evaluation_batches(tested, tested.test, 16, device)
    logits, labels = compute_logits(create_engine(result.model, device=device.type), batches, MODES)
    chosen = ["--checkpoint", CHECKPOINT, "--seed", str(seed), "--device", device.type, "--name", "run"]
    chosen += options(fields)
    validation = [max(m["top1"] for m in line["validation"].values()) for line in found["curve"]]
    return {
        "options": options(changes),
        "trained_by": shlex.join(["bkn-zoo", "train", f"{data.name}/train", *chosen]),
        **{name: found[name] for name in KEPT},
        "seconds": round(seconds, 1),
        "validation_loss": round(found["validation"][found["chosen_statistics"]]["loss"], 4),
        "test": {mode: _rounded(measure(outputs, labels)) for mode, outputs in logits.items()},
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
    mode = model.default_statistics

    def of(images: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, or features if the network has no classifier, and labels."""
        logits, labels = compute_logits(engine, evaluation_batches(found, images, 16, device), [mode])
        return logits[mode].clone(), labels.clone()

    if restricted:
        known = model.config.label_names
        if not set(found.label_names) <= set(known):
            return {"reason": "the checkpoint does not know these classes"}
        columns = [known.index(name) for name in found.label_names]
        engine = create_engine(model, device=device.type)
        logits, labels = of(found.test)
        return {"chosen_statistics": mode, "test": {mode: _rounded(measure(logits[:, columns], labels))}}
    started = time.monotonic()
    name = next(name for name, module in model.named_modules() if module is classifier(model))
    model.set_submodule(name, torch.nn.Identity())
    engine = create_engine(model, device=device.type)
    train, validation = of(found.train), of(found.validation)
    fits = {decay: logistic_regression(train[0], train[1], decay) for decay in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)}
    losses = {decay: measure(fit(validation[0]).detach(), validation[1])["loss"] for decay, fit in fits.items()}
    decay = min(losses, key=lambda decay: losses[decay])
    seconds = time.monotonic() - started
    features_of_test, labels = of(found.test)
    return {
        "seconds": round(seconds, 1),
        "chosen_statistics": mode,
        "weight_decay": decay,
        "validation_loss": round(losses[decay], 4),
        "test": {mode: _rounded(measure(fits[decay](features_of_test).detach(), labels))},
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
    """A row for each arm, a column for each data set: the mean over seeds, and ± their deviation."""

    def cell(arm: str, dataset: str) -> str:
        found = _runs(records, arm, dataset)
        values = [top1(record) for record in found if "test" in record]
        if not values:
            return UNKNOWN if found else NOT_RUN
        few = "" if len(values) == len(SEEDS) or arm == ORIGINAL else f" ({len(values)} of {len(SEEDS)} seeds)"
        return spread(values, 1) + few

    return [
        {"arm": arm, "options": f"`{' '.join(options(fields))}`" if fields else ""}
        | {shown: cell(arm, dataset) for dataset, shown in SETS.items()}
        for arm, fields in ARMS.items()
        if arm not in TUNED
    ]


def rival_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """A row for each way to fine-tune, with the seconds of its training, without the test."""

    def cell(arm: str | None, dataset: str) -> str:
        runs = _runs(records, arm, dataset) if arm else []
        if len(runs) < len(SEEDS):
            return NOT_RUN
        lr = f"lr {ARMS[arm]['lr']:g}; " if arm in TUNED else ""
        return f"{spread(map(top1, runs), 1)}; {lr}{mean(record['seconds'] for record in runs):.0f} s"

    def row(way: str, arm: Callable[[str], str | None]) -> dict[str, str]:
        return {"by": way} | {shown: cell(arm(dataset), dataset) for dataset, shown in SETS.items()}

    return [
        row("`bkn-zoo train`", lambda _: "defaults"),
        row("a loop with timm", lambda dataset: tuned(dataset, records)),
        row("a linear probe", lambda _: PROBE),
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
