"""The benchmarks write the rows that the pages show."""

import json
import runpy
import sys
import time
from pathlib import Path

import pytest
from benchmarks import frontend, serve, server

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


def test_frontend_and_stand_in_agree_with_the_network(tmp_path, monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.setattr(frontend, "MODES", ["sample"])  # each takes seconds
    words = ("frontend", "--cases", "inception_cifar_bkn:32", "--rounds", "1")
    rows = run(monkeypatch, tmp_path / "frontend.json", *words)
    assert [(row["statistics"], row["way"]) for row in rows] == [
        ("sample", way) for way in ("torch", "stand-in", "frontend")
    ]
    assert all(row["max_difference"] < 1e-4 for row in rows)


def test_train_cpu_compares_groups_with_bn(tmp_path, monkeypatch):
    words = ("train-cpu", "--batch", "2", "--groups", "2", "1", "--rounds", "1")
    rows = run(monkeypatch, tmp_path / "train.json", *words)
    assert [(row["norm"], row["statistics_batch"]) for row in rows] == [("bn", 2), ("bkn", 2), ("bkn", 1)]
    assert rows[0]["ratio_to_bn"] == 1
    assert all(row["ms_per_step"] > 0 for row in rows)


def test_serve_starts_the_servers_that_it_compares(tmp_path):
    now = serve.commands_of("name", tmp_path, None)
    assert list(now)[:2] == ["service", "litserve"]
    assert (tmp_path / "peer.py").exists()
    assert all(command[-1] == "--port" for name, command in now.items() if name != "litserve")
    assert list(serve.commands_of("name", tmp_path, tmp_path)) == ["service", "before"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="there is no /proc")
def test_cpu_seconds_count_all_processes_of_a_server(tmp_path):
    work = "import time\nwhile time.process_time() < 1: pass\nprint('done', flush=True)\ntime.sleep(60)"
    first = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    log = tmp_path / "log"
    with server.serving([sys.executable, "-c", first], log, tmp_path) as process:
        until = time.monotonic() + 60
        while "done" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        assert 0.9 <= server.cpu_seconds(process.pid) < 2
        assert server.resident_mb(process.pid) > 0
