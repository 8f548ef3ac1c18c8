"""Where and how a result was computed: the command, the processes, the hardware and the versions."""

import json
import os
import platform
import re
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bkn_zoo.cores import allowed_cores
from bkn_zoo.version import __version__

PACKAGES = (
    "torch", "torchvision", "timm", "triton", "openvino", "numpy", "safetensors", "fastapi", "uvicorn",
    "litserve", "ray",
)  # fmt: skip


def environment(seed: int | None = None, device: Any = None) -> dict[str, Any]:
    """The command, hardware and versions of the running script, which used this device, as in `hardware`."""
    installed = {"bkn-zoo": __version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    # Keep scripts/ of a script. Drop --resume, because it continues a run that others do not have.
    words = [without_folders(word) for word in sys.argv if word != "--resume"]
    if os.path.isabs(sys.argv[0]) and Path(sys.argv[0]).parent.name == "scripts":
        words[0] = f"scripts/{words[0]}"
    if os.path.isabs(sys.argv[0]) and words[0] == "__main__.py":
        words[:1] = ["-m", Path(sys.argv[0]).parent.name]
    return {
        "command": shlex.join(launched(words)),
        "processes": processes(),
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), **installed},
        "seed": seed,
    }


def without_folders(word: str) -> str:
    """A word of a command with the last part only of a path on this machine, which means nothing to others."""
    option, equals, value = word.partition("=")
    if os.path.isabs(word):
        return Path(word).name
    return f"{option}={without_folders(value)}" if equals else word


def write_results(
    path: Path, rows: list[dict[str, Any]], seed: int | None = None, device: Any = None, **more: Any
) -> None:  # fmt: skip
    """Write rows and the environment in which they were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(seed, device), **more, "rows": rows}, indent=1) + "\n")


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def launched(words: list[str]) -> list[str]:
    script = words[0] != "bkn-zoo"
    if processes() == 1:
        return ["python", *words] if script else words
    several = [f"--nnodes={machines()}"] if machines() > 1 else []
    here = f"--nproc-per-node={processes() // machines()}"
    return ["torchrun", *several, here, *([] if script else ["--no-python"]), *words]


def machines() -> int:
    return processes() // int(os.environ.get("LOCAL_WORLD_SIZE", processes()))


def hardware(device: Any = None) -> str:
    """The GPU, by default the current one, or the CPU with the number of cores that this process may use."""
    if torch.cuda.is_available() and torch.device(device or "cuda").type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")  # Linux only
    named = dict(re.findall(r"^(.*?)\s*: (.*)$", info.read_text() if info.exists() else "", re.MULTILINE))
    arm = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
    cpu = named.get("model name") or arm.get(named.get("CPU part", ""), platform.machine())
    cores = allowed_cores()
    return f"{cpu}, {cores} core{'s' * (cores > 1)}"
