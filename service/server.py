"""The HTTP server, based on uvicorn. `edge` lists what both use of it."""

import logging
import math
import os
import signal
import sys
import time
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from bkn_zoo.errors import BknZooError, InputError
from bkn_zoo.terminal import printable

from .app import Service, create_app
from .edge import Connection
from .logs import failed
from .settings import Settings
from .workers import WorkerLink

log = logging.getLogger("bkn_zoo.service")

# Seconds after which computing threads yield to the event loop, which waits this long for each socket.
SWITCH = 0.0005
# Of uvicorn, between two signs of life: a second.
TICKS = 10


class Server(uvicorn.Server):
    """uvicorn with our connections. It prints its address, drains before it stops, and stops if loading models fails.

    It listens from the beginning, so that /health responds. After SIGTERM it serves for another `drain_seconds`, in
    which every response asks the client to close the connection. Then it aborts unfinished uploads.
    """

    def __init__(self, app: FastAPI, settings: Settings, link: WorkerLink | None = None) -> None:
        self.service: Service = app.state.service
        config = uvicorn.Config(
            app, settings.host, settings.port, log_config=None, access_log=False, server_header=False,
            proxy_headers=False, ws="none", http=cast(Any, partial(Connection, self.service.edge)),
            backlog=min(256, self.service.edge.most),
            timeout_graceful_shutdown=math.ceil(settings.deadline),
        )  # fmt: skip
        super().__init__(config)
        self._announced = False
        self._drained: float | None = None
        self._link = link

    async def startup(self, sockets: Any = None) -> None:
        if self._link is not None:
            # `handle_exit` is installed now.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if self.should_exit:
                return
        await super().startup(sockets)

    def _announce(self) -> None:
        self._announced = True
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        by = "" if self._link is None else f", by process {os.getpid()}"
        names = printable(", ".join(self.service.pool.names))
        print(f"bkn_zoo serves {names} at http://{shown}:{port}{by}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        if self.service.pool.started and not self._announced:
            self._announce()
        drained = self._drained is not None and time.monotonic() >= self._drained
        orphaned = self._link is not None and counter % TICKS == 0 and not self._link.beat()
        return await super().on_tick(counter) or drained or orphaned or self.service.pool.failure is not None

    def handle_exit(self, sig: int, frame: Any) -> None:
        again, self.service.edge.draining = self.service.edge.draining, True
        if sig == signal.SIGTERM and not again:
            self._drained = time.monotonic() + self.service.settings.drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        self.service.edge.draining = True
        self.service.bodies.give_up_unfinished()
        await super().shutdown(sockets)
        log.info("stopped", extra={"requests": self.server_state.total_requests})


def run_server(settings: Settings, link: WorkerLink | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0, or 1 if the service could not start."""
    try:
        app = create_app(settings, link is not None, None if link is None else link.folder)
    except BknZooError as error:
        return failed(error)
    server = Server(app, settings, link)
    # uvicorn would log that it cannot listen, which is said below.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not isinstance(record.msg, OSError))
    sys.setswitchinterval(SWITCH)
    # uvicorn raises the caught signal again at its end, which would kill this process.
    before = {caught: signal.signal(caught, lambda *_: None) for caught in (signal.SIGTERM, signal.SIGINT)}
    failure: Exception | None = None
    try:
        server.run(None if link is None else [link.listener])
    except (SystemExit, OSError):
        failure = InputError(f"cannot listen on {settings.host}:{settings.port}: choose another port with --port.")
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
    failure = server.service.pool.failure or failure
    code = 0 if failure is None else failed(failure)
    if server.service.pool.loading or server.service.decoders.busy:
        # Otherwise Python would wait for these threads.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
