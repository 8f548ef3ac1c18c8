"""The tables of docs/results.md and its figures, from the plans of two studies and their records."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd

from bkn_zoo.modes import MODES
from bkn_zoo.norms.batch_kalman import INITIAL_GAIN
from studies.base import DOCS, RESULTS, Record
from studies.full_length import full_length_table, full_lengths
from studies.records import counted, least_to_most, read_twins
from studies.render import Content, frame
from studies.replication_cells import Cell, best, cell, difference, leads_by_length, missing
from studies.replication_plan import HELD, Experiment, Plan, listed
from studies.stats import Difference, spread

Pages = dict[Path, dict[str, Content]]

NOT_RUN = "not run yet"
WORTH = {"held": "a gain", "did not hold": "a loss", "within chance": "within chance", "one seed": "one seed"}


def sections(plan: Plan, records: Mapping[str, Record]) -> dict[str, Content]:
    """A region for each experiment of a plan, by its name: its arms, and the differences between them."""
    return {each.name: _section(each, _compared(each, plan, records), plan, records) for each in plan.experiments}


def pages(plan: Plan, records: Mapping[str, Record], newer: Plan, fresh: Mapping[str, Record]) -> Pages:
    """The regions of docs/results.md, and the tables that are CSV files only.

    Args:
        plan, records: of the replication.
        newer, fresh: of the study `standardized`.
    """
    claims = _found(plan.claims, plan, records)
    compared = [_compared(each, plan, records) for each in plan.experiments]
    count = sum(found is not None for _, found in itertools.chain(claims, *compared))
    lengths, standardized = _lengths(plan, records), sections(newer, fresh)
    return {
        DOCS / "results.md": {
            "headline": frame(_headline(norms_by_group(plan, records, newer, fresh))),
            "standardized": pd.concat([standardized[name][2] for name in ("full", "parts")]),
            "verdicts": str(count),
            "outcomes": _outcomes(claims),
            "state": _state(plan, records),
            "claims": frame(_claims(claims)),
            "link": lengths[lengths["over"] == HELD].drop(columns="over"),
        },
        RESULTS / "tables" / "results": {
            **sections(plan, records),
            "full_length": full_length_table(full_lengths(read_twins(RESULTS))),
            "settings": frame(_settings(plan)),
            "speed": _speed(),
            "lengths": lengths,
            "rules": frame(_rules(plan, records)),
            "gains": frame([*_gains(plan, records), *_gains(newer, fresh)]),
        },
    }


def _settings(plan: Plan) -> list[dict[str, str]]:
    used = dict.fromkeys(experiment.setting for experiment in plan.experiments)
    lines = []
    for name in used:
        setting = dict(plan.settings[name])
        recipe, schedule = setting.pop("recipe"), setting.pop("brn", None)
        changes = [f"{field} = {value}" for field, value in setting.items()]
        changes += [f"BRN's schedule {', '.join(f'{k} = {v}' for k, v in schedule.items())}"] if schedule else []
        lines.append({"setting": name, "recipe": f"`recipes/{recipe}.toml`", "changes": "; ".join(changes)})
    return lines


def _state(plan: Plan, records: Mapping[str, Record]) -> str:
    runs = plan.runs()
    done = [records[run.key] for run in runs if run.key in records]
    where = dict.fromkeys(f"{each['hardware']}, torch {each['versions']['torch']}" for each in done)
    left = len(missing(plan, records))
    rest = f" {left} {'was' if left == 1 else 'were'} not run for lack of GPU time." if left else ""
    return (
        f"Of {len(runs)} planned runs, {len(done)} are done ({'; '.join(where)}).{rest} Each record contains its "
        "command, hardware, versions, seed and recipe."
    )


Found = list[tuple[Mapping[str, Any], Difference | None]]
"""Claims with the differences that were found."""


def _found(claims: Iterable[Mapping[str, Any]], plan: Plan, records: Mapping[str, Record]) -> Found:
    """The difference for each claim; None if the networks to compare with did not learn."""
    found: Found = []
    for claim in claims:
        points = difference(claim, plan, records)
        that = None if points is None else best(listed(claim["that"]), plan, records)
        mode = claim.get("modes", [None, None])[1]
        if that and claim["this"] != claim["that"] and not that.learned(mode):
            some = any(Cell(that.arm, (each,)).learned(mode) for each in that.good)
            how = "did not learn, or failed, with some seeds" if some else "did not learn"
            found.append(({**claim, "untested": f"{that.arm.label} {how}"}, None))
        else:
            found.append((claim, points))
    return found


def _compared(experiment: Experiment, plan: Plan, records: Mapping[str, Record]) -> Found:
    return _found([{"paired": experiment.paired, **about} for about in experiment.differences], plan, records)


def _claims(claims: Found) -> list[dict[str, str]]:
    return [
        {
            "the paper says": claim["says"], "where": claim.get("place", ""),
            "paper": f"{claim['paper']:+.2f}" if "paper" in claim else "",
            "here": str(found or ""), "seeds": "" if found is None else _seeds(found),
            "claim": found.verdict(claim.get("same", False))
            if found else f"not tested: {claim.get('untested', NOT_RUN)}",
        }
        for claim, found in claims
    ]  # fmt: skip


def _outcomes(claims: Found) -> str:
    """How many claims have each verdict."""
    counts = Counter(row["claim"].partition(":")[0] for row in _claims(claims))
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def _seeds(found: Difference) -> str:
    return str(found.seeds[0]) if found.seeds[0] == found.seeds[1] else f"{found.seeds[0]} and {found.seeds[1]}"


def _section(experiment: Experiment, found: Found, plan: Plan, records: Mapping[str, Record]) -> Content:
    place = f"In the paper: {experiment.place}. " if experiment.place else ""
    about = f"{place}Setting `{experiment.setting}`, {counted(*(len(arm.runs) for arm in experiment.arms))}."
    about += " Differences are paired by seed." if experiment.paired else ""
    cells = [cell(arm, records) for arm in experiment.arms]
    if not any(each.records for each in cells):
        return [about, f"None of the {len(cells)} rows has been run yet."]
    table = frame(map(_row, cells))
    parts: list[Any] = [about, table if table["paper"].any() else table.drop(columns="paper")]
    lines = [
        {"comparison": what, "points": "", "seeds": "", "verdict": claim.get("untested", NOT_RUN)}
        if each is None
        else {"comparison": what, "points": str(each), "seeds": _seeds(each), "verdict": WORTH[each.verdict()]}
        for claim, each in found
        if each or "untested" in claim or _waits(claim, plan, records)
        for what in [claim["says"] + (", on validation images" if claim.get("images") == "validation" else "")]
    ]
    parts += [frame(lines)] if lines else []
    lists = [claim[side] for claim in experiment.differences for side in ("this", "that")]
    choices = {tuple(names): best(names, plan, records) for names in lists if isinstance(names, list)}
    ends = [each.arm for names, each in choices.items() if each.good and each.arm.name == names[-1]]
    last = [f"{arm.label} ({arm.batches})" for arm in ends]
    if last:
        parts += [f"The best value is the largest that was tried, so a larger one may be better: {'; '.join(last)}."]
    return parts


def _waits(claim: Mapping[str, Any], plan: Plan, records: Mapping[str, Record]) -> bool:
    """Whether some of its arms have no records yet; otherwise, one of its rules was not measured."""
    names = [name for side in ("this", "that") for name in listed(claim[side])]
    return not all(cell(plan.arms[name], records).records for name in names)


def _lengths(plan: Plan, records: Mapping[str, Record]) -> pd.DataFrame:
    """The lead after a short training and a long one, over networks that learned in both."""
    pairs = leads_by_length(plan, records)
    found = [pair for pair in pairs if all(cell(lead.over, records).learned() for lead in pair)]
    return frame(
        {
            "setting": short.arm.setting, "batches": short.arm.batches, "over": short.over.label,
            "epochs": short.arm.runs[0].recipe.epochs, "lead": _judged(short.points),
            "at full length": full.arm.runs[0].recipe.epochs, "lead then": _judged(full.points),
        }
        for short, full in found
    )  # fmt: skip


def _judged(found: Difference) -> str:
    return f"{found}, {WORTH[found.verdict()]}"


def _row(each: Cell) -> dict[str, Any]:
    failed = [record for record in each.records if "failed" in record]
    shown = spread(each.top1()) or (f"none: {failed[0]['failed']}" if failed else NOT_RUN)
    wanted, have = len(each.arm.runs), len(each.good)
    diverged = f", {len(failed)} diverged" if failed else ""
    return {
        "norm": each.arm.label,
        "batches": each.arm.batches,
        "paper": "" if each.arm.paper is None else f"{each.arm.paper:g}",
        "top-1": f"**{shown}**" if have else shown,
        "seeds": (str(have) if have == wanted else f"{have} of {wanted}") + diverged,
        "validation": spread(each.top1(images="validation")),
        **{mode: spread(each.top1(mode)) for mode in MODES},
    }


def _arms(plan: Plan, records: Mapping[str, Record], field: str) -> list[Cell]:
    """Each arm's records that have a field, by setting and norm, then from the smallest groups to the largest."""
    seen: set[frozenset[str]] = set()
    found = []
    for arm in plan.arms.values():
        keys = frozenset(run.key for run in arm.runs)
        members = tuple(record for record in cell(arm, records).good if field in record)
        if members and not any(keys <= other for other in seen):
            seen.add(keys)
            found.append(Cell(arm, members))
    return sorted(found, key=lambda each: (each.arm.setting, each.arm.label, each.arm.group))


def _head(each: Cell) -> dict[str, Any]:
    arm = each.arm
    return {"setting": arm.setting, "norm": arm.label, "batches": arm.batches, "seeds": len(each.records)}


def _of_some(top1: Sequence[float], each: Cell) -> str:
    """Mean and deviation over the measured networks, with their number if not all were measured."""
    return spread(top1) + (f" ({counted(len(top1))})" if 0 < len(top1) < len(each.records) else "")


def _rules(plan: Plan, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Accuracy of the same networks with other rules for the statistics at inference."""
    rows = []
    for each in _arms(plan, records, "rules"):
        if each.arm.ablation and each.arm.label != HELD:
            continue
        weighed = _of_some(each.top1("example weighing"), each)
        shares = sorted({found["share"] for r in each.records if (found := r["rules"].get("example weighing"))})
        rows.append({
            **_head(each),
            "population": spread(each.top1("population")),
            "recalibrated": _of_some(each.top1("recalibrated population"), each),
            "sample": spread(each.top1("sample")),
            "expected": spread(each.top1("expected")),
            "expected, recalibrated": _of_some(each.top1("recalibrated expected"), each),
            "EvalNorm": _of_some(each.top1("EvalNorm"), each),
            "example weighing": f"{weighed} ({', '.join(f'{share:g}' for share in shares)})" if weighed else "",
        })  # fmt: skip
    return rows


def _speed() -> pd.DataFrame:
    """Images per second of a training step, BN in its fastest form: compiled."""
    names = "benchmark_train.json", "benchmark_train_inception.json"
    every = [row for name in names for row in json.loads((RESULTS / name).read_text())["rows"]]
    rows = [row for row in every if row["launch"] == "graph"]
    lines = []
    for row in rows:
        if (row["norm"], row["mode"]) == ("bkn", "eager"):
            model = row["model"]
            of_bn = max(each["images_per_s"] for each in rows if (each["model"], each["norm"]) == (model, "bn"))
            lines.append({
                "network": model, "batches": f"256, {row['statistics_batch']}", "BN": f"{of_bn:.0f}",
                "BKN": f"{row['images_per_s']:.0f}", "BKN / BN": f"{row['images_per_s'] / of_bn:.3f}",
            })  # fmt: skip
    return frame(lines)


# The first table, and the figures.

GROUPS = {1: "1 image per group", 2: "2", 8: "8", 128: "128"}
FULL = "cifar100_full"
ANY_GROUP = ("GroupNorm", "EvoNorm-S0", "FRN")
"""Norms that use no statistics of several images."""
STYLES = {
    "BKN, standardized weights": ("#1f77b4", "-"), "EvoNorm-S0": ("#9467bd", "-"),
    "GroupNorm, channels per group = 8, standardized weights": ("#2ca02c", "-"),
    "BN, standardized weights": ("#d62728", "-"), "BKN": ("#1f77b4", "--"), HELD: ("#17becf", ":"),
    "GroupNorm": ("#2ca02c", "--"), "BN": ("#d62728", "--"), "BRN": ("#ff7f0e", "--"),
}  # fmt: skip
"""Colour and line of each norm, in the order of the table."""
PALETTE = {1: "#1f77b4", 2: "#2ca02c", 8: "#d62728", 32: "#555555"}
"""Colours by images per group."""
LOWEST = 60
"""Where the axis of the first figure begins, in percent."""


def _tuned(label: str) -> str:
    """The label of an arm without what was tuned on validation images."""
    return ", ".join(part for part in label.split(", ") if not part.startswith(("lr =", "initial gain =")))


Norms = dict[str, dict[int, Cell]]
"""The results of each norm at full length, by its label and the images per group."""


def norms_by_group(plan: Plan, records: Mapping[str, Record], newer: Plan, fresh: Mapping[str, Record]) -> Norms:
    """The norms of STYLES on CIFAR-100, the newer ones with the learning rate and gain that their plan chose."""
    every = [(arm.label, cell(arm, records)) for arm in plan.arms.values() if arm.setting == FULL]
    chosen = next(each for each in newer.experiments if each.name == "full")
    every += [(_tuned(arm.label), cell(arm, fresh)) for arm in chosen.arms]
    every = [(label, each) for label, each in every if each.good]
    found = {label: {each.arm.group: each for own, each in every if own == label} for label in STYLES}
    for label, cells in found.items():
        if label.startswith(ANY_GROUP) and cells:
            found[label] = dict.fromkeys(GROUPS, cells[128])
    return {label: cells for label, cells in found.items() if cells}


def _headline(norms: Norms) -> list[dict[str, Any]]:
    """Each norm by images per group."""
    return [
        {f"top-1 (%): {_about(norms)}": label}
        | {shown: spread(cells[group].top1()) if group in cells else "" for group, shown in GROUPS.items()}
        | {"seeds": least_to_most(len(each.good) for each in cells.values())}
        for label, cells in norms.items()
    ]


def _about(norms: Norms) -> str:
    """Data, length and batches of the comparison."""
    run = next(iter(norms["BKN"].values())).arm.runs[0]
    return f"CIFAR-100, {run.recipe.epochs} epochs, gradient batches of {run.recipe.gradient_batch}"


def group_size_figure(norms: Norms) -> Any:
    """Accuracy over images per group after a full training: a line for each norm, with the deviation over seeds."""
    figure, axes = _new_figure((8.6, 4.4))
    groups, hidden = sorted(GROUPS), []
    for label, cells in norms.items():
        colour, line = STYLES[label]
        tops = {groups.index(group): cells[group].top1() for group in groups if group in cells}
        means = [mean(each) for each in tops.values()]
        deviations = [stdev(each) if len(each) > 1 else 0.0 for each in tops.values()]
        marker = "" if label.startswith(ANY_GROUP) else "o"
        width = 3 if label == next(iter(STYLES)) else 1.6
        shown = label.replace(", channels per group = 8", "").replace("standardized weights", "standardized")
        hidden += [
            f"{shown}, groups of {group}" for group in groups if group in cells and mean(cells[group].top1()) < LOWEST
        ]
        axes.errorbar(list(tops), means, deviations, color=colour, linestyle=line, marker=marker, linewidth=width,
                      capsize=4, label=shown)  # fmt: skip
    axes.set_xticks(range(len(groups)), list(map(str, groups)))
    axes.set_xlabel("images that share one mean and variance in training")
    axes.set_ylabel("top-1 accuracy (%)")
    axes.set_ylim(LOWEST, None)
    axes.set_title(f"{_about(norms)}\nbelow the axis: {', '.join(hidden) or 'none'}", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def rules_figure(norms: Norms) -> Any:
    """Accuracy by the rule that gives the statistics at inference, for BN and BKN with few images per group."""
    figure, axes = _new_figure((7.6, 3.6))
    rules = {"population": "population", "sample": "sample", "expected": "expected", "EvalNorm": "EvalNorm",
             "example weighing": "example\nweighing"}  # fmt: skip
    for norm, line in (("BN", "--"), ("BKN", "-")):
        for group in (1, 2, 8):
            each = norms[norm][group]
            tops = {place: top1 for place, rule in enumerate(rules) if (top1 := each.top1(rule))}
            axes.plot(list(tops), [mean(top1) for top1 in tops.values()], line, color=PALETTE[group], marker="o",
                      label=f"{each.arm.label}, {group} per group")  # fmt: skip
    axes.set_xticks(range(len(rules)), list(rules.values()))
    axes.set_ylabel("top-1 accuracy (%)")
    axes.set_title(f"{_about(norms)}, without standardized weights", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _gains(plan: Plan, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """The gain of each norm of inception_cifar after training, and how many end below 0.05: means of seeds."""
    rows = []
    for arm in plan.arms.values():
        gains = [record["gain"] for record in cell(arm, records).good if record.get("gain")]
        if gains and arm.setting.startswith("cifar"):
            low = spread([sum(gain < 0.05 for gain in of.values()) for of in gains], 1)
            about = {"setting": arm.setting, "norm": arm.label, "batches": arm.batches, "seeds": len(gains)}
            shown = {_place(name): f"{mean(of[name] for of in gains):.2f}" for name in gains[0]}
            rows.append({**about, "epochs": arm.runs[0].recipe.epochs, "below 0.05": low, **shown})
    return rows


def gains_figure(
    norms: Norms, plan: Plan, records: Mapping[str, Record], newer: Plan, fresh: Mapping[str, Record]
) -> Any:
    """The gain of every norm, from the first to the last, for groups of several sizes; large ones are trained less."""
    short = [cell(arm, fresh) for each in newer.experiments if each.name == "depth" for arm in each.arms]
    plain = [cell(plan.arms["cifar100.bkn.128-32"], records)]
    figure, axes = _new_figure((9, 4), 2)
    for place, label, more in zip(axes, ("BKN", "BKN, standardized weights"), (plain, short), strict=True):
        lines = [(each, "o-", "") for _, each in sorted(norms[label].items())]
        lines += [(each, "o:", f", {each.arm.runs[0].recipe.epochs} epochs") for each in more if each.good]
        for each, style, length in lines:
            group = each.arm.group
            gains = [record["gain"] for record in each.good if "gain" in record]
            names = list(gains[0])
            means = [mean(of[name] for of in gains) for name in names]
            shown = f"groups of {group}{length}"
            place.plot(range(len(names)), means, style, color=PALETTE[group], markersize=4, label=shown)
        place.set_xticks(range(len(names)), [_place(name) for name in names], fontsize=6, rotation=90)
        place.set_ylim(-0.03, 1.03)
        start = lines[0][0].arm.runs[0].recipe.norm_options.get("initial_gain", INITIAL_GAIN)
        place.set_title(f"{label}, initial gain {start}", fontsize=10)
        place.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes[0].set_ylabel("gain q after training")
    return figure


def _place(name: str) -> str:
    """Block, branch and layer of a norm of inception_cifar, such as "c 1.1"."""
    block, _, branch, layer, *_ = name.split(".")
    return f"{block.removeprefix('inception_')} {branch}.{layer}"


def _new_figure(size: tuple[float, float], columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns)
    for each in [axes] if columns == 1 else axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", alpha=0.3)
    return figure, axes
