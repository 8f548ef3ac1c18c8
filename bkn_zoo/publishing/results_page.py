"""docs/results.md, written from the plan of a replication and its records."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.publishing.chance import SAME, Difference, spread
from bkn_zoo.publishing.replication import (
    HELD,
    Arm,
    Cell,
    Experiment,
    Lead,
    Plan,
    Record,
    best,
    cell,
    cells,
    counted,
    difference,
    leads_by_length,
    listed,
    missing,
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
validation images in the mean over seeds, as all choices here are made on those; *population*, *sample* and *expected*
are the three modes ([docs/paper.md](paper.md), 3.5). *batches* are gradient and statistics batch. The paper's numbers
are those of its data sets: its ImageNet is Tiny ImageNet here, so that differences can be compared there, and levels
cannot.

**What is chance.** ± is the standard deviation over seeds for an accuracy, and the standard error for a difference. Two
or three seeds may be near to each other by chance: each arm of a difference is taken to scatter as its setting's arms
typically do, or as it does itself where that is more, and a setting's arms with one seed as the others; what is typical
is taken from arms of which every seed learned. A claim *held*, or there is *a gain*, where zero is outside the 95 %
interval (Student's t, with Welch's and Satterthwaite's degrees of freedom). Two things are *the same* where that whole
interval is within a point of zero. Where no arm of a setting was repeated, a point is asked of a difference, and "one
seed" is said; a point may be too little, as two seeds of ResNet101 with BN are further apart. Over networks of which
one learned nothing, or diverged, no gain is counted. There are {count} verdicts on this page: of those on differences
that are none, about one in twenty is wrong, and more where an arm has one seed.

**What was decided with results in view.** That arms of which a seed did not learn say nothing of how others scatter:
with BRN's on CIFAR-10, which broke down, BKN's leads there over BN with two images by EvalNorm's rule, and with two
over BN with whole batches, would be within chance. And seeds were added where a difference had come out within chance:
to BKN with one image a group on CIFAR-100, with A learned and held at zero, and to BKN and BN at (256,32) on Tiny
ImageNet, where BKN's leads are gains with them.

**Effort.** All norms are trained by one recipe, and none has settings of its own but BRN. That recipe was made with BKN
and BN in view ([docs/runs.md](runs.md)); its learning rate is not the best for each of them, and what they are worth at
the best of several is asked below, with one seed. BRN's momentum is its paper's, and its schedule that one scaled to
the length of a training; where it breaks down, others were not tried, nor on CIFAR-10 other rates. GroupNorm has 32
groups of channels, or as many of them as divide a layer's: in the small network of CIFAR a group of some layers is one
channel, and other sizes are tried below. At full length, seed 0 of published networks and of some twins is by
`scripts/train.py`; all others are by `scripts/reproduce.py`, which asks more. Short trainings on CIFAR hold out a tenth
of the images, full ones a fiftieth.
"""

NOT_RUN = "not run yet"
HEADLINE = "CIFAR-100, top-1 (%)"
WORTH = {"held": "a gain", "did not hold": "a loss", "within chance": "within chance"}
WORTH |= {f"{verdict} (one seed)": f"{worth} (one seed)" for verdict, worth in WORTH.items()}

BEYOND = """\
## Beyond the paper

What a sceptic would ask next.
"""

LENGTHS = """\
## The lead, and the length of training

Most of what is compared here is trained briefly. BKN less another norm in points, at equal batches, after few epochs
and at the recipe's full length. GroupNorm has no groups of images: it is the same for all of BKN's. A lead over
networks that learned nothing in few epochs, as BN with one image a group on CIFAR-100, would say nothing, and is left
out.
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
`population`, which does not ask for A. *A set to zero* takes it away from a network that was trained with it: where
that loses nothing, to keep it in a smaller form says little. An empty cell: the run is older than the question.
"""

GAPS = """\
## The variance gap

The paper shows that the variance which normalizes a group strays less from its moving average with BKN than with BN.
Here, over 64 training batches after the training: the mean of |log(variance of the group / running variance)|, over
groups, channels and layers. For BKN the group's variance is its belief, which is drawn towards a prediction: it strays
less almost by construction. Networks that learned nothing are left out.
"""

SPEED = """\
## Examples per second

The paper's Table 2 has 325.74 for BN and 320.94 for BKN, 0.985 of it. From `results/benchmark_train.json` and
`benchmark_train_inception.json` ([docs/performance.md](performance.md)): training steps of 256 images of 224 px on one
{hardware}, both replayed from a CUDA graph, BN's by the fastest way that is there (compiled). *From Python*: BKN's
speed by BN's where both are launched kernel by kernel, none compiled. BN is PyTorch's own, and BKN has kernels of this
package: a ratio above one says that these are good, and not that BKN is less to do.
"""


def page(plan: Plan, records: Mapping[str, Record], root: Path) -> str:
    """docs/results.md; shows those plots that are drawn."""

    def picture(name: str, text: str) -> list[str]:
        path = root / "results" / "plots" / f"{name}.png"
        return [f"![{text}](../results/plots/{name}.png)\n"] if path.exists() else []

    claims = _found(plan.claims, plan, records)
    differences = {each.name: _found(each.differences, plan, records) for each in plan.experiments}
    count = sum(found is not None for _, found in itertools.chain(claims, *differences.values()))
    parts = [INTRODUCTION.format(count=count), _settings(plan), _state(plan, records)]
    parts += ["## The paper's claims\n", _claims(claims), "## What did not replicate\n", _failures(claims)]
    parts += ["## The paper's tables and figures\n"]
    for experiment in plan.experiments:
        if experiment.place:
            parts += [_section(experiment, differences[experiment.name], plan, records)]
    parts += [LENGTHS, _lengths(plan, records), *picture("lengths", "BKN's lead, after few epochs and many")]
    parts += picture("micro_batches", "The course of training at each pair of batches, as in the paper's figures")
    parts += [GAPS, _gaps(plan, records), *picture("variance_gap", "How far variances stray from their moving average")]
    parts += [*_speed(root), BEYOND]
    for experiment in plan.experiments:
        if not experiment.place:
            parts += [_section(experiment, differences[experiment.name], plan, records)]
            parts += picture(experiment.name, experiment.title)
    parts += picture("curves", "Validation accuracy over the training")
    parts += [RULES, _rules(plan, records), CALIBRATION, _calibration(plan, records), SMALLER, _smaller(plan, records)]
    return "\n".join(parts)


def headline(plan: Plan, records: Mapping[str, Record]) -> str:
    """The README's first table: each norm by images per group, on CIFAR-100, after a long training and a short one."""
    groups = {128: "128 images a group", 8: "8", 2: "2", 1: "1"}
    rows = []
    for setting in ("cifar100_full", "cifar100"):
        for label in ("BN", "BRN", "GroupNorm", HELD, "BKN"):
            found = {
                arm.group: each
                for arm in plan.arms.values()
                if (arm.setting, arm.label) == (setting, label) and (each := cell(arm, records)).good
            }
            if label == "GroupNorm":  # by each image itself, whatever is in the batch
                found = dict.fromkeys(groups, found[128]) if found else {}
            if found:
                epochs = next(iter(found.values())).arm.runs[0].recipe.epochs
                tops = {shown: spread(found[group].top1()) if group in found else "" for group, shown in groups.items()}
                rows.append({HEADLINE: label, "epochs": epochs, **tops})
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
    left = len(missing(plan, records))
    rest = f"; {left} {'is' if left == 1 else 'are'} not: GPU time is why" if left else ""
    return (
        f"Of {len(runs)} runs planned, {len(done)} are done ({'; '.join(where)}){rest}. Each record holds its command, "
        "hardware, versions, seed and recipe.\n"
    )


Found = list[tuple[Mapping[str, Any], Difference | None]]
"""Claims, and what was found."""


def _found(claims: Iterable[Mapping[str, Any]], plan: Plan, records: Mapping[str, Record]) -> Found:
    """A difference from networks that learned nothing would be a number that says nothing."""
    found: Found = []
    for claim in claims:
        points = difference(claim, plan, records)
        that = None if points is None else best(listed(claim["that"]), plan, records)
        mode = claim.get("modes", [None, None])[1]
        if that and claim["this"] != claim["that"] and not that.learned(mode):
            some = any(Cell(that.arm, (each,)).learned(mode) for each in that.good)
            how = "did not learn, or broke down, with some seeds" if some else "did not learn"
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
        lines = ["Of what was tested, nothing."]
    if untested:
        are = "is" if untested == 1 else "are"
        lines += ["", f"{untested} of the {len(claims)} claims {are} not tested."]
    return "\n".join(lines) + "\n"


def _section(experiment: Experiment, found: Found, plan: Plan, records: Mapping[str, Record]) -> str:
    place = f"For {experiment.place}. " if experiment.place else ""
    about = f"{place}Setting `{experiment.setting}`, {counted(*(len(arm.runs) for arm in experiment.arms))}.\n"
    parts = [f"### {experiment.title}\n", about]
    found_cells = list(cells(experiment, records))
    if not any(each.records for each in found_cells):
        return "\n".join([*parts, f"None of its {len(found_cells)} rows is run yet.\n"])
    rows = [_row(each) for each in found_cells]
    names = list(rows[0])
    if all(not row["paper"] for row in rows):
        names.remove("paper")
    parts += [table(rows, names) + "\n"]
    lines = [
        {"what": what, "points": "", "seeds": "", "": claim.get("untested", NOT_RUN)}
        if each is None
        else {"what": what, "points": str(each), "seeds": _seeds(each), "": WORTH[each.verdict()]}
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
        parts += [f"The largest that was tried, so that a larger one may be better still: {'; '.join(last)}.\n"]
    return "\n".join(parts)


def _waits(claim: Mapping[str, Any], plan: Plan, records: Mapping[str, Record]) -> bool:
    """Whether some of its arms have no records yet; if not, networks were not asked for one of its rules."""
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
    said = (
        f"Of {len(gained)} gains after few epochs, {smaller} are smaller at full length and {none} within chance there"
    )
    so = ": a short training says who learns faster, and not by how much one ends higher"
    said += so if 2 * smaller > len(gained) else ""
    return f"{_table_of(rows)}\n{said}.\n" if gained else _table_of(rows)


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
    """Of the networks that were asked, and how many they are where that is not all."""
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
    return "\n".join([_table_of(rows), "By more than a point better (+) or worse (-) than `expected`:\n", *said, ""])


def _calibration(plan: Plan, records: Mapping[str, Record]) -> str:
    rows = []
    for each in _arms(plan, records, "test"):
        if not each.arm.ablation:
            errors = {mode: spread(record["test"][mode]["ece"] for record in each.records) for mode in MODES}
            rows.append({**_head(each), **errors, "chosen for top-1": each.chosen})
    return _table_of(rows)


WAYS = "A in 8 bits", "A of rank 16", "A of rank 4", "A set to zero"


def _smaller(plan: Plan, records: Mapping[str, Record]) -> str:
    """Each network in the mode that it was asked in, its own."""
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
        """Where the one is smaller, in words, and whether it is so everywhere."""
        both = [place for place in gaps[this] if place in gaps[that]]
        larger = [place for place in both if gaps[this][place] >= gaps[that][place]]
        but_for = f" (not at {', '.join(larger)})" if larger else ""
        return f"{len(both) - len(larger)} of {len(both)}{but_for}", bool(both) and not larger

    (than_bn, _), (unlinked_than_bkn, everywhere) = compared("BKN", "BN"), compared(HELD, "BKN")
    so = ": what steadies it is the shrinking, and not the link between layers" if everywhere else ""
    return (
        f"{_table_of(rows)}\nBKN's is smaller than BN's at {than_bn} pairs of batches; with A held at zero it is "
        f"smaller still at {unlinked_than_bkn}{so}.\n"
    )


def _speed(root: Path) -> list[str]:
    names = "benchmark_train.json", "benchmark_train_inception.json"
    results = [json.loads((root / "results" / name).read_text()) for name in names]
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
        f"In a graph BKN has {min(ratios):.3f} to {max(ratios):.3f} of BN's speed: there, that it costs little "
        f"{held}. From Python it has {min(plain):.3f} to {max(plain):.3f}.\n"
    )
    return [SPEED.format(hardware=results[0]["hardware"]), _table_of(lines), said]
