"""Compiled graphs that are kept from one start to the next: when they are read, and when they are not."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bkn_zoo import create_model
from bkn_zoo.inference import engines, kept_graphs
from bkn_zoo.inference.engines import OpenVINOEngine

pytestmark = [
    pytest.mark.skipif(engines.ov is None, reason="openvino is not installed"),
    pytest.mark.usefixtures("shallow_network"),
]
needs_owners = pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without owners of files")
IMAGES = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(away_from_start):
    torch.manual_seed(0)
    model = create_model("inception_cifar_bkn", num_classes=5)
    away_from_start(model)
    return model.eval()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BKN_ZOO_CACHE", str(tmp_path / "a" / "cache"))
    monkeypatch.setattr(kept_graphs, "WORTHWHILE", -1.0)
    monkeypatch.setattr(kept_graphs, "PAUSE", 0.0)
    kept_graphs._warn.cache_clear()
    return tmp_path / "a" / "cache"


@pytest.fixture
def made(monkeypatch):
    """What was compiled, and not read."""
    found, compile_graph = [], engines.compile_graph
    monkeypatch.setattr(engines, "compile_graph", lambda *args: found.append(args) or compile_graph(*args))
    return found


def wait():
    """Until all is kept that will be."""
    for thread in threading.enumerate():
        if thread.name == "keeper of graphs":
            thread.join()


def start(model, mode="population"):
    """The logits of an engine of its own, as at a new start."""
    logits = OpenVINOEngine(model)(IMAGES, mode)
    wait()
    return logits


def only(folder):
    (path,) = folder.iterdir()
    return path


def refuse(*_):
    raise PermissionError("not yours")


def test_second_start_reads_compiled_graphs(model, folder, made):
    model.statistics_batch_size = 4
    first = {mode: start(model, mode) for mode in ("sample", "expected", "population")}
    assert len(list(folder.iterdir())) == len(made) == 2  # one for `sample` and `expected`
    written = {path: path.stat().st_ino for path in folder.iterdir()}
    for mode, logits in first.items():
        assert_close(start(model, mode), logits, atol=1e-5, rtol=0)
        with torch.no_grad():
            assert_close(logits, model(IMAGES, mode), atol=1e-3, rtol=0)
    assert len(made) == 2
    assert {path: path.stat().st_ino for path in folder.iterdir()} == written


CHANGES = {
    "a weight": lambda model: list(model.parameters())[4].data.view(-1)[-1].add_(1),
    "a buffer of no checkpoint": lambda model: model.register_buffer("more", torch.ones(1), persistent=False),
    "a number": lambda model: setattr(next(each for each in model.modules() if hasattr(each, "eps")), "eps", 0.5),
    "the precision": lambda model: model.half(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_network_has_another_file(model, change):
    before = kept_graphs._name(model, "what")
    assert before is not None
    assert before == kept_graphs._name(model, "what")
    CHANGES[change](model)
    assert kept_graphs._name(model, "what") != before


def test_a_graph_for_a_quota_has_its_own_file_and_keeps_to_it(model, folder, made, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    for quota in (2.0, 1.0):
        monkeypatch.setattr("bkn_zoo.cores._quota", lambda root, quota=quota: quota)
        start(model)
    assert len(list(folder.iterdir())) == len(made) == 2
    engine = OpenVINOEngine(model)
    engine(IMAGES, "population")
    (graph,) = engine._prepared.values()
    assert len(made) == 2
    assert graph.compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert not graph.compiled.get_property("ENABLE_CPU_PINNING")


def test_another_size_has_another_file(model, folder, made):
    engine = OpenVINOEngine(model)
    for side in (32, 48):
        engine(torch.zeros(1, 3, side, side), "population")
    wait()
    assert len(list(folder.iterdir())) == len(made) == 2


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def sealed(path, content, name):
    """As a whole, under a name."""
    path.write_bytes(content + kept_graphs._digest(path.with_name(name), content))


ANOTHER = f"{'0' * 64}{kept_graphs.SUFFIX}"
DAMAGE = {
    "flipped": flip,
    "another's": lambda path: sealed(path, path.read_bytes()[: -kept_graphs.DIGEST], ANOTHER),
    "no graph": lambda path: sealed(path, b"no graph at all" * 1000, path.name),
    "short": lambda path: path.write_bytes(b"\0" * 20),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_replaced(model, folder, made, damage):
    first = start(model)
    DAMAGE[damage](only(folder))
    assert_close(start(model), first, atol=1e-5, rtol=0)
    assert len(made) == 2
    start(model)
    assert len(made) == 2 + (damage == "no graph")


class Strange(nn.ReLU):
    """Code that may change without anyone here knowing."""


STRANGE = {
    "a layer": lambda model: model.add_module("strange", Strange()),
    "a hook": lambda model: next(model.children()).register_forward_hook(lambda *_: None),
    "a method": lambda model: setattr(next(model.children()), "forward", next(model.children()).forward),
    "a head": lambda model: setattr(model, "head", model.head),
}


@pytest.mark.parametrize("change", STRANGE)
def test_network_with_code_of_others_is_not_kept(model, folder, made, change):
    STRANGE[change](model)
    start(model)
    start(model)
    assert len(made) == 2
    assert list(folder.iterdir()) == []


@needs_owners
def test_where_others_can_write_nothing_is_read_or_written(model, folder, made, caplog):
    start(model)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only(folder).stat().st_mode & 0o777 == 0o600
    assert not kept_graphs._is_ours(os.stat_result((0o40700, 0, 0, 1, os.getuid() + 2, 0, 0, 0, 0, 0)))
    only(folder).chmod(0o620)
    start(model)
    assert len(made) == 2
    only(folder).chmod(0o600)
    folder.chmod(0o770)
    start(model)
    start(model)
    assert len(made) == 4
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(folder) in record.getMessage()
    assert "BKN_ZOO_CACHE" in record.getMessage()


def test_cache_can_be_off_and_is_for_slow_graphs_only(model, folder, made, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kept_graphs, "WORTHWHILE", 1000.0)
    start(model)
    assert list(folder.iterdir()) == []
    folder.rmdir()
    monkeypatch.setenv("BKN_ZOO_CACHE", "off")
    start(model)
    assert len(made) == 2
    assert not list(folder.parent.iterdir())
    assert list(tmp_path.iterdir()) == [folder.parent]


def test_folder_that_cannot_be_made_is_reported_once(model, folder, caplog):
    folder.parent.write_text("a file in the place of a folder")
    start(model)
    start(model)
    (record,) = caplog.records
    assert str(folder) in record.getMessage()


def test_without_the_variable_graphs_are_in_the_user_s_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("BKN_ZOO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kept_graphs._folder() == tmp_path / "xdg" / "bkn_zoo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert kept_graphs._folder() == tmp_path / ".cache" / "bkn_zoo"


def test_least_recently_used_graph_is_removed(model, folder, monkeypatch):
    start(model)
    used = only(folder)
    left = folder / f"{'1' * 64}{kept_graphs.SUFFIX}.1234"  # by a process that was killed
    unused, others = folder / f"{'2' * 64}{kept_graphs.SUFFIX}", folder / "notes.txt"
    for path in (left, unused, others):
        path.write_bytes(b"\0" * 1000)
        os.utime(path, (10**9, 10**9))
    os.utime(used, (10**8, 10**8))
    start(model)  # which reads it
    monkeypatch.setattr(kept_graphs, "MOST_BYTES", used.stat().st_size + 500)
    kept_graphs._make_room(folder)
    assert sorted(folder.iterdir()) == sorted([used, others])
    monkeypatch.setattr(kept_graphs, "MOST_BYTES", 0)
    start(model, "sample")
    assert only(folder) == others


def test_full_disk_leaves_nothing_behind(model, folder, made, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(kept_graphs.os, "replace", refuse)
        first = start(model)
        assert list(folder.iterdir()) == []
    assert_close(start(model), first, atol=1e-5, rtol=0)
    monkeypatch.setattr(kept_graphs.os, "utime", refuse)  # a folder that can only be read, as in an image
    start(model)
    assert len(made) == 2


def test_several_at_once_leave_one_whole_file(model, folder, made):
    with ThreadPoolExecutor(4) as threads:
        first, *_ = threads.map(lambda one: OpenVINOEngine(one)(IMAGES, "population"), [model] * 4)
    wait()
    before = len(made)
    assert_close(start(model), first, atol=1e-5, rtol=0)
    assert len(made) == before
    assert only(folder).suffix == kept_graphs.SUFFIX


@pytest.mark.usefixtures("whole_network")
def test_a_process_that_ends_at_once_keeps_its_graph_first(folder, made):
    """And another process reads it."""
    script = (
        "import torch; from bkn_zoo import create_model; from bkn_zoo.inference import kept_graphs; "
        "from bkn_zoo.inference.engines import OpenVINOEngine; "
        "kept_graphs.WORTHWHILE, kept_graphs.PAUSE = -1.0, 600.0; torch.manual_seed(0); "
        "OpenVINOEngine(create_model('inception_cifar_bkn').eval())(torch.zeros(1, 3, 32, 32), 'population')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert only(folder).suffix == kept_graphs.SUFFIX
    torch.manual_seed(0)
    start(create_model("inception_cifar_bkn").eval())
    assert made == []


MOVES = {"moved": lambda model: model.share_memory(), "trained": lambda model: model.fc.weight.add_(1.0)}


@pytest.mark.parametrize("change", MOVES)
def test_a_network_that_changes_too_soon_leaves_no_graph(model, folder, made, monkeypatch, change):
    """And is prepared again."""
    write, changed = kept_graphs._write, threading.Event()
    monkeypatch.setattr(kept_graphs, "_write", lambda *args: changed.wait() and write(*args))
    engine = OpenVINOEngine(model)
    engine(IMAGES, "population")
    with torch.no_grad():
        MOVES[change](model)
    changed.set()
    wait()
    assert list(folder.iterdir()) == []
    assert_close(engine(IMAGES, "population"), model(IMAGES, statistics="population"), atol=1e-4, rtol=1e-4)
    assert len(made) == 2
