"""Compiled graphs that are cached between two starts."""

import os
import shutil

import pytest
import torch
from torch.testing import assert_close

from bkn_zoo import create_model
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
    for name in ("1.blob", "notes.txt"):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (10**9, 10**9))
    monkeypatch.setattr(graph_cache, "MOST_BYTES", used.stat().st_size + 500)
    start(model)
    assert {path.name for path in folder.iterdir()} == {used.name, "notes.txt"}
