"""Model cards: README.md of a checkpoint and MODEL_CARD.md of the zoo, written from configs and results/, never typed.

A run is a record that scripts/train.py left in results/runs/; speed is results/benchmark_infer.json.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bkn_zoo.config import Config
from bkn_zoo.errors import CheckpointError
from bkn_zoo.norms.statistics import MODES
from bkn_zoo.results import table

Run = Mapping[str, Any]

DATASETS = {  # the name in a recipe: the name to show, and the id on the Hub
    "cifar10": ("CIFAR-10", "uoft-cs/cifar10"),
    "cifar100": ("CIFAR-100", "uoft-cs/cifar100"),
    "tiny_imagenet": ("Tiny ImageNet", "zh-plus/tiny-imagenet"),
    "imagenet": ("ImageNet-1k", "ILSVRC/imagenet-1k"),
    "folder": ("images of its owner", None),
}
METRICS = {"top1": "top-1 accuracy", "top5": "top-5 accuracy"}

USE = """\
## What it is for, and what not

To classify a photograph into one of the classes that it was trained on, to start training on other images from, and to
study normalization with few images per statistics group. It knows no other classes and does not say "none of them". It
has not been tested for fairness, for robustness or on images of another kind than its training data, whose biases and
licence it inherits: decide nothing about people with it."""

MEASURED = """\
In percent, on the test images, with the weights as they are stored; `ece` is the expected calibration error. The
default was chosen on validation images, and nothing by the test images."""

SEEN = """\
In percent, with the weights as they are stored, on the validation images, since there were no others: those that the
default was chosen on, so that they flatter it a little; `ece` is the expected calibration error."""

TWINS = """\
### Against its twins

Runs of the same network by the same recipe, but for the norm and the statistics batch: top-1 in percent per statistics
mode, the mean over seeds and, if there are several, ± their standard deviation. *batches* are gradient and statistics
batch."""


def read_runs(folder: Path) -> list[Run]:
    """The records of all runs, by name."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda run: run["name"])


def read_speed(path: Path) -> dict[str, Any]:
    """The measurements of inference; empty if there are none."""
    return json.loads(path.read_text()) if path.exists() else {}


def check_agreement(config: Config, name: str, runs: Sequence[Run]) -> None:
    """Refuse a config whose accuracy, recipe or default statistics are not what the record of its run says."""
    if not config.accuracy:
        return
    ours = name, config.architecture, config.training.get("recipe"), config.default_statistics
    for run in runs:
        theirs = run["name"], run["model"], run["recipe"], run["chosen_statistics"]
        if ours == theirs and _measured(config, run):
            return
    raise CheckpointError(
        f"the accuracy in the config.json of {name} is not that in results/runs/{name}.json, or there is none: "
        "take both from the same run."
    )


def _measured(config: Config, run: Run) -> bool:
    """Whether a run measured all of a config's accuracy, which is rounded to three decimals."""
    return config.accuracy.keys() == run["test"].keys() and all(
        round(run["test"][mode].get(metric, -1), 3) == value
        for mode, measured in config.accuracy.items()
        for metric, value in measured.items()
    )


def checkpoint_card(config: Config, name: str, runs: Sequence[Run] = (), speed: Mapping[str, Any] | None = None) -> str:
    """README.md of a checkpoint: what its config says and, where there are any, the runs and speeds of its network."""
    data = dataset_name(config)
    on = f", trained on {data}" if data else ""
    shown = [
        f"---\n{_metadata(config, name)}\n---",
        f"# {name}",
        f"`{config.architecture}` with {config.num_classes} classes{on}: a checkpoint of bkn_zoo, Batch Kalman "
        "Normalization (Wang, Peng, Luo, Wang and Lin, 2018) in PyTorch.",
        _how_to_load(config, name),
        _how_to_call(config, name),
        _accuracy(config),
        _twins(config, runs),
        _speed(config, speed or {}),
        _training(config, next((run for run in runs if run["name"] == name), {})),
        USE,
    ]
    return "\n\n".join(part for part in shown if part) + "\n"


def dataset_name(config: Config) -> str | None:
    """The data set that a network was trained on, to show."""
    key = config.training.get("recipe", {}).get("dataset")
    return DATASETS.get(key, (key, None))[0]


def _metadata(config: Config, name: str) -> str:
    # Imported here: it takes a while, and loading a network does not need it.
    from huggingface_hub import EvalResult, ModelCardData

    key = config.training.get("recipe", {}).get("dataset")
    shown, identifier = DATASETS.get(key, (key, None))
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=identifier or key,
            dataset_name=shown,
            metric_type="accuracy",
            metric_name=f"{METRICS[metric]}, {mode} statistics",
            metric_value=value,
        )
        for mode, measured in config.accuracy.items()
        for metric, value in measured.items()
        if metric in METRICS and key
    ]
    return ModelCardData(
        license="apache-2.0",
        library_name="bkn_zoo",
        pipeline_tag="image-classification",
        tags=["batch-kalman-normalization", config.architecture],
        datasets=[identifier] if identifier else None,
        metrics=["accuracy"] if config.accuracy else None,
        model_name=name if results else None,
        eval_results=results or None,
    ).to_yaml()


def _how_to_load(config: Config, name: str) -> str:
    size = config.preprocessing.size if config.preprocessing else 64
    return f"""\
## Load it

With bkn_zoo installed, as `pip install -e '.[serve,openvino]'` does in a checkout of its repository:

```python
import torch

import bkn_zoo

# By its name in a checkout, or by its id on the Hub, "owner/{name}".
model = bkn_zoo.from_pretrained("{name}")
logits = model(torch.randn(1, 3, {size}, {size}), statistics="{config.default_statistics}")
```

From an image file to names and probabilities:

```python
classify = bkn_zoo.Classifier.from_pretrained("{name}")
classify("photo.jpg", top_k=5)
```"""


def _how_to_call(config: Config, name: str) -> str:
    return f"""\
## Call it over HTTP

```bash
bkn-zoo serve --models {name}
curl --data-binary @photo.jpg 'http://localhost:8000/v1/classify?statistics={config.default_statistics}'
```"""


def _accuracy(config: Config) -> str:
    if not config.accuracy:
        return ""
    metrics = list(dict.fromkeys(metric for measured in config.accuracy.values() for metric in measured))
    rows = [
        {"statistics": f"{mode} (default)" if mode == config.default_statistics else mode}
        | {metric: f"{value:g}" for metric, value in measured.items()}
        for mode, measured in config.accuracy.items()
    ]
    measured = SEEN if config.training.get("test_images") == "validation" else MEASURED
    return f"## Accuracy\n\n{measured}\n\n{table(rows, ['statistics', *metrics])}"


def _twins(config: Config, runs: Sequence[Run]) -> str:
    recipe = config.training.get("recipe", {})
    network = config.architecture.rpartition("_")[0]
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run["model"].rpartition("_")[0] == network and _but_for_twins(run["recipe"]) == _but_for_twins(recipe):
            groups.setdefault((run["norm"], batches(run)), []).append(run)
    if len(groups) < 2:
        return ""
    rows = [
        {"norm": norm, "batches": sizes, "runs": len(members)}
        | {mode: _spread([run["test"][mode]["top1"] for run in members]) for mode in MODES}
        for (norm, sizes), members in sorted(groups.items())
    ]
    return f"{TWINS}\n\n{table(rows, list(rows[0]))}"


def batches(run: Run) -> str:
    """Its gradient and statistics batch, to show."""
    return f"{run['gradient_batch']}, {run['statistics_batch'] or run['gradient_batch']}"


def _but_for_twins(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What twins have in common."""
    own = ("model", "norm_options", "statistics_batch", "seed")
    return {name: value for name, value in recipe.items() if name not in own}


def _spread(values: list[float]) -> str:
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _speed(config: Config, speed: Mapping[str, Any]) -> str:
    network, _, norm = config.architecture.rpartition("_")
    rows = [row for row in speed.get("rows", []) if (row["model"], row["norm"]) == (network, norm)]
    if config.preprocessing is not None:
        rows = [row for row in rows if row["size"] == config.preprocessing.size]
    if not rows:
        return ""
    columns = ["engine", "precision", "statistics", "batch", "size", "ms_per_image"]
    return (
        f"## Speed\n\nMilliseconds per image on {speed['hardware']}, of the network with untrained weights "
        f"(`results/benchmark_infer.json`, by `{speed['command']}`).\n\n{table(rows, columns)}"
    )


def _training(config: Config, run: Run) -> str:
    training = config.training
    if "command" not in training:
        return ""
    versions = ", ".join(f"{package} {version}" for package, version in training.get("versions", {}).items())
    took = f" in {duration(run['seconds'])}" if run else ""
    group = config.statistics_batch_size or "all"
    return (
        f"## Training\n\nOn {dataset_name(config) or 'data that it does not name'}, {group} images per statistics "
        f"group, from {'`' + training['init'] + '`' if training.get('init') else 'random weights'}, with seed "
        f"{training.get('seed')} on {training.get('hardware')}{took}; {versions}.\n\n"
        f"```bash\n{training['command']}\n```\n\n"
        f"The recipe:\n\n```json\n{json.dumps(training.get('recipe', {}), indent=1)}\n```"
    )


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min" if seconds >= 60 else "a minute"
