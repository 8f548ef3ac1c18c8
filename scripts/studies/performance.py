"""The numbers of docs/performance.md and docs/performance_tables.md, and the plot, from results/benchmark_*.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from bkn_zoo.checkpoints.config import Config
from studies.card_sections import gained, read_evaluations, read_speeds
from studies.render import Content, frame

Row = Mapping[str, Any]
Records = Mapping[str, Mapping[str, Any]]
"""The content of the files results/benchmark_NAME.json, by NAME."""

DATES = {
    "train": "2026-11-16",
    "train_16": "2026-11-16",
    "train_inception": "2026-11-16",
    "train_cpu": "2026-11-15",
    "infer.x86_64": "2026-11-16",
    "infer.aarch64": "2026-11-16",
    "infer_cuda": "2026-11-16",
}
"""Of records that do not say when they were made."""

TRAIN_GPU = ("train", "train_inception", "train_16")
"""The records with training steps on a GPU, a network's own first."""


class Headline(NamedTuple):
    """A row of the first table: one ratio of one row of a record.

    Attributes:
        what: is compared.
        record: as in results/benchmark_RECORD.json.
        row: fields by which the row of the record is found.
        ratio: the field that is shown.
        target: the ratio that we aim at, if there is one.
    """

    what: str
    record: str
    row: dict[str, Any]
    ratio: str
    target: float | None = None


def _step(what: str, record: str, batch: int, group: int, mode: str = "eager", launch: str = "python") -> Headline:
    row = {"norm": "bkn", "gradient_batch": batch, "statistics_batch": group, "mode": mode, "launch": launch}
    return Headline(f"{what}, {batch} images in groups of {group}", record, row, "ratio_to_bn")


def _image(network: str, size: int, record: str, precision: str, **row: Any) -> Headline:
    engine = "torch" if record.endswith("cuda") else "openvino"
    row |= {"model": network, "norm": "bkn", "size": size, "engine": engine, "precision": precision}
    several = f", {row['batch']} at a time" if row.get("batch", 1) > 1 else ""
    what = f"{network}, {size} px, {precision}{several}"
    return Headline(what, record, row | {"statistics": "sample"}, "ratio_to_population")


def _converted(network: str, mode: str = "sample") -> dict[str, Any]:
    return {"model": network, "statistics": mode, "way": "stand-in"}


TRAINING = [
    _step("resnet101, captured step", "train_16", 16, 2, launch="graph"),
    _step("resnet101, reduce-overhead", "train_16", 16, 2, "reduce-overhead")._replace(target=1.15),
    _step("resnet101, from Python", "train_16", 16, 2),
    _step("resnet101, captured step", "train", 256, 4, launch="graph"),
    _step("resnet101, compiled step", "train", 256, 4, "compiled")._replace(target=1.02),
    _step("resnet101, from Python", "train", 256, 4),
    _step("inception_v2, captured step", "train_inception", 256, 4, launch="graph"),
    _step("inception_v2, from Python", "train_inception", 256, 4)._replace(target=1.05),
    _step("inception_cifar, float32", "train_cpu", 64, 2)._replace(ratio="ratio_to_bn_eager"),  # an older record
]
INFERENCE = [
    *(
        _image(network, 128, f"infer.{kind}", precision)._replace(target=target)
        for kind, targets in (("x86_64", {"f32": 1.25, "bf16": 1.5}), ("aarch64", {"f32": 1.25, "f16": 1.35}))
        for network in ("resnet101", "inception_v2")
        for precision, target in targets.items()
    ),
    *(_image(network, 128, "infer_avx512", "f32")._replace(target=1.25) for network in ("resnet101", "inception_v2")),
    *(
        Headline(
            f"{network}, converted, 224 px, f32", "frontend_converted", _converted(network), "ratio_to_population", 1.35
        )
        for network in ("torchvision:resnet50", "timm:efficientnet_lite0", "torchvision:regnet_y_400mf")
    ),
    *(
        Headline(
            f"efficientnet_lite0, the default checkpoint, file to answer, {precision}",
            "defaults.x86_64",
            {"checkpoint": "efficientnet_lite0_bkn.imagenet", "precision": precision, "statistics": "sample"},
            "ratio_to_population",
        )
        for precision in ("f32", "auto")
    ),
    _image("resnet101", 224, "infer_cuda", "bf16", batch=1),
    _image("resnet101", 224, "infer_cuda", "bf16", batch=32),
]


def read_benchmarks(results: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(results.glob("benchmark_*.json"))
    return {path.stem.removeprefix("benchmark_"): json.loads(path.read_text()) for path in paths}


def _by_processor(kind: str, records: Records) -> list[str]:
    return [name for name in records if name.startswith(f"{kind}.")]


def row_of(headline: Headline, records: Records) -> Row:
    """The row that a headline shows; a record without it, or with two, is an error."""
    (row,) = (row for row in records[headline.record]["rows"] if headline.row.items() <= row.items())
    return row


def ratio(headline: Headline, records: Records) -> float:
    return row_of(headline, records)[headline.ratio]


def headlines(records: Records) -> pd.DataFrame:
    """The first table of docs/performance.md."""
    compared = {"step of BKN relative to BN": TRAINING, "`sample` relative to `population`": INFERENCE}
    rows = [
        {
            "compared": name,
            "where": headline.what,
            "ratio": f"{ratio(headline, records):.2f}",
            "target": None if headline.target is None else f"{headline.target:.2f}",
            **_measured_in(headline.record, records, row_of(headline, records)),
        }
        for name, group in compared.items()
        for headline in group
    ]
    return frame(rows)


def _measured_in(name: str, records: Records, row: Row) -> dict[str, str]:
    record = records[name]
    date = row.get("date") or record.get("date") or DATES[name]
    return {"measured on": _processor(record), "date": date, "record": f"`benchmark_{name}.json`"}


def _processor(record: Row) -> str:
    return record["hardware"] + (", AMX switched off" if record.get("instructions") == "AVX512_CORE" else "")


def seconds(records: Records) -> pd.DataFrame:
    """The second table of docs/performance.md: what is a time, rather than a ratio."""
    name = "frontend_converted"
    wanted = [_converted("torchvision:resnet50", mode) for mode in ("population", "sample")]
    pair = [row for row in records[name]["rows"] if any(each.items() <= row.items() for each in wanted)]
    built = {"what": "converted ResNet50 in OpenVINO, both modes prepared, in seconds of one core", "target": "10"}
    rows = [built | {"seconds": f"{sum(row['build_s'] for row in pair):.1f}"} | _measured_in(name, records, pair[0])]
    for name in _by_processor("classify", records):
        image, missing = records[name]["rows"]
        for what, value, target in (
            ("`bkn-zoo classify`: first line on the terminal", image["first_line_s"], "1"),
            ("`bkn-zoo classify`: answer", image["end_s"], "4"),
            ("`bkn-zoo classify`: error for a missing file", missing["end_s"], "0.5"),
        ):
            found = {"what": what, "seconds": f"{value:.1f}", "target": target}
            rows.append(found | _measured_in(name, records, image))
    return frame(rows)[["what", "seconds", "target", "measured on", "date", "record"]]


def picture(records: Records) -> Any:
    """The ratios of the first table, a panel for training and one for inference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, height_ratios=[len(TRAINING), len(INFERENCE)])
    titles = "Training step: BKN relative to BN", "Inference: statistics 'sample' relative to 'population'"
    for axes, title, group in zip(panels, titles, (TRAINING, INFERENCE), strict=True):
        ratios = [ratio(headline, records) for headline in group]
        places = list(range(len(group)))[::-1]
        for place, value in zip(places, ratios, strict=True):
            colour = "C0" if value <= 1 else "C1"
            axes.plot([1, value], [place, place], color=colour, linewidth=6, alpha=0.4, solid_capstyle="butt")
            axes.plot([value], [place], "o", color=colour)
            side = 1 if value > 1 else -1
            axes.annotate(f"{value:.2f}", (value, place), (8 * side, 0), textcoords="offset points", va="center",
                          ha="left" if side > 0 else "right")  # fmt: skip
        places_of = [f"{headline.what} ({_short(records[headline.record])})" for headline in group]
        axes.set_yticks(places, places_of, fontsize=8)
        axes.set_title(title, fontsize=10, loc="left")
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.08)
    panels[0].set_xlim(0.5, 2.5)
    panels[1].set_xlabel("ratio of times (1: equal; below 1: faster)")
    return figure


def _short(record: Row) -> str:
    name = _processor(record).replace(", 2 cores", "")
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
    captured = next(each for each in TRAINING if each.record == "train" and each.row["launch"] == "graph")
    return {
        "headlines": headlines(records),
        "seconds": seconds(records),
        "fastest": f"{ratio(captured._replace(ratio='ratio_to_fastest_bn'), records):.2f}",
        "service": between_engine_and_service(records["serve"]),
        "start": starts(records),
    }


# The appendix.


def rounded(value: Any) -> Any:
    """Whole from 100 upward, three significant digits below."""
    if not isinstance(value, float):
        return value
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}" if value else "0"


def tables(records: Records, results: Path, checkpoints: Path) -> dict[str, Content]:
    """The regions of docs/performance_tables.md."""
    rooflines = [row for name in TRAIN_GPU for row in _steps(records[name]["rooflines"], 256)]

    def several(names: Sequence[str], batch: int | None = None) -> list[str | pd.DataFrame]:
        return [part for name in names for part in _measured(name, records[name], batch)]

    def on_each(kind: str) -> list[str | pd.DataFrame]:
        return several(_by_processor(kind, records))

    return {
        "train_16": several(TRAIN_GPU, 16),
        "train_256": several(TRAIN_GPU, 256),
        "rooflines": _table(rooflines),
        "train_cpu": several(["train_cpu"]),
        "infer_cuda": several(["infer_cuda"]),
        "infer_cpu": several([*_by_processor("infer", records), "infer_avx512"]),
        "converted": several(["frontend_converted"]),
        "classify": on_each("classify"),
        "defaults": on_each("defaults"),
        "counters": on_each("counters"),
        "rivals": on_each("rivals"),
        "loading": on_each("loading"),
        "precision": frame(precisions(results, checkpoints)),
        "frontend": several(["frontend"]),
        "serve": several(["serve"]),
        "start": on_each("start"),
    }


def _measured(name: str, record: Row, batch: int | None) -> list[str | pd.DataFrame]:
    """A record's rows, and how they were measured."""
    rows = _steps(record["rows"], batch)
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    about = f"`results/benchmark_{name}.json`: `{record['command']}`, {_processor(record)}, {versions}."
    return [about, _table(rows)] if rows else []


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
        size = config.preprocessing.size if config.preprocessing else None
        evaluations = read_evaluations(results / "evaluate", folder.name, ["cpu"])
        exact = {row["statistics"]: row["top1"] for found in evaluations[:1] for row in found["rows"]}
        for found in evaluations:
            precision = found.get("precision") or "f32"
            for row in found["rows"]:
                mode, top1 = row["statistics"], row["top1"]
                line = {"checkpoint": folder.name, "precision": precision, "statistics": mode, "top1": f"{top1:.2f}"}
                line["more than in f32"] = gained(top1, exact[mode]) if precision != "f32" else None
                for kind, speed in speeds.items():
                    ran = (*config.architecture.rsplit("_", 1), "openvino", precision, mode, size)
                    fields = ("model", "norm", "engine", "precision", "statistics", "size")
                    time = next((r for r in speed["rows"] if tuple(r[field] for field in fields) == ran), {})
                    line[f"ms, {kind}"] = rounded(time.get("ms_per_image"))
                    line[f"to population, {kind}"] = rounded(time.get("ratio_to_population"))
                rows.append(line)
    return rows
