"""The study of fine-tuning: its tables, and what docs/finetuning.md says of its records."""

from studies.finetuning import ARMS, CHECKPOINT, SETS, STUDY, TUNED, rival_rows, study_rows, tuned


def records():
    return [run for run in STUDY.records(STUDY.results).values() if run["checkpoint"] == CHECKPOINT]


def seeds(arm, dataset):
    return sorted(run["seed"] for run in records() if (run["arm"], run["dataset"]) == (arm, dataset))


def test_every_arm_has_a_record_for_each_seed():
    for dataset in SETS:
        for arm in set(ARMS) - set(TUNED):
            assert seeds(arm, dataset) == ([0] if arm == "original head" else [0, 1, 2])
    assert len(records()) == 60


def test_chosen_rate_lies_between_two_others_that_were_tried():
    for dataset in SETS:
        best = tuned(dataset, records())
        tried = [arm for arm in TUNED if seeds(arm, dataset)]
        assert (len(tried), tried[1]) == (3, best)
        assert [seeds(arm, dataset) for arm in tried] == [[0], [0, 1, 2], [0]]


def record(arm, dataset, top1, **more):
    about = {"arm": arm, "dataset": dataset, "checkpoint": CHECKPOINT, "chosen_statistics": "sample", "seconds": 120.0}
    return {**about, "seed": 0, "validation_loss": 0.5, "test": {"sample": {"top1": top1}}, **more}


def test_table_says_where_the_checkpoint_does_not_know_the_classes():
    runs = [record(arm, dataset, 40.0) for arm in ARMS for dataset in SETS]
    runs = [run for run in runs if (run["arm"], run["dataset"]) != ("original head", "imagewoof")]
    unknown = {"arm": "original head", "dataset": "imagewoof", "checkpoint": CHECKPOINT, "reason": "no"}
    more = [record("defaults", "imagewoof", top1) for top1 in (42.0, 44.0)]
    other = record("linear probe", "imagewoof", 90.0, checkpoint="other")
    rows = study_rows([*runs, unknown, *more, other])
    assert {row["arm"]: (row["options"], row["Imagewoof"]) for row in rows} == {
        "defaults": ("", "42.0 ± 2.0"),
        "linear probe": ("", "40.0"),
        "classifier only": ("`--freeze`", "40.0"),
        "original head": ("", "does not know them"),
    }
    assert {row["Imagenette"] for row in rows} == {"40.0"}


def test_rate_with_the_lowest_validation_loss_is_shown():
    runs = [record(arm, dataset, 40.0) for arm in ARMS if arm not in TUNED for dataset in SETS]
    runs += [record(TUNED[k], dataset, 50.0 + k, validation_loss=0.1 * (3 - k)) for k in range(3) for dataset in SETS]
    # The loss of another seed does not count.
    runs += [record(TUNED[2], "imagewoof", 54.0, validation_loss=0.9, seed=1)]
    assert {row["by"]: (row["Imagewoof"], row["Imagenette"]) for row in rival_rows(runs)} == {
        "`bkn-zoo train`": ("40.0; 120 s", "40.0; 120 s"),
        "a loop with timm": ("53.0 ± 1.4; lr 0.003; 120 s", "52.0; lr 0.003; 120 s"),
        "a linear probe": ("40.0; 120 s", "40.0; 120 s"),
    }
