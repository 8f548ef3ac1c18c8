"""The numbers and the plot of docs/performance.md, and all measurements as CSV, from results/benchmark_*.json."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bkn_zoo.checkpoints.config import Config
from studies.card_sections import gained, read_evaluations, read_speeds, speeds_of
from studies.render import Content, frame

Row = Mapping[str, Any]
Records = Mapping[str, Mapping[str, Any]]
"""The content of the files results/benchmark_NAME.json, by NAME."""

DATES = {
    "train": "2026-11-16",
    "train_16": "2026-11-16",
    "train_inception": "2026-11-16",
    "train_cpu": "2026-11-15",
    "infer_cuda": "2026-11-16",
}
"""Of records that do not say when they were made."""

TRAIN_GPU = ("train", "train_inception", "train_16")
"""The records with training steps on a GPU, a network's own first."""


HEADLINES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""The ratios of the first table, in groups; performance.toml explains them."""


def read_benchmarks(results: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(results.glob("benchmark_*.json"))
    return {path.stem.removeprefix("benchmark_"): json.loads(path.read_text()) for path in paths}


def _by_processor(kind: str, records: Records) -> list[str]:
    return [name for name in records if name.startswith(f"{kind}.")]


def row_of(name: str, fields: Row, records: Records) -> Row:
    """The row of a record that has these fields; a record without it, or with two, is an error."""
    (row,) = (row for row in records[name]["rows"] if fields.items() <= row.items())
    return row


def headlines(records: Records) -> pd.DataFrame:
    """The first table of docs/performance.md."""
    return frame(
        {
            "compared": group["compared"],
            "where": each["what"],
            "ratio": f"{row[each['ratio']]:.2f}",
            "target": f"{each['target']:.2f}" if "target" in each else None,
            **_measured_in(each["record"], records, row),
        }
        for group in HEADLINES.values()
        for each in group["ratios"]
        for row in [row_of(each["record"], each["row"], records)]
    )


def _measured_in(name: str, records: Records, row: Row) -> dict[str, str]:
    record = records[name]
    date = row.get("date") or record.get("date") or DATES[name]
    return {"measured on": record["hardware"], "date": date, "record": f"`benchmark_{name}.json`"}


def seconds(records: Records) -> pd.DataFrame:
    """The second table of docs/performance.md: what is a time, rather than a ratio."""
    name, network = "frontend_converted", {"model": "torchvision:resnet50", "way": "stand-in"}
    pair = [row_of(name, {**network, "statistics": mode}, records) for mode in ("population", "sample")]
    built = {"what": "converted ResNet50 in OpenVINO, both modes prepared, in seconds of one core", "target": "10"}
    rows = [built | {"seconds": f"{sum(row['build_s'] for row in pair):.1f}"} | _measured_in(name, records, pair[0])]
    for name in _by_processor("classify", records):
        image, missing = records[name]["rows"]
        for what, value, target in (
            ("`bkn-zoo classify`: first line on the terminal", image["first_line_s"], "1"),
            ("`bkn-zoo classify`: answer of the first start", image["first_start_s"], "-"),
            ("`bkn-zoo classify`: answer", image["end_s"], "2.5"),
            ("`bkn-zoo classify`: error for a missing file", missing["end_s"], "0.5"),
        ):
            found = {"what": what, "seconds": f"{value:.1f}", "target": target}
            rows.append(found | _measured_in(name, records, image))
    return frame(rows)[["what", "seconds", "target", "measured on", "date", "record"]]


def picture(records: Records) -> Any:
    """The ratios of the first table, a panel for each group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    heights = [len(group["ratios"]) for group in HEADLINES.values()]
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes, group in zip(panels, HEADLINES.values(), strict=True):
        names = [f"{each['what']} ({_short(records[each['record']])})" for each in group["ratios"]]
        places = list(range(len(names)))[::-1]
        for place, each in zip(places, group["ratios"], strict=True):
            value = row_of(each["record"], each["row"], records)[each["ratio"]]
            colour = "C0" if value <= 1 else "C1"
            axes.plot([1, value], [place, place], color=colour, linewidth=6, alpha=0.4, solid_capstyle="butt")
            axes.plot([value], [place], "o", color=colour)
            side = 1 if value > 1 else -1
            axes.annotate(f"{value:.2f}", (value, place), (8 * side, 0), textcoords="offset points", va="center",
                          ha="left" if side > 0 else "right")  # fmt: skip
        axes.set_yticks(places, names, fontsize=8)
        axes.set_title(group["title"], fontsize=10, loc="left")
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.08)
    panels[0].set_xlim(0.3, 2.5)
    panels[-1].set_xlabel("ratio of times (1: equal; below 1: faster)")
    return figure


def _short(record: Row) -> str:
    name = record["hardware"].replace(", 2 cores", "")
    return name.replace("Intel(R) Xeon(R) Processor", "Xeon").removeprefix("NVIDIA ")


def between_engine_and_service(record: Row) -> pd.DataFrame:
    """What the service adds to its engine, where that is most, in time of the cores."""
    rows = record["rows"]
    service = min((row for row in rows if row["server"] == "service"), key=lambda row: row["fraction_of_engine"])
    same = {name: service[name] for name in ("model", "input", "clients")}
    engine = next(row for row in rows if row["server"] == "engine" and same.items() <= row.items())
    cores = int(record["hardware"].split()[-2])  # "a name, 2 cores"
    bare, served = (1e3 * cores / row["images_per_s"] for row in (engine, service))
    busy = service["cpu_ms_per_image"]
    shares = {
        f"engine alone, {cores} cores together": bare,
        "service, its own process": busy,
        "of that, HTTP and decoding": busy - bare,
        f"service and clients, {cores} cores together": served,
        "of that, clients and idle cores": served - busy,
    }
    clients = f"{service['clients']} client{'s' * (service['clients'] > 1)}"
    about = f"`{service['model']}` at {service['input']} px, {clients}"
    return frame({about: name, "ms per image": f"{value:.1f}"} for name, value in shares.items())


def starts(records: Records) -> pd.DataFrame:
    """Seconds to the service's first answer, by processor."""
    rows = [
        {
            "checkpoint": row["checkpoint"],
            "measured on": record["hardware"],
            "start": row.get("start"),
            "seconds": f"{row['first_answer_s']:.1f}",
        }
        for record in (records[name] for name in _by_processor("start", records))
        for row in record["rows"]
        if row["precision"] == "auto"
    ]
    return frame(rows)


def summary(records: Records) -> dict[str, Content]:
    """The regions of docs/performance.md."""
    return {"headlines": headlines(records), "seconds": seconds(records)}


# All measurements.


def rounded(value: Any) -> Any:
    """Whole from 100 upward, three significant digits below."""
    if not isinstance(value, float):
        return value
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}" if value else "0"


def tables(records: Records, results: Path, checkpoints: Path) -> dict[str, Content]:
    """All measurements, for CSV files; `records` has command, hardware and versions of each."""
    rooflines = [row for name in TRAIN_GPU for row in _steps(records[name]["rooflines"], 256)]

    def several(names: Sequence[str], batch: int | None = None) -> list[pd.DataFrame]:
        found = (_steps(records[name]["rows"], batch) for name in names)
        return [_table(rows) for rows in found if rows]

    def on_each(kind: str) -> list[pd.DataFrame]:
        return several(_by_processor(kind, records))

    return {
        "records": frame(
            {
                "record": f"results/benchmark_{name}.json",
                "command": record["command"],
                "measured on": record["hardware"],
                "versions": ", ".join(f"{package} {version}" for package, version in record["versions"].items()),
            }
            for name, record in records.items()
            if "versions" in record
        ),
        "train_16": several(TRAIN_GPU, 16),
        "train_256": several(TRAIN_GPU, 256),
        "train_options": several(["train_standardized", "train_rank"]),
        "rooflines": _table(rooflines),
        "train_cpu": several(["train_cpu"]),
        "infer_cuda": several(["infer_cuda"]),
        "infer_cpu": several([name for name in records if name.startswith(("infer.", "infer_rank"))]),
        "converted": several(["frontend_converted"]),
        "classify": on_each("classify"),
        "defaults": on_each("defaults"),
        "counters": several([name for name in records if name.startswith("counters")]),
        "rivals": on_each("rivals"),
        "loading": on_each("loading"),
        "precision": frame(precisions(results, checkpoints)),
        "frontend": several(["frontend"]),
        "serve": several(["serve"]),
        "service": between_engine_and_service(records["serve"]),
        "first_answer": starts(records),
        "start": on_each("start"),
        "watch": on_each("watch"),
        "pooling": frame(json.loads((results / "pooling_kernels.json").read_text())["rows"]).drop(
            columns=["ms", "peak_gib"]
        ),
    }


def _steps(rows: list[dict[str, Any]], batch: int | None) -> list[dict[str, Any]]:
    """Those with gradient batches of this size; all, where none is given."""
    return [row for row in rows if batch in (None, row.get("gradient_batch"))]


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """All fields that differ between rows, in their order; images per second follow from the time of a step."""
    table = frame(rows).drop(columns="image", errors="ignore")
    if "ms_per_step" in table:
        table = table.drop(columns="images_per_s", errors="ignore")
    differing = [name for name in table if table[name].astype(str).nunique() > 1]
    return table[differing].map(rounded, na_action="ignore")


def precisions(results: Path, checkpoints: Path) -> list[dict[str, Any]]:
    """Of each checkpoint, in each precision and mode that it was evaluated in: accuracy, and time by processor."""
    rows, speeds = [], read_speeds(results)
    for folder in sorted(path.parent for path in checkpoints.glob("*/config.json")):
        config = Config.read(folder / "config.json")
        evaluations = read_evaluations(results / "evaluate", folder.name, ["cpu"])
        exact = {row["statistics"]: row["top1"] for found in evaluations[:1] for row in found["rows"]}
        for found in evaluations:
            precision = found.get("precision") or "f32"
            for row in found["rows"]:
                mode, top1 = row["statistics"], row["top1"]
                line = {"checkpoint": folder.name, "precision": precision, "statistics": mode, "top1": f"{top1:.2f}"}
                line["more than in f32"] = gained(top1, exact[mode]) if precision != "f32" else None
                for kind, measured in speeds.items():
                    ran, fields = ("openvino", precision, mode), ("engine", "precision", "statistics")
                    same = (r for r in speeds_of(config, measured) if tuple(r[field] for field in fields) == ran)
                    time = next(same, {})
                    line[f"ms, {kind}"] = rounded(time.get("ms_per_image"))
                    line[f"to population, {kind}"] = rounded(time.get("ratio_to_population"))
                rows.append(line)
    return rows
