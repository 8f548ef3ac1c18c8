"""Robustness under distribution shift: the tables of docs/shift.md that compare norms and modes, from its records.

The runs are finished; the history of this repository has the code that made the corruptions and measured the networks,
until commit 25e6aea. Commit 30af943b has the script for today's checkpoints. A record of results/shift/ is one network:
`methods` has accuracy by statistics at inference.
"""

import base64
import tomllib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from bkn_zoo.modes import MODES
from studies.base import DOCS, RESULTS, Record, Study
from studies.stats import mean_of, spread

PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TITLES, DIFFERENCES = PLAN["titles"], PLAN["differences"]
DATASETS = ("cifar10", "cifar100")
EARLIER = ", earlier weights"
SETS = {"clean_hits": 1, "shifted_hits": 75}
"""How many sets of images the hits of a method are counted over: 15 corruptions at 5 severities under shift."""


class Shift(Study):
    name = "shift"
    results = RESULTS / "shift"

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.render import frame

        found = list(records.values())
        every = checkpoints(records)
        tables = {"checkpoints": every, "by_corruption": by_corruption(records)}
        for dataset in DATASETS:
            tables |= {f"twins.{dataset}": twins(found, dataset), f"differences.{dataset}": differences(found, dataset)}
        modes = [
            each for each in every if each["statistics"].strip("*`") in MODES and not each["network"].endswith(EARLIER)
        ]
        page = {"differences.cifar10": tables.pop("differences.cifar10"), "modes": modes}
        shown = {DOCS / "shift.md": page, RESULTS / "tables" / self.name: tables}
        return {path: {name: frame(rows) for name, rows in each.items()} for path, each in shown.items()}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        return {"shift": figure(list(records.values()))}


STUDY = Shift()


def arms(records: Iterable[Record], dataset: str) -> dict[str, list[Record]]:
    """The records of each arm, a seed each."""
    of = [record for record in records if record["dataset"] == dataset]
    by_seed = {arm: [record for record in of if record.get("arm") == arm] for arm in TITLES}
    return {arm: sorted(found, key=lambda each: each["network_seed"]) for arm, found in by_seed.items() if found}


def summaries(of_arm: Iterable[Record], method: str) -> list[Mapping[str, Any]]:
    return [record["methods"][method] for record in of_arm if method in record["methods"]]


def row(name: str, method: str, found: Sequence[Mapping[str, Any]], default: bool) -> dict[str, str]:
    shown = f"`{method}`" if method in MODES else method
    images = sorted({each["images"] for each in found})
    columns = {"clean": "clean", "shifted": "shifted", "ECE, clean": "ece", "ECE, shifted": "ece_shifted"}
    return {
        "network": name,
        "statistics": f"**{shown}**" if default else shown,
        **{head: spread([each[column] for each in found], 1) for head, column in columns.items()},
        "images": f"{images[0]:,}" + (f" to {images[-1]:,}" if len(images) > 1 else ""),
    }


def twins(records: Sequence[Record], dataset: str) -> list[dict[str, str]]:
    """Networks that differ in the norm, by each method."""
    return [
        row(TITLES[arm], method, summaries(of_arm, method), default=method == of_arm[0]["default"])
        for arm, of_arm in arms(records, dataset).items()
        for method in dict.fromkeys(method for record in of_arm for method in record["methods"])
    ]


def checkpoints(records: Mapping[str, Record]) -> list[dict[str, str]]:
    """As twins, and the differences from the default mode and from the same mode of the earlier weights."""
    rows = []
    for file, record in records.items():
        name = f"`{record.get('checkpoint')}`" + EARLIER * file.endswith("-plain")
        earlier = records[f"{file}-plain"]["methods"] if f"{file}-plain" in records else {}
        for method, summary in record["methods"].items() if "checkpoint" in record else ():
            default = record["methods"][record["default"]]
            shown = row(name, method, [summary], default=summary is default)
            # A method is not compared with itself.
            for head, that in (("the default", default), ("earlier weights", earlier.get(method, summary))):
                for key, images in zip(SETS, ("clean", "shifted"), strict=True):
                    shown[f"against {head}, {images}"] = signed(gap(summary, that, key)) if that is not summary else "-"
            rows.append(shown)
    return rows


def by_corruption(records: Mapping[str, Record]) -> list[dict[str, str]]:
    """The accuracy of the last measured weights of a checkpoint, as the mean over the severities of a corruption."""
    return [
        {"network": record["checkpoint"] + EARLIER * file.endswith("-plain"), "corruption": corruption}
        | {mode: f"{mean(found[mode]['by_corruption'][corruption]):.1f}" for mode in MODES if mode in found}
        for file, record in records.items()
        if "checkpoint" in record and not (file.endswith("-plain") and file.removesuffix("-plain") in records)
        for found in [record["methods"]]
        for corruption in found["sample"]["by_corruption"]
    ]


def hits(summary: Mapping[str, Any], key: str) -> np.ndarray:
    """How often each image was classified correctly."""
    values = np.frombuffer(zlib.decompress(base64.b64decode(summary[key])), np.uint8)
    return (np.unpackbits(values)[: summary["images"]] if key == "clean_hits" else values).astype(float)


def gap(this: Mapping[str, Any], that: Mapping[str, Any], key: str) -> np.ndarray:
    """The difference of two methods on each image that both saw, in points."""
    images = min(this["images"], that["images"])
    one, other = (hits(each, key)[:images] / SETS[key] for each in (this, that))
    return 100 * (one - other)


def signed(gaps: np.ndarray) -> str:
    """The mean, with its 95 % interval over images."""
    return f"{gaps.mean():+.1f} ± {interval(gaps):.1f}"


def interval(gaps: np.ndarray) -> float:
    return 1.96 * gaps.std(ddof=1) / len(gaps) ** 0.5


def differences(records: Sequence[Record], dataset: str) -> list[dict[str, str]]:
    """On clean images and under shift, paired by seed and image, with 95 % intervals over images and over seeds."""
    found, rows = arms(records, dataset), []
    for each in DIFFERENCES:
        (this, one), (that, other) = each["this"], each["that"]
        pairs = [
            (ours["methods"][one], theirs["methods"][other])
            for ours in found.get(this, [])
            for theirs in found.get(that, [])
            if ours["network_seed"] == theirs["network_seed"] and one in ours["methods"] and other in theirs["methods"]
        ]
        shown = {"difference": each["says"]}
        for key, head in zip(SETS, ("clean", "shifted"), strict=True):
            gaps = [gap(ours, theirs, key) for ours, theirs in pairs]
            if gaps:
                fewest = min(map(len, gaps))
                over_images = interval(np.mean([by_image[:fewest] for by_image in gaps], 0))
                over_seeds = mean_of([float(by_image.mean()) for by_image in gaps])
                seeds = f", seeds ± {over_seeds.margin:.1f}" if len(pairs) > 1 else ""
                shown[head] = f"{over_seeds.value:+.1f} (images ± {over_images:.1f}{seeds})"
        rows += [shown] if pairs else []
    return rows


SHOWN = (
    ("bn128", "population"), ("bn128", "mix, tuned"), ("bn128", "TENT online"), ("gn", "population"),
    ("brn2", "population"), ("bkn8", "expected"), ("bkn2", "expected"), ("bkn1", "sample"),
    ("bkn1.link=False", "sample"),
)  # fmt: skip
"""The arms and their statistics in the figure."""


def figure(records: Sequence[Record]) -> Any:
    """Accuracy on clean and on corrupted images of CIFAR-10, by norm."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8.4, 3.8), layout="constrained")
    axes, found = drawing.subplots(), arms(records, "cifar10")
    for place, (arm, method) in enumerate(reversed(SHOWN)):
        of = summaries(found[arm], method)
        clean, shifted = ([each[key] for each in of] for key in ("clean", "shifted"))
        colour = "#1f77b4" if arm.startswith("bkn") else "#7f7f7f"
        axes.plot([np.mean(shifted), np.mean(clean)], [place, place], color=colour, linewidth=2, alpha=0.4)
        axes.errorbar(np.mean(shifted), place, xerr=np.std(shifted, ddof=1), color=colour, marker="o", capsize=3,
                      label="" if place else "corrupted images")  # fmt: skip
        axes.plot(np.mean(clean), place, "|", color=colour, markersize=14, label="" if place else "clean images")
    axes.set_yticks(range(len(SHOWN)), [f"{TITLES[arm]}: {method}" for arm, method in reversed(SHOWN)])
    axes.set_xlabel("top-1 accuracy (%), CIFAR-10, 15 epochs, mean and deviation over three seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    drawing.legend(loc="outside upper right", ncols=2, frameon=False)
    return drawing
