"""The routes of the service."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import bkn_zoo
from bkn_zoo.errors import BknZooError

from . import schemas
from .batching import FAILED
from .bodies import Bodies
from .decoding import Decoders
from .edge import Edge
from .envelope import Envelope
from .errors import ServiceError, error_body, of_the_image, respond
from .metrics import Metrics
from .pages import add_pages
from .pool import Loaded, Pool
from .settings import Settings
from .uploads import read_uploads

ERRORS = {
    400: "malformed request", 401: "API key missing or wrong", 404: "unknown model", 408: "the body stalled",
    413: "too many bytes or pixels", 415: "not an accepted image format", 422: "broken image or bad parameter",
    429: "too many requests wait; see Retry-After", 500: "a bug in the service",
    503: "starting, stopping, or the model cannot be loaded now", 504: "deadline passed",
}  # fmt: skip
DESCRIPTION = """Classifies images with networks that use Batch Kalman Normalization. A request chooses the statistics
that normalize the image: `population` (averages from training), `sample` (the image's own) or `expected` (the average
over all training groups that the image could have been in)."""
TAGS = [
    {"name": "classify", "description": "Send images; needs a key if the service has keys."},
    {"name": "models", "description": "What there is to choose from; needs a key, too."},
    {"name": "operation", "description": "For load balancers and monitoring; needs no key."},
]

log = logging.getLogger("bkn_zoo.service")
Result = TypeVar("Result")


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a route, for OpenAPI."""
    return {status: {"model": schemas.ErrorBody, "description": ERRORS[status]} for status in statuses}


class Service:
    """The state that the routes share."""

    def __init__(self, settings: Settings, metrics_folder: Path | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics(metrics_folder)
        self.pool = Pool(settings, self.metrics)
        self.edge = Edge(settings, self.metrics)
        self.bodies = Bodies(settings)
        self.decoders = Decoders(settings)
        self._keys = [hashlib.sha256(key.get_secret_value().encode()).digest() for key in settings.api_keys]

    def check_key(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode()).digest()
        # Always compare all, so that the time does not depend on the key.
        if True not in [hmac.compare_digest(digest, key) for key in self._keys]:
            message = "an API key is missing or wrong: send the header Authorization: Bearer KEY."
            raise ServiceError("invalid_key", message)

    async def classify(self, request: Request, field: str, model: str | None = None) -> schemas.Classified:
        """Serve a request within the deadline, and only as long as the client waits."""
        async with self._until(self._deadline()):
            (image,), options = await read_uploads(request, field, False, self.decoders.parse_text)
            if isinstance(image, ServiceError):
                raise image
            loaded = await self._load(request, options, model)
            with loaded.queue.place():
                return await _unless_gone(request, self._answer(loaded, image, options))

    async def classify_several(self, request: Request) -> list[schemas.Classified | ServiceError]:
        """The same for several images: the result or error of each, in order."""
        deadline = self._deadline()
        async with self._until(deadline):
            images, options = await read_uploads(request, "images", True, self.decoders.parse_text)
            loaded = await self._load(request, options)
        # A few at a time, so that images of other requests come in between.
        turns = asyncio.Semaphore(loaded.queue.share)

        async def one(image: bytes | ServiceError) -> schemas.Classified | ServiceError:
            try:
                if isinstance(image, ServiceError):
                    return image
                async with self._until(deadline), turns:
                    return await self._answer(loaded, image, options)
            except ServiceError as error:
                return error
            except Exception:
                log.exception("an image of several failed")
                return ServiceError("internal", FAILED)

        with loaded.queue.place():
            answers = await _unless_gone(request, asyncio.gather(*map(one, images)))
        failed = [answer for answer in answers if isinstance(answer, ServiceError)]
        request.scope["facts"] |= {"images": len(answers), "failed": len(failed)}
        for error in failed:
            self.count(error)
        return answers

    async def _load(self, request: Request, options: schemas.Options, model: str | None = None) -> Loaded:
        """The model of a request; the log says which, and the mode."""
        loaded = await self.pool.get(options.model if model is None else model)
        statistics = loaded.classifier.choose(options.statistics)
        request.scope["facts"] = {"model": loaded.queue.name, "statistics": statistics}
        return loaded

    def count(self, error: ServiceError) -> None:
        """Count refused images."""
        if error.status in (413, 415, 429, 503, 504):
            self.metrics.rejected.labels(error.code).inc()

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.settings.deadline

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Turn timeouts and errors of the library into errors of the service."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            message = f"not finished within {self.settings.deadline:g} s: try again later, with a smaller image."
            raise ServiceError("deadline", message) from None
        except BknZooError as error:
            raise of_the_image(error) from None

    async def _answer(self, loaded: Loaded, image: bytes, options: schemas.Options) -> schemas.Classified:
        classifier, queue = loaded.classifier, loaded.queue
        statistics = cast(schemas.Statistics, classifier.choose(options.statistics))
        tensor = await self.decoders.prepare(classifier, image)
        answer = await asyncio.wrap_future(queue.submit(tensor, statistics))
        found = classifier.classification(answer.scores, statistics, options.top_k)
        timing = {"queue": 1000 * answer.queue_seconds, "inference": 1000 * answer.inference_seconds}
        return schemas.Classified.model_validate({**found.to_dict(), "timing_ms": timing})


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client disconnects."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        patience.reschedule(asyncio.get_running_loop().time())

    # Ends when the client disconnects, not by the clock.
    patience = asyncio.timeout(None)
    watching = asyncio.create_task(watch())
    try:
        async with patience:
            return await work
    except TimeoutError:
        if patience.expired():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


def create_app(settings: Settings, one_of_many: bool = False, metrics_folder: Path | None = None) -> FastAPI:
    """The service as an ASGI application. If it is one of many processes, it starts only after loading its models."""
    service = Service(settings, metrics_folder)

    async def start(app: FastAPI) -> None:
        await service.pool.start()
        # Cached, because creating it would block the loop.
        await asyncio.to_thread(app.openapi)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # In the background, so that /health responds from the beginning.
        tasks = [asyncio.create_task(work) for work in (start(app), service.pool.warm(), service.metrics.share())]
        if one_of_many:
            await tasks[0]
            if service.pool.failure is not None:
                raise service.pool.failure
        yield
        for task in tasks:
            task.cancel()
        service.pool.stop()
        service.decoders.stop()

    app = FastAPI(
        title="bkn_zoo", version=bkn_zoo.__version__, description=DESCRIPTION, lifespan=lifespan,
        redirect_slashes=False, docs_url=None, redoc_url=None, responses=_errors(500), openapi_tags=TAGS,
    )  # fmt: skip
    app.state.service = service
    _add_routes(app, service)
    add_pages(app)

    @app.exception_handler(ServiceError)
    async def refuse(request: Request, error: ServiceError) -> Response:
        service.count(error)
        request.scope["facts"] = {**request.scope.get("facts", {}), "error": error.message}
        return respond(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "malformed_request")
        message = f"{request.method[:20]} {request.url.path[:200]}: {error.detail}; /docs lists what there is."
        answer = respond(ServiceError(code, message))
        answer.headers.update(error.headers or {})
        return answer

    app.add_middleware(service.bodies.limit)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key"], expose_headers=["x-request-id"],
        )  # fmt: skip
    app.add_middleware(Envelope, metrics=service.metrics)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    # Keys are checked by a call, because a dependency takes FastAPI as long as everything else. Routes of an included
    # router would take a quarter longer than those of the app.
    of_an_image = _errors(400, 401, 404, 408, 413, 415, 422, 429, 503, 504)
    # Errors of single images are inside the response.
    of_several = {status: about for status, about in of_an_image.items() if status != 415}

    @app.post(
        "/v1/classify", tags=["classify"], responses=of_an_image, response_model=schemas.Classified,
        openapi_extra=schemas.upload("image", form=True),
    )  # fmt: skip
    async def classify(request: Request) -> Response:
        """Classify an image: its bytes as the body, a form (`-F image=@photo.jpg`), or JSON with base64."""
        service.check_key(request)
        answer = await service.classify(request, "image")
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.post(
        "/v1/classify/batch", tags=["classify"], responses=of_several, response_model=schemas.Several,
        openapi_extra=schemas.uploads("images"),
    )  # fmt: skip
    async def classify_several(request: Request) -> Response:
        """Classify several images: a form (`-F images=@a.jpg -F images=@b.jpg`), or JSON with a list of base64."""
        service.check_key(request)
        answers = await service.classify_several(request)
        return JSONResponse(
            {"results": [error_body(a) if isinstance(a, ServiceError) else a.model_dump() for a in answers]}
        )

    @app.post(
        "/models/{name:path}", tags=["classify"], openapi_extra=schemas.upload("inputs", form=False),
        response_model=list[schemas.LabelScore], responses=of_an_image,
    )  # fmt: skip
    async def hugging_face(request: Request, name: str) -> Response:
        """The same in the format of the Hugging Face inference API, for `InferenceClient.image_classification`."""
        service.check_key(request)
        answer = await service.classify(request, "inputs", name)
        return JSONResponse([prediction.model_dump() for prediction in answer.predictions])

    @app.get("/v1/models", tags=["models"], response_model=schemas.Models, responses=_errors(401, 429))
    async def models(request: Request) -> schemas.Models:
        """List the models. The first is the default."""
        service.check_key(request)
        return schemas.Models.model_validate({"models": await asyncio.to_thread(service.pool.describe)})

    @app.get(
        "/v1/labels", tags=["models"], response_model=schemas.Labels, responses=_errors(401, 404, 429),
        openapi_extra={"parameters": [schemas.MODEL_IN_QUERY]},
    )  # fmt: skip
    async def labels(request: Request) -> schemas.Labels:
        """List the classes of a model, in the order of its outputs."""
        service.check_key(request)
        return schemas.Labels(**await asyncio.to_thread(service.pool.labels, request.query_params.get("model")))

    @app.get("/health/live", tags=["operation"], response_model=schemas.Health)
    async def live() -> schemas.Health:
        """Respond as long as the process runs."""
        return schemas.Health(status="live")

    @app.get(
        "/health/ready", tags=["operation"], response_model=schemas.Health, responses={503: {"model": schemas.Health}}
    )
    async def ready() -> Response:
        """Whether requests are served now."""
        status = "draining" if service.edge.draining else "ready" if service.pool.started else "starting"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        text = await asyncio.to_thread(service.metrics.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)
