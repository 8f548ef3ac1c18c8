"""The tables of docs/results.md and its first figure, from the plan of the replication and its records."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from bkn_zoo.modes import MODES
from studies.base import RESULTS, Record
from studies.full_length import full_length_table, full_lengths
from studies.records import counted, least_to_most, read_twins
from studies.render import Content, frame
from studies.replication_cells import Cell, best, cell, difference, leads_by_length, missing, verdict
from studies.replication_plan import HELD, Arm, Experiment, Plan, listed
from studies.stats import SAME, Difference, spread

NOT_RUN = "not run yet"
WORTH = {"held": "a gain", "did not hold": "a loss", "within chance": "within chance"}
WORTH |= {f"{verdict} (one seed)": f"{worth} (one seed)" for verdict, worth in WORTH.items()}


def sections(plan: Plan, records: Mapping[str, Record]) -> dict[str, Content]:
    """A region for each experiment of a plan, by its name: its arms, and the differences between them."""
    return {each.name: _section(each, _compared(each, plan, records), plan, records) for each in plan.experiments}


def contents(plan: Plan, records: Mapping[str, Record]) -> dict[str, Content]:
    """The regions of docs/results.md by name."""
    claims = _found(plan.claims, plan, records)
    compared = [_compared(each, plan, records) for each in plan.experiments]
    count = sum(found is not None for _, found in itertools.chain(claims, *compared))
    return {
        **sections(plan, records),
        **_speed(),
        "headline": frame(_headline(plan, records)),
        "full_length": full_length_table(full_lengths(read_twins(RESULTS))),
        "verdicts": str(count),
        "settings": frame(_settings(plan)),
        "state": _state(plan, records),
        "claims": frame(_claims(claims)),
        "failures": _failures(claims),
        "lengths": _lengths(plan, records),
        "rules": _rules(plan, records),
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
            "the paper says": claim["says"], "paper": f"{claim['paper']:+.2f}" if "paper" in claim else "",
            "here": str(found or ""), "seeds": "" if found is None else _seeds(found),
            "claim": f"not tested: {claim.get('untested', NOT_RUN)}" if found is None else verdict(claim, found),
        }
        for claim, found in claims
    ]  # fmt: skip


def _seeds(found: Difference) -> str:
    return str(found.seeds[0]) if found.seeds[0] == found.seeds[1] else f"{found.seeds[0]} and {found.seeds[1]}"


def _failures(claims: Found) -> str:
    lines, untested = [], 0
    for claim, found in claims:
        if found is None:
            untested += 1
        elif not (said := verdict(claim, found)).startswith("held"):
            theirs = f"{claim['paper']:+.2f} in the paper, " if "paper" in claim else ""
            note = f" {claim['note']}" if "note" in claim else ""
            lines.append(f"- {claim['says']}: {theirs}{found} here ({said}).{note}")
    if not lines:
        lines = ["Every claim that was tested held."]
    if untested:
        are = "is" if untested == 1 else "are"
        lines += ["", f"{untested} of the {len(claims)} claims {are} not tested."]
    return "\n".join(lines)


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


def _lengths(plan: Plan, records: Mapping[str, Record]) -> Content:
    """The lead after a short training and a long one, over networks that learned in both."""
    pairs = leads_by_length(plan, records)
    found = [pair for pair in pairs if all(cell(lead.over, records).learned() for lead in pair)]
    rows = [
        {
            "setting": short.arm.setting, "batches": short.arm.batches, "over": short.over.label,
            "epochs": short.arm.runs[0].recipe.epochs, "lead": _judged(short.points),
            "at full length": full.arm.runs[0].recipe.epochs, "lead then": _judged(full.points),
        }
        for short, full in found
    ]  # fmt: skip
    gained = [(short, full) for short, full in found if short.points.verdict().startswith("held")]
    smaller = sum(full.points.value < short.points.value for short, full in gained)
    none = sum(full.points.verdict().startswith("within") for _, full in gained)
    said = f"Of {len(gained)} gains after few epochs, {smaller} are smaller at full length and {none} are within chance"
    so = " A short training shows which norm learns faster, not how far ahead it ends."
    said += "." + (so if 2 * smaller > len(gained) else "")
    return [frame(rows), said] if gained else frame(rows)


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


def _kind(arm: Arm) -> str:
    """Its norm, and whether A is held at zero; not its rate."""
    return arm.label if arm.label == HELD else arm.label.partition(",")[0]


def _rules(plan: Plan, records: Mapping[str, Record]) -> Content:
    rows = []
    apart: dict[str, list[str]] = {"EvalNorm": [], "example weighing": []}
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
        for rule, places in apart.items():
            gaps = each.gaps(rule, "expected")
            if gaps and abs(mean(gaps)) > SAME and each.learned():
                places.append(f"{_kind(each.arm)} at {each.arm.setting} ({each.arm.batches}) {mean(gaps):+.1f}")
    said = [f"- {rule}: {'; '.join(places) or 'nowhere'}." for rule, places in apart.items()]
    return [frame(rows), "More than one point better (+) or worse (-) than `expected`:", "\n".join(said)]


def _speed() -> dict[str, Content]:
    names = "benchmark_train.json", "benchmark_train_inception.json"
    results = [json.loads((RESULTS / name).read_text()) for name in names]
    every = [row for result in results for row in result["rows"]]
    rows = [row for row in every if row["launch"] == "graph"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):

        def launched(norm: str, group: int, model: str = model) -> float:
            wanted = {"model": model, "norm": norm, "statistics_batch": group, "mode": "eager", "launch": "python"}
            return next(row["images_per_s"] for row in every if wanted.items() <= row.items())

        of_bn = max(row["images_per_s"] for row in rows if row["model"] == model and row["norm"] == "bn")
        for row in rows:
            if (row["model"], row["norm"], row["mode"]) == (model, "bkn", "eager"):
                lines.append({
                    "network": model, "batches": f"256, {row['statistics_batch']}", "BN": f"{of_bn:.0f}",
                    "BKN": f"{row['images_per_s']:.0f}", "BKN / BN": f"{row['images_per_s'] / of_bn:.3f}",
                    "from Python": f"{launched('bkn', row['statistics_batch']) / launched('bn', 256):.3f}",
                })  # fmt: skip
    ratios, plain = ([float(line[column]) for line in lines] for column in ("BKN / BN", "from Python"))
    held = "held" if min(ratios) > 0.95 else "did not hold"
    said = (
        f"In a CUDA graph, BKN has {min(ratios):.3f} to {max(ratios):.3f} of BN's speed: the claim that BKN costs "
        f"little {held}. From Python it has {min(plain):.3f} to {max(plain):.3f}."
    )
    return {"speed": [frame(lines), said], "speed_hardware": results[0]["hardware"]}


# The first table and the first figure.

GROUPS = {128: "128 images per group", 8: "8", 2: "2", 1: "1"}
FULL, SHORT = "cifar100_full", "cifar100"
COLOURS = {"BKN": "#1f77b4", "BN": "#d62728", "GroupNorm": "#2ca02c", "BRN": "#ff7f0e"}
NAMES = {
    "BKN": "Batch Kalman Normalization (BKN)",
    "BN": "batch normalization (BN)",
    "GroupNorm": "group normalization",
    "BRN": "batch renormalization (BRN)",
}


def _headline_cells(setting: str, label: str, plan: Plan, records: Mapping[str, Record]) -> dict[int, Cell]:
    """One norm's results in a setting, by images per group. GroupNorm has the same for every group."""
    found = {
        arm.group: each
        for arm in plan.arms.values()
        if (arm.setting, arm.label) == (setting, label) and (each := cell(arm, records)).good
    }
    return dict.fromkeys(GROUPS, found[128]) if label == "GroupNorm" and found else found


def _headline(plan: Plan, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Each norm by images per group, on CIFAR-100, after a full training and after a short one."""
    rows = []
    for setting in (FULL, SHORT):
        for label in ("BN", "BRN", "GroupNorm", HELD, "BKN"):
            found = _headline_cells(setting, label, plan, records)
            if found:
                epochs = next(iter(found.values())).arm.runs[0].recipe.epochs
                tops = {shown: spread(found[group].top1()) if group in found else "" for group, shown in GROUPS.items()}
                rows.append({"CIFAR-100, top-1 (%)": label, "epochs": epochs, **tops})
    return rows


def headline_figure(plan: Plan, records: Mapping[str, Record]) -> Any:
    """Accuracy over images per group after a full training: a line for each norm, with the deviation over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4), layout="constrained")
    axes = figure.subplots()
    groups, shown = sorted(GROUPS), []
    for label, colour in COLOURS.items():
        found = _headline_cells(FULL, label, plan, records)
        shown += found.values()
        tops = {groups.index(group): found[group].top1() for group in groups if group in found}
        means, deviations = [mean(each) for each in tops.values()], [stdev(each) for each in tops.values()]
        style = {"marker": "" if label == "GroupNorm" else "o", "linewidth": 3 if label == "BKN" else 1.8}
        axes.errorbar(list(tops), means, deviations, color=colour, capsize=4, label=NAMES[label], **style)
    axes.set_xticks(range(len(groups)), list(map(str, groups)))
    axes.set_xlabel("images that share one mean and variance in training")
    axes.set_ylabel("top-1 accuracy (%)")
    epochs, seeds = shown[0].arm.runs[0].recipe.epochs, least_to_most(len(each.top1()) for each in shown)
    axes.set_title(f"CIFAR-100, {epochs} epochs, mean and deviation over {seeds} seeds", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    return figure
