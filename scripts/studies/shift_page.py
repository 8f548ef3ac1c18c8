"""docs/shift.md: its tables and its plot, from the records in results/shift/.

PYTHONPATH=scripts python -m studies.shift_page
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

import numpy as np

from studies.base import RESULTS, Record
from studies.chance import mean_of, spread
from studies.shift_corruptions import MAIN, SEVERITIES
from studies.shift_evaluate import unpacked
from studies.shift_page_norms import drift_summary, layer_table, roc_table

TITLES = {
    "bn128": "BN, groups of 128", "gn": "GroupNorm", "brn2": "BRN, groups of 2", "bkn8": "BKN, groups of 8",
    "bkn2": "BKN, groups of 2", "bkn1": "BKN, groups of 1", "bkn1.link=False": "BKN, groups of 1, A = 0",
}  # fmt: skip
DATASETS = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny_imagenet": "Tiny ImageNet", "imagenet": "NIPS 2017",
}  # fmt: skip
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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arms(records: Iterable[Record], dataset: str) -> dict[str, list[Record]]:
    """The records of each arm, a seed each."""
    found: dict[str, list[Record]] = {}
    for arm in TITLES:
        of_arm = [r for r in records if r["dataset"] == dataset and r.get("arm") == arm]
        if of_arm:
            found[arm] = sorted(of_arm, key=lambda record: record["network_seed"])
    return found


def summaries(of_arm: Iterable[Record], method: str) -> list[Mapping[str, Any]]:
    return [record["methods"][method] for record in of_arm if method in record["methods"]]


def methods(of_arm: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(method for record in of_arm for method in record["methods"]))


def row(name: str, method: str, found: Sequence[Mapping[str, Any]], default: bool) -> list[str]:
    columns = [spread([each[column] for each in found], 1) for column in ("clean", "shifted", "ece", "ece_shifted")]
    shown = f"`{method}`" if method in ("population", "sample", "expected") else method
    images = sorted({each["images"] for each in found})
    counts = f"{images[0]:,}" + (f" to {images[-1]:,}" if len(images) > 1 else "")
    return [name, f"**{shown}**" if default else shown, *columns, counts]


HEAD = ["network", "statistics", "clean", "shifted", "ECE, clean", "ECE, shifted", "images"]


def twins(records: Sequence[Record], dataset: str) -> str:
    rows = []
    for arm, of_arm in arms(records, dataset).items():
        for method in methods(of_arm):
            found = summaries(of_arm, method)
            rows.append(row(TITLES[arm], method, found, default=method == of_arm[0]["default"]))
    return table(HEAD, rows) if rows else "Not measured yet."


def checkpoints(records: Sequence[Record]) -> str:
    """As twins, and the differences from the default mode."""
    rows = []
    for record in records:
        for method, summary in record["methods"].items() if "checkpoint" in record else ():
            default = record["methods"][record["default"]]
            gaps = [signed(gap(summary, default, key)) if summary is not default else "-" for key in SETS]
            name = f"`{record['checkpoint']}`"
            rows.append([*row(name, method, [summary], default=summary is default), *gaps])
    head = [*HEAD, "against the default, clean", "against the default, shifted"]
    return table(head, rows) if rows else "Not measured yet."


SETS = {"clean_hits": 1, "shifted_hits": len(MAIN) * len(SEVERITIES)}


def gap(this: Mapping[str, Any], that: Mapping[str, Any], key: str) -> np.ndarray:
    """The difference of two methods on each image that both saw, in points."""
    images = min(this["images"], that["images"])
    one, other = (hits(each, key)[:images] / SETS[key] for each in (this, that))
    return 100 * (one - other)


def signed(gaps: np.ndarray) -> str:
    """The mean, with its 95 % interval over images."""
    return f"{gaps.mean():+.1f} ± {1.96 * gaps.std(ddof=1) / len(gaps) ** 0.5:.1f}"


def paired(these: Sequence[Record], those: Sequence[Record], names: tuple[str, str]) -> list[str] | None:
    """The difference under shift and on clean images, with 95 % intervals over images and over seeds."""
    pairs = [
        (this["methods"][names[0]], that["methods"][names[1]])
        for this in these
        for that in those
        if this["network_seed"] == that["network_seed"] and names[0] in this["methods"] and names[1] in that["methods"]
    ]
    if not pairs:
        return None
    cells = []
    for key in SETS:
        gaps = [gap(this, that, key) for this, that in pairs]
        fewest = min(map(len, gaps))
        by_image = np.mean([gap[:fewest] for gap in gaps], 0)
        over_images = 1.96 * by_image.std(ddof=1) / len(by_image) ** 0.5
        over_seeds = mean_of([float(gap.mean()) for gap in gaps], (len(pairs), len(pairs)))
        seeds = f", seeds ± {over_seeds.margin:.1f}" if len(pairs) > 1 else ""
        cells.append(f"{over_seeds.value:+.1f} (images ± {over_images:.1f}{seeds})")
    return cells


def hits(summary: Mapping[str, Any], key: str) -> np.ndarray:
    values = unpacked(summary[key])
    if key == "clean_hits":
        values = np.unpackbits(values)[: summary["images"]]
    return values.astype(float)


def differences(records: Sequence[Record], dataset: str) -> str:
    found, rows = arms(records, dataset), []
    for title, (this, one), (that, other) in DIFFERENCES:
        cells = paired(found.get(this, []), found.get(that, []), (one, other))
        if cells:
            rows.append([title, *cells])
    return table(["difference", "clean", "shifted"], rows) if rows else "Not measured yet."


def by_corruption(records: Sequence[Record], dataset: str) -> str:
    chosen = [("bn128", "population"), ("gn", "population"), ("bkn2", "expected"), ("bkn2", "sample")]
    chosen += [("bkn1", "sample"), ("bkn1.link=False", "sample"), ("bn128", "adaptive from population, tuned")]
    found = arms(records, dataset)
    columns = [(arm, method) for arm, method in chosen if arm in found and summaries(found[arm], method)]
    rows = []
    for name in MAIN:
        values = [mean(mean(each["by_corruption"][name]) for each in summaries(found[a], m)) for a, m in columns]
        rows.append([name, *(f"{value:.1f}" for value in values)])
    head = ["corruption", *(f"{TITLES[arm]}, {method}" for arm, method in columns)]
    return table(head, rows) if rows and columns else "Not measured yet."


def tuned(records: Sequence[Record]) -> str:
    rows = []
    for dataset in DATASETS:
        for arm, of_arm in arms(records, dataset).items():
            for rule in of_arm[0]["tuning"]:
                if rule == "default":
                    continue
                for name in of_arm[0]["tuning"][rule]["chosen"]:
                    values = [str(record["tuning"][rule]["chosen"].get(name, "none")) for record in of_arm]
                    rows.append([DATASETS[dataset], TITLES[arm], name, ", ".join(values)])
    for record in records:
        for rule, about in record["tuning"].items() if "checkpoint" in record else ():
            for name, value in about["chosen"].items() if rule != "default" else ():
                rows.append([DATASETS[record["dataset"]], f"`{record['checkpoint']}`", name, str(value)])
    return table(["data", "network", "rule", "value, by seed"], rows) if rows else "Not measured yet."


def learned(records: Sequence[Record]) -> dict[tuple[str, bool], list[Record]]:
    """The records of learning without labels, by data set and by whether the network was trained with jitter."""
    groups: dict[tuple[str, bool], list[Record]] = {}
    for record in records:
        if "augmented" in record:
            groups.setdefault((record["dataset"], record["augmented"]), []).append(record)
    return groups


def unlabelled(records: Sequence[Record]) -> str:
    rows = []
    for (dataset, augmented), found in learned(records).items():
        name = f"ResNet18, {DATASETS[dataset]}{', trained with jitter' if augmented else ''}"
        for method in methods(found):
            of_method = summaries(found, method)
            columns = [spread([each[column] for each in of_method], 1) for column in ("clean", "shifted")]
            rows.append([name, method, *columns, str(len(of_method)), str(of_method[0]["images"])])
    head = ["network", "statistics, or what was learned", "clean", "shifted", "seeds", "images"]
    return table(head, rows) if rows else "Not measured yet."


def links(records: Sequence[Record]) -> str:
    """What the transition A is worth: networks with it against those in which it was held at zero."""
    rows = []
    for dataset in ("cifar10", "cifar100"):
        found = arms(records, dataset)
        cells = paired(found.get("bkn1", []), found.get("bkn1.link=False", []), ("sample", "sample"))
        if cells:
            rows.append([f"{DATASETS[dataset]}, trained, groups of 1", *cells])
    for (dataset, augmented), of_group in learned(records).items():
        for method in methods(of_group):
            if method.startswith("A, R and q"):
                cells = paired(of_group, of_group, (method, method.replace("A, R and q", "R and q, A = 0")))
                name = f"{DATASETS[dataset]}, {'trained with jitter, ' if augmented else ''}learned without labels"
                rows.append([f"{name} on {method.split(', ')[-1]}", *(cells or ["-", "-"])])
    return table(["with A against A = 0", "clean", "shifted"], rows) if rows else "Not measured yet."


def decision(records: Sequence[Record]) -> str:
    """Each checkpoint's default mode against its adaptive rules: what the rule for a fourth mode asks."""
    rows = []
    for record in records:
        default = record["methods"].get(record["default"]) if "checkpoint" in record else None
        for method, summary in record["methods"].items() if default else ():
            if method.startswith("adaptive"):
                clean, shifted = (gap(summary, default, key) for key in SETS)
                passes = "yes" if clean.mean() >= -0.3 and shifted.mean() > 0 else "no"
                name, mode = f"`{record['checkpoint']}`", f"`{record['default']}`"
                rows.append([name, mode, method, signed(clean), signed(shifted), passes])
    head = ["checkpoint", "default mode", "rule", "clean", "shifted", "passes"]
    return table(head, rows) if rows else "Not measured yet."


def cost() -> str:
    path = RESULTS / "shift_cost.json"
    if not path.exists():
        return "Not measured yet."
    record = json.loads(path.read_text())
    rows = [[row["method"], f"{row['ms']:.1f}", f"{row['ratio']:.2f}"] for row in record["rows"]]
    return table(["method", "ms", "relative to `population`"], rows)


def contents(records: Sequence[Record]) -> dict[str, str]:
    """Of the page's regions."""
    found = {"checkpoints": checkpoints(records), "decision": decision(records), "tuned": tuned(records)}
    for dataset in ("cifar10", "cifar100"):
        found[f"twins.{dataset}"] = twins(records, dataset)
        found[f"differences.{dataset}"] = differences(records, dataset)
    found["corruptions"] = by_corruption(records, "cifar10")
    networks = {
        "cifar10": [r for r in records if r.get("checkpoint") == "inception_cifar_bkn.cifar10"],
        "bn": arms(records, "cifar100").get("bn128", []),
        "imagenet": [r for r in records if r.get("checkpoint") == "efficientnet_lite0_bkn.imagenet"],
    }
    for name, of_network in networks.items():
        for of_32, text in ((False, "single"), (True, "means")):
            found[f"drift.{name}.{text}"] = roc_table(of_network, of_32)
    found["drift.summary"] = drift_summary(records)
    found["layers.accuracy"], found["layers.surprise"] = (
        layer_table(records, what) for what in ("accuracy", "surprise")
    )
    found["unlabelled"], found["links"], found["cost"] = unlabelled(records), links(records), cost()
    return found


def figure(records: Sequence[Record]) -> Any:
    """Accuracy by severity, one line per arm."""
    from matplotlib.figure import Figure

    present = [dataset for dataset in ("cifar10", "cifar100") if arms(records, dataset)]
    if not present:
        return None
    drawing = Figure(figsize=(5.2 * len(present) + 2.5, 4.2), layout="constrained")
    colours = {line: f"C{number}" for number, line in enumerate((a, m) for a, found in LINES.items() for m in found)}
    shown: dict[str, Any] = {}
    for number, dataset in enumerate(present, start=1):
        axes = drawing.add_subplot(1, len(present), number)
        for arm, of_arm in arms(records, dataset).items():
            for method in LINES[arm]:
                found = summaries(of_arm, method)
                if not found:
                    continue
                lines = [
                    [each["clean"], *(mean(each["by_corruption"][name][s] for name in MAIN) for s in range(5))]
                    for each in found
                ]
                height = [mean(values) for values in zip(*lines, strict=True)]
                error = [stdev(values) if len(values) > 1 else 0.0 for values in zip(*lines, strict=True)]
                shown[f"{TITLES[arm]}: {method}"] = axes.errorbar(
                    range(6), height, error, capsize=2, linewidth=1.3, color=colours[arm, method]
                )
        axes.set_title(f"{DATASETS[dataset]}, mean of 15 corruptions")
        axes.set_xlabel("severity (0: clean)")
        axes.set_ylabel("top-1, percent")
        axes.grid(alpha=0.3)
    axes.legend(shown.values(), shown.keys(), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawing
