"""Middleware around every request: its id, its log line, its metrics, and a response to every error inside."""

import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import ClientDisconnect

from .errors import ServiceError, respond
from .logs import request_id
from .metrics import Metrics

log = logging.getLogger("bkn_zoo.service")

ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Labels of metrics.
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE")
# Requested all the time.
QUIET = ("/health/live", "/health/ready", "/metrics")
SAFETY = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
FAILED = "an internal error occurred: try again; if it fails again, tell the operator of this service."
POLICY = b"content-security-policy"
PAGE_POLICY = b"default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'"


class Envelope:
    """ASGI middleware, the outermost."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        method = scope["method"]
        if method == "HEAD":  # handled like GET; `uvicorn` omits the body
            scope = {**scope, "method": "GET"}
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        identity = given if ID.fullmatch(given) else uuid.uuid4().hex
        request_id.set(identity)
        begun, status = time.perf_counter(), 0

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = dict(message["headers"])
                policy = given.get(b"content-type", b"").startswith(b"text/html") and POLICY not in given
                safety = [*SAFETY, (POLICY, PAGE_POLICY)] if policy else SAFETY
                # Only files of the page have an ETag. Everything else is about one request, or about this moment.
                cache = [] if b"etag" in given else [(b"cache-control", b"no-store")]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode()), *safety, *cache]
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except ClientDisconnect:
            pass  # the client has disconnected; counted as 499
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.exception("a request failed")
            if status:  # too late for another response, so the connection is closed
                raise
            problem = error if isinstance(error, ServiceError) else ServiceError("internal", FAILED)
            await respond(problem)(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            seconds = time.perf_counter() - begun
            known = method if method in METHODS and route != "none" else "any"
            self.metrics.requests.labels(known, route, status or 499).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            if route not in QUIET:
                facts = {"method": method[:20], "path": scope["path"][:200], "status": status or 499}
                log.info("request", extra={**facts, "ms": round(1000 * seconds, 2), **scope.get("facts", {})})
