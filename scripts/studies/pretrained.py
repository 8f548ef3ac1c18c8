"""Fine-tuning a pretrained network with 1, 2 and 4 images per batch: docs/pretrained.md, from the records.

The runs are finished; the history of this repository has the code that trained them, until commit 25e6aea.
pretrained.toml says what was trained. A record of results/pretrained/ is one arm on one data set, with all its
trainings: those of the stage "final" have one of three seeds.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies.base import DOCS, RESULTS, Record, Study
from studies.stats import AHEAD, Difference, mean_of, spread

ARMS = {
    "bn": "BN", "frozen": "frozen BN", "adabn": "AdaBN, then frozen", "partial": "partial BN", "gn": "GroupNorm",
    "measured": "BKN, measured gain", "learned": "BKN, learned gain", "linkless": "BKN, learned gain, A = 0",
}  # fmt: skip
COMPARED, ENDS, OTHERS = ("measured", "learned"), ("frozen", "bn"), ("bn", "frozen", "adabn", "partial", "gn")
SEEDS = (1, 2, 3)
METRICS = {"classification": "top-1 (%)", "segmentation": "mean IoU (%)"}
MEAN = "mean"  # of the targets, as a column
ALL = 0  # the mean over the batch sizes, as a batch size


class Pretrained(Study):
    name = "pretrained"
    results = RESULTS / "pretrained"

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.render import frame

        found = experiments(records)
        tables: dict[str, Any] = {}
        for name, each in found.items():
            tables[f"{name}.results"] = [frame(rows) for rows in each.results()]
            tables[f"{name}.differences"] = frame(each.differences())
        page = {"summary": frame(summary(list(found.values())))}
        return {DOCS / "pretrained.md": page, RESULTS / "tables" / self.name: tables}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        return {"pretrained": figure(list(experiments(records).values()))}


def experiments(records: Mapping[str, Record]) -> dict[str, "Experiment"]:
    """The data sets of pretrained.toml."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {name: Experiment(name, about, records) for name, about in content.items()}


STUDY = Pretrained()


class Experiment:
    """The results on one data set.

    Args:
        name: its name in pretrained.toml.
        about: its fields there.
        records: of all arms.
    """

    def __init__(self, name: str, about: Mapping[str, Any], records: Mapping[str, Record]) -> None:
        self.about, self.title = about, about["title"].partition(":")[0]
        self.metric, self.batches = METRICS[about["task"]], about["batches"]
        self.targets: Sequence[str] = about.get("domains", [""])
        self.columns = [*self.targets, MEAN] if "domains" in about else [""]
        self.trainings = {arm: records[f"{name}.{arm}"]["trainings"] for arm in ARMS}

    def measured(self, arm: str, target: str, batch: int) -> list[float]:
        """The test results of the seeds, in the mode with the best mean on the validation images."""
        wanted = ("final", target, batch)
        finals = [each for each in self.trainings[arm] if (each["stage"], each["target"], each["batch"]) == wanted]
        finals.sort(key=lambda each: each["seed"])
        modes = finals[0]["validation"]
        chosen = max(modes, key=lambda mode: mean(each["validation"][mode] for each in finals))
        return [each["test"][chosen] for each in finals]

    def values(self, arm: str, column: str, batch: int) -> list[float]:
        """The test results of an arm's seeds, averaged for each seed over the targets (MEAN) and batch sizes (ALL)."""
        targets, batches = self.targets if column == MEAN else [column], self.batches if batch == ALL else [batch]
        each = [self.measured(arm, target, size) for target in targets for size in batches]
        return [mean(seeds) for seeds in zip(*each, strict=True)]

    def means(self, arms: Iterable[str], column: str, batch: int) -> dict[str, float]:
        return {arm: mean(self.values(arm, column, batch)) for arm in arms}

    def difference(self, one: str, other: str, column: str, batch: int) -> Difference:
        """The mean difference between runs with the same seed."""
        pairs = zip(self.values(one, column, batch), self.values(other, column, batch), strict=True)
        return mean_of([this - that for this, that in pairs])

    def compared(self, one: str, others: Sequence[str], column: str, batch: int) -> tuple[str, str]:
        """The best of other arms, and the difference to it."""
        best = self.means(others, column, batch)
        other = max(others, key=lambda arm: best[arm])
        found = self.difference(one, other, column, batch)
        return ARMS[other], f"{found.value:+.1f} ± {found.error:.1f} ({AHEAD[found.verdict()]})"

    def cell(self, arm: str, column: str, batch: int) -> str:
        text, best = spread(self.values(arm, column, batch), 1), self.means(ARMS, column, batch)
        return f"**{text}**" if best[arm] == max(best.values()) else text

    def results(self) -> list[list[dict[str, str]]]:
        """One table; with domains one for each batch size. The best arm of each column is in bold."""
        heads = {batch: f"{batch} image{'s' if batch > 1 else ''} per batch" for batch in self.batches}
        if len(self.columns) == 1:
            tables = {self.metric: {head: ("", batch) for batch, head in heads.items()}}
        else:
            tables = {f"{self.metric}, {head}": {c: (c, batch) for c in self.columns} for batch, head in heads.items()}
        return [
            [
                {first: title} | {head: self.cell(arm, *where) for head, where in columns.items()}
                for arm, title in ARMS.items()
            ]
            for first, columns in tables.items()
        ]

    def differences(self) -> list[dict[str, Any]]:
        """BKN against the best other arm, and the better of frozen BN and BN, with the standard error."""
        rows = []
        for batch in self.batches:
            for column in self.columns:
                for arm in COMPARED:
                    other, points = self.compared(arm, OTHERS, column, batch)
                    rows.append({
                        "images per batch": batch, **({"test": column} if column else {}), "arm": ARMS[arm],
                        "best other arm": other, "difference to it": points,
                        "to the better of frozen BN and BN": self.compared(arm, ENDS, column, batch)[1],
                    })  # fmt: skip
        return rows


def summary(experiments: Sequence[Experiment]) -> list[dict[str, str]]:
    """A column for each data set: the mean over batch sizes and targets, and BKN against the better of two ends."""
    rows = {title: {"mean over batch sizes": title} for title in ARMS.values()}
    gaps = {arm: f"{ARMS[arm]}, against the better of frozen BN and BN" for arm in COMPARED}
    rows |= {title: {"mean over batch sizes": title} for title in gaps.values()}
    for each in experiments:
        column, head = each.columns[-1], f"{each.title}, {each.metric}"
        for arm, value in each.means(ARMS, column, ALL).items():
            rows[ARMS[arm]][head] = f"{value:.1f}"
        for arm, title in gaps.items():
            rows[title][head] = each.compared(arm, ENDS, column, ALL)[1]
    return list(rows.values())


def figure(found: Sequence[Experiment]) -> Any:
    """BKN less frozen BN by data set and batch size, paired by seed, with 95 % intervals."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8.4, 4.6), layout="constrained")
    axes = drawing.subplots()
    rows = [(each, batch) for each in found for batch in (*each.batches, ALL)][::-1]
    for place, (each, batch) in enumerate(rows):
        for arm, colour, shift in (("measured", "#7f7f7f", 0.15), ("learned", "#1f77b4", -0.15)):
            gap = each.difference(arm, "frozen", each.columns[-1], batch)
            axes.errorbar(gap.value, place + shift, xerr=gap.margin, color=colour, marker="D" if batch == ALL else "o",
                          markersize=5, capsize=2, label="" if place else ARMS[arm])  # fmt: skip
    names = [f"{each.title}, {'all batch sizes' if batch == ALL else f'batch {batch}'}" for each, batch in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_xlim(-8, 12)
    axes.set_xlabel("points more than frozen BN, three seeds, paired, 95 % intervals")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    drawing.legend(loc="outside upper right", ncols=2, frameon=False)
    return drawing
