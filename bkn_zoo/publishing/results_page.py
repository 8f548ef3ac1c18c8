"""docs/results.md, written from the plan of a replication and its records."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.publishing.replication import (
    Arm,
    Cell,
    Difference,
    Experiment,
    Plan,
    Record,
    best,
    cell,
    cells,
    difference,
    missing,
    spread,
    verdict,
)
from bkn_zoo.publishing.results import table

INTRODUCTION = """\
# What holds

The paper's comparisons, repeated, and some that it does not make. This page is written by `python scripts/reproduce.py
--table --plot` from the records of runs under `results/reproduce/` and `results/runs/`, without a GPU; a test fails
when page and records disagree. What is run, and in which order, is said by `scripts/experiments.toml`; `python
scripts/reproduce.py --data DATA_FOLDER` trains what is missing.

**How to read it.** *top-1* is the accuracy on the test images in percent, by the statistics mode that was best on the
run's own validation images, as all choices here are made on those; *population*, *sample* and *expected* are the three
modes ([docs/paper.md](paper.md), 3.5). ± is the standard deviation over seeds for an accuracy, and the standard error
for a difference. A claim *held* if the difference exceeds two standard errors, which is not much where there are two
seeds; with one seed, if it exceeds half a point, and that is said. That two things are the same held if they differ by
no more than that, or by 0.3 points. *batches* are gradient and statistics batch. The paper's numbers are those of its
data sets: its ImageNet is Tiny ImageNet here, so that differences can be compared there, and levels cannot.

**Effort.** All norms are trained by one recipe, and none has a setting of its own but BRN's schedule. That recipe was
made with BKN and BN in view ([docs/runs.md](runs.md)); its learning rate is not the best for each of them, and what
they are worth at the best of three is asked below, with one seed.
"""

NOT_RUN = "not run yet"
HEADLINE = "CIFAR-100, top-1 (%)"
WORTH = {"held": "a gain", "did not hold": "a loss", "within chance": "within chance"}
WORTH |= {f"{verdict} (one seed)": f"{worth} (one seed)" for verdict, worth in WORTH.items()}

BEYOND = """\
## Beyond the paper

What a sceptic would ask next.
"""

RULES = """\
## Whose statistics, at inference

The same trained networks under other rules, top-1 in percent: *recalibrated* takes the running averages anew from 64
training batches by the final, averaged weights; *EvalNorm* (Singh & Shrivastava 2019) mixes an image's mean and
variance with the population's by two shares a layer, fitted to training groups by least squares; *example weighing*
(Summers & Dinneen 2020) mixes moments by a share that is chosen on the validation images, and shown. BKN takes each
through predict and update. docs/paper.md, 3.5, says how they differ. Where groups are whole batches, the last two have
nothing to fit.
"""

CALIBRATION = """\
## Calibration

The expected calibration error in percent (15 bins), by mode.
"""

SMALLER = """\
## A made smaller

A is most of what BKN adds to a network's parameters. Here it is rounded to eight bits after training, with a scale for
each row, or replaced by the nearest matrix of a rank; top-1 in percent, in the mode chosen, where that is not
`population`, which does not ask for A. An empty cell: the run is older than the question.
"""

GAPS = """\
## The variance gap

The paper shows that the variance which normalizes a group strays less from its moving average with BKN than with BN.
Here, over 64 training batches after the training: the mean of |log(variance of the group / running variance)|, over
groups, channels and layers. For BKN the group's variance is its belief. With A held at zero it is as steady or
steadier: what steadies it is the shrinking, and not the link between layers.
"""

SPEED = """\
## Examples per second

The paper's Table 2 has 325.74 for BN and 320.94 for BKN, 0.985 of it. From `results/benchmark_train.json` and
`benchmark_train_inception.json` ([docs/performance.md](performance.md)): training steps of 256 images of 224 px on one
{hardware}, both replayed from a CUDA graph, BN's by the fastest way that is there (compiled).
"""


def page(plan: Plan, records: Mapping[str, Record], root: Path) -> str:
    """docs/results.md; shows those plots that are drawn."""

    def picture(name: str, text: str) -> list[str]:
        path = root / "results" / "plots" / f"{name}.png"
        return [f"![{text}](../results/plots/{name}.png)\n"] if path.exists() else []

    parts = [INTRODUCTION, _settings(plan), _state(plan, records)]
    parts += [
        "## The paper's claims\n",
        _claims(plan, records),
        "## What did not replicate\n",
        _failures(plan, records),
    ]
    parts += ["## The paper's tables and figures\n"]
    for experiment in plan.experiments:
        if experiment.place:
            parts += [_section(experiment, plan, records, "###")]
    parts += picture("micro_batches", "The course of training at each pair of batches, as in the paper's figures")
    parts += [GAPS, _gaps(plan, records), *picture("variance_gap", "How far variances stray from their moving average")]
    parts += [*_speed(root), BEYOND]
    for experiment in plan.experiments:
        if not experiment.place:
            parts += [_section(experiment, plan, records, "###")]
            parts += picture(experiment.name, experiment.title)
    parts += picture("curves", "Validation accuracy over the training")
    parts += [RULES, _rules(plan, records), CALIBRATION, _calibration(plan, records), SMALLER, _smaller(plan, records)]
    return "\n".join(parts)


def headline(plan: Plan, records: Mapping[str, Record]) -> str:
    """The README's first table: each norm by images per group, on CIFAR-100."""
    groups = {128: "128 images a group", 2: "2", 1: "1"}
    rows = []
    for label in ("BN", "BRN", "BKN, A held at zero", "BKN"):
        found = {
            each.arm.group: spread(each.top1()) or NOT_RUN
            for experiment in plan.experiments
            if experiment.setting == "cifar100"
            for each in cells(experiment, records)
            if each.arm.label == label
        }
        rows.append({HEADLINE: label, **{shown: found.get(group, "") for group, shown in groups.items()}})
    alone = spread(cell(plan.arms["cifar100.gn.128-128"], records).top1())
    rows.append({HEADLINE: "GroupNorm, which has no groups", **dict.fromkeys(groups.values(), alone)})
    return table(rows, list(rows[0]))


def with_headline(readme: str, plan: Plan, records: Mapping[str, Record]) -> str:
    """The README with that table in place of its own, if it has one."""
    pattern = rf"^\| {re.escape(HEADLINE)} \|.*?(?=\n\n)"
    return re.sub(pattern, lambda _: headline(plan, records), readme, count=1, flags=re.M | re.S)


def _settings(plan: Plan) -> str:
    used = dict.fromkeys(experiment.setting for experiment in plan.experiments)
    lines = []
    for name in used:
        setting = dict(plan.settings[name])
        recipe, schedule = setting.pop("recipe"), setting.pop("brn", None)
        changes = [f"{field} = {value}" for field, value in setting.items()]
        changes += [f"BRN's schedule {', '.join(f'{k} = {v}' for k, v in schedule.items())}"] if schedule else []
        lines.append({"setting": name, "recipe": f"`recipes/{recipe}.toml`", "but for": "; ".join(changes)})
    return table(lines, ["setting", "recipe", "but for"]) + "\n"


def _state(plan: Plan, records: Mapping[str, Record]) -> str:
    runs = plan.runs()
    done = [records[run.key] for run in runs if run.key in records]
    where = dict.fromkeys(f"{each['hardware']}, torch {each['versions']['torch']}" for each in done)
    return (
        f"Of {len(runs)} runs planned, {len(done)} are done ({'; '.join(where)}) and {len(missing(plan, records))} are "
        "not: GPU time is why. Each record holds its command, hardware, versions, seed and recipe.\n"
    )


def _claims(plan: Plan, records: Mapping[str, Record]) -> str:
    rows = []
    for claim in plan.claims:
        found = difference(claim, plan, records)
        rows.append({
            "the paper says": claim["says"], "paper": f"{claim['paper']:+.2f}" if "paper" in claim else "",
            "here": NOT_RUN if found is None else str(found), "seeds": "" if found is None else _seeds(found),
            "claim": "not tested" if found is None else verdict(claim, found),
        })  # fmt: skip
    return table(rows, list(rows[0])) + "\n" if rows else ""


def _seeds(found: Difference) -> str:
    return str(found.seeds[0]) if found.seeds[0] == found.seeds[1] else f"{found.seeds[0]} and {found.seeds[1]}"


def _failures(plan: Plan, records: Mapping[str, Record]) -> str:
    lines, untested = [], 0
    for claim in plan.claims:
        found = difference(claim, plan, records)
        if found is None:
            untested += 1
        elif not (said := verdict(claim, found)).startswith("held"):
            theirs = f"{claim['paper']:+.2f} in the paper, " if "paper" in claim else ""
            note = f" {claim['note']}" if "note" in claim else ""
            lines.append(f"- {claim['says']}: {theirs}{found} here ({said}).{note}")
    if not lines:
        lines = ["Of what was tested, nothing."]
    if untested:
        are = "is" if untested == 1 else "are"
        lines += ["", f"{untested} of the {len(plan.claims)} claims {are} not tested yet, for want of runs."]
    return "\n".join(lines) + "\n"


def _section(experiment: Experiment, plan: Plan, records: Mapping[str, Record], level: str) -> str:
    place = f"For {experiment.place}. " if experiment.place else ""
    seeds = "1 seed" if experiment.seeds == 1 else f"{experiment.seeds} seeds"
    parts = [f"{level} {experiment.title}\n", f"{place}Setting `{experiment.setting}`, {seeds}.\n"]
    found_cells = list(cells(experiment, records))
    if not any(each.records for each in found_cells):
        return "\n".join([*parts, f"None of its {len(found_cells)} rows is run yet.\n"])
    rows = [_row(each) for each in found_cells]
    names = list(rows[0])
    if all(not row["paper"] for row in rows):
        names.remove("paper")
    parts += [table(rows, names) + "\n"]
    found = [(claim, difference(claim, plan, records)) for claim in experiment.differences]
    lines = [
        {"what": claim["says"], "points": str(each), "seeds": _seeds(each), "": WORTH[each.verdict()]}
        for claim, each in found
        if each is not None
    ]
    if lines:
        parts += [table(lines, list(lines[0])) + "\n"]
    lists = [claim[side] for claim in experiment.differences for side in ("this", "that")]
    choices = {tuple(names): best(names, plan, records) for names in lists if isinstance(names, list)}
    ends = [each.arm for names, each in choices.items() if each.good and each.arm.name == names[-1]]
    last = [f"{arm.label} ({arm.gradient}, {arm.group})" for arm in ends]
    if last:
        parts += [f"The largest that was tried, so that a larger one may be better still: {'; '.join(last)}.\n"]
    return "\n".join(parts)


def _row(each: Cell) -> dict[str, Any]:
    failed = [record for record in each.records if "failed" in record]
    shown = spread(each.top1()) or (f"none: {failed[0]['failed']}" if failed else NOT_RUN)
    wanted, have = len(each.arm.runs), len(each.good)
    return {
        "norm": each.arm.label,
        "batches": f"{each.arm.gradient}, {each.arm.group}",
        "paper": "" if each.arm.paper is None else f"{each.arm.paper:g}",
        "top-1": f"**{shown}**" if have else shown,
        "seeds": str(have) if have == wanted else f"{have} of {wanted}",
        "validation": spread(each.top1(images="validation")),
        **{mode: spread(each.top1(mode)) for mode in MODES},
    }


def _asked(plan: Plan, records: Mapping[str, Record], field: str) -> Iterator[tuple[Arm, list[Record]]]:
    """Arms whose records have a field, with those records."""
    seen: set[frozenset[str]] = set()
    for arm in plan.arms.values():
        keys = frozenset(run.key for run in arm.runs)
        members = [record for record in cell(arm, records).good if field in record]
        if members and not any(keys <= other for other in seen):
            seen.add(keys)
            yield arm, members


def _sorted(arms: Iterable[tuple[Arm, list[Record]]]) -> list[tuple[Arm, list[Record]]]:
    """By setting and norm, then from the smallest groups to the largest."""
    return sorted(arms, key=lambda pair: (pair[0].name.partition(".")[0], pair[0].label, pair[0].group))


def _table_of(rows: list[dict[str, Any]]) -> str:
    return table(rows, list(rows[0])) + "\n" if rows else f"{NOT_RUN.capitalize()}.\n"


def _head(arm: Arm, members: list[Record]) -> dict[str, Any]:
    return {
        "setting": arm.name.partition(".")[0],
        "norm": arm.label,
        "batches": f"{arm.gradient}, {arm.group}",
        "seeds": len(members),
    }


def _rules(plan: Plan, records: Mapping[str, Record]) -> str:
    rows = []
    for arm, members in _sorted(_asked(plan, records, "rules")):
        if arm.ablation:
            continue

        def top1(rule: str, members: list[Record] = members) -> str:
            return spread(each["rules"][rule]["top1"] for each in members if rule in each["rules"])

        weighed = top1("example weighing")
        shares = sorted({found["share"] for each in members if (found := each["rules"].get("example weighing"))})
        rows.append({
            **_head(arm, members),
            "population": spread(each["test"]["population"]["top1"] for each in members),
            "recalibrated": top1("recalibrated population"),
            "sample": spread(each["test"]["sample"]["top1"] for each in members),
            "expected": spread(each["test"]["expected"]["top1"] for each in members),
            "expected, recalibrated": top1("recalibrated expected"),
            "EvalNorm": top1("EvalNorm"),
            "example weighing": f"{weighed} ({', '.join(f'{share:g}' for share in shares)})" if weighed else "",
        })  # fmt: skip
    return _table_of(rows)


def _calibration(plan: Plan, records: Mapping[str, Record]) -> str:
    rows = []
    for arm, members in _sorted((arm, cell(arm, records).good) for arm in plan.arms.values()):
        if members and not arm.ablation:
            errors = {mode: spread(each["test"][mode]["ece"] for each in members) for mode in MODES}
            chosen = "; ".join(sorted({each["chosen_statistics"] for each in members}))
            rows.append({**_head(arm, members), **errors, "chosen for top-1": chosen})
    return _table_of(rows)


def _smaller(plan: Plan, records: Mapping[str, Record]) -> str:
    rows = []
    for arm, members in _sorted(_asked(plan, records, "rules")):
        asked = [each for each in members if "A in 8 bits" in each["rules"]]
        members = [each for each in asked if each["chosen_statistics"] != "population"]
        if members and not arm.ablation:
            row = {
                **_head(arm, members),
                "A as trained": spread(each["test"][each["chosen_statistics"]]["top1"] for each in members),
            }
            for way in ("A in 8 bits", "A of rank 16", "A of rank 4"):
                row[way] = spread(each["rules"][way]["top1"] for each in members if way in each["rules"])
            rows.append(row)
    return _table_of(rows)


def _gaps(plan: Plan, records: Mapping[str, Record]) -> str:
    rows: list[dict[str, Any]] = []
    gaps: dict[str, dict[str, float]] = {"BN": {}, "BKN": {}}
    for arm, members in _sorted(_asked(plan, records, "variance_gap")):
        if not arm.ablation or "link=False" in arm.name:
            gap = [mean(each["variance_gap"]) for each in members]
            error = f" ± {stdev(gap):.3f}" if len(gap) > 1 else ""
            rows.append({**_head(arm, members), "gap": f"{mean(gap):.3f}{error}"})
        if not arm.ablation:
            gaps.setdefault(arm.label.partition(",")[0], {})[
                f"{arm.name.partition('.')[0]} ({rows[-1]['batches']})"
            ] = mean(gap)
    both = [place for place in gaps["BKN"] if place in gaps["BN"]]
    larger = [place for place in both if gaps["BKN"][place] >= gaps["BN"][place]]
    held = f"BKN's is smaller than BN's at {len(both) - len(larger)} of {len(both)} pairs of batches"
    return f"{_table_of(rows)}\n{held}{'; not at ' + ', '.join(larger) if larger else ''}.\n"


def _speed(root: Path) -> list[str]:
    names = "benchmark_train.json", "benchmark_train_inception.json"
    results = [json.loads((root / "results" / name).read_text()) for name in names]
    rows = [row for result in results for row in result["rows"] if row["launch"] == "graph"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_bn = max(row["images_per_s"] for row in rows if row["model"] == model and row["norm"] == "bn")
        for row in rows:
            if (row["model"], row["norm"], row["mode"]) == (model, "bkn", "eager"):
                lines.append({
                    "network": model, "batches": f"256, {row['statistics_batch']}", "BN": f"{of_bn:.0f}",
                    "BKN": f"{row['images_per_s']:.0f}", "BKN / BN": f"{row['images_per_s'] / of_bn:.3f}",
                })  # fmt: skip
    ratios = [float(line["BKN / BN"]) for line in lines]
    held = "held" if min(ratios) > 0.95 else "did not hold"
    said = f"BKN has {min(ratios):.3f} to {max(ratios):.3f} of BN's speed: that it costs next to nothing {held}.\n"
    return [SPEED.format(hardware=results[0]["hardware"]), _table_of(lines), said]
