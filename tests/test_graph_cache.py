"""Compiled graphs that are cached between two starts."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from bkn_zoo import create_model, save_pretrained
from bkn_zoo.checkpoints import files
from bkn_zoo.checkpoints import folder as checkpoints
from bkn_zoo.cli import main
from bkn_zoo.images import Preprocessing
from bkn_zoo.inference import graph_cache
from bkn_zoo.inference.engines import OpenVINOEngine

pytest.importorskip("openvino")
pytestmark = pytest.mark.usefixtures("shallow_network")
IMAGES = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(away_from_start):
    model = create_model("inception_cifar_bkn", num_classes=5)
    away_from_start(model)
    return model.eval()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BKN_ZOO_CACHE", str(tmp_path / "a" / "cache"))
    graph_cache._warn.cache_clear()
    return tmp_path / "a" / "cache"


def start(model, mode="population"):
    """The logits of a new engine, as at a new start."""
    return OpenVINOEngine(model)(IMAGES, mode)


def test_second_start_reads_compiled_graphs(model, folder):
    model.statistics_batch_size = 4
    first = {mode: start(model, mode) for mode in ("sample", "expected", "population")}
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(written) == 2  # one for `sample` and `expected`
    for mode, logits in first.items():
        assert_close(start(model, mode), logits, atol=1e-5, rtol=0)
        with torch.no_grad():
            assert_close(logits, model(IMAGES, mode), atol=1e-3, rtol=0)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written


def test_cache_can_be_off(model, folder, monkeypatch):
    monkeypatch.setenv("BKN_ZOO_CACHE", "off")
    start(model)
    assert not folder.exists()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without owners of files")
@pytest.mark.parametrize("wrong", ["writable by others", "a file"])
def test_folder_that_cannot_be_used_is_reported_once(model, folder, wrong, caplog):
    first = start(model)
    assert folder.stat().st_mode & 0o777 == 0o700
    if wrong == "a file":
        shutil.rmtree(folder)
        folder.write_text("a file in the place of a folder")
    else:
        folder.chmod(0o770)
    for _ in range(2):
        assert_close(start(model), first, atol=1e-5, rtol=0)
    (record,) = caplog.records
    assert str(folder) in record.getMessage()
    assert "BKN_ZOO_CACHE" in record.getMessage()


def test_least_recently_used_graphs_are_deleted(model, folder, monkeypatch):
    start(model)
    (used,) = folder.iterdir()
    for name in ("1.blob", "bkn_zoo-1.f16.bin", "notes.txt", "mine.bin"):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (10**9, 10**9))
    monkeypatch.setattr(graph_cache, "MOST_BYTES", used.stat().st_size + 500)
    start(model)
    assert {path.name for path in folder.iterdir()} == {used.name, "notes.txt", "mine.bin"}


# The graphs that the command stores


@pytest.fixture
def checkpoint(model, tmp_path):
    model.statistics_batch_size = 4
    images = Preprocessing(size=32, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    save_pretrained(model, tmp_path / "mine", preprocessing=images, label_names=[*"abcde"])
    rng = np.random.default_rng(0)
    for k in range(3):
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / f"{k}.png")
    (tmp_path / "3.png").write_bytes(b"no image")
    return tmp_path / "mine"


@pytest.fixture
def classify(checkpoint, capsys, monkeypatch):
    """Runs the command and returns its output, its errors and its exit code."""

    def run(*options, quick=False):
        load = None if quick else checkpoints.load_checkpoint
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "load_checkpoint", load)
            images = [str(checkpoint.parent / f"{k}.png") for k in range(4)]
            code = main(["classify", *images, "--device", "cpu", "--checkpoint", str(checkpoint), *options])
        return *capsys.readouterr(), code

    return run


@pytest.mark.parametrize("precision", ["auto", "f32"])
@pytest.mark.parametrize("mode", ["population", "sample", "expected"])
def test_stored_graph_gives_the_same_answers(classify, folder, mode, precision):
    options = ("--statistics", mode, "--precision", precision)
    first = classify(*options, "--format", "jsonl")
    assert first[2] == 1
    assert first[0].count("\n") == 3
    assert classify(*options, "--format", "jsonl", quick=True) == first
    assert classify(*options, "--format", "csv", quick=True)[0].count("\n") == 16
    # Another mode or precision has another graph.
    others = classify("--statistics", "population" if mode == "sample" else "sample")
    assert others[0] != first[0]


def test_each_start_hashes_the_weights_once(classify, folder, monkeypatch):
    hashed, plain = [], files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: hashed.append(path.name) or plain(path))
    for count in (1, 2):
        classify(quick=count == 2)
        assert hashed == ["model.safetensors"] * count


def test_stored_graph_needs_no_pytorch(checkpoint, classify, folder):
    wanted = classify("--format", "json")
    code = "import sys; from bkn_zoo.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    images = [str(checkpoint.parent / f"{k}.png") for k in range(4)]
    options = ["--device", "cpu", "--checkpoint", str(checkpoint), "--format", "json"]
    run = [sys.executable, "-c", code, "classify", *images, *options]
    found = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
    assert (found.stdout, found.stderr) == wanted[:2]


def test_stored_graph_of_other_weights_is_not_used(checkpoint, classify, folder):
    first = classify("--top-k", "1")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"label_names": [*"vwxyz"]}))
    assert {line.split()[1] for line in classify("--top-k", "1")[0].splitlines() if line.startswith("  ")} <= {*"vwxyz"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[:-4] + b"1234")
    _, errors, code = classify("--top-k", "1")
    assert code == 1
    assert "is damaged or belongs to another checkpoint" in errors
    (checkpoint / "model.safetensors").write_bytes(weights)
    assert classify("--top-k", "1", quick=True) == first


@pytest.mark.parametrize("ending", ["bin", "xml"])
def test_damaged_stored_graph_is_written_again(classify, folder, ending):
    first = classify()
    for path in folder.glob("*.blob"):
        path.unlink()
    (stored,) = folder.glob(f"*.{ending}")
    stored.write_bytes(stored.read_bytes()[:-1000])
    assert classify() == first
    assert classify(quick=True) == first


def test_stored_graph_is_replaced_not_overwritten(classify, folder, tmp_path):
    """Another process may have its file in memory."""
    classify()
    (stored,) = folder.glob("*.bin")
    (tmp_path / "in use").hardlink_to(stored)
    weights = stored.read_bytes()
    next(folder.glob("*.xml")).unlink()
    classify()
    assert not stored.samefile(tmp_path / "in use")
    assert stored.read_bytes() == (tmp_path / "in use").read_bytes() == weights
    assert {path.suffix for path in folder.iterdir()} == {".bin", ".xml", ".blob"}


def test_graph_that_cannot_be_stored_is_still_used(classify, folder, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("openvino.save_model", fail)
        first = classify()
    assert not list(folder.glob("*.xml"))
    assert classify() == first


def test_enlarged_images_need_pytorch(checkpoint, classify, folder):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["preprocessing"]["native_size"] = 16
    path.write_text(json.dumps(config))
    assert classify() == classify()
    assert not list(folder.glob("*.xml"))
