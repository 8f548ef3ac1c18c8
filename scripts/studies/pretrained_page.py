"""The tables and pictures of docs/pretrained.md, from the records of the study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.publishing.results import table
from studies.base import Record
from studies.chance import between
from studies.pretrained_plan import ARMS, Drift, Experiment, diverged, measured

COLOURS = {"bn": "#d62728", "frozen": "#7f7f7f", "gn": "#2ca02c", "bkn": "#1f77b4"}
METRICS = {"top1": "top-1 (%)", "miou": "mean IoU (%)"}
# CamVid's own, from sky to bicyclist; then void.
PALETTE = (
    (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0), (192, 128, 128),
    (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192), (0, 0, 0),
)  # fmt: skip


SAYS = {"held": "BKN is ahead", "did not hold": "BKN is behind", "within chance": "within chance"}


def _drift(rows: Sequence[Mapping[str, Any]]) -> str:
    batches = sorted({row["batch"] for row in rows})
    found = {(row["start"], row["batch"]): row["similarity"] for row in rows}
    shown = [
        {"start of BKN": str(start), **{f"batch {batch}": f"{found[start, batch]:.2f}" for batch in batches}}
        for start in dict.fromkeys(row["start"] for row in rows)
    ]
    return table(shown, list(shown[0])) + "\n"


def contents(experiments: Sequence[Experiment], records: Mapping[str, Record]) -> dict[str, str]:
    """Those of the regions of docs/pretrained.md."""
    found = {"drift": _drift(records[Drift.NAME]["rows"]) if Drift.NAME in records else "Not run yet."}
    for each in experiments:
        found |= {
            f"{each.name}.images": f"{each.images:,}",
            f"{each.name}.state": _state(each, records),
            f"{each.name}.results": "\n".join([_results(each, records), *_verdict(each, records)]),
            f"{each.name}.modes": _modes(each, records),
            f"{each.name}.tried": _tried(each, records),
        }
    return found


def _state(experiment: Experiment, records: Mapping[str, Record]) -> str:
    missing = sum(run.key not in records for run in experiment.planned(records))
    done = [record for record in records.values() if record.get("run", {}).get("experiment") == experiment.name]
    if not done:
        return "No run is done yet: the cells below are empty.\n"
    where = ", ".join(sorted({f"{each['hardware']}, torch {each['versions']['torch']}" for each in done}))
    rest = "none is missing" if not missing else f"{missing} or more are missing, and their cells are empty"
    return f"{len(done)} runs are done ({where}); {rest}.\n"


def _spread(values: Sequence[float], seeds: int, lost: int = 0) -> str:
    if not values:
        return "does not train" if lost else "not run yet"
    text = f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
    rest = [f"{len(values)} of {seeds} seeds"] if len(values) + lost < seeds else []
    rest += [f"{lost} of {seeds} diverged"] if lost else []
    return f"{text} ({', '.join(rest)})" if rest else text


def _cell(experiment: Experiment, arm: str, batch: int, records: Mapping[str, Record]) -> str:
    shown = experiment.shown(arm, batch, records)
    if shown and all("failed" in records.get(run.key, {}) for run in shown[:1]):
        return "does not train"
    lost = diverged(experiment, arm, batch, records)
    return _spread(measured(experiment, arm, batch, records), experiment.seeds, lost)


def _results(experiment: Experiment, records: Mapping[str, Record]) -> str:
    heads = {batch: f"{batch} image{'s' if batch > 1 else ''} a batch" for batch in experiment.batches}
    rows = [
        {
            METRICS[experiment.metric]: ARMS[arm],
            **{head: _cell(experiment, arm, batch, records) for batch, head in heads.items()},
        }
        for arm in experiment.arms
    ]
    return table(rows, list(rows[0])) + "\n"


def _verdict(experiment: Experiment, records: Mapping[str, Record]) -> list[str]:
    """BKN against the best of the others, and the usual one, of those with several seeds of which none diverged."""
    lines = []
    for batch in experiment.batches:
        found = {arm: measured(experiment, arm, batch, records) for arm in experiment.arms}
        whole = {
            arm: values
            for arm, values in found.items()
            if len(values) > 1 and not diverged(experiment, arm, batch, records)
        }
        this = whole.pop("bkn", None)
        if this is None or not whole:
            continue
        best = max(whole, key=lambda arm: mean(whole[arm]))
        compared = [_compared(this, whole[arm], ARMS[arm]) for arm in dict.fromkeys((best, "frozen")) if arm in whole]
        lines.append(f"- {batch} image{'s' if batch > 1 else ''} a batch: {'; '.join(compared)}.")
    about = (
        "BKN against the best of the others, and against frozen BN, with the standard error of the difference; ahead "
        "or behind is where zero is outside its 95 % interval:\n"
    )
    return [about, "\n".join(lines) + "\n"] if lines else []


def _compared(these: Sequence[float], those: Sequence[float], name: str) -> str:
    found = between(these, those)
    return f"{found.value:+.1f} ± {found.error:.1f} to {name}, {SAYS[found.verdict()]}"


def _modes(experiment: Experiment, records: Mapping[str, Record]) -> str:
    rows = [
        {"norm": ARMS[arm], "images a batch": batch}
        | {
            mode: _spread(
                measured(experiment, arm, batch, records, mode),
                experiment.seeds,
                diverged(experiment, arm, batch, records),
            )
            for mode in MODES
        }
        for arm in ("bn", "bkn")
        for batch in experiment.batches
    ]
    return table(rows, list(rows[0])) + "\n"


def _tried(experiment: Experiment, records: Mapping[str, Record]) -> str:
    """Every setting with its validation result, and the chosen one marked."""
    rows = []
    for arm, settings in experiment.arms.items():
        for each in settings:
            row: dict[str, Any] = {"norm": ARMS[arm], "setting": ", ".join(f"{k} = {v}" for k, v in each.items())}
            for batch in experiment.batches:
                run, best = experiment.run(arm, batch, each, 0), experiment.chosen(arm, batch, records)
                record = records.get(run.key)
                text = (
                    "not run yet"
                    if record is None
                    else record.get("failed") or f"{max(record['validation'].values()):.1f}"
                )
                row[f"validation, batch {batch}"] = f"**{text}**" if best and best.key == run.key else text
            rows.append(row)
    return table(rows, list(rows[0])) + "\n"


# The pictures.


def figures(experiments: Sequence[Experiment], records: Mapping[str, Record], predictions: Path) -> dict[str, Any]:
    """One plot for each experiment, and predictions where a run left some in their folder."""
    plots = {each.name: _plot(each, records) for each in experiments}
    return plots | {f"{each.name}_predictions": _predictions(each, records, predictions) for each in experiments}


def _plot(experiment: Experiment, records: Mapping[str, Record]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for arm in experiment.arms:
        found = {batch: measured(experiment, arm, batch, records) for batch in experiment.batches}
        found = {batch: values for batch, values in found.items() if values}
        if found:
            spreads = [stdev(values) if len(values) > 1 else 0.0 for values in found.values()]
            axes.errorbar(
                [str(batch) for batch in found], [mean(values) for values in found.values()], spreads,
                label=ARMS[arm], color=COLOURS[arm], marker="o", capsize=3,
            )  # fmt: skip
    if not axes.has_data():
        return None
    axes.set(xlabel="images in the whole batch", ylabel=f"test {METRICS[experiment.metric]}", title=experiment.title)
    figure.legend(loc="outside right upper")
    return figure


def _predictions(experiment: Experiment, records: Mapping[str, Record], folder: Path) -> Any:
    """A row for each image, the truth and every arm's prediction beside it, at the smallest batch.

    Of arms that lack seeds there is none, or one of a setting that is not theirs any more.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from PIL import Image

    batch = min(experiment.batches)
    whole = [arm for arm in experiment.arms if len(measured(experiment, arm, batch, records)) == experiment.seeds]
    files = {"truth": folder / "truth.png"} | {ARMS[arm]: folder / f"{arm}-{batch}.png" for arm in whole}
    files = {name: path for name, path in files.items() if path.exists()}
    if experiment.metric != "miou" or len(files) < 2:
        return None
    columns = {"image": np.asarray(Image.open(folder / "images.jpg"))}
    columns |= {name: np.array(PALETTE, np.uint8)[np.asarray(Image.open(path))] for name, path in files.items()}
    figure = Figure(figsize=(2.2 * len(columns), 5.2), layout="constrained")
    for axes, (name, picture) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(name)
        axes.axis("off")
    return figure
