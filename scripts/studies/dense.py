"""A U-Net for CamVid, trained from random weights with one image per batch: docs/results.md, from the records.

The runs are finished; the history of this repository has the code that trained them, in commit dea6b35d. dense.toml
says what was trained. A record of results/dense/ is one training: those of the stage "final" have one of three seeds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies.base import DOCS, RESULTS, Record, Study
from studies.stats import AHEAD, Difference, gaps, mean_of, spread, typical_of_pairs

ARMS = {
    "bn": "BN",
    "gn": "GroupNorm, standardized weights",
    "evonorm": "EvoNorm-S0",
    "bkn": "BKN",
    "bkns": "BKN, standardized weights",
}
# Compared with each other arm.
OURS = "bkns"

Finals = Mapping[str, Sequence[Record]]
"""The final runs of each arm."""


class Dense(Study):
    name = "dense"
    results = RESULTS / "dense"

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.render import frame

        runs = [run for run in records.values() if run["stage"] == "final"]
        finals = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
        tables = {"results": frame(results(finals)), "differences": frame(differences(finals))}
        return {DOCS / "results.md": {"dense": frame(summary(finals))}, RESULTS / "tables" / self.name: tables}


STUDY = Dense()


def by_seed(runs: Sequence[Record], mode: str, split: str = "test") -> dict[int, float]:
    return {run["seed"]: run[split][mode] for run in runs}


def chosen_mode(runs: Sequence[Record]) -> str:
    """The statistics at inference with the best mean over seeds on validation images."""
    return max(runs[0]["test"], key=lambda mode: mean(by_seed(runs, mode, "validation").values()))


def chosen(runs: Sequence[Record]) -> dict[int, float]:
    return by_seed(runs, chosen_mode(runs))


def leads(finals: Finals) -> dict[str, Difference]:
    """Our arm less each other one, paired by seed, with the deviation of the pairs or the typical one, if larger."""
    found = {arm: gaps(chosen(finals[OURS]), chosen(runs)) for arm, runs in finals.items() if arm != OURS}
    usual = typical_of_pairs(list(found.values()), len(finals))
    return {arm: mean_of(each, usual=usual) for arm, each in found.items()}


def results(finals: Finals) -> list[dict[str, Any]]:
    return [
        {
            "arm": ARMS[arm],
            "statistics": mode,
            "chosen": "yes" if mode == chosen_mode(runs) else "no",
            "mean IoU (%)": spread(by_seed(runs, mode).values()),
            "on validation images": spread(by_seed(runs, mode, "validation").values()),
            "learning rate": f"{runs[0]['lr']:g}",
            "seeds": len(runs),
            "seconds": round(mean(run["seconds"] for run in runs)),
            **{
                name: pick((gain for run in runs for gain in run["gain"].values()), default=None)
                for name, pick in (("smallest gain", min), ("largest gain", max))
            },
        }
        for arm, runs in finals.items()
        for mode in runs[0]["test"]
    ]


def differences(finals: Finals) -> list[dict[str, Any]]:
    return [
        {
            "against": ARMS[arm],
            "points": str(gap),
            "95 % interval": f"± {gap.margin:.2f}",
            "verdict": AHEAD[gap.verdict()],
            "seeds": gap.seeds[0],
        }
        for arm, gap in leads(finals).items()
    ]


def summary(finals: Finals) -> list[dict[str, Any]]:
    """The arms, the best one first."""
    found = {arm: f"{gap} ({AHEAD[gap.verdict()]})" for arm, gap in leads(finals).items()}
    return [
        {
            "norm": ARMS[arm],
            "mean IoU (%), best statistics": spread(chosen(runs).values(), 1),
            "`population`": spread(by_seed(runs, "population").values(), 1) if "population" in runs[0]["test"] else "",
            f"{ARMS[OURS]}, less this": found.get(arm, ""),
        }
        for arm, runs in sorted(finals.items(), key=lambda arm: -mean(chosen(arm[1]).values()))
    ]
