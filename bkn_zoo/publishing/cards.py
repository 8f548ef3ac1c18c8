"""Model cards: README.md of a checkpoint and MODEL_CARD.md of the zoo, written from configs and results/, never typed.

A run is a record that scripts/train.py left in results/runs/, or scripts/reproduce.py in results/reproduce/; speed is
results/benchmark_infer.*.json.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.errors import CheckpointError
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.modes import MODES
from bkn_zoo.publishing.chance import Deviation, Difference, between, spread, typical
from bkn_zoo.publishing.replication import (
    LAUNCHING,
    NORMS,
    chosen_statistics,
    counted,
    learned,
    measured,
    read_run,
    recipe_key,
)
from bkn_zoo.publishing.results import table
from bkn_zoo.training.recipes import Recipe, read_recipe

Run = Mapping[str, Any]


class Dataset(NamedTuple):
    """What cards say about a data set.

    Attributes:
        shown: its name.
        hub: its id on the Hub.
        split: what the Hub calls the images that are the test images here.
        note: on those images, where the name misleads.
    """

    shown: str | None
    hub: str | None = None
    split: str | None = None
    note: str = ""


OFFICIAL_VALIDATION = """\
The labels of Tiny ImageNet's own test images are not public. The test images here are its 10,000 official validation
images, and the validation images here a part of its training images."""

DATASETS = {  # by the name in a recipe
    "cifar10": Dataset("CIFAR-10", "uoft-cs/cifar10", "test"),
    "cifar100": Dataset("CIFAR-100", "uoft-cs/cifar100", "test"),
    "tiny_imagenet": Dataset("Tiny ImageNet", "zh-plus/tiny-imagenet", "valid", OFFICIAL_VALIDATION),
    "imagenet": Dataset("ImageNet-1k", "ILSVRC/imagenet-1k", "validation"),
    "folder": Dataset("images of its owner"),
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

INTERVAL = "From `top1_low` to `top1_high` is the 95 % interval of `top1` (Wilson), for the number of images only."

TWINS = """\
### Against its twins

Runs of the same network by the same recipe, but for the norm, the statistics batch and the seed: top-1 in percent per
statistics mode, the mean over seeds and, if there are several, ± their standard deviation. *batches* are gradient and
statistics batch. In bold, the mode that was best on the validation images, in the mean over a row's runs: rows are to
be compared by those. Between single runs, a difference of a point or so may be chance."""

PARTS_UNKNOWN = (
    "How much of the gain is the link between layers, and how much the shrinking of what a layer observes, was not "
    "measured for this network and these batches."
)

LESS = """\
### In less precision

Top-1 by OpenVINO on a CPU and by PyTorch on a GPU (`results/evaluate/`). `precision="auto"`, the default of classifier,
command and service, takes bf16 or f16 where the processor has it; `precision="f32"` gives the accuracy above."""


def read_runs(folder: Path) -> list[Run]:
    """The records of all runs, by name."""
    return sorted(map(read_run, folder.glob("*.json")), key=lambda run: run["name"])


def read_twins(results: Path) -> list[Run]:
    """The runs that can be compared with published ones: of the whole network, on all images.

    One that diverged has `failed` in place of what was measured. Of two by the same recipe, that of results/runs/; in
    the order of their seeds.
    """
    runs = [*read_runs(results / "reproduce"), *read_runs(results / "runs")]
    whole = [run for run in runs if run.get("width", 1) == run.get("every", 1) == 1]
    once = {recipe_key(read_recipe(None, run["recipe"])): run for run in whole}
    return sorted(once.values(), key=lambda run: (run["seed"], run["name"]))


def read_speeds(folder: Path) -> dict[str, dict[str, Any]]:
    """The measurements of inference on a CPU, by the kind of processor that a file is named after."""
    paths = sorted(folder.glob("benchmark_infer.*.json"))
    return {path.stem.partition(".")[2]: json.loads(path.read_text()) for path in paths}


def read_evaluations(folder: Path, name: str, devices: Sequence[str] = ("cpu", "cuda")) -> list[dict[str, Any]]:
    """The evaluations of a checkpoint: on a CPU in f32 and, where it was measured, on each of the devices in less."""
    less = (sorted(folder.glob(f"{name}.{device}.*.json")) for device in devices)
    paths = [folder / f"{name}.cpu.json", *itertools.chain(*less)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def gained(top1: float, exact: float) -> str:
    """How far one accuracy is above another, to show; what rounds to zero has no sign of its own."""
    return f"{round(top1 - exact, 2) + 0:+.2f}"


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
        "take both from the same run, name the folder of its results by --results, or publish the folder as it is with "
        "bkn_zoo.push_to_hub."
    )


def _measured(config: Config, run: Run) -> bool:
    """Whether a run measured all of a config's accuracy, which is rounded to three decimals."""
    return config.accuracy.keys() == run["test"].keys() and all(
        round(run["test"][mode].get(metric, -1), 3) == value
        for mode, measured in config.accuracy.items()
        for metric, value in measured.items()
    )


def checkpoint_card(
    config: Config,
    name: str,
    runs: Sequence[Run] = (),
    speeds: Mapping[str, Mapping[str, Any]] | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
) -> str:
    """README.md of a checkpoint: what its config says and, where there are any, the runs and speeds of its network.

    Args:
        runs: as `read_twins` gives them.
        speeds: by the kind of processor.
        evaluations: those of the checkpoint, as `read_evaluations` gives them.
    """
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
        _precisions(evaluations),
        _twins(config, runs),
        _speed(config, speeds or {}),
        _training(config, next((run for run in runs if run["name"] == name), {})),
        USE,
    ]
    return "\n\n".join(part for part in shown if part) + "\n"


def dataset_name(config: Config) -> str | None:
    """The data set that a network was trained on, to show."""
    return _dataset(config).shown


def _dataset(config: Config) -> Dataset:
    key = config.recipe.get("dataset")
    return DATASETS.get(key, Dataset(key)) if isinstance(key, str) else Dataset(None)


def _metadata(config: Config, name: str) -> str:
    # Imported here: it takes a while, and loading a network does not need it.
    from huggingface_hub import EvalResult, ModelCardData

    data = _dataset(config)
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=data.hub or config.recipe["dataset"],
            dataset_name=data.shown,
            dataset_split=None if _on_validation(config) else data.split,
            metric_type="accuracy",
            metric_name=f"{METRICS[metric]}, {mode} statistics",
            metric_value=value,
        )
        for mode, measured in config.accuracy.items()
        for metric, value in measured.items()
        if metric in METRICS and data.shown
    ]
    return ModelCardData(
        license="apache-2.0",
        library_name="bkn_zoo",
        pipeline_tag="image-classification",
        tags=["batch-kalman-normalization", config.architecture],
        datasets=[data.hub] if data.hub else None,
        metrics=["accuracy"] if config.accuracy else None,
        model_name=name if results else None,
        eval_results=results or None,
    ).to_yaml()


def _how_to_load(config: Config, name: str) -> str:
    installed = f"""\
## Load it

With bkn_zoo installed, as `pip install -e '.[serve,openvino]'` does in a checkout of its repository; by the name of the
checkpoint in a checkout, or by its id on the Hub, "owner/{name}":"""
    if config.preprocessing is None:  # nobody knows how to make its input of an image
        return f"""\
{installed}

```python
import bkn_zoo

model = bkn_zoo.from_pretrained("{name}")
```"""
    return f"""\
{installed}

```python
import bkn_zoo

classify = bkn_zoo.Classifier.from_pretrained("{name}")
classify("photo.jpg", top_k=5)
```

The network itself takes images that are prepared as they were for the accuracy below:
{_prepared(config.preprocessing)}.

```python
from bkn_zoo.images import open_image, preprocess

model = bkn_zoo.from_pretrained("{name}")
image = preprocess(open_image("photo.jpg"), model.config.preprocessing)
logits = model(image[None], statistics="{config.default_statistics}")
```"""


def _prepared(preprocessing: Preprocessing) -> str:
    p = preprocessing
    sizes = f"{p.size} px" if p.native_size in (None, p.size) else f"{p.native_size} px, then to {p.size} px"
    means, deviations = (", ".join(f"{value:.3f}" for value in values) for values in (p.mean, p.std))
    part = "" if p.crop == 1 else f" ({p.crop:.1%} of the shorter side)"
    square = f"the central square{part}, resized to {sizes} ({p.interpolation}), in [0, 1]"
    return f"{square}, less ({means}) and divided by ({deviations})"


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
    about = [SEEN] if _on_validation(config) else [MEASURED, _dataset(config).note]
    about += [INTERVAL] if "top1_low" in metrics else []
    return "\n\n".join(["## Accuracy", *filter(None, about), table(rows, ["statistics", *metrics])])


def _precisions(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if len(evaluations) < 2:
        return ""
    exact = {row["statistics"]: row["top1"] for row in evaluations[0]["rows"]}
    rows = [
        {"hardware": found["hardware"], "precision": found["precision"], "statistics": row["statistics"]}
        | {"top1": f"{row['top1']:.2f}"}
        | {"more than in f32": gained(row["top1"], exact[row["statistics"]])}
        for found in evaluations[1:]
        for row in found["rows"]
    ]
    return f"{LESS}\n\n{table(rows, list(rows[0]))}"


def _on_validation(config: Config) -> bool:
    """Whether the accuracy is that on the validation images, for want of others."""
    return config.training.get("test_images") == "validation"


def _twins(config: Config, runs: Sequence[Run]) -> str:
    recipe = config.recipe
    network = config.architecture.rpartition("_")[0]
    groups: dict[tuple[str, int, int], list[Run]] = {}
    for run in runs:
        same = but_for_twins(run["recipe"]) == but_for_twins(recipe) and is_plain(run, recipe)
        if same and run["model"].rpartition("_")[0] == network:
            groups.setdefault((run["norm"], *sizes(run)), []).append(run)
    if len(groups) < 2:
        return ""
    rows = [
        {"norm": norm, "batches": batches(members[0]), "runs": _counted(members)}
        | {mode: _top1(to_the_end(members), mode) for mode in MODES}
        for (norm, *_), members in sorted(groups.items())
    ]
    trained = {key: members for key, members in groups.items() if _learned(members, config)}
    gain = _gain(recipe, trained, _usual(_length(next(iter(groups.values()))[0]), config, runs))
    parts = _parts(config, runs) if gain and config.norm == "bkn" else ""
    return "\n\n".join(filter(None, [TWINS, table(rows, list(rows[0])), gain, parts]))


def _counted(runs: Sequence[Run]) -> str:
    ended = len(to_the_end(runs))
    return f"{ended}, {len(runs) - ended} diverged" if ended < len(runs) else str(ended)


def to_the_end(runs: Iterable[Run]) -> list[Run]:
    """Those that did not diverge."""
    return [run for run in runs if "failed" not in run]


def _gain(recipe: Mapping[str, Any], groups: Mapping[tuple[str, int, int], list[Run]], usual: Deviation | None) -> str:
    """What the norm of a recipe bought, in a sentence: over others with as large groups, and BN with the largest."""
    ours = next((key for key, runs in groups.items() if any(run["recipe"] == recipe for run in runs)), None)
    if ours is None:
        return ""
    gaps = {key: between(chosen_top1(groups[ours]), chosen_top1(runs), usual) for key, runs in groups.items()}
    largest = max((statistics for norm, _, statistics in groups if norm == "bn"), default=0)
    gains = [
        f"{abs(gap.value):.2f} points {'above' if gap.value > 0 else 'below'} {NORMS[norm]}"
        + ("" if norm == "gn" else f" with groups of {statistics}")  # it has none
        + _by_chance(gap)
        for (norm, _, statistics), gap in sorted(gaps.items())
        if norm != ours[0] and (norm == "gn" or statistics == ours[2] or (norm, statistics) == ("bn", largest))
    ]
    shown = f"In the modes in bold, {NORMS[ours[0]]} with groups of {ours[2]} ends"
    return f"{shown} {', '.join(gains)}." if gains else ""


def _by_chance(gap: Difference) -> str:
    return " (within chance)" if gap.verdict().startswith("within") else ""


Length = tuple[int, int, float]
"""A training's epochs, its images' size and the share held out."""


def _parts(config: Config, runs: Sequence[Run]) -> str:
    """What part of the gain over BN is the link between layers, by runs with A held at zero, or that nobody knows.

    By runs of the recipe or, where there are none, of one that differs by its length, the images' size and the share
    held out alone.
    """
    shortened = ("epochs", "validation", "size", "train_size")

    def kind(recipe: Mapping[str, Any]) -> dict[str, Any]:
        same = {key: value for key, value in but_for_twins(recipe).items() if key not in shortened}
        return same | {"network": recipe["model"].rpartition("_")[0], "group": recipe["statistics_batch"]}

    options = config.recipe.get("norm_options", {})
    arms = {"whole": ("bkn", options), "unlinked": ("bkn", options | {"link": False}), "plain": ("bn", {})}
    of: dict[Length, dict[str, list[Run]]] = {}
    for run in to_the_end(runs):
        own = run["norm"], run["recipe"].get("norm_options", {})
        for name in (name for name, arm in arms.items() if own == arm and kind(run["recipe"]) == kind(config.recipe)):
            of.setdefault(_length(run), {}).setdefault(name, []).append(run)
    linked = sorted(length for length in of if {"whole", "unlinked"} <= of[length].keys())
    if not linked:
        return PARTS_UNKNOWN
    complete = [length for length in linked if "plain" in of[length]]
    asked = dict.fromkeys([linked[-1], *complete[-1:]])
    said = " ".join(_part(length, of[length], _usual(length, config, runs), config) for length in asked)
    return f"{said} ± is the standard error of a difference." if "±" in said else said


def _length(run: Run) -> Length:
    return run["epochs"], run["recipe"].get("size", 0), run["recipe"].get("validation", 0.0)


def _usual(length: Length, config: Config, runs: Sequence[Run]) -> Deviation | None:
    """How far seeds are apart in trainings of a length, of the same network on the same data."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        of_it = run["model"].rpartition("_")[0] == config.architecture.rpartition("_")[0]
        if of_it and run["recipe"]["dataset"] == config.recipe["dataset"] and _length(run) == length:
            arms.setdefault(recipe_key(read_recipe(None, {**run["recipe"], "seed": 0})), []).append(run)
    return typical(chosen_top1(arm) for arm in arms.values() if _learned(arm, config))


def _learned(arm: Sequence[Run], config: Config) -> bool:
    """Whether all of an arm's seeds did."""
    return len(to_the_end(arm)) == len(arm) and learned(chosen_top1(arm), config.num_classes)


def _part(length: Length, found: Mapping[str, Sequence[Run]], usual: Deviation | None, config: Config) -> str:
    """By runs of one length, with BN or without."""
    epochs, size, _ = length
    top1 = {name: chosen_top1(runs) for name, runs in found.items()}

    def less(this: str, that: str, points: str = " points") -> str:
        gap = between(top1[this], top1[that], usual)
        return f"{gap}{points}{_by_chance(gap)}"

    smaller = "" if size == config.recipe.get("size", 0) else f" with images of {size} px"
    by = f"In runs of {epochs} epochs{smaller} ({counted(len(top1['unlinked']))})"
    if "plain" not in top1:
        return f"{by} the link between layers is worth {less('whole', 'unlinked')}, against A held at zero."
    if not learned(top1["plain"], config.num_classes):
        return (
            f"{by} BN with as few images per group does not learn: it ends at {mean(top1['plain']):.2f} %, and chance "
            f"is {100 / config.num_classes:g} %. A gain over it in points would say little; against A held at zero, "
            f"the link between layers is worth {less('whole', 'unlinked')}."
        )
    return (
        f"{by} the whole gain over BN with as many images per group is {less('whole', 'plain')}. By runs with A held "
        f"at zero, the link between layers is worth {less('whole', 'unlinked', ' of them')} and the shrinking of what "
        f"a layer observes {less('unlinked', 'plain', '')}.{_by_other_rules(found, usual)}"
    )


def _by_other_rules(found: Mapping[str, Sequence[Run]], usual: Deviation | None) -> str:
    """The same three in modes other than those chosen: what a part is worth depends on it. BN was not asked for all."""
    rules = {"population": "moving averages", "sample": "an image's own statistics", "EvalNorm": "EvalNorm's rule"}
    parts = []
    for rule, shown in rules.items():
        asked = {name: [measured(run, "test").get(rule) for run in runs] for name, runs in found.items()}
        top1 = {name: [each["top1"] for each in every if each] for name, every in asked.items()}

        def less(this: str, that: str, top1: dict[str, list[float]] = top1) -> str:
            gap = between(top1[this], top1[that], usual)
            return f"{gap}{_by_chance(gap)}"

        if top1["whole"] and top1["unlinked"]:
            link = less("whole", "unlinked")
            three = top1["plain"] and f"{less('whole', 'plain')}, {link} and {less('unlinked', 'plain')}"
            parts.append(f"by {shown}, {three or f'{link} for the link'}")
    return f" With one rule at inference for all three networks these are, {'; '.join(parts)}." if parts else ""


def chosen_top1(runs: Sequence[Run]) -> list[float]:
    """On the test images, in the mode that was best on the validation images."""
    mode = chosen_statistics(runs)
    return [run["test"][mode]["top1"] for run in runs]


def _top1(runs: list[Run], mode: str) -> str:
    if not runs:
        return ""
    shown = spread(run["test"][mode]["top1"] for run in runs)
    return f"**{shown}**" if mode == chosen_statistics(runs) else shown


def batches(run: Run) -> str:
    """Its gradient and statistics batch, to show."""
    return ", ".join(map(str, sizes(run)))


def sizes(run: Run) -> tuple[int, int]:
    return run["gradient_batch"], run["statistics_batch"] or run["gradient_batch"]


def but_for_twins(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What twins have in common; without the fields at their defaults, since older records lack the younger fields."""
    own = "model", "norm_options", "statistics_batch", "seed", *LAUNCHING
    defaults = {field.name: field.default for field in fields(Recipe)}
    return {name: value for name, value in recipe.items() if name not in own and value != defaults.get(name, MISSING)}


def is_plain(run: Run, recipe: Mapping[str, Any]) -> bool:
    """Whether its norm has no options of its own but those of `recipe`, and BRN its schedule, which it must have."""
    options = recipe.get("norm_options", {}) if run["model"] == recipe.get("model") else {}
    return run["norm"] == "brn" or run["recipe"].get("norm_options", {}) == options


def _speed(config: Config, speeds: Mapping[str, Mapping[str, Any]]) -> str:
    network, _, norm = config.architecture.rpartition("_")
    columns = ["engine", "precision", "statistics", "batch", "size", "ms_per_image", "spread_ms"]
    parts = []
    for kind, speed in speeds.items():
        rows = [row for row in speed["rows"] if (row["model"], row["norm"]) == (network, norm)]
        if config.preprocessing is not None:
            rows = [row for row in rows if row["size"] == config.preprocessing.size]
        if rows:
            parts.append(
                f"Milliseconds per image on {speed['hardware']}, of the network with untrained weights "
                f"(`results/benchmark_infer.{kind}.json`, by `{speed['command']}`): the median over rounds, and the "
                f"slowest round less the fastest.\n\n{table(rows, columns)}"
            )
    return "\n\n".join(["## Speed", *parts]) if parts else ""


def _training(config: Config, run: Run) -> str:
    training = config.training
    if "command" not in training:
        return ""
    given = training.get("versions")
    versions = ", ".join(f"{name} {version}" for name, version in (given if isinstance(given, dict) else {}).items())
    took = f" in at most {duration(run['seconds'])}" if run else ""
    group = config.statistics_batch_size or "all"
    images = "image" if group == 1 else "images"
    anew = (
        " In the end the running averages were taken anew, for the averaged weights: that was better on the validation "
        "images."
    )
    done, recipe = training.get("epochs"), config.recipe
    ended = f" It ended after {done} of {recipe.get('epochs')} epochs, the last {recipe.get('patience')} no better."
    return (
        f"## Training\n\nOn {dataset_name(config) or 'data that it does not name'}, {group} {images} per statistics "
        f"group, from {'`' + training['init'] + '`' if training.get('init') else 'random weights'}, with seed "
        f"{training.get('seed')} on {training.get('hardware')}{took}; {versions}."
        f"{ended if done not in (None, recipe.get('epochs')) else ''}"
        f"{anew if training.get('statistics_anew') else ''}\n\n"
        f"```bash\n{training['command']}\n```\n\n"
        f"The recipe:\n\n```json\n{json.dumps(recipe, indent=1)}\n```"
    )


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min" if seconds >= 60 else "a minute"
