"""The study of fine-tuning: the small data sets that it packs, its runs, and the page that shows them."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from bkn_zoo.publishing.finetuning import ARMS, DEFAULTS, ORIGINAL, PROBE, SEEDS, SETS, study_table
from PIL import Image

ROOT = Path(__file__).parent.parent


@pytest.fixture
def study(load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with a network that a processor trains in seconds, and fewer images."""
    module = load_script("finetune_study")
    for name, value in {"CHECKPOINT": "inception_cifar_bkn.cifar10", "PER_CLASS": 10, "TESTED": 4, "SIDE": 16}.items():
        monkeypatch.setattr(module, name, value)
    return module


def write_official(root: Path, names: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 35), ("val", 6)):
        for label, name in enumerate(names):
            (root / split / name).mkdir(parents=True)
            for k in range(count):
                pixels = rng.integers(100 * label, 100 * label + 100, (40, 60, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{k}.png")


def test_every_seed_trains_on_images_of_its_own_and_all_are_tested_on_the_same(study: Any, tmp_path: Path) -> None:
    write_official(tmp_path / "official", ("cat", "dog"))
    assert study.main(["--pack", str(tmp_path / "small"), "--imagewoof", str(tmp_path / "official")]) == 0
    packed = tmp_path / "small" / "imagewoof"
    assert Image.open(packed / "train" / "cat" / "000.jpg").size == (16, 16)
    trees = [study.tree_of(packed, seed, tmp_path / str(seed)) for seed in SEEDS]
    trained = [{path.resolve() for path in tree.glob("train/*/*")} for tree in trees]
    assert [len(paths) for paths in trained] == [20, 20, 20]
    assert len(set.union(*trained)) == 60
    assert len({path.resolve() for tree in trees for path in tree.glob("val/*/*")}) == 8


def test_runs_leave_records_of_the_defaults_a_linear_probe_and_the_original_head(study: Any, tmp_path: Path) -> None:
    write_official(tmp_path / "official", ("cat", "dog"))
    write_official(tmp_path / "unknown", ("car", "sun"))
    pack = ["--pack", str(tmp_path / "small"), "--imagenette", str(tmp_path / "unknown")]
    study.main([*pack, "--imagewoof", str(tmp_path / "official")])
    common = ["--data", str(tmp_path / "small"), "--results", str(tmp_path / "results"), "--device", "cpu", "--run"]

    def record(dataset: str, arm: str) -> dict[str, Any]:
        study.main([*common, dataset, arm, "0", "--", "--epochs", "2"])
        return json.loads(study.place(tmp_path / "results", dataset, arm, 0).read_text())

    trained = record("imagewoof", DEFAULTS)
    assert (trained["statistics_batch"], trained["epochs"], trained["test_images"]) == (2, 2, "test")
    assert len(trained["validation"]) == 2
    assert trained["command"].endswith("--sets imagewoof -- --epochs 2")
    assert trained["trained_by"].startswith("bkn-zoo train --data imagewoof --init ")
    assert trained["trained_by"].endswith(" --epochs 2")
    assert trained["test"].keys() == {"population", "sample", "expected"}
    probed = record("imagewoof", PROBE)
    assert probed["test"][probed["chosen_statistics"]]["top1"] == 100  # of dark and light images
    restricted = record("imagewoof", ORIGINAL)
    assert 0 <= restricted["test"][restricted["chosen_statistics"]]["top1"] <= 100
    unknown = record("imagenette", ORIGINAL)
    assert unknown["reason"] == "the checkpoint does not know these classes"
    for found in (trained, probed, restricted, unknown):
        assert {"command", "hardware", "versions", "seed", "arm", "dataset", "checkpoint"} <= found.keys()


def test_the_table_tells_what_was_not_run_from_what_cannot_be() -> None:
    def record(arm: str, dataset: str, top1: float) -> dict[str, Any]:
        return {"arm": arm, "dataset": dataset, "chosen_statistics": "sample", "test": {"sample": {"top1": top1}}}

    records = [record(DEFAULTS, "imagewoof", top1) for top1 in (50.0, 52.0, 54.0)]
    records += [record(PROBE, "imagewoof", 40.0), {"arm": ORIGINAL, "dataset": "imagewoof", "reason": "no"}]
    lines = study_table(records).splitlines()
    assert len(lines) == 2 + len(ARMS)
    assert lines[2] == "| defaults |  | 52.0 ± 2.0 | not run yet | not run yet |"
    assert lines[3] == "| linear probe |  | 40.0 (1 of 3 seeds) | not run yet | not run yet |"
    assert lines[4] == "| original head |  | does not know them | not run yet | not run yet |"
    assert "`--statistics_batch 1`" in lines[5]


def test_the_page_shows_the_records() -> None:
    """`python scripts/report.py` writes its table again."""
    page = ROOT / "docs" / "finetuning.md"
    assert runpy.run_path(str(ROOT / "scripts" / "report.py"))["finetuning"]() == page.read_text()
    assert all(shown in page.read_text() for shown in SETS.values())
