"""The tables and figures of docs/pretrained.md, from the records of the study."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.publishing.results import table
from studies.base import Record
from studies.chance import Deviation, Difference, between, typical
from studies.pretrained_plan import (
    ARMS,
    BELIEVING,
    GAINS,
    SEEDS,
    TUNED_BATCH,
    Arm,
    Experiment,
    best_rate,
    best_validation,
    chosen_mode,
    finals,
    finished,
    measured,
)

COLOURS = dict(
    zip(
        ARMS,
        ("#d62728", "#7f7f7f", "#000000", "#ff7f0e", "#2ca02c", "#1f77b4", "#17becf", "#9467bd"),
        strict=True,
    )
)
METRICS = {"top1": "top-1 (%)", "miou": "mean IoU (%)"}
OTHERS = [arm for arm in ARMS if arm not in BELIEVING]
COMPARED = ("measured", "learned")
CHOICES = {"freeze": "frozen", "AdaBN": "adabn", "BN": "bn", "BKN": "measured"}
SAYS = {"held": "ahead", "did not hold": "behind", "within chance": "within chance"}
MEAN = "mean"  # of the targets, as a column
ALL = 0  # the mean over the batch sizes, as a batch size

Records = Mapping[str, Record]


def contents(experiments: Sequence[Experiment], records: Records) -> dict[str, str]:
    """The regions of docs/pretrained.md."""
    found = {
        "state": _state(experiments, records),
        "summary": _summary(experiments, records),
        "aim": _aim(experiments, records),
        "advice": _advice(experiments, records),
        "gains": _gains(experiments, records),
        "drift": _drift(records["drift"]["rows"]) if "drift" in records else "Not run yet.",
    }
    for each in experiments:
        found |= {
            f"{each.name}.images": f"{each.images:,}",
            f"{each.name}.results": _results(each, records),
            f"{each.name}.differences": _differences(each, records),
            f"{each.name}.modes": _modes(each, records),
            f"{each.name}.rates": _rates(each, records),
        }
    return found


# What was measured.


def of(experiment: Experiment, arm: str, records: Records) -> Record | None:
    return records.get(Arm.of(experiment, arm).key)


def columns(experiment: Experiment) -> list[str]:
    """The targets and, if there are several, their mean."""
    return [*experiment.targets, MEAN] if experiment.domains else [""]


def values(experiment: Experiment, arm: str, column: str, batch: int, records: Records, mode: str = "") -> list[float]:
    """The test results of an arm's seeds, averaged for each seed over the targets (MEAN) and the batch sizes (ALL)."""
    record = of(experiment, arm, records)
    targets = experiment.targets if column == MEAN else [column]
    batches = experiment.batches if batch == ALL else [batch]
    each = [measured(record, target, size, mode or None) for target in targets for size in batches]
    return [mean(seeds) for seeds in zip(*each, strict=True)] if len({*map(len, each)}) == 1 else []


def usual(experiment: Experiment, column: str, batch: int, records: Records) -> Deviation | None:
    """The deviation between seeds that is typical of the arms in a column."""
    batches = [ALL] if batch == ALL else experiment.batches
    found = [values(experiment, arm, column, size, records) for arm in ARMS for size in batches]
    return typical([each for each in found if len(each) > 1])


def difference(experiment: Experiment, one: str, other: str, column: str, batch: int, records: Records) -> Difference:
    """Between two arms that have all seeds."""
    these, those = (values(experiment, arm, column, batch, records) for arm in (one, other))
    return between(these, those, usual(experiment, column, batch, records))


def whole(experiment: Experiment, arms: Iterable[str], column: str, batch: int, records: Records) -> dict[str, float]:
    """The means of those arms whose seeds are all there."""
    found = {arm: values(experiment, arm, column, batch, records) for arm in arms}
    return {arm: mean(seeds) for arm, seeds in found.items() if len(seeds) == len(SEEDS)}


def cells(experiments: Sequence[Experiment]) -> list[tuple[Experiment, str, int]]:
    """Every training set with every batch size."""
    return [(each, target, batch) for each in experiments for target in each.targets for batch in each.batches]


# The tables.


def _state(experiments: Sequence[Experiment], records: Records) -> str:
    planned = [Arm.of(each, arm) for each in experiments for arm in ARMS]
    done = [records[arm.key] for arm in planned if arm.key in records]
    if not done:
        return "No run is done yet: the cells below are empty.\n"
    where = ", ".join(sorted({f"{each['hardware']}, torch {each['versions']['torch']}" for each in done}))
    missing = [arm.name for arm in planned if arm.key not in records]
    rest = "none is missing" if not missing else f"missing are {', '.join(missing)}, whose cells are empty"
    count = sum(len(each["trainings"]) for each in done)
    return f"{len(done)} of {len(planned)} arms are done, with {count:,} training runs ({where}); {rest}.\n"


def _spread(seeds: Sequence[float]) -> str:
    return f"{mean(seeds):.1f} ± {stdev(seeds):.1f}" if len(seeds) > 1 else "not run yet"


def _cell(experiment: Experiment, arm: str, column: str, batch: int, records: Records) -> str:
    done = [] if column == MEAN else finals(of(experiment, arm, records), column, batch)
    failed = sum("failed" in each for each in done)
    found = values(experiment, arm, column, batch, records)
    if failed:
        return f"{_spread(found)} ({failed} of {len(SEEDS)} diverged)" if len(found) > 1 else "diverged"
    text = _spread(found)
    best = whole(experiment, ARMS, column, batch, records)
    return f"**{text}**" if best and arm == max(best, key=best.__getitem__) else text


def _results(experiment: Experiment, records: Records) -> str:
    """One table; with domains one for each batch size. The best arm of each column is in bold."""
    heads = {batch: f"{batch} image{'s' if batch > 1 else ''} per batch" for batch in experiment.batches}
    name = METRICS[experiment.metric]
    if not experiment.domains:
        rows = [
            {name: title, **{head: _cell(experiment, arm, "", batch, records) for batch, head in heads.items()}}
            for arm, title in ARMS.items()
        ]
        return table(rows, list(rows[0])) + "\n"
    tables = []
    for batch, head in heads.items():
        rows = [
            {f"{name}, {head}": title}
            | {each: _cell(experiment, arm, each, batch, records) for each in columns(experiment)}
            for arm, title in ARMS.items()
        ]
        tables.append(table(rows, list(rows[0])) + "\n")
    return "\n".join(tables)


def _summary(experiments: Sequence[Experiment], records: Records) -> str:
    """A column for each data set: the mean over batch sizes and targets, and BKN against the better of two ends."""
    rows = {title: {"mean over batch sizes": title} for title in ARMS.values()}
    gaps = {arm: f"{ARMS[arm]}, against the better of frozen BN and BN" for arm in COMPARED}
    rows |= {title: {"mean over batch sizes": title} for title in gaps.values()}
    for each in experiments:
        column, head = columns(each)[-1], f"{_named(each, '')}, {METRICS[each.metric]}"
        found = whole(each, ARMS, column, ALL, records)
        if len(found) == len(ARMS):
            best = max(("frozen", "bn"), key=found.__getitem__)
            for arm, value in found.items():
                rows[ARMS[arm]][head] = f"{value:.1f}"
            for arm, title in gaps.items():
                rows[title][head] = _compared(each, arm, best, column, ALL, records)
    shown = list(rows.values())
    return table(shown, list(shown[0])) + "\n" if len(shown[0]) > 1 else "Not run yet.\n"


def _compared(experiment: Experiment, arm: str, other: str, column: str, batch: int, records: Records) -> str:
    found = difference(experiment, arm, other, column, batch, records)
    return f"{found.value:+.1f} ± {found.error:.1f} ({SAYS[found.verdict()]})"


def _differences(experiment: Experiment, records: Records) -> str:
    """BKN against the best other arm, and the better of frozen BN and BN, with the standard error."""
    rows = []
    for batch in experiment.batches:
        for column in columns(experiment):
            for arm in COMPARED:
                best = whole(experiment, OTHERS, column, batch, records)
                if not best or not whole(experiment, [arm], column, batch, records):
                    continue
                row: dict[str, Any] = {"images per batch": batch}
                row |= {"test": column} if column else {}
                other = max(best, key=best.__getitem__)
                ends = max((end for end in ("frozen", "bn") if end in best), key=best.__getitem__)
                rows.append(row | {
                    "arm": ARMS[arm],
                    "best other arm": ARMS[other],
                    "difference to it": _compared(experiment, arm, other, column, batch, records),
                    "to the better of frozen BN and BN": _compared(experiment, arm, ends, column, batch, records),
                })  # fmt: skip
    return table(rows, list(rows[0])) + "\n" if rows else "Not run yet.\n"


def _aim(experiments: Sequence[Experiment], records: Records) -> str:
    """How often BKN is ahead of, or behind, the better of frozen BN and BN."""
    lines = []
    for arm in COMPARED:
        verdicts: dict[str, list[str]] = {says: [] for says in SAYS.values()}
        for each, target, batch in cells(experiments):
            ends = whole(each, ("frozen", "bn"), target, batch, records)
            if len(ends) == 2 and whole(each, [arm], target, batch, records):
                best = max(ends, key=ends.__getitem__)
                verdict = difference(each, arm, best, target, batch, records).verdict()
                verdicts[SAYS[verdict]].append(f"{target or each.name} at {batch}")
        if any(verdicts.values()):
            named = {says: f" ({', '.join(where)})" for says, where in verdicts.items() if where}
            ahead, behind = (f"{len(verdicts[says])} times{named.get(says, '')}" for says in ("ahead", "behind"))
            count = sum(map(len, verdicts.values()))
            lines.append(
                f"- {ARMS[arm]}, against the better of frozen BN and BN, in {count} cells (test set at images per "
                f"batch): ahead {ahead}, behind {behind}, otherwise within chance."
            )
    return "\n".join(lines or ["Not run yet."]) + "\n"


def facts_of(experiment: Experiment, records: Records) -> dict[str, Any]:
    """What was measured before training, by target."""
    return records.get(f"{experiment.name}.facts", {}).get("facts", {})


def _named(experiment: Experiment, target: str) -> str:
    return experiment.title.partition(":")[0] + (f" without {target}" if target else "")


def _advice(experiments: Sequence[Experiment], records: Records) -> str:
    """The advice beside the best of the four choices, and how often it was right; the same for each choice alone."""
    rows, right = [], {"advice": [0, 0], **{choice: [0, 0] for choice in CHOICES.values()}}
    compared = 0
    for each, target, batch in cells(experiments):
        facts = facts_of(each, records).get(target)
        if facts is None:
            continue
        advised = CHOICES[facts["advice"][str(batch)]]
        row = {"data": _named(each, target), "images per batch": batch, "advice": ARMS[advised]}
        row |= {"best of the four": "not run yet", "advice against best": "-", "match": "-"}
        best = whole(each, CHOICES.values(), target, batch, records)
        if len(best) == len(CHOICES):
            first, compared = max(best, key=best.__getitem__), compared + 1
            gaps = {arm: difference(each, arm, first, target, batch, records) for arm in best}
            for name, arm in {"advice": advised, **{arm: arm for arm in best}}.items():
                right[name][0] += arm == first
                right[name][1] += arm == first or gaps[arm].verdict() == "within chance"
            row["best of the four"] = ARMS[first]
            if advised != first:
                row["advice against best"] = f"{gaps[advised].value:+.1f} ± {gaps[advised].error:.1f}"
            close = gaps[advised].verdict() == "within chance"
            row["match"] = "yes" if advised == first else "within chance" if close else "no"
        rows.append(row)
    if not rows:
        return "Not run yet.\n"
    if not compared:
        return f"The training runs that the advice is compared with are missing.\n\n{table(rows, list(rows[0]))}\n"
    names = {"advice": "the advice", **{arm: f"always {ARMS[arm]}" for arm in CHOICES.values()}}
    counts = [
        {f"of {compared} cells": names[name], "best": hit, "best or within chance of it": close}
        for name, (hit, close) in right.items()
    ]
    return f"{table(counts, list(counts[0]))}\n\n{table(rows, list(rows[0]))}\n"


def _gains(experiments: Sequence[Experiment], records: Records) -> str:
    """T, V and the gain measured from them, beside fixed gains on the validation images."""
    rows = []
    for each in experiments:
        for target, facts in facts_of(each, records).items():
            trainings = (of(each, "measured", records) or {"trainings": []})["trainings"]
            chosen = [t for t in trainings if (t["stage"], t["target"]) == ("gain", target)]
            tried = {t["gain"]: best_validation(t) for t in chosen}
            best = max(tried, key=tried.__getitem__) if tried else None
            texts = {q: f"**{value:.1f}**" if q == best else f"{value:.1f}" for q, value in tried.items()}
            ends = [t["gains"][1] for t in finals(of(each, "learned", records), target, each.batches[-1])]
            rows.append({
                "data": _named(each, target),
                "images": facts["images"],
                "T": f"{facts['T']:.3f}",
                "T between": f"{facts['between']:.3f}" if each.domains else "-",
                "V": f"{facts['V']:.3f}",
                "share Q": f"{facts['shares'][str(TUNED_BATCH)]:.3f}",
                "measured gain": f"{facts['gains'][str(TUNED_BATCH)]:.4f}",
                **{f"q = {q:g}": texts.get(q, "not run yet") for q in GAINS},
                "measured, largest batch": f"{facts['gains'][str(each.batches[-1])]:.4f}",
                "learned, largest batch": f"{mean(ends):.4f}" if ends else "not run yet",
            })  # fmt: skip
    return table(rows, list(rows[0])) + "\n" if rows else "Not run yet.\n"


def _drift(rows: Sequence[Mapping[str, Any]]) -> str:
    batches = sorted({row["batch"] for row in rows})
    found = {(row["start"], row["batch"]): row["similarity"] for row in rows}
    shown = [
        {"gain at the start": str(start), **{f"batch {batch}": f"{found[start, batch]:.2f}" for batch in batches}}
        for start in dict.fromkeys(row["start"] for row in rows)
    ]
    return table(shown, list(shown[0])) + "\n"


def _modes(experiment: Experiment, records: Records) -> str:
    """Test results by the statistics at inference; those chosen on the validation images are in bold."""
    rows = []
    for arm in ("bn", *BELIEVING):
        for batch in experiment.batches:
            for column in columns(experiment)[-1:]:
                row: dict[str, Any] = {"arm": ARMS[arm], "images per batch": batch}
                for mode in MODES:
                    found = values(experiment, arm, column, batch, records, mode)
                    targets = [finals(of(experiment, arm, records), each, batch) for each in experiment.targets]
                    chosen = {chosen_mode(each) for each in targets}
                    text = _spread(found)
                    row[mode] = f"**{text}**" if mode in chosen else text
                rows.append(row)
    return table(rows, list(rows[0])) + "\n"


def _rates(experiment: Experiment, records: Records) -> str:
    """Validation results by learning rate; the chosen one is in bold."""
    found = {}
    for arm, title in ARMS.items():
        done = finished(of(experiment, arm, records))
        for target in experiment.targets:
            row = title, target
            found[row] = Arm.of(experiment, arm).tried(target, done)
    rates = sorted({*experiment.rates, *(rate for tried in found.values() for rate in tried)})
    rows = []
    for (title, target), tried in found.items():
        best = best_rate(tried) if tried else None
        texts = {rate: f"{tried[rate]:.1f}" if tried.get(rate, -1) >= 0 else "diverged" for rate in tried}
        shown = {f"{rate:g}": f"**{texts[rate]}**" if rate == best else texts.get(rate, "-") for rate in rates}
        rows.append({"validation, by learning rate": title, **({"without": target} if target else {}), **shown})
    return table(rows, list(rows[0])) + "\n"


# The figures.


def figures(experiments: Sequence[Experiment], records: Records) -> dict[str, Any]:
    """One plot for each experiment."""
    return {each.name: _plot(each, records) for each in experiments}


def _plot(experiment: Experiment, records: Records) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for place, (arm, title) in enumerate(ARMS.items()):
        found = {b: values(experiment, arm, columns(experiment)[-1], b, records) for b in experiment.batches}
        found = {batch: seeds for batch, seeds in found.items() if len(seeds) > 1}
        if found:
            axes.errorbar(
                [experiment.batches.index(batch) + 0.04 * (place - 4) for batch in found],
                [mean(seeds) for seeds in found.values()], [stdev(seeds) for seeds in found.values()],
                label=title, color=COLOURS[arm], marker="o", linestyle="", capsize=3,
            )  # fmt: skip
    if not axes.has_data():
        return None
    axes.set_xticks(range(len(experiment.batches)), [str(batch) for batch in experiment.batches])
    axes.set(xlabel="images in the whole batch", ylabel=f"test {METRICS[experiment.metric]}", title=experiment.title)
    figure.legend(loc="outside right upper")
    return figure
