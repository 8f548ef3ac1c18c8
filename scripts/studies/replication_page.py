"""The tables of docs/results.md, from the plan of the replication and its records."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.publishing.results import table
from studies.base import RESULTS, Record
from studies.chance import SAME, Difference, spread
from studies.records import counted
from studies.replication_cells import (
    Cell,
    Lead,
    best,
    cell,
    cells,
    difference,
    leads_by_length,
    missing,
    verdict,
)
from studies.replication_plan import HELD, Arm, Experiment, Plan, listed

NOT_RUN = "not run yet"
WORTH = {"held": "a gain", "did not hold": "a loss", "within chance": "within chance"}
WORTH |= {f"{verdict} (one seed)": f"{worth} (one seed)" for verdict, worth in WORTH.items()}


def contents(plan: Plan, records: Mapping[str, Record]) -> dict[str, str]:
    """The regions of docs/results.md by name: one for each experiment, and those listed at the end."""
    claims = _found(plan.claims, plan, records)
    differences = {each.name: _found(each.differences, plan, records) for each in plan.experiments}
    count = sum(found is not None for _, found in itertools.chain(claims, *differences.values()))
    sections = {each.name: _section(each, differences[each.name], plan, records) for each in plan.experiments}
    return (
        sections
        | _speed()
        | {
            "verdicts": str(count),
            "settings": _settings(plan),
            "state": _state(plan, records),
            "claims": _claims(claims),
            "failures": _failures(claims),
            "lengths": _lengths(plan, records),
            "gaps": _gaps(plan, records),
            "rules": _rules(plan, records),
            "calibration": _calibration(plan, records),
            "smaller": _smaller(plan, records),
        }
    )


def _settings(plan: Plan) -> str:
    used = dict.fromkeys(experiment.setting for experiment in plan.experiments)
    lines = []
    for name in used:
        setting = dict(plan.settings[name])
        recipe, schedule = setting.pop("recipe"), setting.pop("brn", None)
        changes = [f"{field} = {value}" for field, value in setting.items()]
        changes += [f"BRN's schedule {', '.join(f'{k} = {v}' for k, v in schedule.items())}"] if schedule else []
        lines.append({"setting": name, "recipe": f"`recipes/{recipe}.toml`", "changes": "; ".join(changes)})
    return table(lines, ["setting", "recipe", "changes"]) + "\n"


def _state(plan: Plan, records: Mapping[str, Record]) -> str:
    runs = plan.runs()
    done = [records[run.key] for run in runs if run.key in records]
    where = dict.fromkeys(f"{each['hardware']}, torch {each['versions']['torch']}" for each in done)
    left = len(missing(plan, records))
    rest = f" {left} {'was' if left == 1 else 'were'} not run for lack of GPU time." if left else ""
    return (
        f"Of {len(runs)} planned runs, {len(done)} are done ({'; '.join(where)}).{rest} Each record contains its "
        "command, hardware, versions, seed and recipe.\n"
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


def _claims(claims: Found) -> str:
    rows = []
    for claim, found in claims:
        rows.append({
            "the paper says": claim["says"], "paper": f"{claim['paper']:+.2f}" if "paper" in claim else "",
            "here": str(found or ""), "seeds": "" if found is None else _seeds(found),
            "claim": f"not tested: {claim.get('untested', NOT_RUN)}" if found is None else verdict(claim, found),
        })  # fmt: skip
    return table(rows, list(rows[0])) + "\n" if rows else ""


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
    return "\n".join(lines) + "\n"


def _section(experiment: Experiment, found: Found, plan: Plan, records: Mapping[str, Record]) -> str:
    place = f"In the paper: {experiment.place}. " if experiment.place else ""
    about = f"{place}Setting `{experiment.setting}`, {counted(*(len(arm.runs) for arm in experiment.arms))}.\n"
    parts = [about]
    found_cells = list(cells(experiment, records))
    if not any(each.records for each in found_cells):
        return "\n".join([*parts, f"None of the {len(found_cells)} rows has been run yet.\n"])
    rows = [_row(each) for each in found_cells]
    names = list(rows[0])
    if all(not row["paper"] for row in rows):
        names.remove("paper")
    parts += [table(rows, names) + "\n"]
    lines = [
        {"comparison": what, "points": "", "seeds": "", "verdict": claim.get("untested", NOT_RUN)}
        if each is None
        else {"comparison": what, "points": str(each), "seeds": _seeds(each), "verdict": WORTH[each.verdict()]}
        for claim, each in found
        if each or "untested" in claim or _waits(claim, plan, records)
        for what in [claim["says"] + (", on validation images" if claim.get("images") == "validation" else "")]
    ]
    if lines:
        parts += [table(lines, list(lines[0])) + "\n"]
    lists = [claim[side] for claim in experiment.differences for side in ("this", "that")]
    choices = {tuple(names): best(names, plan, records) for names in lists if isinstance(names, list)}
    ends = [each.arm for names, each in choices.items() if each.good and each.arm.name == names[-1]]
    last = [f"{arm.label} ({arm.batches})" for arm in ends]
    if last:
        parts += [f"The best value is the largest that was tried, so a larger one may be better: {'; '.join(last)}.\n"]
    return "\n".join(parts)


def _waits(claim: Mapping[str, Any], plan: Plan, records: Mapping[str, Record]) -> bool:
    """Whether some of its arms have no records yet; otherwise, one of its rules was not measured."""
    names = [name for side in ("this", "that") for name in listed(claim[side])]
    return not all(cell(plan.arms[name], records).records for name in names)


def leads(plan: Plan, records: Mapping[str, Record]) -> list[tuple[Lead, Lead]]:
    """After a short training and a long one, over networks that learned in both."""
    pairs = leads_by_length(plan, records)
    return [pair for pair in pairs if all(cell(lead.over, records).learned() for lead in pair)]


def _lengths(plan: Plan, records: Mapping[str, Record]) -> str:
    found = leads(plan, records)
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
    return f"{_table_of(rows)}\n{said}\n" if gained else _table_of(rows)


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


def _table_of(rows: list[dict[str, Any]]) -> str:
    return table(rows, list(rows[0])) + "\n" if rows else f"{NOT_RUN.capitalize()}.\n"


def _head(each: Cell) -> dict[str, Any]:
    arm = each.arm
    return {"setting": arm.setting, "norm": arm.label, "batches": arm.batches, "seeds": len(each.records)}


def _of_some(top1: Sequence[float], each: Cell) -> str:
    """Mean and deviation over the measured networks, with their number if not all were measured."""
    return spread(top1) + (f" ({counted(len(top1))})" if 0 < len(top1) < len(each.records) else "")


def _kind(arm: Arm) -> str:
    """Its norm, and whether A is held at zero; not its rate."""
    return arm.label if arm.label == HELD else arm.label.partition(",")[0]


def _rules(plan: Plan, records: Mapping[str, Record]) -> str:
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
    return "\n".join([_table_of(rows), "More than one point better (+) or worse (-) than `expected`:\n", *said, ""])


def _calibration(plan: Plan, records: Mapping[str, Record]) -> str:
    rows = []
    for each in _arms(plan, records, "test"):
        if not each.arm.ablation:
            errors = {mode: spread(record["test"][mode]["ece"] for record in each.records) for mode in MODES}
            rows.append({**_head(each), **errors, "chosen for top-1": each.chosen})
    return _table_of(rows)


WAYS = "A in 8 bits", "A of rank 16", "A of rank 4", "A set to zero"


def _smaller(plan: Plan, records: Mapping[str, Record]) -> str:
    """Accuracy with smaller transitions, for each network in its own mode."""
    rows = []
    for each in _arms(plan, records, "rules"):
        asked = [r for r in each.records if WAYS[0] in r["rules"] and r["chosen_statistics"] != "population"]
        if asked and not each.arm.ablation:
            those = Cell(each.arm, tuple(asked))
            whole = spread(record["test"][record["chosen_statistics"]]["top1"] for record in asked)
            row = {**_head(those), "A as trained": whole}
            for way in WAYS:
                found = [record["rules"][way]["top1"] for record in asked if way in record["rules"]]
                row[way] = _of_some(found, those)
            rows.append(row)
    return _table_of(rows)


def _gaps(plan: Plan, records: Mapping[str, Record]) -> str:
    rows: list[dict[str, Any]] = []
    gaps: dict[str, dict[str, float]] = {"BN": {}, "BKN": {}, HELD: {}}
    for each in _arms(plan, records, "variance_gap"):
        if not each.learned() or (each.arm.ablation and each.arm.label != HELD):
            continue
        gap = [mean(record["variance_gap"]) for record in each.records]
        rows.append({**_head(each), "gap": spread(gap, 3)})
        gaps.setdefault(_kind(each.arm), {})[f"{each.arm.setting} ({each.arm.batches})"] = mean(gap)

    def compared(this: str, that: str) -> tuple[str, bool]:
        """In how many places the first is smaller, in words, and whether it is everywhere."""
        both = [place for place in gaps[this] if place in gaps[that]]
        larger = [place for place in both if gaps[this][place] >= gaps[that][place]]
        but_for = f" (not at {', '.join(larger)})" if larger else ""
        return f"{len(both) - len(larger)} of {len(both)}{but_for}", bool(both) and not larger

    (than_bn, _), (unlinked_than_bkn, everywhere) = compared("BKN", "BN"), compared(HELD, "BKN")
    so = " So the gap shrinks because of the shrinkage, not because of the link between layers." if everywhere else ""
    return (
        f"{_table_of(rows)}\nThe gap of BKN is smaller than that of BN at {than_bn} pairs of batches. With A held at "
        f"zero it is even smaller at {unlinked_than_bkn}.{so}\n"
    )


def _speed() -> dict[str, str]:
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
        f"little {held}. From Python it has {min(plain):.3f} to {max(plain):.3f}.\n"
    )
    return {"speed": f"{_table_of(lines)}\n{said}", "speed_hardware": results[0]["hardware"]}
