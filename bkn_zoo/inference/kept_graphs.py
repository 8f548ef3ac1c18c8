"""A cache of compiled graphs on disk, because reading a graph is faster than compiling it.

The name of a file is a hash of everything that determines its graph, so any change leads to another file. A file ends
with a hash of its content, and a damaged file is replaced. The variable BKN_ZOO_CACHE sets another folder, or disables
the cache with `off`. Problems with the cache are never errors: the graph is then compiled.
"""

import functools
import hashlib
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from bkn_zoo.cores import allowed_cores
from bkn_zoo.inference.folding import as_seen
from bkn_zoo.inference.openvino_graph import Graph, core, ov
from bkn_zoo.models.network import BeliefNetwork
from bkn_zoo.regular import open_regular
from bkn_zoo.version import __version__

log = logging.getLogger(__name__)

VARIABLE = "BKN_ZOO_CACHE"
MOST_BYTES = 2 * 10**9  # of all files; the least recently used ones are deleted
WORTHWHILE = 0.2  # seconds; faster compilations are not cached
PAUSE = 2.0  # seconds before a graph is written, unless the process ends, so that the first image does not wait
DIGEST = hashlib.sha256().digest_size
SUFFIX = ".graph"


def kept(
    model: BeliefNetwork, what: Any, options: dict[Any, Any], make: Callable[[], Graph], built: Any = None
) -> Graph:
    """The result of `make` for a network, from the cache if possible.

    Args:
        what: everything that the graph depends on besides the network and OpenVINO's options, with a complete `repr`.
        built: the graph to compile, if foreign code determines it.
    """
    folder = _folder()
    seen = _seen(model)
    name = None
    if folder is not None:
        name = _name(model, (what, options)) if built is None else _name_of_graph(built, (what, options))
    if folder is None or name is None:
        return make()
    path = folder / name
    graph = _read(path, options)
    if graph is None:
        begun = time.monotonic()
        graph = make()
        if time.monotonic() - begun > WORTHWHILE:
            with suppress(RuntimeError):  # no more threads available, or the process ends
                threading.Thread(target=_write, args=(path, graph, model, seen), name="keeper of graphs").start()
    return graph


def _folder() -> Path | None:
    """The folder of the cache; None if it is disabled, or if other users can write to it."""
    given = os.environ.get(VARIABLE)
    if given == "off":
        return None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(given) if given else caches / "bkn_zoo"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder.stat()):
            return folder
        _warn(
            f"{folder} is not used for compiled graphs, because others can write to it: run chmod 700, or set another"
        )
    except (OSError, RuntimeError) as error:  # it cannot be created, or there is no home folder
        if given:
            _warn(f"{given} cannot be used for compiled graphs ({error}): set another folder")
    return None


@functools.cache
def _warn(message: str) -> None:
    """Once."""
    log.warning("%s in the variable %s.", message, VARIABLE)


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user and root can write to it."""
    return not hasattr(os, "getuid") or (status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022)


def _name(model: BeliefNetwork, what: Any) -> str | None:
    """The name of the file; None if foreign code determines the graph."""
    digest = hashlib.sha256(repr((_surroundings(), what)).encode())
    for name, module in model.named_modules():
        kind, values = type(module), vars(module)
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        foreign = kind.__module__.partition(".")[0] not in ("bkn_zoo", "torch") or any(hooks)
        if foreign or any(isinstance(value, FunctionType | MethodType) for value in values.values()):
            return None
        plain = [item for item in sorted(values.items()) if isinstance(item[1], str | int | float | tuple | None)]
        digest.update(repr((name, kind.__module__, kind.__qualname__, plain)).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() + SUFFIX


def _name_of_graph(built: Any, what: Any) -> str:
    """The name of the file, from the content of a graph that is not compiled yet."""
    digest = hashlib.sha256(repr((_surroundings(), what)).encode())
    places: dict[str, int] = {}
    for node in built.get_ordered_ops():
        kind, sources = node.get_type_name(), node.input_values()
        taken = [(places[source.get_node().get_name()], source.get_index()) for source in sources]
        places[node.get_name()] = len(places)
        constant = kind == "Constant"
        about = None if constant else sorted(node.get_attributes().items())
        types = [(output.get_element_type().get_type_name(), output.partial_shape) for output in node.outputs()]
        digest.update(repr((kind, types, taken, about)).encode())
        if constant:
            digest.update(np.ascontiguousarray(node.data).reshape(-1).view(np.uint8).data)
    return digest.hexdigest() + SUFFIX


@functools.cache
def _surroundings() -> Any:
    """What a graph depends on besides the network: code, versions and the processor."""
    code = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    properties = [core().get_property("CPU", name) for name in ("FULL_DEVICE_NAME", "OPTIMIZATION_CAPABILITIES")]
    versions = (__version__, ov.get_version(), torch.__version__, np.__version__)
    return code.hexdigest(), versions, platform.machine(), allowed_cores(), properties


def _read(path: Path, options: dict[Any, Any]) -> Graph | None:
    """The graph in a file; None if it does not exist or cannot be trusted."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if not _is_ours(status):
                return None
            content = np.fromfile(
                file, np.uint8
            )  # not mapped, because truncating a mapped file would crash the process
        if content[-DIGEST:].tobytes() != _digest(path, content[:-DIGEST]):
            path.unlink()
            return None
        with suppress(OSError):  # fails if the file belongs to root
            os.utime(path)
        return Graph(core().import_model(ov.Tensor(content[:-DIGEST], shared_memory=True), "CPU", options), content)
    except (OSError, RuntimeError, TypeError):  # missing, or OpenVINO refuses it
        return None


def _seen(model: BeliefNetwork) -> list[tuple[int, int, int]]:
    return as_seen((*model.parameters(), *model.buffers()))


def _write(path: Path, graph: Graph, model: BeliefNetwork, seen: list[tuple[int, int, int]]) -> None:
    """Write a graph completely or not at all, and delete old ones.

    The graph shares weights with the network. If these have changed, it does not fit its name and is not written.
    """
    threading.main_thread().join(PAUSE)
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists():  # written by another process, or refused by OpenVINO, which would refuse it again
            return
        with open(scratch, "xb", opener=functools.partial(os.open, mode=0o600)) as file:
            content = graph.compiled.export_model().getbuffer()
            file.write(content)
            file.write(_digest(path, content))
        if _seen(model) != seen:
            return scratch.unlink()
        os.replace(scratch, path)
        _make_room(path.parent)
    except (OSError, RuntimeError):
        with suppress(OSError):
            scratch.unlink()


def _digest(path: Path, content: Any) -> bytes:
    digest = hashlib.sha256(path.name.encode())  # so that a file cannot replace another one
    digest.update(content)
    return digest.digest()


def _make_room(folder: Path) -> None:
    """Delete the least recently used files, and leftovers of interrupted processes. Other processes may do so, too."""
    files = []
    for path in folder.glob(f"*{SUFFIX}*"):
        with suppress(OSError):
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    room = MOST_BYTES
    for _, size, path in sorted(files, reverse=True):
        room -= size
        if room < 0:
            with suppress(OSError):
                path.unlink()
