"""The folder in which OpenVINO caches compiled graphs between two starts.

OpenVINO names a file by a hash of the graph, its options, the processor and its own version, and compiles again if a
file is incomplete. The variable BKN_ZOO_CACHE sets another folder, or disables the cache with `off`. Problems with the
folder are never errors: graphs are then compiled at every start.

The command also stores the graph itself (`graph_file`), so that the next start needs neither PyTorch nor weights.
"""

import functools
import hashlib
import logging
import os
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bkn_zoo.cores import allowed_cores, usable_cores

log = logging.getLogger(__name__)

VARIABLE = "BKN_ZOO_CACHE"
MOST_BYTES = 2 * 10**9  # of all files; the least recently used ones are deleted
PRECISION = "INFERENCE_PRECISION_HINT"
LIBRARIES = ("timm", "torch", "torchvision")


@functools.cache
def core() -> Any:
    """The only OpenVINO Core of the process: two that end leave a freed signal stack, and the next signal crashes."""
    import openvino

    return openvino.Core()


def native() -> Any:
    """What OpenVINO lists as native on this processor, such as FP32 and BF16."""
    return core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def graph_options() -> dict[str, Any]:
    """The options of all graphs."""
    if usable_cores() == allowed_cores():
        return {"PERFORMANCE_HINT": "LATENCY"}
    # OpenVINO ignores a quota and would start a thread for each core of the machine. It would pin fewer threads to the
    # first cores, which are the same in every container.
    return {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": usable_cores(), "ENABLE_CPU_PINNING": False}


def graph_file(*about: Any) -> Path | None:
    """A file for a graph, named by a hash of all that its operations and weights depend on; None without a cache."""
    code = [(str(path), path.stat().st_mtime_ns) for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    versions = [metadata.version(library) for library in LIBRARIES if find_spec(library)]
    # The precision may depend on the processor, and the engine on whether there is a GPU.
    hardware = native(), sorted(Path("/dev").glob("nv[ghi]*")), os.environ.get("CUDA_VISIBLE_DEVICES")
    name = hashlib.sha256(repr((about, code, versions, hardware)).encode()).hexdigest()
    return (folder := cache_folder()) and folder / f"bkn_zoo-{name}.xml"


def load_graph(file: Path) -> Any:
    """The graph that `compiled` has written to this file, compiled; None if it is missing or damaged."""
    for found in file.parent.glob(f"{file.stem}.*.xml"):
        options = {**graph_options(), PRECISION: found.stem.partition(".")[2], "CACHE_DIR": str(file.parent)}
        with suppress(RuntimeError):
            return core().compile_model(found, "CPU", options)
    return None


def cache_folder() -> Path | None:
    """The folder of the cache; None if it is disabled or cannot be used."""
    given = os.environ.get(VARIABLE)
    if given == "off":
        return None
    try:
        folder = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bkn_zoo")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if hasattr(os, "getuid") and (status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022):
            # They could choose what runs here.
            raise PermissionError(f"others can write to {folder}")
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError if there is no home folder
        _warn(str(error))
        return None


def delete_old_graphs(folder: Path) -> None:
    """Delete the least recently used files if all together are too large."""
    # Another process may be faster.
    with suppress(OSError):
        files = [(path.stat(), path) for path in [*folder.glob("*.blob"), *folder.glob("bkn_zoo-*")]]
        room = MOST_BYTES
        for status, path in sorted(files, key=lambda file: -max(file[0].st_atime, file[0].st_mtime)):
            room -= status.st_size
            if room < 0:
                path.unlink()


@functools.cache
def _warn(message: str) -> None:
    """Once."""
    log.warning("compiled graphs are not cached (%s): set another folder in the variable %s.", message, VARIABLE)
