"""How many cores a process may use, and who keeps to that: workers, decoders, PyTorch, OpenVINO."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from service_process import save_small_checkpoint

import bkn_zoo
from bkn_zoo import Network
from bkn_zoo.cli import command
from bkn_zoo.cores import share_quota, usable_cores
from bkn_zoo.inference import engines
from bkn_zoo.inference.engines import create_engine
from service.decoding import Decoders
from service.metrics import Metrics
from service.pool import Loaded
from service.settings import Settings
from service.workers import _work

GROUPS = "sys/fs/cgroup"
LIMITS = {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    yield
    share_quota(1)


@pytest.fixture
def quota_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkn_zoo.cores._quota", lambda root: 3.0)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_cores_are_those_that_affinity_and_quota_leave(tmp_path: Path, quota: str, cores: int) -> None:
    assert usable_cores(tmp_path) == 8
    write(tmp_path, {f"{GROUPS}/cpu.max": quota})
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        pytest.param("0::/", {"cpu.max": "200000 100000"}, 2, id="a container"),
        pytest.param(
            "0::/system.slice/it.service",
            {"system.slice/cpu.max": "400000 100000", "system.slice/it.service/cpu.max": "max 100000"},
            4,
            id="systemd, the group above",
        ),
        pytest.param(
            "0::/a/b", {"a/cpu.max": "max 100000", "a/b/cpu.max": "50000 10000", "b/cpu.max": "1 1"}, 5, id="systemd"
        ),
        pytest.param(
            "5:cpu,cpuacct:/docker/1234\n4:memory:/x\n0::/",
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2,
            id="the first version, in a container under the machine's name",
        ),
        pytest.param(
            "5:cpu:/it\n4:cpuset:/other",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
            | {"cpu/it/cpu.cfs_quota_us": "600000", "cpu/it/cpu.cfs_period_us": "100000"},
            6,
            id="the first version",
        ),
        pytest.param("5:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8, id="none"),
        pytest.param("no such format", {"cpu.max": "nor this"}, 8, id="nonsense"),
    ],
)
def test_the_quota_is_that_of_the_processes_own_groups(
    tmp_path: Path, group: str, files: dict[str, str], cores: int
) -> None:
    write(tmp_path, {"proc/self/cgroup": group} | {f"{GROUPS}/{name}": text for name, text in files.items()})
    assert usable_cores(tmp_path) == cores


@pytest.mark.usefixtures("quota_of_three")
def test_workers_share_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.setpgid", lambda *_: None)
    monkeypatch.setattr("service.workers.set_up_logs", lambda: None)
    found: list[int] = []
    for workers in (1, 2, 3, 8):
        with pytest.raises(SystemExit):
            _work(Settings(workers=workers), lambda _: found.append(usable_cores()) or 0)
    assert found == [3, 2, 1, 1]


@pytest.mark.usefixtures("quota_of_three")
def test_there_are_as_many_decoders_as_a_quota_leaves_cores() -> None:
    decoders = Decoders(Settings())
    assert decoders._small._threads._max_workers == 3
    decoders.stop()


def serve(folder: Path) -> None:
    save_small_checkpoint(folder)
    Loaded("it", bkn_zoo.from_pretrained(folder), Settings(engine="torch", device="cpu"), Metrics())


def classify(folder: Path) -> None:
    assert command.main(["classify", str(folder), "--model", str(folder)]) == 1  # there is neither


def measure(folder: Path) -> None:
    assert command.main(["evaluate", str(folder), "--data", str(folder), "--device", "cpu"]) == 1


def train(folder: Path) -> None:
    assert command.main(["train", "--data", str(folder), "--device", "cpu", "--model", "inception_cifar_bkn"]) != 0


@pytest.mark.usefixtures("quota_of_three")
@pytest.mark.parametrize("program", [serve, classify, measure, train])
def test_programs_let_pytorch_have_as_many_threads_as_a_quota_leaves_cores(
    program: Callable[[Path], None], tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    try:
        for threads, kept in ((5, 3), (2, 2)):
            torch.set_num_threads(threads)
            program(tmp_path / "it")
            assert torch.get_num_threads() == kept
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(engines.ov is None, reason="openvino is not installed")
@pytest.mark.parametrize(("quota", "limits"), [(math.inf, {}), (8.0, {}), (1.0, LIMITS)])
def test_openvino_keeps_to_a_quota_and_goes_its_own_way_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, quota: float, limits: dict[str, Any]
) -> None:
    monkeypatch.setattr("bkn_zoo.cores._quota", lambda root: quota)
    told = {}
    compile_graph = engines.compile_graph

    def noted(network: Network, shape: Any, population: bool, options: dict[Any, Any]) -> Any:
        told.update(options)
        return compile_graph(network, shape, population, options)

    monkeypatch.setattr(engines, "compile_graph", noted)
    model = bkn_zoo.create_model("inception_cifar_bkn").eval()
    engine, images = create_engine(model, "openvino", streams=2), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(engine(images), model(images), atol=1e-3, rtol=0)
    assert {name: told[name] for name in LIMITS.keys() & told} == limits
    assert engine.streams == (1 if limits else 2)
    (graph,) = engine._prepared.values()
    assert {name: graph.compiled.get_property(name) for name in limits} == limits
