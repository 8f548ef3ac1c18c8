"""The benchmarks write the rows that the pages show, and all scripts find what they import."""

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

import bkn_zoo
from bkn_zoo.inference import engines
from bkn_zoo.modes import MODES

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("shallow_network")


def run(monkeypatch, output, *words):
    """The rows that `python scripts/benchmark.py ...` writes."""
    script = str(ROOT / "scripts" / "benchmark.py")
    monkeypatch.setattr(sys, "argv", [script, *words, "--output", str(output)])
    runpy.run_path(script, run_name="__main__")
    return json.loads(output.read_text())["rows"]


def test_infer_times_all_engines_and_modes(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "ov", None)
    rows = run(monkeypatch, tmp_path / "infer.json", "infer", "--cases", "inception_cifar:32", "--rounds", "1")
    assert [(row["norm"], row["engine"], row["statistics"]) for row in rows] == [
        *(("bkn", engine, mode) for engine in ("eager", "torch") for mode in MODES),
        *(("bn", engine, "population") for engine in ("eager", "torch")),
    ]
    assert all(row["max_difference"] < 1e-3 for row in rows)
    assert all(row["ms_per_image"] > 0 and row["ratio_to_torch"] > 0 for row in rows)


def test_watch_times_the_search_for_changes(tmp_path, monkeypatch):
    words = ("watch", "--cases", "inception_cifar:32", "--engines", "torch", "--rounds", "1")
    rows = run(monkeypatch, tmp_path / "watch.json", *words)
    assert [row["statistics"] for row in rows] == ["population", "sample"]
    assert all(row["ms"] > 0 and "added_ms" in row for row in rows)


@pytest.mark.skipif(engines.ov is None, reason="openvino is not installed")
def test_counters_name_operations_of_both_modes(tmp_path, monkeypatch):
    preprocessing = bkn_zoo.Preprocessing(32, (0.5,) * 3, (0.2,) * 3)
    bkn_zoo.save_pretrained(bkn_zoo.create_model("inception_cifar_bkn"), tmp_path / "x", preprocessing=preprocessing)
    words = ("counters", "--checkpoints", str(tmp_path / "x"), "--precisions", "f32", "--rounds", "1")
    rows = run(monkeypatch, tmp_path / "counters.json", *words)
    assert [row["statistics"] for row in rows] == ["population", "sample"]
    assert rows[0]["poolings"] < rows[1]["poolings"]


def test_train_cpu_compares_groups_with_bn(tmp_path, monkeypatch):
    words = ("train-cpu", "--batch", "2", "--groups", "2", "1", "--rounds", "1")
    rows = run(monkeypatch, tmp_path / "train.json", *words)
    assert [(row["norm"], row["statistics_batch"]) for row in rows] == [("bn", 2), ("bkn", 2), ("bkn", 1)]
    assert rows[0]["ratio_to_bn"] == 1
    assert all(row["ms_per_step"] > 0 for row in rows)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "scripts").glob("*.py")))
def test_script_can_be_imported(name):
    import_module(name)
