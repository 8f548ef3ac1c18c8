"""Robustness under distribution shift: the tables of docs/shift.md that compare norms and modes, from its records.

The runs are finished; the history of this repository has the code that made the corruptions and measured the networks,
until commit 25e6aea. A record of results/shift/ is one network: `methods` has accuracy by statistics at inference.
"""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from bkn_zoo.modes import MODES
from studies.base import DOCS, RESULTS, Record, Study
from studies.stats import mean_of, spread

TITLES = {
    "bn128": "BN, groups of 128", "gn": "GroupNorm", "brn2": "BRN, groups of 2", "bkn8": "BKN, groups of 8",
    "bkn2": "BKN, groups of 2", "bkn1": "BKN, groups of 1", "bkn1.link=False": "BKN, groups of 1, A = 0",
}  # fmt: skip
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
LINES = {
    "bn128": ["population", "mix, tuned", "adaptive from population, tuned"], "gn": ["population"],
    "brn2": ["population"], "bkn8": ["expected"], "bkn2": ["expected", "sample"], "bkn1": ["sample"],
    "bkn1.link=False": ["sample"],
}  # fmt: skip
"""The arms of the plot, and by which methods."""
DIFFERENCES = [
    ("BKN (1) `sample` against BN (128) `population`", ("bkn1", "sample"), ("bn128", "population")),
    ("BKN (1) `sample` against GroupNorm", ("bkn1", "sample"), ("gn", "population")),
    ("BKN (1) `sample` against BN (128), tuned mix", ("bkn1", "sample"), ("bn128", "mix, tuned")),
    ("the link between layers: BKN (1) against A = 0, `sample`", ("bkn1", "sample"), ("bkn1.link=False", "sample")),
    ("BKN (2) `expected` against BN (128) `population`", ("bkn2", "expected"), ("bn128", "population")),
    ("BKN (2), `sample` against `expected`", ("bkn2", "sample"), ("bkn2", "expected")),
    ("BKN (2), `expected` against `population`", ("bkn2", "expected"), ("bkn2", "population")),
    ("BKN (2), adaptive against `expected`", ("bkn2", "adaptive from expected, tuned"), ("bkn2", "expected")),
    ("BKN (8), adaptive against `expected`", ("bkn8", "adaptive from expected, tuned"), ("bkn8", "expected")),
    ("BN (128), adaptive against `population`", ("bn128", "adaptive from population, tuned"), ("bn128", "population")),
    ("BN (128), adaptive against the tuned mix", ("bn128", "adaptive from population, tuned"), ("bn128", "mix, tuned")),
]
SETS = {"clean_hits": 1, "shifted_hits": 75}
"""How many sets of images the hits of a method are counted over: 15 corruptions at 5 severities under shift."""


class Shift(Study):
    name = "shift"
    results = plots = RESULTS / "shift"

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.render import frame

        found = list(records.values())
        tables = {"checkpoints": checkpoints(found)}
        for dataset in DATASETS:
            tables |= {f"twins.{dataset}": twins(found, dataset), f"differences.{dataset}": differences(found, dataset)}
        return {DOCS / "shift.md": {name: frame(rows) for name, rows in tables.items()}}

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


def checkpoints(records: Sequence[Record]) -> list[dict[str, str]]:
    """As twins, and the differences from the default mode."""
    rows = []
    for record in records:
        for method, summary in record["methods"].items() if "checkpoint" in record else ():
            default = record["methods"][record["default"]]
            gaps = [signed(gap(summary, default, key)) if summary is not default else "-" for key in SETS]
            against = {"against the default, clean": gaps[0], "against the default, shifted": gaps[1]}
            rows.append(row(f"`{record['checkpoint']}`", method, [summary], default=summary is default) | against)
    return rows


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
    for title, (this, one), (that, other) in DIFFERENCES:
        pairs = [
            (ours["methods"][one], theirs["methods"][other])
            for ours in found.get(this, [])
            for theirs in found.get(that, [])
            if ours["network_seed"] == theirs["network_seed"] and one in ours["methods"] and other in theirs["methods"]
        ]
        shown = {"difference": title}
        for key, head in zip(SETS, ("clean", "shifted"), strict=True):
            gaps = [gap(ours, theirs, key) for ours, theirs in pairs]
            if gaps:
                fewest = min(map(len, gaps))
                over_images = interval(np.mean([each[:fewest] for each in gaps], 0))
                over_seeds = mean_of([float(each.mean()) for each in gaps], (len(pairs), len(pairs)))
                seeds = f", seeds ± {over_seeds.margin:.1f}" if len(pairs) > 1 else ""
                shown[head] = f"{over_seeds.value:+.1f} (images ± {over_images:.1f}{seeds})"
        rows += [shown] if pairs else []
    return rows


def figure(records: Sequence[Record]) -> Any:
    """Accuracy by severity, one line per arm."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5.2 * len(DATASETS) + 2.5, 4.2), layout="constrained")
    lines = [(arm, method) for arm, found in LINES.items() for method in found]
    shown: dict[str, Any] = {}
    for number, dataset in enumerate(DATASETS, start=1):
        axes = drawing.add_subplot(1, len(DATASETS), number)
        found = arms(records, dataset)
        for colour, (arm, method) in enumerate(lines):
            by_severity = [
                [each["clean"], *(mean(accuracy[k] for accuracy in each["by_corruption"].values()) for k in range(5))]
                for each in summaries(found.get(arm, []), method)
            ]
            if by_severity:
                heights = [mean(values) for values in zip(*by_severity, strict=True)]
                errors = [stdev(values) if len(values) > 1 else 0.0 for values in zip(*by_severity, strict=True)]
                shown[f"{TITLES[arm]}: {method}"] = axes.errorbar(
                    range(6), heights, errors, capsize=2, linewidth=1.3, color=f"C{colour}"
                )
        axes.set_title(f"{DATASETS[dataset]}, mean of 15 corruptions")
        axes.set_xlabel("severity (0: clean)")
        axes.set_ylabel("top-1, percent")
        axes.grid(alpha=0.3)
    axes.legend(shown.values(), shown.keys(), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawing
