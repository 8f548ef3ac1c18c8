"""The cores and devices that this process may use: no more cores than its affinity and its quota leave it."""

import math
import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

from bkn_zoo.errors import InputError

_sharers = 1


def allowed_cores() -> int:
    """Those that its threads may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(root: Path = Path("/")) -> int:
    """As many of them as the quota of its control groups, a container's or a service's, is; a part counts as one."""
    quota = _quota(root) / _sharers
    return allowed_cores() if quota >= allowed_cores() else max(1, math.ceil(quota))


def share_quota(processes: int) -> None:
    """Let this process take no more of the quota than one of so many that share it."""
    global _sharers
    _sharers = processes


def keep_to_quota() -> None:
    """Let PyTorch start no more threads than a quota leaves cores: for programs, since it is of the whole process."""
    import torch  # in these functions only: cores are counted in processes that do not import it

    if usable_cores() < min(allowed_cores(), torch.get_num_threads()):
        torch.set_num_threads(usable_cores())


def default_device() -> str:
    """The device to use where the caller names none."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Refuse one that PyTorch does not know or find, or that nothing can be read from, as "meta"."""
    import torch

    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, ImportError):
        there = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise InputError(f"device {device!r} is nothing that PyTorch finds here: choose from {there}.") from None


def _quota(root: Path) -> float:
    """In cores; infinite where there is none. A group's holds for those within it, too, so that the least counts."""
    own = {"": "/", "cpu": "/"}  # the group that this process is in, of the second version of groups and of the first
    with suppress(OSError, ValueError):  # another system
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), name)
    least = math.inf
    for version, files in (("", ["cpu.max"]), ("cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"])):
        group = PurePosixPath(own[version])
        # In a container the group may go by the name that it has outside, and be found at the top.
        for place in (group, *group.parents):
            folder = root / "sys/fs/cgroup" / version / str(place).lstrip("/")
            with suppress(OSError, ValueError):  # missing, or "max"
                quota, period = (int(word) for file in files for word in (folder / file).read_text().split())
                if quota > 0:
                    least = min(least, quota / period)
    return least
