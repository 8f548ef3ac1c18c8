"""Several processes that share one port: each loads its models by itself, and one that dies is replaced."""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from bkn_zoo.cores import share_quota
from bkn_zoo.errors import InputError

from .logs import set_up_logs
from .metrics import FOLDER
from .settings import Settings

log = logging.getLogger("bkn_zoo.service")

COULD_NOT_START = 3  # a worker's exit code, other than that of a crash
PAUSE = 1.0  # seconds before a worker is replaced, in case it dies at once every time


def supervise(settings: Settings, serve: Callable[[Settings], int]) -> int:
    """Run `serve` in `settings.workers` processes until SIGTERM or SIGINT; 0 then, 1 where they could not start."""
    settings = settings.model_copy(update={"port": _reserve(settings)})
    # Not forked: the threads of an engine would not come along, but their locks.
    context = multiprocessing.get_context("spawn")
    workers: dict[int, Any] = {}
    stopping = failed = False

    def start(place: int) -> None:
        # A daemon, so that an error here leaves none behind.
        worker = workers[place] = context.Process(target=_work, args=(settings, serve), daemon=True)
        with _share_of_cores(place, settings.workers), _interrupts_held_back():
            worker.start()
        if stopping:
            worker.terminate()

    def stop(number: int, frame: Any = None) -> None:
        nonlocal stopping
        stopping = True
        for worker in workers.values():
            if worker.is_alive():
                os.kill(worker.pid, number)

    with tempfile.TemporaryDirectory(prefix="bkn-zoo-") as folder, _kept(folder):
        os.environ[FOLDER] = folder
        before = {caught: signal.signal(caught, stop) for caught in (signal.SIGTERM, signal.SIGINT)}
        try:
            for place in range(settings.workers):
                start(place)
            first = list(workers.values())
            while workers:
                wait([worker.sentinel for worker in workers.values()])
                for place, worker in list(workers.items()):
                    if worker.is_alive():
                        continue
                    mark_process_dead(worker.pid, folder)
                    if worker.exitcode == COULD_NOT_START and worker in first and not stopping:
                        failed = True
                        stop(signal.SIGINT)
                    if not stopping:
                        log.error("a worker died and is replaced", extra={"code": worker.exitcode})
                        time.sleep(PAUSE)
                    if stopping:
                        del workers[place]
                    else:
                        start(place)
        finally:
            del os.environ[FOLDER]
            for caught, handler in before.items():
                signal.signal(caught, handler)
    return int(failed)


@contextmanager
def _kept(folder: str) -> Iterator[None]:
    """Not removed by systemd-tmpfiles, to which what is mapped looks old: it leaves alone what somebody has locked."""
    import fcntl  # Windows has none, nor ports that processes share

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # of a file system that has no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def listen(settings: Settings) -> socket.socket:
    """A worker's own socket at the port of all: the system gives each its share of the connections."""
    return _bind(settings, socket.SO_REUSEPORT)


def _reserve(settings: Settings) -> int:
    """The port to listen on, which must be nobody's yet: the others' sockets would otherwise join a stranger's."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise InputError("--workers needs a system on which processes share a port: leave it out.")
    try:
        with _bind(settings, socket.SO_REUSEADDR) as alone:
            return int(alone.getsockname()[1])
    except OSError:
        raise InputError(f"it cannot listen on {settings.host}:{settings.port}: choose another.") from None


def _bind(settings: Settings, option: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


@contextmanager
def _share_of_cores(place: int, workers: int) -> Iterator[None]:
    """What is started within has cores of its own: as many as every other, so that all sum in the same order."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // workers
    if not share:
        yield
        return
    os.sched_setaffinity(0, cores[place * share : (place + 1) * share])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """What is started within meets SIGINT only once it asks for it: in the midst of imports it would be a traceback."""
    resource_tracker.ensure_running()  # which lets SIGINT through again when it starts, and a process would start it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(settings: Settings, serve: Callable[[Settings], int]) -> None:
    os.setpgid(0, 0)  # or Ctrl-C would reach it twice, and the second time means at once
    share_quota(settings.workers)
    set_up_logs()
    sys.exit(COULD_NOT_START if serve(settings) else 0)
