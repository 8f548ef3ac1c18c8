"""The plots of docs/results.md: one message each; means over seeds, with bands or bars of one standard deviation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bkn_zoo.publishing.cards import DATASETS
from bkn_zoo.publishing.replication import Cell, Experiment, Plan, Record, cell, cells
from bkn_zoo.publishing.results import save_figures
from bkn_zoo.training.recipes import Recipe

COLOURS = {
    "BKN": "#1f77b4",
    "BKN, A held at zero": "#9ecae1",
    "BN": "#d62728",
    "BRN": "#ff7f0e",
    "GroupNorm": "#2ca02c",
}


SPREAD = ",\nmean and standard deviation over seeds"


def draw(plan: Plan, records: Mapping[str, Record], folder: Path) -> list[Path]:
    """All plots for which there are runs; those for which there are none are removed."""
    return save_figures({name: plot(plan, records) for name, plot in PLOTS.items()}, folder)


def _figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns)


def _experiment(plan: Plan, name: str) -> Experiment | None:
    return next((experiment for experiment in plan.experiments if experiment.name == name), None)


def _done(plan: Plan, name: str, records: Mapping[str, Record]) -> list[Cell]:
    experiment = _experiment(plan, name)
    return [] if experiment is None else [each for each in cells(experiment, records) if each.good]


def _band(axes: Any, xs: list[float], all_values: list[list[float]], label: str, colour: str, **style: Any) -> None:
    means = [mean(values) for values in all_values]
    spreads = [stdev(values) if len(values) > 1 else 0.0 for values in all_values]
    axes.plot(xs, means, label=label, color=colour, **style)
    low, high = zip(*((m - s, m + s) for m, s in zip(means, spreads, strict=True)), strict=True)
    axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def _controls(plan: Plan, records: Mapping[str, Record]) -> Any:
    found = _done(plan, "controls", records)
    if len(found) < 3:
        return None
    found.sort(key=lambda each: mean(each.top1()))
    figure, axes = _figure(7.5, 0.42 * len(found) + 1.2)
    for place, each in enumerate(found):
        values = each.top1()
        colour = COLOURS.get(each.arm.label, "#7f7f7f")
        axes.errorbar(
            mean(values), place, xerr=stdev(values) if len(values) > 1 else None, fmt="o", color=colour, capsize=3
        )
        axes.annotate(
            f"{mean(values):.1f}", (mean(values), place), xytext=(0, 6), textcoords="offset points", ha="center", size=8
        )
    axes.set_yticks(range(len(found)), [f"{e.arm.label} ({e.arm.gradient},{e.arm.group})" for e in found])
    axes.set(xlabel=f"test top-1 (%){SPREAD}", title=_title(plan, "controls"))
    axes.set_ylim(-0.6, len(found) - 0.2)
    axes.grid(axis="x", alpha=0.3)
    return figure


def _setting(recipe: Recipe) -> str:
    return f"{DATASETS[recipe.dataset].shown}, {recipe.model.rpartition('_')[0]}"


def _title(plan: Plan, name: str) -> str:
    experiment = _experiment(plan, name)
    assert experiment is not None
    recipe = experiment.arms[0].runs[0].recipe
    return f"{experiment.title}\n{_setting(recipe)}, {recipe.epochs} epochs"


def _link(plan: Plan, records: Mapping[str, Record]) -> Any:
    found = _done(plan, "link", records)
    lines = {
        label: sorted((each.arm.group, each.top1()) for each in found if each.arm.label == label)
        for label in ("BKN", "BKN, A held at zero")
    }
    if min(map(len, lines.values())) < 3:
        return None
    figure, axes = _figure(6.5, 4.2)
    for label, points in lines.items():
        xs, values = [float(group) for group, _ in points], [top1 for _, top1 in points]
        shown = "BKN, A learned" if label == "BKN" else label
        _band(axes, xs, values, shown, COLOURS["BKN"] if label == "BKN" else "#ff7f0e", marker="o")
    for each in found:
        if each.arm.label == "BN":
            axes.axhline(mean(each.top1()), color=COLOURS["BN"], linestyle="--", label="BN, whole batches of 128")
    groups = sorted({group for points in lines.values() for group, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(groups, [str(group) for group in groups])
    axes.minorticks_off()
    axes.set(xlabel="images per statistics group", ylabel=f"test top-1 (%){SPREAD}", title=_title(plan, "link"))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _gain(plan: Plan, records: Mapping[str, Record]) -> Any:
    found = _done(plan, "gain", records)
    lines: dict[int, list[tuple[float, list[float]]]] = {}
    for each in found:
        gain = each.arm.runs[0].recipe.norm_options.get("initial_gain", 0.5)
        lines.setdefault(each.arm.group, []).append((gain, each.top1(images="validation")))
    if not lines or max(map(len, lines.values())) < 3:
        return None
    figure, axes = _figure(6.5, 4.2)
    for (group, points), colour in zip(sorted(lines.items()), ("#1f77b4", "#ff7f0e"), strict=False):
        points.sort()
        shown = f"groups of {group} image{'s' if group > 1 else ''}"
        _band(axes, [gain for gain, _ in points], [v for _, v in points], shown, colour, marker="o")
    axes.set(xlabel="gain q at the start", ylabel=f"validation top-1 (%){SPREAD}", title=_title(plan, "gain"))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _course(axes: Any, each: Cell, against: str, label: str, colour: str, **style: Any) -> None:
    """Validation accuracy over the training, in the mode that was chosen at its end."""
    curves = [(record["curve"], record["chosen_statistics"]) for record in each.good]
    values = [[curve[k]["top1"][mode] for curve, mode in curves] for k in range(len(curves[0][0]))]
    _band(axes, [float(line[against]) for line in curves[0][0]], values, label, colour, **style)


def _curves(plan: Plan, records: Mapping[str, Record]) -> Any:
    found = [each for each in _done(plan, "controls", records) if all("top1" in r["curve"][0] for r in each.good)]
    wanted = [("BN", 128), ("BKN", 2), ("BN", 2), ("GroupNorm", 128)]
    chosen = [each for key in wanted for each in found if (each.arm.label, each.arm.group) == key]
    if len(chosen) < 3:
        return None
    figure, axes = _figure(6.5, 4.2)
    for each in chosen:
        style = {"linestyle": "--"} if each.arm.group == 128 and each.arm.label == "BN" else {}
        label = f"{each.arm.label} ({each.arm.gradient},{each.arm.group})"
        _course(axes, each, "epoch", label, COLOURS[each.arm.label], **style)
    recipe = chosen[0].arm.runs[0].recipe
    axes.set(xlabel="epoch", ylabel=f"validation top-1 (%){SPREAD}")
    axes.set_title(f"How training goes\n{_setting(recipe)}, averaged weights")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _micro_batches(plan: Plan, records: Mapping[str, Record]) -> Any:
    panels: dict[tuple[str, int, int], list[tuple[str, Cell]]] = {}
    for name in ("tiny", "tiny_fifth"):
        for each in _done(plan, name, records):
            norm = each.arm.label.partition(",")[0]
            panels.setdefault((name, each.arm.gradient, each.arm.group), []).append((norm, each))
    panels = {key: members for key, members in panels.items() if {"BN", "BKN"} <= {norm for norm, _ in members}}
    if len(panels) < 3:
        return None
    columns = 3
    rows = -(-len(panels) // columns)
    figure, axes = _figure(3.4 * columns, 2.9 * rows + 0.6, columns, rows)
    for place, ((name, gradient, group), members) in zip(axes.flat, panels.items(), strict=False):
        for norm, each in sorted(members, key=lambda member: list(COLOURS).index(member[0])):
            _course(place, each, "step", norm, COLOURS[norm])
        part = ", a fifth of the images" if name == "tiny_fifth" else ""
        place.set(title=f"({gradient},{group}){part}", xlabel="step", ylim=(0, None))
        place.grid(alpha=0.3)
        place.legend(loc="upper left")
    for place in list(axes.flat)[len(panels) :]:
        place.remove()
    figure.supylabel(f"validation top-1 (%){SPREAD}")
    recipe = next(iter(panels.values()))[0][1].arm.runs[0].recipe
    figure.suptitle(f"(gradient, statistics batch): {_setting(recipe)}, {recipe.epochs} epochs, averaged weights")
    return figure


def _variance_gap(plan: Plan, records: Mapping[str, Record]) -> Any:
    for setting in ("cifar10", "cifar100"):
        maps: dict[str, Any] = {}
        for norm in ("bn", "bkn"):
            arm = plan.arms.get(f"{setting}.{norm}.128-2")
            members = [] if arm is None else cell(arm, records).good
            maps |= {norm.upper(): each["variance_gap_map"] for each in members if "variance_gap_map" in each}
        if len(maps) == 2:
            break
    else:
        return None
    figure, axes = _figure(8.5, 4.2, columns=2)
    limit = 1.0
    for each, (norm, values) in zip(axes, maps.items(), strict=True):
        transposed = [list(row) for row in zip(*values, strict=True)]
        picture = each.imshow(
            transposed, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
        )
        size = mean(abs(value) for row in values for value in row)
        each.set(title=f"{norm}, mean |gap| {size:.2f}", xlabel="group of two images", ylabel="channel")
    figure.colorbar(picture, ax=axes, label="log(variance of the group / running variance)", extend="both")
    about = f"last layer of one network each, {DATASETS[setting].shown}"
    figure.suptitle(f"How far variances stray from their moving average: {about}")
    return figure


PLOTS: dict[str, Callable[[Plan, Mapping[str, Record]], Any]] = {
    "controls": _controls, "link": _link, "gain": _gain, "curves": _curves, "micro_batches": _micro_batches,
    "variance_gap": _variance_gap,
}  # fmt: skip
