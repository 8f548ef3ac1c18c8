"""Tables of docs/shift.md about single norms and about D: the drift score, and what adapting some norms gives."""

from collections.abc import Mapping, Sequence
from statistics import mean

from bkn_zoo.publishing.results import table as table_of
from studies.base import Record
from studies.shift_corruptions import MAIN, SEVERITIES
from studies.shift_evaluate import CLEAN, UNKNOWN

MISSING = "Not measured yet."
KINDS = {
    "noise": MAIN[:3],
    "blur": MAIN[3:7],
    "weather": MAIN[7:11],
    "contrast": ("contrast",),
    "elastic, pixelate, JPEG": MAIN[12:],
}
SHIFTED = [f"{name} {severity}" for name in MAIN for severity in SEVERITIES]
DETECTED = 0.9
SHOWN = ("drift", "early drift", "confidence", "energy")


def area(records: Sequence[Record], sets: Sequence[str], score: str, of_32: bool) -> float | None:
    found = [record["roc_areas"][each] for record in records for each in sets if each in record["roc_areas"]]
    values = [areas[score][int(of_32)] for areas in found if score in areas]  # the first records have fewer scores
    return mean(values) if values else None


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def roc_table(records: Sequence[Record], of_32: bool) -> str:
    """Areas under the ROC curve by corruption, mean over seeds; of the drift by severity."""
    rows = []
    for name in (*MAIN, UNKNOWN) if records else ():
        sets = [name] if name == UNKNOWN else [f"{name} {severity}" for severity in SEVERITIES]
        by_severity = [[each] for each in sets] if len(sets) > 1 else [[]] * len(SEVERITIES)
        values = [area(records, each, "drift", of_32) for each in by_severity]
        values += [area(records, sets, score, of_32) for score in SHOWN]
        heads = [*(f"drift, {severity}" for severity in SEVERITIES), *SHOWN]
        if values[-1] is not None:
            rows.append({"against clean images": name, **dict(zip(heads, map(shown, values), strict=True))})
    return table_of(rows, list(rows[0])) if rows else MISSING


def drift_summary(records: Sequence[Record]) -> str:
    """For each checkpoint: the mean area over the 75 sets, and how many of them are noticed."""
    rows = []
    for record in records:
        if "checkpoint" not in record or "early drift" not in record["roc_areas"][SHIFTED[0]]:
            continue
        row = {"checkpoint": f"`{record['checkpoint']}`"}
        for of_32, text in ((False, "one image"), (True, "32")):
            for score in SHOWN:
                row[f"{score}, {text}"] = shown(area([record], SHIFTED, score, of_32))
        for scores in (("drift",), ("early drift",), ("confidence",), ("early drift", "confidence")):
            found = [any(record["roc_areas"][each][s][1] > DETECTED for s in scores) for each in SHIFTED]
            row[f"noticed by {' or '.join(scores)}"] = f"{sum(found)} of {len(found)}"
        rows.append(row)
    return table_of(rows, list(rows[0])) if rows else MISSING


def layers_of(records: Sequence[Record]) -> dict[str, list[Mapping[str, Mapping[str, Mapping[str, float]]]]]:
    found: dict[str, list[Mapping[str, Mapping[str, Mapping[str, float]]]]] = {}
    for record in records:
        if record.get("layers"):
            name = record.get("network", f"`{record.get('checkpoint')}`")
            found.setdefault(name, []).append(record["layers"])
    return found


def by_kind(studies: Sequence[Mapping[str, Mapping[str, Mapping[str, float]]]], what: str, row: str) -> dict[str, str]:
    cells = {}
    for kind, names in {CLEAN: (CLEAN,), **KINDS}.items():
        value = mean(study[what][row][name] for study in studies for name in names)
        cells[kind] = f"{value:.1f}" if what == "accuracy" else f"{value:.2f}"
    return cells


def layer_table(records: Sequence[Record], what: str) -> str:
    """Accuracy by rule and group of norms, or D by group of norms, by kind of corruption."""
    rows = []
    for name, studies in layers_of(records).items():
        for row in studies[0][what]:
            if name.startswith("`") and row.startswith("adaptive"):
                continue  # measured with the gains that `sample` has learned there, which leave next to nothing of it
            rows.append({"network": name, "norms" if what == "surprise" else "rule, norms": row})
            rows[-1] |= by_kind(studies, what, row)
    return table_of(rows, list(rows[0])) if rows else MISSING
