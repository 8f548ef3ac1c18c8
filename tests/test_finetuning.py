"""The study of fine-tuning: the small data sets that it packs, its runs, and its table."""

from argparse import Namespace

import pytest
from image_trees import write_noise
from PIL import Image
from studies import finetuning, finetuning_data
from studies.finetuning import ARMS, ORIGINAL, PROBE, STUDY, TUNED, planned, rival_rows, study_rows
from studies.finetuning_data import SEEDS, tree_of
from studies.finetuning_loop import timm_loop

import bkn_zoo
from bkn_zoo.training.datasets import load_data

pytestmark = pytest.mark.usefixtures("shallow_network")


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """What the study takes of two data sets, for a network that a processor trains in seconds: few, small images."""
    model = bkn_zoo.create_model("inception_cifar_bkn", 3)
    model.statistics_batch_size = 2
    preprocessing = bkn_zoo.Preprocessing(16, (0.5,) * 3, (0.25,) * 3)
    bkn_zoo.save_pretrained(model, tmp_path / "start", label_names=["cat", "dog", "ox"], preprocessing=preprocessing)
    monkeypatch.setattr(finetuning, "CHECKPOINT", str(tmp_path / "start"))
    for name, value in {"PER_CLASS": 10, "TESTED": 4, "SIDE": 16}.items():
        monkeypatch.setattr(finetuning_data, name, value)
    for folder, names in {"imagewoof2-320": ("cat", "dog"), "imagenette2-320": ("car", "sun")}.items():
        for split, count in (("train", 35), ("val", 6)):
            write_noise(tmp_path / "official" / folder / split, (60, 40), **dict.fromkeys(names, count))
    STUDY.pack(Namespace(data=tmp_path / "official", pack=tmp_path / "small"))
    return tmp_path / "small"


def test_every_seed_trains_on_images_of_its_own(packed, tmp_path):
    assert Image.open(packed / "imagewoof" / "train" / "cat" / "000.jpg").size == (16, 16)
    trees = [tree_of(packed / "imagewoof", seed, tmp_path / str(seed)) for seed in SEEDS]
    trained = [{path.resolve() for path in tree.glob("train/*/*")} for tree in trees]
    assert [len(paths) for paths in trained] == [20, 20, 20]
    assert len(set.union(*trained)) == 60
    assert len({path.resolve() for tree in trees for path in tree.glob("val/*/*")}) == 8


def test_sets_without_test_images_are_divided(tmp_path):
    write_noise(tmp_path / "official" / "PACS" / "sketch", dog=70, house=62)
    STUDY.pack(Namespace(data=tmp_path / "official", pack=tmp_path / "small"))
    counts = {f"{path.parent.name}/{path.name}": len([*path.iterdir()]) for path in tmp_path.glob("small/*/*/*")}
    assert counts == {"train/dog": 60, "train/house": 60, "val/dog": 10, "val/house": 2}


def test_runs_are_of_defaults_probe_and_original_head(packed, monkeypatch):
    # Or it would stop after the classifier's phase.
    monkeypatch.setattr("bkn_zoo.training.start.PERFECT", 0.0)

    def record(dataset, arm):
        found = STUDY.train(planned(dataset, arm, 0), Namespace(data=packed, device="cpu", changes={"epochs": 2}))
        assert found.items() >= {"dataset": dataset, "arm": arm, "checkpoint": finetuning.CHECKPOINT}.items()
        return found

    trained = record("imagewoof", "defaults")
    assert (trained["statistics_batch"], trained["epochs"]) == (2, 2)
    assert len(trained["validation"]) == 3  # with the classifier on the frozen network
    assert trained["cpu_seconds"] > 0
    assert trained["trained_by"].startswith("bkn-zoo train imagewoof/train --checkpoint ")
    assert trained["trained_by"].endswith(" --epochs 2")
    assert trained["test"].keys() == {"population", "sample", "expected"}
    probed = record("imagewoof", PROBE)
    assert probed["test"][probed["chosen_statistics"]]["top1"] == 100  # of dark and light images
    restricted = record("imagewoof", ORIGINAL)
    assert 0 <= restricted["test"][restricted["chosen_statistics"]]["top1"] <= 100
    assert record("imagenette", ORIGINAL)["reason"] == "the checkpoint does not know these classes"


def test_table_separates_missing_from_impossible_runs():
    def record(arm, dataset, top1, checkpoint=finetuning.CHECKPOINT):
        about = {"arm": arm, "dataset": dataset, "checkpoint": checkpoint, "chosen_statistics": "sample"}
        return {**about, "test": {"sample": {"top1": top1}}}

    records = [record("defaults", "imagewoof", top1) for top1 in (50.0, 52.0, 54.0)]
    unknown = {"arm": ORIGINAL, "dataset": "imagewoof", "checkpoint": finetuning.CHECKPOINT, "reason": "no"}
    other = record(PROBE, "imagenette", 40.0, "other")
    rows = study_rows([*records, record(PROBE, "imagewoof", 40.0), unknown, other])
    shown = {row["arm"]: (row["options"], row["Imagewoof"]) for row in rows}
    assert shown == {
        "defaults": ("", "52.0 ± 2.0"),
        "linear probe": ("", "40.0 (1 of 3 seeds)"),
        "classifier only": ("`--freeze`", "not run yet"),
        "original head": ("", "does not know them"),
    }
    assert {row["Imagenette"] for row in rows} == {"not run yet"}
    assert len(rows) == len(ARMS) - len(TUNED)


def test_rate_with_the_lowest_validation_loss_is_shown(monkeypatch):
    def record(arm, top1, loss, seed):
        about = {"arm": arm, "dataset": "imagewoof", "checkpoint": finetuning.CHECKPOINT, "seconds": 120.0}
        found = {"chosen_statistics": "sample", "validation_loss": loss, "test": {"sample": {"top1": top1}}}
        return {**about, **found, "seed": seed}

    def planned_seeds():
        monkeypatch.setattr(STUDY, "records", lambda _: dict(enumerate(records)))
        runs = [run for run in STUDY.planned({}) if run.data == "imagewoof"]
        return {arm: [run.seed for run in runs if run.arm == arm] for arm in TUNED}

    def shown():
        return {row["by"]: row["Imagewoof"] for row in rival_rows(records)}

    records = [record(TUNED[1], 60.0, 0.4, 0), record(TUNED[2], 70.0, 0.3, 0)]
    # The larger one is better, so that a still larger one is tried.
    assert planned_seeds() == {TUNED[0]: [], TUNED[1]: [0], TUNED[2]: [0], TUNED[3]: [0]}
    assert set(shown().values()) == {"not run yet"}
    records.append(record(TUNED[3], 65.0, 0.35, 0))
    assert planned_seeds() == {TUNED[0]: [], TUNED[1]: [0], TUNED[2]: [0, 1, 2], TUNED[3]: [0]}
    records += [record(TUNED[2], 70.0, 0.9, seed) for seed in (1, 2)]
    rows = shown()
    assert rows.pop("a loop with timm") == "70.0 ± 0.0; lr 0.003; 120 s"
    assert set(rows.values()) == {"not run yet"}
    records[0] |= {"validation_loss": 0.1}
    assert planned_seeds()[TUNED[0]] == [0]


def test_loop_of_timm_starts_from_the_same_weights(tmp_path):
    """It trains for at least one step, whatever the time."""
    write_noise(tmp_path / "train", (40, 40), cat=20, dog=20)
    write_noise(tmp_path / "val", (40, 40), cat=2, dog=2)
    found = timm_loop(load_data("folder", tmp_path, 32), bkn_zoo.create_model("efficientnet_lite0_bkn"), 1e-3, 0, 0.01)
    assert (found["epochs"], found["chosen_statistics"]) == (1, "population")
    assert found["validation_loss"] > 0
    assert 0 <= found["test"]["population"]["top1"] <= 100
