"""Where and how a result was computed: the command, the processes, the hardware and the versions."""

import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bkn_zoo.cores import allowed_cores
from bkn_zoo.version import __version__

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "triton",
    "openvino",
    "numpy",
    "safetensors",
    "fastapi",
    "uvicorn",
    "litserve",
    "ray",
)


def environment(seed: int | None = None) -> dict[str, Any]:
    """Where and how the running script runs."""
    installed = {"bkn-zoo": __version__}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # Paths of the machine say nothing to others: of those, the last part, and that a script is one of scripts/.
    # Without --resume, which continues a run that others do not have.
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv if word != "--resume"]
    if os.path.isabs(sys.argv[0]) and Path(sys.argv[0]).parent.name == "scripts":
        words[0] = f"scripts/{words[0]}"
    return {
        "command": shlex.join(launched(words)),
        "processes": processes(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **installed},
        "seed": seed,
    }


def processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def launched(words: list[str]) -> list[str]:
    """The words of a command, after those that start it: for several processes, torchrun's."""
    script = words[0] != "bkn-zoo"
    if processes() == 1:
        return ["python", *words] if script else words
    several = [f"--nnodes={machines()}"] if machines() > 1 else []
    here = f"--nproc-per-node={processes() // machines()}"
    return ["torchrun", *several, here, *([] if script else ["--no-python"]), *words]


def machines() -> int:
    """On how many these processes run, by what torchrun says of this one."""
    return processes() // int(os.environ.get("LOCAL_WORLD_SIZE", processes()))


def hardware() -> str:
    """The GPU in use, or the CPU with the cores that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {allowed_cores()} cores"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # Linux only
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    arm = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
    return named.get("model name") or arm.get(named.get("CPU part", ""), platform.machine())
