"""The plots of docs/results.md. Each shows one message, with means over seeds and their uncertainty.

Titles are computed from the values that are drawn.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping
from statistics import mean, stdev
from typing import Any

from bkn_zoo.publishing.cards import DATASETS
from bkn_zoo.training.recipes import Recipe
from studies.base import Record
from studies.chance import Difference, between, spread
from studies.records import counted
from studies.replication_cells import Cell, cell, cells, deviation
from studies.replication_page import WORTH, leads
from studies.replication_plan import HELD, Plan

COLOURS = {"BKN": "#1f77b4", HELD: "#9467bd", "BN": "#d62728", "BRN": "#ff7f0e", "GroupNorm": "#2ca02c"}
DEFAULT_GAIN = 0.5
TICKS = (-100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100)
BEYOND = "(points, with 95 % interval; beyond ±2 logarithmic)"
SPREAD = ",\nmean and standard deviation over seeds"


def figures(plan: Plan, records: Mapping[str, Record]) -> dict[str, Any]:
    """By name; None where runs are missing."""
    return {name: plot(plan, records) for name, plot in PLOTS.items()}


def _figure(width: float, height: float, columns: int = 1, rows: int = 1, sharey: bool = False) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharey=sharey)


def _cells(plan: Plan, name: str, records: Mapping[str, Record]) -> list[Cell]:
    return [each for experiment in plan.experiments if experiment.name == name for each in cells(experiment, records)]


def _done(plan: Plan, name: str, records: Mapping[str, Record]) -> list[Cell]:
    return [each for each in _cells(plan, name, records) if each.good]


def _recipe(each: Cell) -> Recipe:
    return each.arm.runs[0].recipe


def _setting(recipe: Recipe) -> str:
    return f"{DATASETS[recipe.dataset].shown}, {recipe.model.rpartition('_')[0]}"


def _title(message: str, below: str, width: int = 66) -> str:
    return "\n".join([*(textwrap.fill(line, width) for line in message.splitlines()), below])


def _less(this: Cell, that: Cell, plan: Plan, records: Mapping[str, Record], images: str = "test") -> Difference:
    typical = deviation(this.arm.setting, plan, records, images)
    return between(this.top1(images=images), that.top1(images=images), typical)


def _worth(found: Difference) -> str:
    """The verdict in the words of the page's tables, without the number of seeds."""
    return WORTH[found.verdict().partition(" (")[0]]


def _is(found: Difference) -> str:
    """What follows "this is", and precedes "that"."""
    side = {"a gain": "above", "a loss": "below"}.get(_worth(found))
    return f"{abs(found.value):.1f} points {side}" if side else "within chance of"


def _listed(words: Iterable[object]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def _looks(number: int) -> list[dict[str, Any]]:
    """Styles of lines that do not stand for a norm: colours from dark to light, each with its own marker."""
    from matplotlib import colormaps

    shades = [colormaps["viridis"](0.85 * k / max(number - 1, 1)) for k in range(number)]
    return [{"color": shade, "marker": "os^Dv"[k % 5]} for k, shade in enumerate(shades)]


def _band(axes: Any, xs: list[float], all_values: list[list[float]], label: str, colour: str, **style: Any) -> None:
    """A line of means; with several seeds, a band around it."""
    means = [mean(values) for values in all_values]
    axes.plot(xs, means, label=label, color=colour, **style)
    if min(map(len, all_values)) > 1:
        spreads = [stdev(values) for values in all_values]
        low, high = zip(*((m - s, m + s) for m, s in zip(means, spreads, strict=True)), strict=True)
        axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def _controls(plan: Plan, records: Mapping[str, Record]) -> Any:
    found = _done(plan, "controls", records)
    if len(found) < 3:
        return None
    found.sort(key=lambda each: mean(each.top1()))
    figure, axes = _figure(7.5, 0.42 * len(found) + 1.5)
    for place, each in enumerate(found):
        values = each.top1()
        axes.errorbar(
            mean(values), place, xerr=stdev(values) if len(values) > 1 else None, fmt="o", capsize=3,
            color=COLOURS[each.arm.label],
        )  # fmt: skip
        axes.annotate(
            f"{mean(values):.1f}", (mean(values), place), xytext=(0, 6), textcoords="offset points", ha="center", size=8
        )
    axes.set_yticks(range(len(found)), [f"{e.arm.label} ({e.arm.gradient},{e.arm.group})" for e in found])
    axes.set_xlabel(f"test top-1 (%){SPREAD}")
    recipe = _recipe(found[0])
    about = f"{_setting(recipe)}, {recipe.epochs} epochs, (gradient batch, statistics batch)"
    figure.suptitle(_title(_norm_and_link(found, plan, records), about, 90), size=10.5)
    axes.set_ylim(-0.6, len(found) - 0.2)
    axes.grid(axis="x", alpha=0.3)
    return figure


def _norm_and_link(found: list[Cell], plan: Plan, records: Mapping[str, Record]) -> str:
    """BKN's lead over BN and over BKN without the link, for each group size that has all three."""
    of = {(each.arm.label, each.arm.group): each for each in found}
    parts = []
    for group in sorted({group for _, group in of}):
        if all((label, group) in of for label in ("BKN", "BN", HELD)):
            bn, held = (_is(_less(of["BKN", group], of[label, group], plan, records)) for label in ("BN", HELD))
            over = f"{bn} BN, {held} A held at zero" if of["BN", group].learned() else f"{held} A held at zero"
            none = "" if of["BN", group].learned() else "; BN did not learn"
            parts.append(f"Groups of {group}: BKN is {over}{none}")
    return "\n".join(parts) or "Each norm by the size of groups"


def _link(plan: Plan, records: Mapping[str, Record]) -> Any:
    found = _done(plan, "link", records)
    lines = {label: {each.arm.group: each for each in found if each.arm.label == label} for label in ("BKN", HELD)}
    if min(map(len, lines.values())) < 3:
        return None
    figure, axes = _figure(6.5, 4.4)
    groups = sorted({group for points in lines.values() for group in points})
    for label, points in lines.items():
        shown, marker = (f"{label}, A learned", "o") if label == "BKN" else (label, "s")
        xs = [float(group) for group in sorted(points)]
        _band(axes, xs, [points[group].top1() for group in sorted(points)], shown, COLOURS[label], marker=marker)
    for each in found:
        if each.arm.label == "BN":
            ends, shown = [float(groups[0]), float(groups[-1])], f"BN, whole batches of {each.arm.group}"
            _band(axes, ends, [each.top1()] * 2, shown, COLOURS["BN"], linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(groups, [str(group) for group in groups])
    axes.minorticks_off()
    axes.set(xlabel="images per statistics group", ylabel=f"test top-1 (%){SPREAD}")
    kinds: dict[str, list[int]] = {"a gain": [], "a loss": [], "within chance": []}
    for group in groups:
        if group in lines["BKN"] and group in lines[HELD]:
            kinds[_worth(_less(lines["BKN"][group], lines[HELD][group], plan, records))].append(group)
    said = "; ".join(f"{kind} with groups of {_listed(these)}" for kind, these in kinds.items() if these)
    recipe = _recipe(found[0])
    axes.set_title(_title(f"Learning A: {said}", f"{_setting(recipe)}, {recipe.epochs} epochs"), size=10.5)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def _gain(plan: Plan, records: Mapping[str, Record]) -> Any:
    """Accuracy with other initial gains than the default, for each group size."""
    found = [each for name in ("gain", "gain_larger") for each in _done(plan, name, records)]
    of = {(each.arm.group, _recipe(each).norm_options.get("initial_gain", DEFAULT_GAIN)): each for each in found}
    against = {
        (group, start): _less(each, of[group, DEFAULT_GAIN], plan, records, "validation")
        for (group, start), each in sorted(of.items(), key=lambda item: item[0])
        if start != DEFAULT_GAIN and (group, DEFAULT_GAIN) in of
    }
    if len(against) < 3:
        return None
    figure, axes = _figure(7.0, 4.6)
    groups, starts = (sorted({key[k] for key in against}) for k in (0, 1))
    for k, (start, look) in enumerate(zip(starts, _looks(len(starts)), strict=True)):
        members = [(groups.index(group), each) for (group, at), each in against.items() if at == start]
        axes.errorbar(
            [place + 0.18 * (k - (len(starts) - 1) / 2) for place, _ in members], [each.value for _, each in members],
            [each.margin for _, each in members], label=f"q = {start:g}", linestyle="", capsize=3, **look,
        )  # fmt: skip
    axes.axhline(0, color="black", linewidth=1, label=f"q = {DEFAULT_GAIN:g}, the default")
    _both_small_and_large(axes, against.values())
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set(xlabel="images per statistics group", xlim=(-0.5, len(groups) - 0.5))
    axes.set_ylabel(f"validation top-1 minus that of the default\n{BEYOND}")
    beyond = [
        f"{start:g} with groups of {group} ({each.value:+.1f})"
        for (group, start), each in against.items()
        if _worth(each) != "within chance"
    ]
    recipe = _recipe(found[0])
    said = f"{len(beyond)} {'is' if len(beyond) == 1 else 'are'} beyond chance: {_listed(beyond)}" if beyond else ""
    message = f"Of {len(against)} initial gains other than {DEFAULT_GAIN:g}, {said or 'none is beyond chance'}"
    axes.set_title(_title(message, f"{_setting(recipe)}, {recipe.epochs} epochs"), size=10.5)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(starts) + 1)
    return figure


def _courses(each: Cell) -> tuple[list[int], list[int], list[list[float]]]:
    """Epochs, steps, and the validation accuracy of every seed at each of them, in the chosen mode."""
    curves = [record["curve"] for record in each.good]
    epochs, steps = ([line[name] for line in curves[0]] for name in ("epoch", "step"))
    return epochs, steps, [[line["top1"][each.chosen] for line in lines] for lines in zip(*curves, strict=True)]


def _curves(plan: Plan, records: Mapping[str, Record]) -> Any:
    found = [each for each in _done(plan, "controls", records) if all("top1" in r["curve"][0] for r in each.good)]
    wanted = [("BN", 128), ("BKN", 2), ("BN", 2), ("GroupNorm", 128)]
    chosen = {key: each for key in wanted for each in found if (each.arm.label, each.arm.group) == key}
    if len(chosen) < 3 or ("BKN", 2) not in chosen:
        return None
    figure, axes = _figure(6.5, 4.4)
    shown = {}
    for (label, group), each in chosen.items():
        epochs, _, values = _courses(each)
        name = f"{label} ({each.arm.gradient},{group})"
        style = "--" if group == 128 and label == "BN" else "-"
        _band(axes, [float(epoch) for epoch in epochs], values, name, COLOURS[label], linestyle=style)
        shown[name] = each
    axes.set(xlabel="epoch", ylabel=f"validation top-1 (%){SPREAD}")
    (this,) = (name for name in shown if name.startswith("BKN"))
    ends = {that: _less(shown[this], shown[that], plan, records, "validation") for that in shown if that != this}
    said = _listed(f"{_is(end)} {that}" for that, end in ends.items())
    recipe = _recipe(chosen["BKN", 2])
    axes.set_title(_title(f"At the end, {this} is {said}", f"{_setting(recipe)}, averaged weights"), size=10.5)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    return figure


def _micro_batches(plan: Plan, records: Mapping[str, Record]) -> Any:
    panels: dict[tuple[str, int, int], dict[str, Cell]] = {}
    for name in ("tiny", "tiny_fifth"):
        for each in _cells(plan, name, records):
            if each.records and not each.arm.ablation:
                norm, place = each.arm.label.partition(",")[0], (name, each.arm.gradient, each.arm.group)
                panels.setdefault(place, {})[norm] = each
    # GroupNorm does not use groups of images, so its run with whole batches is shown in every panel of that size.
    alone = {key[:2]: members.pop("GroupNorm") for key, members in panels.items() if "GroupNorm" in members}
    panels = {
        key: members
        for key, members in panels.items()
        if all(norm in members and members[norm].good for norm in ("BN", "BKN"))
    }
    if len(panels) < 3:
        return None
    columns = 3
    rows = -(-len(panels) // columns)
    figure, axes = _figure(3.4 * columns, 2.9 * rows + 0.8, columns, rows)
    first: dict[str, Any] = {}
    ahead = 0
    for panel, ((name, gradient, group), members) in zip(axes.flat, panels.items(), strict=False):
        if first.setdefault(name, panel) is not panel:
            panel.sharey(first[name])
        for norm in (norm for norm in COLOURS if norm in members):
            _course(panel, norm, members[norm])
        if (name, gradient) in alone:
            _course(panel, "GroupNorm", alone[name, gradient], linewidth=0.9, linestyle="-.")
        part = ", a fifth of the images" if name == "tiny_fifth" else ""
        panel.set(title=f"({gradient},{group}){part}", xlabel="step")
        panel.grid(alpha=0.3)
        panel.locator_params(axis="x", nbins=4)
        panel.legend(loc="upper left", fontsize=9)
        ahead += _worth(_less(members["BKN"], members["BN"], plan, records)) == "a gain"
    for panel in first.values():
        panel.set_ylim(0, 1.15 * panel.get_ylim()[1])  # room for the legend
    for panel in list(axes.flat)[len(panels) :]:
        panel.remove()
    figure.supylabel(f"validation top-1 (%){SPREAD}")
    recipe = _recipe(next(iter(panels.values()))["BKN"])
    message = (
        f"On test images BKN ends above BN by more than chance with {ahead} of {len(panels)} pairs\n"
        "of gradient and statistics batch"
    )
    about = f"{_setting(recipe)}, {recipe.epochs} epochs, averaged weights; a line of one seed has no band"
    figure.suptitle(_title(message, about, 90))
    return figure


def _course(axes: Any, norm: str, each: Cell, **style: Any) -> None:
    """A line over steps, labelled with its number of seeds; a cross marks the last point of each diverged seed."""
    lost = [record["curve"][-1] for record in each.records if "failed" in record and record["curve"]]
    if each.good:
        _, steps, values = _courses(each)
        shown = f"{norm}, {counted(len(each.good))}"
        _band(axes, [float(step) for step in steps], values, shown, COLOURS[norm], **style)
    if len(each.good) < len(each.records):
        xs, ys = [line["step"] for line in lost], [max(line["top1"].values()) for line in lost]
        shown = f"{norm}, {counted(len(each.records) - len(each.good))} diverged"
        axes.plot(xs, ys, "x", color=COLOURS[norm], label=shown, clip_on=False)


def _both_small_and_large(axes: Any, found: Iterable[Difference]) -> None:
    """A scale on which one very large difference does not flatten the others."""
    ends = [each.value + side * (each.margin if each.error is not None else 0) for each in found for side in (-1, 1)]
    low, high = max(t for t in TICKS if t <= min(0.0, *ends)), min(t for t in TICKS if t >= max(1.0, *ends))
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_yscale("symlog", linthresh=2, linscale=2)
    axes.set_ylim(low, high)
    axes.set_yticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    axes.minorticks_off()


def _lengths(plan: Plan, records: Mapping[str, Record]) -> Any:
    """BKN's lead over each rival after a short training and at the full length of the recipe."""
    found = sorted(leads(plan, records), key=lambda pair: -pair[0].points.value)
    if not found:
        return None
    rivals = list(dict.fromkeys(short.over.label for short, _ in found))
    arms = list(dict.fromkeys((short.arm.setting, short.arm.group) for short, _ in found))
    looks = dict(zip(arms, _looks(len(arms)), strict=True))
    figure, grid = _figure(3.6 * len(rivals) + 0.6, 4.6, columns=len(rivals), sharey=True)
    panels = list(grid) if len(rivals) > 1 else [grid]
    lines: dict[str, Any] = {}
    for axes, rival in zip(panels, rivals, strict=True):
        for ends in (ends for ends in found if ends[0].over.label == rival):
            arm, recipes = ends[0].arm, [lead.arm.runs[0].recipe for lead in ends]
            sizes = [f"{recipe.size} px" for recipe in recipes]
            more = f", {' and '.join(sizes)}" if sizes[0] != sizes[1] else ""
            once = " (the latter with one seed)" if ends[1].points.error is None else ""
            epochs = f"{recipes[0].epochs} and {recipes[1].epochs} epochs{once}"
            shown = f"{DATASETS[recipes[0].dataset].shown} ({arm.gradient},{arm.group}), {epochs}{more}"
            look = looks[arm.setting, arm.group]
            beside = 0.03 * (arms.index((arm.setting, arm.group)) - len(arms) / 2)  # of one another, to be seen
            axes.plot([beside, 1 + beside], [lead.points.value for lead in ends], label=shown, **look)
            for x, lead in enumerate(ends):
                sure = lead.points.error is not None
                axes.errorbar(x + beside, lead.points.value, lead.points.margin if sure else None, capsize=3, **look)
        axes.set_xticks([0, 1], ["shorter\ntraining", "full\nlength"])
        axes.set_xlim(-0.35, 1.35)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_title(f"BKN minus {rival}", size=10.5)
        axes.grid(axis="y", alpha=0.3)
        lines |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2, fontsize=9)
    _both_small_and_large(panels[0], [lead.points for ends in found for lead in ends])
    panels[0].set_ylabel(f"BKN's lead in top-1 on the test images\n{BEYOND}")
    gained = [(short, full) for short, full in found if _worth(short.points) == "a gain"]
    smaller = sum(full.points.value < short.points.value for short, full in gained)
    message = f"Of {len(gained)} gains by BKN after a short training, {smaller} are smaller at full length"
    figure.suptitle(_title(message, "one recipe, shortened or not; (gradient batch, statistics batch)", 90), size=10.5)
    return figure


def _variance_gap(plan: Plan, records: Mapping[str, Record]) -> Any:
    for setting in ("cifar10", "cifar100"):
        maps: dict[str, Any] = {}
        gaps: dict[str, list[float]] = {}
        for norm in ("bn", "bkn"):
            arm = plan.arms.get(f"{setting}.{norm}.128-2")
            members = [] if arm is None else cell(arm, records).good
            maps |= {norm.upper(): each["variance_gap_map"] for each in members if "variance_gap_map" in each}
            gaps |= {norm.upper(): [mean(each["variance_gap"]) for each in members if "variance_gap" in each]}
        if len(maps) == 2:
            break
    else:
        return None
    figure, axes = _figure(8.5, 4.4, columns=2)
    limit = 1.0
    for each, (norm, values) in zip(axes, maps.items(), strict=True):
        here = mean(abs(value) for row in values for value in row)
        transposed = [list(row) for row in zip(*values, strict=True)]
        picture = each.imshow(
            transposed, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
        )
        each.set(title=f"{norm}, one network's last layer: {here:.2f}", xlabel="group of two images", ylabel="channel")
    figure.colorbar(picture, ax=axes, label="gap: log(variance of the group / running variance)", extend="both")
    shown = _listed(f"{spread(each, 3)} with {norm}" for norm, each in gaps.items())
    message = f"The variance of a group differs from the moving average by {shown}"
    seeds = counted(min(map(len, gaps.values())))
    about = f"mean |gap| over layers, with standard deviation over {seeds}, {DATASETS[setting].shown}, (128,2)"
    figure.suptitle(_title(message, about, 100), size=10.5)
    return figure


PLOTS: dict[str, Callable[[Plan, Mapping[str, Record]], Any]] = {
    "controls": _controls, "link": _link, "gain": _gain, "curves": _curves, "micro_batches": _micro_batches,
    "lengths": _lengths, "variance_gap": _variance_gap,
}  # fmt: skip
