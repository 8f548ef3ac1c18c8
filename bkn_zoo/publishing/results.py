"""What every file under results/ says about itself: the command, the hardware, the versions, the seed."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
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


def save_figures(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """As PNG files; what has no figure (None) has no file either, nor keeps one of before.

    What is plotted is in the file, too, so that a test can hold the picture against the results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        figure.savefig(path, dpi=130, metadata={"Software": None, "Description": json.dumps(plotted(figure))})
        drawn.append(path)
    return drawn


def plotted(figure: Any) -> list[dict[str, Any]]:
    """What a figure shows: its words and, of each of its axes, words and values, rounded. Nothing is rendered."""
    import numpy as np
    from matplotlib.collections import LineCollection, PolyCollection

    def rounded(values: Any) -> Any:
        values = np.ma.filled(values)
        return (np.round(values, 3) if values.dtype.kind == "f" else values).tolist()

    found: list[dict[str, Any]] = [{"texts": [text.get_text() for text in figure.texts]}]
    for axes in figure.axes:
        words = [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *axes.get_legend_handles_labels()[1]]
        words += [text.get_text() for text in axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            words += getattr(axis.get_major_formatter(), "seq", [])  # ticks that were given names
        spreads = [each for each in axes.collections if isinstance(each, LineCollection | PolyCollection)]
        found.append({
            "texts": words,
            "lines": [[rounded(line.get_xdata()), rounded(line.get_ydata())] for line in axes.lines],
            # Of a band or bar, its corners: in which order they are drawn is matplotlib's.
            "spreads": [
                sorted(map(list, {tuple(corner) for path in each.get_paths() for corner in rounded(path.vertices)}))
                for each in spreads
            ],
            "maps": [rounded(image.get_array()) for image in axes.images if image.get_array().ndim == 2],
        })  # fmt: skip
    return found


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
