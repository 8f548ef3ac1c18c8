"""How many cores a process may use: those of its affinity, limited by its quota."""

import pytest
import torch

from bkn_zoo.cores import keep_to_quota, share_quota, usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    yield
    share_quota(1)


QUOTAS = {
    "no groups": (None, {}, 8),
    "no quota": (None, {"cpu.max": "max 10"}, 8),
    "two and a half": (None, {"cpu.max": "25 10"}, 3),
    "half": (None, {"cpu.max": "5 10"}, 1),
    "more than there are": (None, {"cpu.max": "990 10"}, 8),
    "container": ("0::/", {"cpu.max": "20 10"}, 2),
    "the group above": ("0::/a/it.service", {"a/cpu.max": "40 10", "a/it.service/cpu.max": "max 10"}, 4),
    "its own group": ("0::/a/b", {"a/cpu.max": "max 10", "a/b/cpu.max": "50 10", "b/cpu.max": "1 1"}, 5),
    "under the machine's name": ("0::/docker/1234", {"cpu.max": "20 10"}, 2),
    "nonsense": ("no such format", {"cpu.max": "nor this"}, 8),
}


@pytest.mark.parametrize(("group", "files", "cores"), QUOTAS.values(), ids=QUOTAS)
def test_cores_are_those_that_affinity_and_quota_leave(tmp_path, monkeypatch, group, files, cores):
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (written | ({} if group is None else {"proc/self/cgroup": group})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr("bkn_zoo.cores.ROOT", tmp_path)
    assert usable_cores() == cores


def test_processes_and_threads_share_a_quota(monkeypatch):
    monkeypatch.setattr("bkn_zoo.cores._quota", lambda: 3.0)
    found = [share_quota(processes) or usable_cores() for processes in (1, 2, 3, 8)]
    assert found == [3, 2, 1, 1]
    share_quota(1)
    before = torch.get_num_threads()
    try:
        for threads, kept in ((5, 3), (2, 2)):
            torch.set_num_threads(threads)
            keep_to_quota()
            assert torch.get_num_threads() == kept
    finally:
        torch.set_num_threads(before)
