"""The routes, and the command that serves them."""

import asyncio
import hashlib
import hmac
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import bkn_zoo
from bkn_zoo.errors import BknZooError
from service.envelope import Envelope
from service.errors import (
    CODES,
    DeadlineError,
    KeyRefusedError,
    ServiceError,
    UnavailableError,
    error_response,
    of_the_image,
    respond,
)
from service.logs import set_up_logs
from service.metrics import Metrics
from service.pool import Loaded, Pool
from service.protocol import Protocol
from service.schemas import Classified, ErrorBody, Health, Models, Options, Prediction, Statistics, Timing, upload
from service.settings import Settings, read_settings
from service.uploads import BodyLimit, read_upload

STATIC = Path(__file__).parent / "static"
PAGE_POLICY = "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'"
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "malformed request"},
    401: {"model": ErrorBody, "description": "API key missing or wrong"},
    404: {"model": ErrorBody, "description": "unknown model"},
    413: {"model": ErrorBody, "description": "too many bytes or pixels"},
    415: {"model": ErrorBody, "description": "not an accepted image format"},
    422: {"model": ErrorBody, "description": "broken image or bad parameter"},
    429: {"model": ErrorBody, "description": "too many requests wait; see Retry-After"},
    503: {"model": ErrorBody, "description": "starting or draining"},
    504: {"model": ErrorBody, "description": "deadline passed"},
}
DESCRIPTION = """Classifies images with networks normalized by Batch Kalman Normalization. The caller chooses whose
statistics normalize the image: `population` (those of the training images), `sample` (the image's own) or `expected`
(those that the image would have met in training)."""

Result = TypeVar("Result")


class Service:
    """What the routes share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.pool = Pool(settings, self.metrics)
        # Decoding leaves Python's lock alone; more threads than cores would only take memory.
        self.decoders = ThreadPoolExecutor(os.cpu_count() or 1, "decoder")
        # Who waits, waits here, and not in the executor, which would keep the image of a client that has gone.
        self._may_decode = asyncio.Semaphore(os.cpu_count() or 1)
        self.draining = False
        self._keys = [hashlib.sha256(key.get_secret_value().encode()).digest() for key in settings.api_keys]

    async def check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode()).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]  # all of them, however early one matches
        if self._keys and not any(matches):
            raise KeyRefusedError("an API key is missing or wrong: send the header Authorization: Bearer KEY.")

    async def classify(self, request: Request, field: str, model: str | None = None) -> Classified:
        """From a request to its answer, within the deadline and only as long as the client waits for it.

        Args:
            field: the image's name in JSON and in forms.
            model: where the path names it.
        """
        if self.draining:
            raise UnavailableError("the service is about to stop: try again, or another one.", retry_after=5)
        try:
            async with asyncio.timeout(self.settings.deadline):
                image, options = await read_upload(request, field)
                loaded = await self.pool.get(options.model if model is None else model)
                request.scope["facts"] = {"model": loaded.line.name, "statistics": options.statistics}
                return await _unless_gone(request, self._run(loaded, image, options))
        except TimeoutError:
            seconds = self.settings.deadline
            raise DeadlineError(f"no answer within {seconds:g} s: try again later, with a smaller image.") from None
        except BknZooError as error:
            raise of_the_image(error) from None

    async def _run(self, loaded: Loaded, image: bytes, options: Options) -> Classified:
        classifier, line = loaded.classifier, loaded.line
        statistics = cast(Statistics, classifier.choose(options.statistics))
        with line.place():
            loop = asyncio.get_running_loop()
            async with self._may_decode:
                tensor = await loop.run_in_executor(self.decoders, classifier.prepare, image, self.settings.max_pixels)
            answer = await asyncio.wrap_future(line.submit(tensor, statistics))
        best = classifier.best(answer.scores, options.top_k)
        return Classified(
            predictions=[Prediction(label=prediction.label, score=prediction.score) for prediction in best],
            model=line.name,
            revision=classifier.revision,
            statistics=statistics,
            engine=classifier.engine_name,
            timing_ms=Timing(queue=1000 * answer.queue_seconds, inference=1000 * answer.inference_seconds),
        )


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application; `app.state.service` holds what it runs on."""
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # In the background, so that /health answers from the first moment.
        tasks = [asyncio.create_task(service.pool.start()), asyncio.create_task(service.pool.watch())]
        yield
        for task in tasks:
            task.cancel()
        service.pool.stop()
        service.decoders.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="bkn_zoo", version=bkn_zoo.__version__, description=DESCRIPTION, lifespan=lifespan, redirect_slashes=False
    )
    app.state.service = service
    _add_routes(app, service)

    @app.exception_handler(ServiceError)
    async def refuse(request: Request, error: ServiceError) -> Response:
        if error.status in (413, 415, 429, 503, 504):
            service.metrics.rejected.labels(error.code).inc()
        return respond(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        code = CODES.get(error.status_code, "malformed_request")
        message = f"{request.method} {request.url.path[:200]}: {error.detail}; /docs lists what there is."
        answer = error_response(error.status_code, code, message)
        answer.headers.update(error.headers or {})
        return answer

    app.add_middleware(BodyLimit, most=settings.max_bytes, together=settings.max_held_bytes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key"], expose_headers=["x-request-id"],
        )  # fmt: skip
    app.add_middleware(Envelope, metrics=service.metrics)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    keyed: dict[str, Any] = {"dependencies": [Depends(service.check_key)], "responses": ERRORS}

    @app.post("/v1/classify", openapi_extra=upload("image", form=True), response_model=Classified, **keyed)
    async def classify(request: Request) -> Response:
        """Classify an image: its bytes as the body, a form (`-F image=@photo.jpg`), or JSON with base64."""
        return JSONResponse((await service.classify(request, "image")).model_dump())

    @app.post(
        "/models/{name:path}", openapi_extra=upload("inputs", form=False), response_model=list[Prediction], **keyed
    )
    async def hugging_face(request: Request, name: str) -> Response:
        """The same in the shape of the Hugging Face inference API, for `InferenceClient.image_classification`."""
        answer = await service.classify(request, "inputs", name)
        return JSONResponse([prediction.model_dump() for prediction in answer.predictions])

    @app.get("/v1/models", response_model=Models, **keyed)
    def models() -> Models:
        """The models to choose from; the first is the default."""
        return Models.model_validate({"models": service.pool.describe()})

    @app.get("/health/live", response_model=Health)
    async def live() -> Health:
        """Answers as long as the process does."""
        return Health(status="live")

    @app.get("/health/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready() -> Response:
        """Whether requests are served now: the models are warm, and every engine is alive."""
        status = "draining" if service.draining else "failing" if service.pool.failing else "ready"
        status = status if service.pool.started or service.draining else "starting"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": PAGE_POLICY})

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


class Server(uvicorn.Server):
    """uvicorn, which also says where it listens, drains when asked to stop, and stops when no model can be loaded."""

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.service = service

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"bkn_zoo serves {', '.join(self.service.pool.names)} at http://{shown}:{port}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.service.pool.failure is not None

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.service.draining = True
        super().handle_exit(sig, frame)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 0 then, 1 where the service could not start."""
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments)
        set_up_logs()
        app = create_app(settings)
    except BknZooError as error:
        print(f"bkn-zoo serve: {error}", file=sys.stderr)
        return 1
    config = uvicorn.Config(
        app, settings.host, settings.port, log_config=None, access_log=False, server_header=False,
        http=Protocol, ws="none", timeout_graceful_shutdown=round(settings.deadline) + 1,
    )  # fmt: skip
    server = Server(app.state.service, config)
    # uvicorn raises the signal that it caught once more when it has finished, which would end this process by it.
    before = {caught: signal.signal(caught, lambda *_: None) for caught in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it could not listen
        print(f"bkn-zoo serve: it cannot listen on {settings.host}:{settings.port}: choose another.", file=sys.stderr)
        return 1
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
    failure = app.state.service.pool.failure
    if failure is not None:
        print(f"bkn-zoo serve: {failure}", file=sys.stderr)
    code = 0 if failure is None else 1
    if app.state.service.pool.loading:  # a download cannot be interrupted, and Python would wait for its end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
