"""The state that all connections share: their number, idle connections that may be closed, and turns to parse."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .metrics import Metrics
from .settings import Settings

if TYPE_CHECKING:
    from .connections import Connection

RESERVE = 16  # connections beyond the limit, for health checks
SPARE_FILES = 64  # descriptors for the engines, the listener, the log and the page
TURN = 0.002  # seconds per turn of the loop for connections that have more to parse


@dataclass(frozen=True)
class Host:
    """The parts of the HTTP server that connections use.

    Attributes:
        app: the ASGI application.
        app_state: the state of its lifespan.
        connections, tasks: connections and tasks that a shutdown waits for.
        headers: returns the headers of every response, such as the date.
    """

    app: Any
    app_state: dict[str, Any]
    connections: set[Any]
    tasks: set[Any]
    headers: Callable[[], list[tuple[bytes, bytes]]]


class Edge:
    """The state that all connections share.

    Attributes:
        most: largest number of connections; more are accepted only for health checks.
        awaited: connections that wait for their client, the longest silent first.
        draining: whether responses ask clients to close the connection.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.most = max(1, min(settings.max_connections, _files_allowed() - SPARE_FILES - RESERVE))
        self.awaited: dict[Connection, None] = {}
        self.draining = False
        self._unparsed: deque[Connection] = deque()
        self._scheduled = False

    def make_room(self) -> None:
        """Close the connection that was silent for the longest time, if any."""
        if self.awaited:
            next(iter(self.awaited)).cut("made room")

    def parse_later(self, connection: "Connection") -> None:
        """Queue a connection for its next turn to parse."""
        self._unparsed.append(connection)
        if not self._scheduled:
            self._scheduled = True
            connection.loop.call_soon(self._turn, connection.loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        end = time.perf_counter() + TURN
        while self._unparsed and time.perf_counter() < end:
            self._unparsed.popleft().go_on()
        self._scheduled = bool(self._unparsed)
        if self._scheduled:
            loop.call_soon(self._turn, loop)


def _files_allowed() -> int:
    """The largest number of file descriptors of this process; very large if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return 2**20
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if limit == resource.RLIM_INFINITY else limit
