"""How many cores a process may use, and who keeps to that: workers, decoders, PyTorch, OpenVINO."""

import pytest
import torch
from service_process import save_small_checkpoint

import bkn_zoo
from bkn_zoo import cli
from bkn_zoo.cores import share_quota, usable_cores
from bkn_zoo.inference import engines
from bkn_zoo.inference.engines import create_engine
from service.decoding import Decoders
from service.metrics import Metrics
from service.pool import Loaded
from service.settings import Settings
from service.workers import _work

pytestmark = pytest.mark.usefixtures("shallow_network")
LIMITS = {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    yield
    share_quota(1)


@pytest.fixture
def quota_of_three(monkeypatch):
    monkeypatch.setattr("bkn_zoo.cores._quota", lambda root: 3.0)


def first_version(quota, folder=""):
    return {f"cpu/{folder}cpu.cfs_quota_us": quota, f"cpu/{folder}cpu.cfs_period_us": "10"}


QUOTAS = {
    "no groups": (None, {}, 8),
    "no quota": (None, {"cpu.max": "max 10"}, 8),
    "two and a half": (None, {"cpu.max": "25 10"}, 3),
    "half": (None, {"cpu.max": "5 10"}, 1),
    "more than there are": (None, {"cpu.max": "990 10"}, 8),
    "container": ("0::/", {"cpu.max": "20 10"}, 2),
    "the group above": ("0::/a/it.service", {"a/cpu.max": "40 10", "a/it.service/cpu.max": "max 10"}, 4),
    "its own group": ("0::/a/b", {"a/cpu.max": "max 10", "a/b/cpu.max": "50 10", "b/cpu.max": "1 1"}, 5),
    "v1, under the machine's name": ("5:cpu,cpuacct:/docker/1234\n4:memory:/x\n0::/", first_version("20"), 2),
    "v1": ("5:cpu:/it\n4:cpuset:/other", first_version("-1") | first_version("60", "it/"), 6),
    "v1, no quota": ("5:cpu:/", first_version("-1"), 8),
    "nonsense": ("no such format", {"cpu.max": "nor this"}, 8),
}


@pytest.mark.parametrize(("group", "files", "cores"), QUOTAS.values(), ids=QUOTAS)
def test_cores_are_those_that_affinity_and_quota_leave(tmp_path, group, files, cores):
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (written | ({} if group is None else {"proc/self/cgroup": group})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.usefixtures("quota_of_three")
def test_workers_and_decoders_share_a_quota(monkeypatch):
    monkeypatch.setattr("os.setpgid", lambda *_: None)
    monkeypatch.setattr("service.workers.set_up_logs", lambda: None)
    decoders = Decoders(Settings())
    assert decoders._small._threads._max_workers == 3
    decoders.stop()
    found = []
    for workers in (1, 2, 3, 8):
        with pytest.raises(SystemExit):
            _work(Settings(workers=workers), lambda *_: found.append(usable_cores()) or 0, None)
    assert found == [3, 2, 1, 1]


def serve(folder):
    save_small_checkpoint(folder)
    Loaded("it", bkn_zoo.from_pretrained(folder), Settings(engine="torch", device="cpu"), Metrics())


def command(*words):
    """One that fails after it has set the number of threads: there is neither data nor a checkpoint."""

    def fail(folder):
        (folder / "class").mkdir(parents=True, exist_ok=True)
        (folder / "class" / "photo.png").write_bytes(b"none")
        (folder / "config.json").write_text("{}")
        assert cli.main([str(folder) if word == "FOLDER" else word for word in words]) != 0

    return fail


@pytest.mark.usefixtures("quota_of_three")
@pytest.mark.parametrize(
    "program",
    [
        serve,
        command("classify", "FOLDER", "--model", "FOLDER"),
        command("evaluate", "FOLDER", "--data", "FOLDER", "--device", "cpu"),
        command("train", "--data", "FOLDER", "--device", "cpu", "--model", "inception_cifar_bkn"),
    ],
    ids=["serve", "classify", "evaluate", "train"],
)
def test_programs_keep_pytorchs_threads_to_the_quota(program, tmp_path):
    before = torch.get_num_threads()
    try:
        for threads, kept in ((5, 3), (2, 2)):
            torch.set_num_threads(threads)
            program(tmp_path / "it")
            assert torch.get_num_threads() == kept
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(engines.ov is None, reason="openvino is not installed")
@pytest.mark.parametrize(("quota", "limits"), [(8.0, {}), (1.0, LIMITS)])
def test_openvino_keeps_to_a_quota_if_there_is_one(monkeypatch, quota, limits):
    monkeypatch.setattr("bkn_zoo.cores._quota", lambda root: quota)
    model = bkn_zoo.create_model("inception_cifar_bkn").eval()
    engine, images = create_engine(model, "openvino", streams=2), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(engine(images), model(images), atol=1e-3, rtol=0)
    assert engine.streams == (1 if limits else 2)
    (graph,) = engine._prepared.values()
    assert {name: graph.compiled.get_property(name) for name in limits} == limits
