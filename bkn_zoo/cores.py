"""The cores and devices that this process may use, according to its CPU affinity and quota."""

import math
import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

from bkn_zoo.errors import InputError

ROOT = Path("/")
_sharers = 1


def allowed_cores() -> int:
    """The cores that the threads of this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """The number of these cores, limited by the CPU quota of its control groups. A fraction of a core counts as one."""
    quota = _quota() / _sharers
    return allowed_cores() if quota >= allowed_cores() else max(1, math.ceil(quota))


def share_quota(processes: int) -> None:
    """Divide the quota by the number of processes that share it."""
    global _sharers
    _sharers = processes


def keep_to_quota() -> None:
    """Limit PyTorch's threads to the quota. Only programs should call this, because it affects the whole process."""
    import torch  # imported here, because processes without PyTorch count cores, too

    if usable_cores() < min(allowed_cores(), torch.get_num_threads()):
        torch.set_num_threads(usable_cores())


def default_device() -> str:
    """The default device."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Refuse a device that is unknown, not available, or without data, such as "meta"."""
    import torch

    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, ImportError):
        there = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise InputError(f"device {device!r} is not available: choose {there}.") from None


def _quota() -> float:
    """The quota in cores, or infinity. The quota of a control group includes the groups inside: the smallest counts."""
    group = PurePosixPath("/")
    # The file is missing on other systems than Linux.
    with suppress(OSError, IndexError):
        group = PurePosixPath((ROOT / "proc/self/cgroup").read_text().strip().split(":", 2)[2])
    least = math.inf
    # In a container, the group may have its outside name but be mounted at the top.
    for place in (group, *group.parents):
        # The file is missing, or contains "max".
        with suppress(OSError, ValueError):
            quota, period = map(int, (ROOT / "sys/fs/cgroup" / str(place).lstrip("/") / "cpu.max").read_text().split())
            least = min(least, quota / period)
    return least
