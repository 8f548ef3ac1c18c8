"""What all connections of the service share: their number, which may be closed for others, turns to parse."""

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

RESERVE = 16  # connections beyond the most, for health checks
SPARE_FILES = 64  # descriptors for the engines, the listener, the log and the page
TURN = 0.002  # seconds per turn of the loop for connections that have more to parse


@dataclass(frozen=True)
class Host:
    """What the HTTP server lends to its connections.

    Attributes:
        app: the ASGI application.
        app_state: what its lifespan left for requests.
        connections, tasks: those that a shutdown waits for.
        headers: returns the headers of every answer, such as the date.
    """

    app: Any
    app_state: dict[str, Any]
    connections: set[Any]
    tasks: set[Any]
    headers: Callable[[], list[tuple[bytes, bytes]]]


class Edge:
    """What all connections share.

    Attributes:
        most: connections at once; more are accepted only for health checks.
        awaited: connections whose client has to act next, the longest silent first.
        draining: whether answers ask their clients to close the connection.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.most = max(1, min(settings.max_connections, _files_allowed() - SPARE_FILES - RESERVE))
        self.awaited: dict[Connection, None] = {}
        self.draining = False
        self._unparsed: deque[Connection] = deque()
        self._scheduled = False

    def make_room(self) -> None:
        """Close the connection that has been silent for longest, if any is."""
        if self.awaited:
            next(iter(self.awaited)).cut("made room")

    def parse_later(self, connection: "Connection") -> None:
        """Let a connection go on parsing when it is its turn."""
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
    """How many descriptors this process may have; very many where nothing says so."""
    try:
        import resource
    except ImportError:  # Windows
        return 2**20
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if limit == resource.RLIM_INFINITY else limit
