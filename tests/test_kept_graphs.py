"""Compiled graphs that are kept from one start to the next: when they are read, and when they are not."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bkn_zoo import Network, create_model
from bkn_zoo.inference import engines, kept_graphs
from bkn_zoo.inference.engines import OpenVINOEngine

pytestmark = [
    pytest.mark.skipif(engines.ov is None, reason="openvino is not installed"),
    pytest.mark.usefixtures("shallow_network"),
]
IMAGES = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(away_from_start: Callable[[nn.Module], None]) -> Network:
    torch.manual_seed(0)
    model = create_model("inception_cifar_bkn", num_classes=5)
    away_from_start(model)
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BKN_ZOO_CACHE", str(tmp_path / "a" / "cache"))
    monkeypatch.setattr(kept_graphs, "WORTHWHILE", -1.0)
    monkeypatch.setattr(kept_graphs, "PAUSE", 0.0)
    kept_graphs._warn.cache_clear()
    return tmp_path / "a" / "cache"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled, and not read."""
    found = []
    compile_graph = engines.compile_graph

    def count(network: Network, *args: Any) -> Any:
        found.append(network)
        return compile_graph(network, *args)

    monkeypatch.setattr(engines, "compile_graph", count)
    return found


def start(model: Network, mode: str = "population") -> Tensor:
    """The logits of an engine of its own, as at a new start, once all is kept that will be."""
    logits = OpenVINOEngine(model)(IMAGES, mode)
    for thread in threading.enumerate():
        if thread.name == "keeper of graphs":
            thread.join()
    return logits


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("mode", ["population", "expected"])
def test_what_one_start_compiles_the_next_one_reads(model: Network, folder: Path, made: list[Any], mode: str) -> None:
    model.statistics_batch_size = 4
    first = start(model, mode)
    written = only(folder).stat().st_ino
    assert_close(start(model, mode), first, atol=1e-5, rtol=0)
    assert len(made) == 1
    assert only(folder).stat().st_ino == written
    with torch.no_grad():
        assert_close(start(model, mode), model(IMAGES, mode), atol=1e-3, rtol=0)


def test_sample_and_expected_are_one_file_and_the_rest_is_not(model: Network, folder: Path, made: list[Any]) -> None:
    model.statistics_batch_size = 4
    sample, expected = start(model, "sample"), start(model, "expected")
    assert len(made) == 1
    assert not torch.equal(sample, expected)
    start(model, "population")
    assert len(list(folder.iterdir())) == len(made) == 2


def change_a_weight(model: Network) -> None:
    list(model.parameters())[4].data.view(-1)[-1] += 1


def change_a_buffer_of_no_checkpoint(model: Network) -> None:
    model.register_buffer("more", torch.ones(1), persistent=False)


def change_a_number(model: Network) -> None:
    next(module for module in model.modules() if hasattr(module, "eps")).eps = 0.5  # type: ignore[assignment]


def change_the_precision(model: Network) -> None:
    model.half()


@pytest.mark.parametrize(
    "change", [change_a_weight, change_a_buffer_of_no_checkpoint, change_a_number, change_the_precision]
)
def test_another_network_has_another_file(model: Network, change: Callable[[Network], None]) -> None:
    before = kept_graphs._name(model, "what")
    assert before is not None
    assert before == kept_graphs._name(model, "what")
    change(model)
    assert kept_graphs._name(model, "what") != before


def test_a_graph_for_a_quota_has_its_own_file_and_keeps_to_it_when_it_is_read(
    model: Network, folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_network_with_code_of_its_own_has_none(model: Network) -> None:
    head = model.head
    model.head = lambda features: 10 * head(features)  # type: ignore[method-assign,assignment]
    assert kept_graphs._name(model, "what") is None


def test_other_options_sizes_and_surroundings_have_another_file(
    model: Network, folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OpenVINOEngine(model)
    engine(IMAGES, "population")
    engine(torch.zeros(1, 3, 48, 48), "population")
    assert len(made) == 2
    what = (("sample", (3, 32, 32)), {"INFERENCE_PRECISION_HINT": "f32"})
    names = {kept_graphs._name(model, what), kept_graphs._name(model, (what[0], {"INFERENCE_PRECISION_HINT": "f16"}))}
    code, versions, machine, cores, properties = kept_graphs._surroundings()
    others = [
        ("other code", versions, machine, cores, properties),
        (code, (*versions[:1], "2025.0", *versions[2:]), machine, cores, properties),
        (code, versions, machine, cores + 1, properties),
        (code, versions, machine, cores, ["another processor", properties[1]]),
    ]
    for other in others:
        monkeypatch.setattr(kept_graphs, "_surroundings", lambda other=other: other)
        names.add(kept_graphs._name(model, what))
    assert len(names) == 2 + len(others)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def take_anothers(path: Path) -> None:
    """As a whole, from under another name."""
    other = path.with_name(f"{'0' * 64}{kept_graphs.SUFFIX}")
    content = path.read_bytes()[: -kept_graphs.DIGEST]
    path.write_bytes(content + kept_graphs._digest(other, content))


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        take_anothers,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\0" * 20),
        lambda path: path.write_bytes(b"\0" * 10**6),
        lambda path: os.truncate(path, path.stat().st_size // 2),
    ],
    ids=["flipped", "another's", "empty", "short", "zeros", "truncated"],
)
def test_a_damaged_file_is_made_anew(
    model: Network, folder: Path, made: list[Any], damage: Callable[[Path], object]
) -> None:
    first = start(model)
    damage(only(folder))
    assert_close(start(model), first, atol=1e-5, rtol=0)
    assert len(made) == 2
    start(model)
    assert len(made) == 2


def test_what_openvino_does_not_take_is_compiled(model: Network, folder: Path, made: list[Any]) -> None:
    first = start(model)
    path, content = only(folder), b"no graph at all" * 1000
    path.write_bytes(content + kept_graphs._digest(path, content))
    assert_close(start(model), first, atol=1e-5, rtol=0)
    assert len(made) == 2


class Strange(nn.ReLU):
    """Code that may change without anyone here knowing."""


def take_a_layer(model: Network) -> None:
    model.strange = Strange()


def watch_a_layer(model: Network) -> None:
    next(model.children()).register_forward_hook(lambda *_: None)


def replace_a_method(model: Network) -> None:
    layer = next(model.children())
    layer.forward = layer.forward  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [take_a_layer, watch_a_layer, replace_a_method])
def test_a_network_with_code_that_is_not_the_zoo_s_is_not_kept(
    model: Network, folder: Path, made: list[Any], change: Callable[[Network], None]
) -> None:
    change(model)
    start(model)
    start(model)
    assert len(made) == 2
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without owners of files")
def test_where_others_can_write_nothing_is_read_or_written(
    model: Network, folder: Path, made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    start(model)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only(folder).stat().st_mode & 0o777 == 0o600
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


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without owners of files")
def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_graphs._folder() == folder
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    used = kept_graphs._folder()
    assert used == (folder if folder.stat().st_uid == 0 else None)  # root may do anything anyway
    status = os.stat_result((0o40700, 0, 0, 1, folder.stat().st_uid + 2, 0, 0, 0, 0, 0))
    assert not kept_graphs._is_ours(status)


def test_it_can_be_switched_off(
    model: Network, folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BKN_ZOO_CACHE", "off")
    start(model)
    start(model)
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_and_harms_nobody(
    model: Network, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.write_text("a file in the place of a folder")
    start(model)
    start(model)
    (record,) = caplog.records
    assert str(folder) in record.getMessage()


def test_without_the_variable_graphs_are_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BKN_ZOO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kept_graphs._folder() == tmp_path / "xdg" / "bkn_zoo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert kept_graphs._folder() == tmp_path / ".cache" / "bkn_zoo"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert kept_graphs._folder() is None


def test_what_is_compiled_soon_is_not_kept(
    model: Network, folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_graphs, "WORTHWHILE", 1000.0)
    start(model)
    assert list(folder.iterdir()) == []


def test_what_was_used_longest_ago_makes_room(model: Network, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(model)
    used = only(folder)
    left = folder / f"{'1' * 64}{kept_graphs.SUFFIX}.1234"  # by a process that was killed
    unused = folder / f"{'2' * 64}{kept_graphs.SUFFIX}"
    others = folder / "notes.txt"
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


def test_a_full_disk_leaves_nothing_behind(
    model: Network, folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(kept_graphs.os, "replace", full)
    first = start(model)
    assert list(folder.iterdir()) == []
    assert_close(start(model), first, atol=1e-5, rtol=0)


def test_a_folder_that_can_only_be_read_is_read(
    model: Network, folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an image, say, that was filled when it was built."""
    start(model)

    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(kept_graphs.os, "utime", refuse)
    start(model)
    assert len(made) == 1


def test_several_at_once_leave_one_whole_file(model: Network, folder: Path, made: list[Any]) -> None:
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(start(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = len(made)
    assert_close(start(model), found[0], atol=1e-5, rtol=0)
    assert len(made) == before
    assert only(folder).suffix == kept_graphs.SUFFIX


@pytest.mark.usefixtures("whole_network")
def test_a_process_that_ends_at_once_keeps_its_graph_first_and_another_reads_it(folder: Path, made: list[Any]) -> None:
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


def moved(model: Network) -> None:
    model.share_memory()


def trained(model: Network) -> None:
    with torch.no_grad():
        model.fc.weight.add_(1.0)


@pytest.mark.parametrize("change", [moved, trained])
def test_a_network_that_moves_or_changes_before_its_graph_is_kept_leaves_none_and_is_prepared_anew(
    model: Network, folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch, change: Callable[[Network], None]
) -> None:
    write, changed = kept_graphs._write, threading.Event()

    def later(*args: Any) -> None:
        changed.wait()
        write(*args)

    monkeypatch.setattr(kept_graphs, "_write", later)
    engine = OpenVINOEngine(model)
    engine(IMAGES, "population")
    change(model)
    changed.set()
    for thread in threading.enumerate():
        if thread.name == "keeper of graphs":
            thread.join()
    assert list(folder.iterdir()) == []
    assert_close(engine(IMAGES, "population"), model(IMAGES, statistics="population"), atol=1e-4, rtol=1e-4)
    assert len(made) == 2
