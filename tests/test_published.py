"""Later measurements on published checkpoints: recomputed running averages, and EvalNorm's rule."""

import json
from argparse import Namespace

import pytest
from image_trees import write_noise
from studies import published
from studies.published import Question
from studies.records import read_run

import bkn_zoo
from bkn_zoo.modes import MODES

pytestmark = pytest.mark.usefixtures("shallow_network")


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Asks a checkpoint of a training on a folder, whose recipe it has with it; 24 images are for each split."""
    for split in ("train", "test"):
        write_noise(tmp_path / "tree" / split, dark=12, light=12)
    recipe = {"model": "inception_cifar_bkn", "dataset": "folder", "size": 8, "validation": 0.5, "gradient_batch": 6}
    model = bkn_zoo.create_model("inception_cifar_bkn", 2)
    model.statistics_batch_size = 2
    about = {"default_statistics": "expected", "training": {"recipe": {**recipe, "statistics_batch": 2, "epochs": 1}}}
    bkn_zoo.save_pretrained(model.eval(), tmp_path / "old", **about)
    monkeypatch.setattr(published, "BATCHES", 2)
    args = Namespace(data=tmp_path / "tree", device="cpu", changes={})
    return lambda asked: published.STUDY.train(Question("run", 0, asked, str(tmp_path / "old"), "folder"), args)


def test_recalibration_is_judged_on_validation(ask):
    record = ask("recalibrated")
    assert (record["checkpoint"], record["images"], record["default_statistics"]) == ("old", 12, "expected")
    assert [row["statistics"] for row in record["rows"]] == list(MODES)
    assert all(0 <= row[which] <= 100 for row in record["rows"] for which in ("stored", "anew"))


def test_evalnorms_rule_is_fitted_in_groups_and_kept_with_runs(ask, tmp_path, monkeypatch):
    rule, asked = published.evalnorm, []

    def watched(model, batches):
        batches = list(batches)
        asked.append([len(images) for images in batches])
        fitted = rule(model, batches)
        return lambda *given: asked.append(given[2]) or fitted(*given)

    monkeypatch.setattr(published, "evalnorm", watched)
    record = ask("evalnorm")
    (row,) = record["rows"]
    assert (record["checkpoint"], record["batches"]) == ("old", 2)
    assert 0 <= row["top1"] <= 100
    assert asked[0] == [6, 6]
    assert set(asked[1:]) == {2}  # its rule observed, in groups as in training
    for folder, content in (("evalnorm", record), ("runs", {"name": "old"})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "old.json").write_text(json.dumps(content))
    assert read_run(tmp_path / "runs" / "old.json") == {"name": "old", "rules": {"EvalNorm": row}}
