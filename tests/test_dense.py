"""What docs/results.md says of the dense task follows from the records."""

from studies.dense import ARMS, STUDY, chosen_mode, differences


def test_findings_of_the_dense_task_follow_from_the_records():
    records = STUDY.records(STUDY.results)
    finals = {arm: [run for run in records.values() if (run["arm"], run["stage"]) == (arm, "final")] for arm in ARMS}
    assert {chosen_mode(runs) for runs in finals.values()} == {"sample"}
    assert {(run["lr"], run["epochs"], run["seed"]) for runs in finals.values() for run in runs} == {
        (3e-4, 24, seed) for seed in (1, 2, 3)
    }
    assert {row["against"]: row["verdict"] for row in differences(finals)} == {
        "BN": "ahead",
        "GroupNorm, standardized weights": "within chance",
        "EvoNorm-S0": "within chance",
        "BKN": "ahead",
    }


def test_final_runs_had_the_best_tuned_rate():
    tuned = [run for run in STUDY.records(STUDY.results).values() if run["stage"] == "tuned"]
    for arm in ARMS:
        runs = [run for run in tuned if run["arm"] == arm]
        best = max(runs, key=lambda run: max(run["validation"].values()))
        assert min(run["lr"] for run in runs) < best["lr"] == 3e-4 < max(run["lr"] for run in runs)
