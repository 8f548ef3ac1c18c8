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
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import bkn_zoo
from bkn_zoo.errors import BknZooError

from .batching import FAILED
from .decoding import Decoders
from .edge import Edge
from .envelope import Envelope
from .errors import CODES, ServiceError, error_body, error_response, of_the_image, respond
from .metrics import Metrics
from .pages import Cors, add_pages
from .pool import Loaded, Pool
from .schemas import (
    MODEL_IN_QUERY,
    Classified,
    ErrorBody,
    Health,
    Labels,
    LabelScore,
    Models,
    Options,
    Several,
    Statistics,
    upload,
    uploads,
)
from .settings import Settings
from .uploads import Bodies, BodyLimit, read_upload, read_uploads

Answers = dict[int | str, dict[str, Any]]
DESCRIPTIONS = {
    400: "malformed request", 401: "API key missing or wrong", 404: "unknown model", 408: "the body stalled",
    413: "too many bytes or pixels", 415: "not an accepted image format", 422: "broken image or bad parameter",
    429: "too many requests wait; see Retry-After", 503: "starting, stopping, or the model cannot be loaded now",
    504: "deadline passed",
}  # fmt: skip
# Of routes that take an image.
ERRORS: Answers = {status: {"model": ErrorBody, "description": text} for status, text in DESCRIPTIONS.items()}
# Errors of single images are inside the response.
ERRORS_OF_SEVERAL: Answers = {status: about for status, about in ERRORS.items() if status != 415}
ERRORS_OF_A_LIST: Answers = {status: ERRORS[status] for status in (401, 429)}
ERRORS_OF_LABELS: Answers = {status: ERRORS[status] for status in (401, 404, 429)}
FAULT: Answers = {500: {"model": ErrorBody, "description": "a bug in the service"}}
DESCRIPTION = """Classifies images with networks that use Batch Kalman Normalization. A request chooses the statistics
that normalize the image: `population` (averages from training), `sample` (the image's own) or `expected` (the average
over all training groups that the image could have been in)."""

log = logging.getLogger("bkn_zoo.service")
Result = TypeVar("Result")


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
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            raise ServiceError(
                "invalid_key", "an API key is missing or wrong: send the header Authorization: Bearer KEY."
            )

    async def classify(self, request: Request, field: str, model: str | None = None) -> Classified:
        """Serve a request within the deadline, and only as long as the client waits.

        Args:
            field: the name of the image in JSON and in forms.
            model: the model, if the path contains it.
        """
        async with self._until(self._deadline()):
            image, options = await read_upload(request, field, self.decoders.parse_text)
            loaded = await self.pool.get(options.model if model is None else model)
            request.scope["facts"] = _facts(loaded, options)
            return await _unless_gone(request, self._run(loaded, image, options))

    async def classify_several(self, request: Request) -> list[Classified | ServiceError]:
        """The same for several images: the result or error of each, in order."""
        deadline = self._deadline()
        async with self._until(deadline):
            images, options = await read_uploads(request, "images", self.settings.max_images, self.decoders.parse_text)
            loaded = await self.pool.get(options.model)
            request.scope["facts"] = _facts(loaded, options)
        answers = await _unless_gone(request, self._run_several(loaded, images, options, deadline))
        failed = [answer for answer in answers if isinstance(answer, ServiceError)]
        request.scope["facts"] |= {"images": len(answers), "failed": len(failed)}
        for error in failed:
            self.count(error)
        return answers

    def count(self, error: ServiceError) -> None:
        """Log and count refused images."""
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
            seconds = self.settings.deadline
            raise ServiceError(
                "deadline", f"not finished within {seconds:g} s: try again later, with a smaller image."
            ) from None
        except BknZooError as error:
            raise of_the_image(error) from None

    async def _run(self, loaded: Loaded, image: bytes, options: Options) -> Classified:
        with loaded.queue.place():
            return await self._answer(loaded, image, options)

    async def _run_several(
        self, loaded: Loaded, images: list[bytes | ServiceError], options: Options, deadline: float
    ) -> list[Classified | ServiceError]:
        """Process a few images at a time in one place of the queue, so that other requests come in between."""
        turns = asyncio.Semaphore(loaded.queue.share)

        async def one(image: bytes | ServiceError) -> Classified | ServiceError:
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
            async with self._until(deadline):
                images = await self.decoders.within(images)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(image)) for image in images]
        return [task.result() for task in tasks]

    async def _answer(self, loaded: Loaded, image: bytes, options: Options) -> Classified:
        classifier, queue = loaded.classifier, loaded.queue
        statistics = cast(Statistics, classifier.choose(options.statistics))
        tensor = await self.decoders.prepare(classifier, image)
        answer = await asyncio.wrap_future(queue.submit(tensor, statistics))
        found = classifier.classification(answer.scores, statistics, options.top_k)
        timing = {"queue": 1000 * answer.queue_seconds, "inference": 1000 * answer.inference_seconds}
        return Classified.model_validate({**found.to_dict(), "timing_ms": timing})


def _facts(loaded: Loaded, options: Options) -> dict[str, Any]:
    """What the log says about a request: the model and the mode, chosen or default."""
    return {"model": loaded.queue.name, "statistics": loaded.classifier.choose(options.statistics)}


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client disconnects."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        patience.reschedule(asyncio.get_running_loop().time())

    patience = asyncio.timeout(None)  # ends when the client disconnects, not by the clock
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
    """Create the service as an ASGI application, with its state in `app.state.service`.

    Args:
        one_of_many: whether other processes serve requests meanwhile, so that it starts only after loading its models.
        metrics_folder: where several processes exchange their metrics.
    """
    service = Service(settings, metrics_folder)

    async def start(app: FastAPI) -> None:
        await service.pool.start()
        await asyncio.to_thread(app.openapi)  # cached, because creating it would block the loop

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # In the background, so that /health responds from the beginning.
        tasks = [asyncio.create_task(work) for work in (
            start(app), service.pool.warm(), service.metrics.share(),
        )]  # fmt: skip
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
        redirect_slashes=False, docs_url=None, redoc_url=None, responses=FAULT,
    )  # fmt: skip
    app.state.service = service
    _add_routes(app, service)
    _add_routes_about_the_service(app, service)
    add_pages(app)

    @app.exception_handler(ServiceError)
    async def refuse(request: Request, error: ServiceError) -> Response:
        service.count(error)
        request.scope["facts"] = {**request.scope.get("facts", {}), "error": error.message}
        return respond(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        code = CODES.get(error.status_code, "malformed_request")
        message = f"{request.method[:20]} {request.url.path[:200]}: {error.detail}; /docs lists what there is."
        answer = error_response(error.status_code, code, message)
        answer.headers.update(error.headers or {})
        return answer

    app.add_middleware(BodyLimit, bodies=service.bodies)
    if settings.cors_origins:
        app.add_middleware(
            Cors, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key"], expose_headers=["x-request-id"],
        )  # fmt: skip
    app.add_middleware(Envelope, metrics=service.metrics)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    # Keys are checked by a call, because a dependency takes FastAPI as long as everything else.
    @app.post("/v1/classify", openapi_extra=upload("image", form=True), response_model=Classified, responses=ERRORS)
    async def classify(request: Request) -> Response:
        """Classify an image: its bytes as the body, a form (`-F image=@photo.jpg`), or JSON with base64."""
        service.check_key(request)
        answer = await service.classify(request, "image")
        return Response(answer.model_dump_json(), media_type="application/json")

    most = service.settings.max_images

    @app.post(
        "/v1/classify/batch", openapi_extra=uploads("images", most), response_model=Several,
        responses=ERRORS_OF_SEVERAL,
    )  # fmt: skip
    async def classify_several(request: Request) -> Response:
        """Classify several images: a form (`-F images=@a.jpg -F images=@b.jpg`), or JSON with a list of base64."""
        service.check_key(request)
        answers = await service.classify_several(request)
        return JSONResponse(
            {"results": [error_body(a) if isinstance(a, ServiceError) else a.model_dump() for a in answers]}
        )

    @app.post(
        "/models/{name:path}", openapi_extra=upload("inputs", form=False), response_model=list[LabelScore],
        responses=ERRORS,
    )  # fmt: skip
    async def hugging_face(request: Request, name: str) -> Response:
        """The same in the format of the Hugging Face inference API, for `InferenceClient.image_classification`."""
        service.check_key(request)
        answer = await service.classify(request, "inputs", name)
        return JSONResponse([prediction.model_dump() for prediction in answer.predictions])


def _add_routes_about_the_service(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=Models, responses=ERRORS_OF_A_LIST)
    async def models(request: Request) -> Models:
        """List the models. The first is the default."""
        service.check_key(request)  # before a thread is used
        return Models.model_validate({"models": await asyncio.to_thread(service.pool.describe)})

    @app.get(
        "/v1/labels", response_model=Labels, responses=ERRORS_OF_LABELS, openapi_extra={"parameters": [MODEL_IN_QUERY]}
    )
    async def labels(request: Request) -> Labels:
        """List the classes of a model, in the order of its outputs."""
        service.check_key(request)
        return Labels(**await asyncio.to_thread(service.pool.labels, request.query_params.get("model")))

    @app.get("/health/live", response_model=Health)
    async def live() -> Health:
        """Respond as long as the process runs."""
        return Health(status="live")

    @app.get("/health/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready() -> Response:
        """Whether requests are served now."""
        status = "draining" if service.edge.draining else "ready" if service.pool.started else "starting"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        text = await asyncio.to_thread(service.metrics.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)
