"""Sections that only the cards of our own checkpoints have: lower precision, comparisons with other norms, speed."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bkn_zoo.checkpoints.card import checkpoint_card, read_record
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.modes import MODES
from bkn_zoo.training.recipes import read_recipe
from studies.records import (
    NORMS,
    Record,
    batches,
    but_for_twins,
    chosen_statistics,
    chosen_top1,
    is_plain,
    learned,
    read_twins,
    recipe_key,
    sizes,
    to_the_end,
)
from studies.render import frame, markdown
from studies.stats import Deviation, Difference, between, spread, typical

LICENSE = "apache-2.0"  # of our own checkpoints

TWINS = """\
### Compared with other norms

These runs use the same network and recipe with another norm, group size or seed. A statistics group is the set of
images that are normalized together in training. The table has top-1 accuracy in percent for each statistics mode: the
mean over seeds and, if there are several, ± their standard deviation. *batches* are the gradient batch and the group
size. The mode in bold was best on the validation images, on average over a row's runs. Compare rows by these modes.
Between single runs, a difference of about a point may be chance."""

ELSEWHERE = """\
### Compared with other norms

For networks trained from scratch. One image per group: BKN with standardized weights, or EvoNorm-S0, which is simpler.
Two: GroupNorm with standardized weights is enough, or EvoNorm-S0. Four: not decided; BN with more images if possible.
docs/results.md, "Standardized weights", compares BKN with other norms and says what has not been trained."""

LINK = (
    "How much of this comes from the link between layers (the transition A) is in docs/results.md, "
    '"What the link is worth".'
)

LESS = """\
### Lower precision

Top-1 accuracy on the test images, with OpenVINO on a CPU and PyTorch on a GPU (`results/evaluate/`).
`precision="auto"`, the default of classifier, command and service, uses bf16 or f16 if the processor supports it.
If the statistics of a mode are too large for f16, OpenVINO runs it in f32, and it is not listed. Differences are to f32
with OpenVINO, whose accuracy may differ from that above by one image."""


SHIFT = """\
### Under distribution shift

Top-1 accuracy on {images:,} {which}, clean and on average over 15 corruptions at 5 severities (`results/shift/`)."""


IMPORTED = """\
### Origin of the weights

{weights} (Apache License 2.0, see LICENSE). They are stored in 16 bits and otherwise unchanged. Their authors report
{reported} % top-1 on ImageNet's validation images, which we do not have.

### Accuracy on photographs

Accuracy in percent over all 1,000 outputs. *as population* is the share of images for which a mode gives the same label
as `population`, which is the original network. The record is `results/imported/{name}.json`."""

LEARNED = """\
### Parameters of the other modes

`bkn_zoo.learn_statistics` learned the transition A, the process noise R, the gain q and the centers of all norms
without labels: {images:,} photographs, {epochs} epochs, from a gain of {gain:g}, with seed {seed} on {hardware}. The
target is the network's own output with `population` statistics. No other weight changed.

```bash
{command}
```"""

UNCERTAIN = """\
### Images of unknown classes

A threshold was chosen for each score so that 95 % of the correct answers on {images} held-out images pass it. Of
{unknown_images} images that show none of the classes ({unknown}), these percentages pass it: {passing}."""


def imported_section(config: Config, name: str, record: Record) -> str:
    """Origin, accuracy and learned parameters of an imported checkpoint; empty for our own."""
    if "weights" not in config.training:
        return ""
    rows = [
        {"photographs": row["set"], "images": row["images"], "statistics": row["mode"], "top-1": f"{row['top1']:.1f}"}
        | {"top-5": f"{row['top5']:.1f}", "as population": f"{row['as_population']:.1f}"}
        for row in record["rows"]
    ]
    weights, reported = config.training["weights"], record["reported_top1"]
    facts = {key: record["learned"][key] for key in ("images", "epochs", "gain", "seed", "hardware", "command")}
    about = IMPORTED.format(weights=weights, reported=reported, name=name)
    return "\n\n".join([about, markdown(rows), LEARNED.format(**facts)])


def uncertain_section(name: str, results: Path) -> str:
    """How often images of unknown classes pass, where it was measured."""
    rows = json.loads((results / "uncertainty.json").read_text())["rows"]
    found = next((row for row in rows if row["checkpoint"] == name), None)
    if found is None:
        return ""
    passing = ", ".join(f"{score} {share:g}" for score, share in found["passing"].items())
    return UNCERTAIN.format(**found | {"passing": passing})


def zoo_checkpoint_card(config: Config, name: str, results: Path) -> str:
    """README.md of one of our checkpoints."""
    record, uncertain = read_record(results, name), uncertain_section(name, results)
    shift = shift_section(results / "shift", name)
    if imported := imported_section(config, name, record):
        sections = [imported, shift, uncertain]
    else:
        precision = precision_section(read_evaluations(results / "evaluate", name))
        twins, speed = twins_section(config, read_twins(results)), speed_section(config, read_speeds(results))
        sections = [precision, twins, shift, uncertain, speed]
    return checkpoint_card(config, name, record, list(filter(None, sections)), license=LICENSE)


def shift_section(folder: Path, name: str) -> str:
    """Accuracy by mode on corrupted test images, if it was measured."""
    paths = sorted(folder.glob(f"*.{name}.json"))
    if not paths:
        return ""
    record = json.loads(paths[0].read_text())
    methods = {"expected": record["methods"]["sample"], **record["methods"]}  # the same for groups of one
    rows = [
        {"statistics": mode, "clean": f"{methods[mode]['clean']:.1f}", "under shift": f"{methods[mode]['shifted']:.1f}"}
        for mode in MODES
    ]
    which = "of the NIPS 2017 photographs" if record["dataset"] == "imagenet" else "test images"
    return f"{SHIFT.format(images=record['images'], which=which)}\n\n{markdown(rows)}"


def read_speeds(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The measured rows of inference on a CPU, by the kind of processor in the file name.

    Those with an A of low rank are in files of their own.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("benchmark_infer*.json")):
        kind, record = path.stem.partition(".")[2], json.loads(path.read_text())
        if kind:
            origin = {"file": path.name, "command": record["command"], "hardware": record["hardware"]}
            found.setdefault(kind, []).extend(row | origin for row in record["rows"])
    return found


def speeds_of(config: Config, measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a checkpoint's network, with the form of its transitions."""
    network, _, norm = config.architecture.rpartition("_")
    size = config.preprocessing and config.preprocessing.size
    wanted = network, norm, config.norm_options.get("transition_rank"), size
    fields = "model", "norm", "transition_rank", "size"
    return [row for row in measured if tuple(map(row.get, fields)) == wanted]


def read_evaluations(folder: Path, name: str, devices: Sequence[str] = ("cpu", "cuda")) -> list[dict[str, Any]]:
    """The evaluations of a checkpoint: on a CPU in f32, without which there are none, and in lower precision."""
    less = (sorted(folder.glob(f"{name}.{device}.*.json")) for device in devices)
    exact = folder / f"{name}.cpu.json"
    return [json.loads(path.read_text()) for path in (exact, *itertools.chain(*less))] if exact.exists() else []


def gained(top1: float, exact: float) -> str:
    """The difference between two accuracies, as text, without a negative zero."""
    return f"{round(top1 - exact, 2) + 0:+.2f}"


def precision_section(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if len(evaluations) < 2:
        return ""
    exact = {row["statistics"]: row["top1"] for row in evaluations[0]["rows"]}
    rows = [
        {
            "hardware": found["hardware"],
            "precision": found["precision"] + (", emulated" if "emulate" in found.get("about", "") else ""),
            "statistics": row["statistics"],
            "top1": f"{row['top1']:.2f}",
            "compared with f32": gained(row["top1"], exact[row["statistics"]]),
        }
        for found in evaluations[1:]
        for row in found["rows"]
    ]
    return f"{LESS}\n\n{markdown(rows)}"


def twins_section(config: Config, runs: Sequence[Record]) -> str:
    recipe = config.recipe
    network = config.architecture.rpartition("_")[0]
    if recipe.get("norm_options", {}).get("standardized_weights"):
        return ELSEWHERE
    groups: dict[tuple[str, int, int], list[Record]] = {}
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
    return "\n\n".join(filter(None, [TWINS, markdown(rows), gain and f"{gain} {LINK}"]))


def _counted(runs: Sequence[Record]) -> str:
    ended = len(to_the_end(runs))
    return f"{ended}, {len(runs) - ended} diverged" if ended < len(runs) else str(ended)


def _gain(
    recipe: Mapping[str, Any], groups: Mapping[tuple[str, int, int], list[Record]], usual: Deviation | None
) -> str:
    """A sentence on the gain of a recipe's norm over others with the same group size, and over BN with the largest."""
    ours = next((key for key, runs in groups.items() if any(run["recipe"] == recipe for run in runs)), None)
    if ours is None:
        return ""
    gaps = {key: between(chosen_top1(groups[ours]), chosen_top1(runs), usual) for key, runs in groups.items()}
    largest = max((statistics for norm, _, statistics in groups if norm == "bn"), default=0)
    gains = [
        f"{abs(gap.value):.2f} points {'above' if gap.value > 0 else 'below'} {NORMS[norm]}"
        + ("" if norm == "gn" else f" with groups of {statistics}")  # GroupNorm has no groups of images
        + _by_chance(gap)
        for (norm, _, statistics), gap in sorted(gaps.items())
        if norm != ours[0] and (norm == "gn" or statistics == ours[2] or (norm, statistics) == ("bn", largest))
    ]
    shown = f"With the modes in bold, {NORMS[ours[0]]} with groups of {ours[2]} ends"
    return f"{shown} {', '.join(gains)}." if gains else ""


def _by_chance(gap: Difference) -> str:
    return " (within chance)" if gap.verdict().startswith("within") else ""


Length = tuple[int, int, float]
"""A training's epochs, its images' size and the share held out."""


def _length(run: Record) -> Length:
    return run["epochs"], run["recipe"].get("size", 0), run["recipe"].get("validation", 0.0)


def _usual(length: Length, config: Config, runs: Sequence[Record]) -> Deviation | None:
    """The typical deviation between seeds for trainings of this length, with the same network and data."""
    arms: dict[str, list[Record]] = {}
    for run in runs:
        of_it = run["model"].rpartition("_")[0] == config.architecture.rpartition("_")[0]
        if of_it and run["recipe"]["dataset"] == config.recipe["dataset"] and _length(run) == length:
            arms.setdefault(recipe_key(read_recipe(None, {**run["recipe"], "seed": 0})), []).append(run)
    return typical(chosen_top1(arm) for arm in arms.values() if _learned(arm, config))


def _learned(arm: Sequence[Record], config: Config) -> bool:
    """Whether all seeds of an arm learned."""
    return len(to_the_end(arm)) == len(arm) and learned(chosen_top1(arm), config.num_classes)


def _top1(runs: list[Record], mode: str) -> str:
    if not runs:
        return ""
    shown = spread(run["test"][mode]["top1"] for run in runs)
    return f"**{shown}**" if mode == chosen_statistics(runs) else shown


def speed_section(config: Config, speeds: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    columns = ["engine", "precision", "statistics", "batch", "size", "ms_per_image", "spread_ms"]
    parts = []
    for measured in speeds.values():
        if rows := speeds_of(config, measured):
            parts.append(
                f"Milliseconds per image on {rows[0]['hardware']}, of the network with untrained weights "
                f"(`results/{rows[0]['file']}`, by `{rows[0]['command']}`): the median over rounds, and the "
                f"slowest round minus the fastest.\n\n{markdown(frame(rows)[columns])}"
            )
    return "\n\n".join(["## Speed", *parts]) if parts else ""
