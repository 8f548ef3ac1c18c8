"""Scripts that ask checkpoints for more than their accuracy, and the cost of ImageNet."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_trees import write_noise
from studies.records import read_run

import bkn_zoo

pytestmark = pytest.mark.usefixtures("shallow_network")
SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes of photographs, told apart by their brightness."""
    return write_noise(tmp_path / "photos", dark=12, light=12)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of a training on a folder of two classes, whose recipe it has with it."""
    recipe = {"model": "inception_cifar_bkn", "dataset": "folder", "size": 8, "validation": 0.5, "gradient_batch": 6}
    model = bkn_zoo.create_model("inception_cifar_bkn", 2)
    model.statistics_batch_size = 2
    recipe |= {"statistics_batch": 2, "epochs": 1}
    about = {"default_statistics": "expected", "training": {"recipe": recipe}}
    bkn_zoo.save_pretrained(model.eval(), tmp_path / "old", **about)
    return tmp_path / "old"


def test_a_checkpoint_is_asked_for_running_averages_taken_anew_on_its_validation_images(
    old: Path, tree: Path, tmp_path: Path, load_script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recalibrate, asked = load_script("recalibrate"), []

    def evaluate(model: bkn_zoo.Network, batches: Any, modes: list[str]) -> dict[str, dict[str, float]]:
        """The layers' running variances stand for the accuracy."""
        asked.append(sum(len(images) for images, _ in batches))
        layer = next(module for module in model.modules() if hasattr(module, "running_var"))
        return {mode: {"top1": layer.running_var.mean().item()} for mode in modes}

    monkeypatch.setattr(recalibrate, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(recalibrate, "evaluate", evaluate)
    monkeypatch.setattr(sys, "argv", ["recalibrate.py", str(old), "--data", str(tree), "--batches", "2"])
    recalibrate.main()
    record = json.loads((tmp_path / "results" / "old.json").read_text())
    assert (record["checkpoint"], record["images"], record["default_statistics"]) == ("old", 12, "expected")
    assert asked == [12, 12]
    assert [row["statistics"] for row in record["rows"]] == ["population", "sample", "expected"]
    assert all(row["stored"] == 1 != row["anew"] for row in record["rows"])  # as it was made, and as it is


def test_a_checkpoint_is_asked_for_its_accuracy_by_evalnorms_rule_on_its_test_images(
    old: Path, tree: Path, tmp_path: Path, load_script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        shutil.copytree(tree, tmp_path / "split" / split)
    script = load_script("evalnorm")
    rule, asked = script.evalnorm, []

    def watched(model: bkn_zoo.Network, batches: Any) -> Any:
        batches = list(batches)
        asked.append([len(images) for images in batches])
        fitted = rule(model, batches)

        def observe(*given: Any) -> Any:
            asked.append(given[2])
            return fitted(*given)

        return observe

    monkeypatch.setattr(script, "RESULTS", tmp_path / "results" / "evalnorm")
    monkeypatch.setattr(script, "evalnorm", watched)
    monkeypatch.setattr(sys, "argv", ["evalnorm.py", str(old), "--data", str(tmp_path / "split"), "--batches", "2"])
    script.main()
    record = json.loads((tmp_path / "results" / "evalnorm" / "old.json").read_text())
    (row,) = record["rows"]
    assert (record["checkpoint"], record["batches"]) == ("old", 2)
    assert 0 <= row["top1"] <= 100
    assert asked[0] == [6, 6]
    assert set(asked[1:]) == {2}  # its rule observed, in groups as in training

    (tmp_path / "results" / "runs").mkdir()
    (tmp_path / "results" / "runs" / "old.json").write_text(json.dumps({"name": "old"}))
    assert read_run(tmp_path / "results" / "runs" / "old.json") == {"name": "old", "rules": {"EvalNorm": row}}


def test_the_cost_of_imagenet_follows_from_the_measured_speeds() -> None:
    """Each row of docs/imagenet.md: 90 epochs of 99 % of the training images at the speeds of the benchmark."""
    root = SCRIPTS.parent
    files = [root / "results" / name for name in ("benchmark_train.json", "benchmark_train_inception.json")]
    measured = [row for file in files for row in json.loads(file.read_text())["rows"]]
    speed = {
        (row["model"], row["statistics_batch"], row["launch"]): row["images_per_s"]
        for row in measured
        if (row["norm"], row["mode"]) == ("bkn", "eager")
    }
    lines = [line for line in (root / "docs" / "imagenet.md").read_text().splitlines() if "| (256," in line]
    assert len(lines) == 6
    for line in lines:
        _, name, sizes, graph, python, one, eight, large, _ = (cell.strip() for cell in line.split("|"))
        key = name.strip("`").removesuffix("_bkn"), int(sizes.strip("()").partition(",")[2])
        fast, slow = speed[*key, "graph"], speed[*key, "python"]
        assert (int(graph), int(python)) == (round(fast), round(slow))
        hours = [90 * 1_268_355 / images_per_s / 3600 for images_per_s in (fast, slow, 8 * slow)]
        assert [float(cell.split(" h")[0]) for cell in (one, eight, large)] == [round(value, 1) for value in hours]
        assert f"({8 * hours[1]:.0f} GPU-hours)" in eight
        assert f"({8 * hours[2]:.0f} GPU-hours)" in large
