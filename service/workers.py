"""Runs several processes that share one port. Each loads its own models, and one that dies or hangs is replaced."""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from bkn_zoo.cores import share_quota
from bkn_zoo.errors import InputError

from .logs import set_up_logs
from .metrics import bury
from .settings import Settings

log = logging.getLogger("bkn_zoo.service")

# Exit code of a worker, different from that of a crash.
COULD_NOT_START = 3
# Seconds before a worker is replaced, in case it dies every time.
PAUSE = 1.0
# Seconds without a sign of life after which a worker is replaced.
MAX_SILENCE = 10.0


class WorkerLink(NamedTuple):
    """What a worker gets from its supervisor."""

    # All workers accept connections from this socket, so that one that hangs gets none.
    listener: socket.socket
    # For signs of life.
    pulse: Connection
    # Where workers exchange their metrics, if there is room for it.
    folder: Path | None

    def beat(self) -> bool:
        """Tell the supervisor that this process lives. Returns whether the supervisor does."""
        try:
            os.set_blocking(self.pulse.fileno(), False)
            os.write(self.pulse.fileno(), b".")
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return False
        return True


@dataclass
class Worker:
    """A process, and when it gave its last sign of life; None until it has loaded its models."""

    process: Any
    pulse: Connection
    heard: float | None = None

    def hangs(self, now: float, limit: float) -> bool:
        if self.pulse in wait([self.pulse], 0):
            os.read(self.pulse.fileno(), 4096)
            self.heard = now
        return self.heard is not None and now - self.heard > limit


Serve = Callable[[Settings, WorkerLink], int]


def supervise(settings: Settings, serve: Serve) -> int:
    """Run `serve` in `settings.workers` processes until SIGTERM or SIGINT. Returns 0, or 1 if they could not start."""
    listener = _bind(settings)
    # Not forked, because a fork copies the locks of an engine's threads without the threads.
    context = multiprocessing.get_context("spawn")
    workers: dict[int, Worker] = {}
    stopping = failed = False
    # Started here, because its start would unblock SIGINT.
    resource_tracker.ensure_running()

    def start(place: int) -> None:
        pulse, other_end = context.Pipe(duplex=False)
        arguments = (settings, serve, WorkerLink(listener, other_end, folder), place)
        # A daemon, so that an error here does not leave processes behind.
        process = context.Process(target=_work, args=arguments, daemon=True)
        workers[place] = Worker(process, pulse)
        # SIGINT would cause a traceback during the imports of the process; `Server.startup` unblocks it there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other_end.close()
        if stopping:
            process.terminate()

    def stop(number: int, frame: Any = None) -> None:
        nonlocal stopping
        stopping = True
        for worker in workers.values():
            # From now on, one that still loads is waited for as well.
            worker.heard = worker.heard or time.monotonic()
            if worker.process.is_alive():
                os.kill(worker.process.pid, number)

    with _exchange() as folder, listener:
        before = {caught: signal.signal(caught, stop) for caught in (signal.SIGTERM, signal.SIGINT)}
        try:
            for place in range(settings.workers):
                start(place)
            first = [worker.process for worker in workers.values()]
            while workers:
                wait([worker.process.sentinel for worker in workers.values()], 1.0)
                if stopping:
                    # Otherwise connections would wait here for workers that have stopped listening.
                    listener.close()
                for place, worker in list(workers.items()):
                    process = worker.process
                    # A worker gives no sign while it waits for its last requests.
                    limit = MAX_SILENCE + settings.deadline * stopping
                    if worker.hangs(time.monotonic(), limit):
                        log.error("a worker hangs and is killed", extra={"pid": process.pid})
                        process.kill()
                        process.join()
                    if process.is_alive():
                        continue
                    if folder is not None:
                        bury(folder, process.pid)
                    worker.pulse.close()
                    del workers[place]
                    if process.exitcode == COULD_NOT_START and process in first and not stopping:
                        failed = True
                        stop(signal.SIGINT)
                    if not stopping:
                        log.error("a worker died and is replaced", extra={"code": process.exitcode})
                        time.sleep(PAUSE)
                        start(place)
        finally:
            for caught, handler in before.items():
                signal.signal(caught, handler)
    return int(failed)


@contextmanager
def _exchange() -> Iterator[Path | None]:
    """A folder for the metrics of the workers; none if there is no room for it."""
    with ExitStack() as stack:
        folder = None
        try:
            made = tempfile.TemporaryDirectory(prefix="bkn-zoo-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
        except OSError as error:
            log.warning("each worker shows only its own metrics, because there is no temporary folder: %s", error)
        yield folder


def _bind(settings: Settings) -> socket.socket:
    """A socket at the port to listen on, which must be free."""
    if not hasattr(os, "setpgid"):
        raise InputError("--workers is not supported on this system, which cannot share a port: omit it.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except OSError:
        raise InputError(
            f"cannot listen on {settings.host}:{settings.port}: choose another port with --port."
        ) from None


def _work(settings: Settings, serve: Serve, link: WorkerLink, place: int) -> None:
    # Otherwise Ctrl-C would reach it twice, and a second signal stops at once.
    os.setpgid(0, 0)
    if hasattr(os, "sched_setaffinity"):
        # Its own cores, as many as the others have, so that all sum in the same order.
        cores = sorted(os.sched_getaffinity(0))
        if share := len(cores) // settings.workers:
            os.sched_setaffinity(0, cores[place * share : (place + 1) * share])
    share_quota(settings.workers)
    set_up_logs()
    sys.exit(COULD_NOT_START if serve(settings, link) else 0)
