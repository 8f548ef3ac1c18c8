"""What every file under results/ says about itself: the command, the hardware, the versions, the seed."""

import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bkn_zoo.training.state import processes
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
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv]
    if os.path.isabs(sys.argv[0]) and Path(sys.argv[0]).parent.name == "scripts":
        words[0] = f"scripts/{words[0]}"
    return {
        "command": shlex.join(launched(words)),
        "processes": processes(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **installed},
        "seed": seed,
    }


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
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    arm = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
    return named.get("model name") or arm.get(named.get("CPU part", ""), platform.machine())


def write_record(path: Path, text: str) -> None:
    """A run's file, whole or not at all: whoever finds it takes the run for done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text + "\n")
    os.replace(scratch, path)


def write_results(path: Path, rows: list[dict[str, Any]], seed: int | None = None, **more: Any) -> None:
    """Write rows and the environment they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(seed), **more, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Rows as a Markdown table; floats with three decimals, missing fields as a dash."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
