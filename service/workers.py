"""Runs several processes that share one port. Each loads its own models, and a process that dies is replaced."""

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

COULD_NOT_START = 3  # exit code of a worker, different from that of a crash
PAUSE = 1.0  # seconds before a worker is replaced, in case it dies every time


def supervise(settings: Settings, serve: Callable[[Settings], int]) -> int:
    """Run `serve` in `settings.workers` processes until SIGTERM or SIGINT. Returns 0, or 1 if they could not start."""
    settings = settings.model_copy(update={"port": _reserve(settings)})
    # Not forked, because a fork copies the locks of an engine's threads without the threads.
    context = multiprocessing.get_context("spawn")
    workers: dict[int, Any] = {}
    stopping = failed = False

    def start(place: int) -> None:
        # A daemon, so that an error here does not leave processes behind.
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
    """Lock a folder, so that systemd-tmpfiles does not remove it. Mapped files look old to it."""
    import fcntl  # not on Windows, which cannot share ports either

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def listen(settings: Settings) -> socket.socket:
    """A socket of one worker at the shared port. The system distributes connections."""
    return _bind(settings, socket.SO_REUSEPORT)


def _reserve(settings: Settings) -> int:
    """The port to listen on, which must be free. Otherwise the workers would share it with a foreign process."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise InputError("--workers is not supported on this system, which cannot share a port: omit it.")
    try:
        with _bind(settings, socket.SO_REUSEADDR) as alone:
            return int(alone.getsockname()[1])
    except OSError:
        raise InputError(f"cannot listen on {settings.host}:{settings.port}: choose another port.") from None


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
    """Give the processes that are started here their own cores, equally many, so that all sum in the same order."""
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
    """Block SIGINT in the processes that are started here, because it would cause a traceback during imports."""
    resource_tracker.ensure_running()  # started here, because its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(settings: Settings, serve: Callable[[Settings], int]) -> None:
    os.setpgid(0, 0)  # otherwise Ctrl-C would reach it twice, and a second signal stops at once
    share_quota(settings.workers)
    set_up_logs()
    sys.exit(COULD_NOT_START if serve(settings) else 0)
