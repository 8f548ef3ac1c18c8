"""The models of the service, and those that are in memory."""

import asyncio
import ctypes
import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.folder import load_checkpoint
from bkn_zoo.checkpoints.locate import Location, find, is_folder, locate, usable_checkpoints
from bkn_zoo.cores import keep_to_quota
from bkn_zoo.errors import BknZooError, InputError
from bkn_zoo.inference.classifier import Classifier
from bkn_zoo.models import Network
from bkn_zoo.modes import MODES

from .batching import ModelQueue
from .errors import ServiceError
from .metrics import Metrics
from .settings import Settings

log = logging.getLogger("bkn_zoo.service")

# Seconds before a model that could not be loaded is tried again.
PAUSE = 30
# Seconds after which PyTorch's allocator on Arm reuses freed memory.
REST = 0.2
# Seconds that a model in use stays before another can replace it, and after which an unused model can be removed.
STAY, UNUSED = 60, 5
# A second for the first requests before other modes are prepared.
HEAD_START = 1
# Seconds that an image waits for others to form a batch; on a GPU only.
MAX_WAIT = 0.004


class Loaded:
    """A model in memory with its queue, ready in its default mode. `warm` prepares the other modes."""

    def __init__(self, name: str, model: Network, settings: Settings, metrics: Metrics) -> None:
        how = (settings.device, settings.engine, settings.precision, settings.streams)
        self.classifier = Classifier(model, name, *how)
        self.classifier.engine.watched = False
        if self.classifier.engine_name == "openvino":
            # PyTorch only preprocesses; more threads would disturb the engine.
            torch.set_num_threads(1)
        else:
            keep_to_quota()
        size = self.classifier.model.config.preprocessing.size
        self._blank = torch.zeros(1, 3, size, size)
        self.classifier.scores(self._blank)
        self.cold = [mode for mode in MODES if mode != self.classifier.choose()]
        self.since = time.monotonic()
        # On a GPU, images run in batches. On a CPU batches gain nothing, and each stream takes the next image.
        together = self.classifier.device.type == "cuda"
        self.queue = ModelQueue(
            name, self.classifier.scores, metrics, settings.queue_length,
            max_batch=settings.max_batch if together else 1,
            max_wait=MAX_WAIT if together else 0.0,
            threads=self.classifier.engine.streams,
        )  # fmt: skip

    def warm(self) -> None:
        """Prepare the remaining modes, so that no image waits for a compilation."""
        while self.cold:
            # Removed first, so that a failing mode is not tried again; a request for it will get the same error.
            mode = self.cold.pop()
            try:
                self.classifier.scores(self._blank, mode)
            except Exception as error:
                log.warning("%s cannot run in mode %s: %s", self.queue.name, mode, error)


class Pool:
    """Loads models at the start and on first use. The least recently used one is removed for another."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        given = settings.models or usable_checkpoints()
        # An error if one does not exist, before anything is loaded.
        for source in filter(is_folder, given):
            Config.read(find(source) / CONFIG)
        self.sources = {_public_name(source): source for source in given}
        if len(self.sources) < len(given):
            raise InputError(f"--models contains {', '.join(given)}, two of which have the same name: omit one.")
        self.names = list(self.sources)
        self.failure: Exception | None = None
        self._loaded: dict[str, Loaded] = {}
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        # One at a time, because each needs the memory of a whole model, and two could exceed the limit.
        self._loader, self._turn = ThreadPoolExecutor(1, "loader"), asyncio.Lock()
        # Time until which a failed model is not tried again.
        self._failed: dict[str, float] = {}
        self._warming: Future[None] | None = None
        self.started = False

    @property
    def loading(self) -> bool:
        """Whether a thread loads a model, or prepares a mode of one."""
        return bool(self._loading) or not (self._warming is None or self._warming.done())

    async def start(self) -> None:
        """Load the first models."""
        # Load the models of --models; of all bundled ones, load only the default.
        first = self.names[: self.settings.loaded_models if self.settings.models else 1]
        try:
            for name in first:
                await self._load(name)
        except Exception as error:
            self.failure = error
            # Otherwise the command or Ray prints the reason.
            if not isinstance(error, BknZooError):
                self.failure = InputError("a model cannot be loaded: see the log.")
                log.exception("the service cannot start")
        else:
            self.started = True
            log.info("ready", extra={"models": ", ".join(self.names)})

    async def warm(self) -> None:
        """Prepare all modes of the loaded models in sequence, until cancelled."""
        while True:
            await asyncio.sleep(HEAD_START)
            cold = [loaded for loaded in self._loaded.values() if loaded.cold]
            if not cold or not self.started or self._loading:
                continue
            # A separate thread that ends, like that of the loader.
            thread = ThreadPoolExecutor(1, "warmer of a model")
            self._warming = thread.submit(cold[0].warm)
            thread.shutdown(wait=False)
            await asyncio.wrap_future(self._warming)
            self._loader.submit(_give_memory_back)

    async def get(self, name: str | None) -> Loaded:
        """The model of this name, which is loaded if needed."""
        name = self._known(name)
        if not self.started:
            raise ServiceError("unavailable", "the service is starting: try again in a few seconds.", retry_after=2)
        if name in self._loaded:
            return self._loaded[name]
        message = f"{name} cannot be loaded at the moment: choose another model."
        if time.monotonic() < self._failed.get(name, 0.0):
            raise ServiceError("unavailable", message, PAUSE)
        try:
            return await asyncio.shield(self._load(name))
        except ServiceError:
            # Other models were loaded first and stay for a while.
            raise
        except Exception as error:
            log.error("%s could not be loaded: %s", name, error, exc_info=not isinstance(error, BknZooError))
            self._failed[name] = time.monotonic() + PAUSE
            raise ServiceError("unavailable", message, PAUSE) from None

    def _known(self, name: str | None) -> str:
        """The name of an offered model, by default the first."""
        name = self.names[0] if name is None else name
        if name not in self.names:
            raise ServiceError(
                "unknown_model", f"there is no model {name[:100]!r}: GET /v1/models lists the available models."
            )
        return name

    def _check_room(self, name: str) -> None:
        """Refuse to load a model if no other may be removed, so that one client cannot keep models loading."""
        if len(self._loaded) < self.settings.loaded_models:
            return
        left = min(map(self._may_leave, self._loaded)) - time.monotonic()
        if left > 0:
            seconds = math.ceil(left)
            raise ServiceError(
                "unavailable",
                f"{name} is not in memory, and all loaded ones are in use: try again in {seconds} s or choose another.",
                seconds,
            )

    def _may_leave(self, name: str) -> float:
        """The time from which a model may be removed for another."""
        loaded = self._loaded[name]
        return min(loaded.since + STAY, loaded.queue.used + UNUSED)

    def _load(self, name: str) -> asyncio.Task[Loaded]:
        """The task that loads a model, shared by all requests that wait for it."""
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._make(name))
            task.add_done_callback(lambda _: self._loading.pop(name))
        return task

    async def _make(self, name: str) -> Loaded:
        async with self._turn:
            self._check_room(name)
            loaded = self._loaded[name] = await self._replace(name)
            return loaded

    async def _replace(self, name: str) -> Loaded:
        """Remove another model if there is no room, and load this one."""
        begun = time.monotonic()
        loop = asyncio.get_running_loop()
        # Download before another model is removed.
        location = await loop.run_in_executor(self._loader, locate, self.sources[name])
        leaving = []
        while len(self._loaded) >= self.settings.loaded_models:
            oldest = min(self._loaded, key=lambda name: (self._may_leave(name) > begun, self._loaded[name].queue.used))
            leaving.append(self._loaded.pop(oldest).queue)
            self.metrics.loaded.labels(oldest).set(0)
        # A thread that ends, because allocators keep freed memory per thread.
        thread = ThreadPoolExecutor(1, "loader of a model")
        try:
            loaded = await loop.run_in_executor(thread, self._exchange, leaving, name, location)
        finally:
            thread.shutdown(wait=False)
        self._loader.submit(_give_memory_back)
        self.metrics.loaded.labels(name).set(1)
        log.info("loaded", extra={"model": name, "seconds": round(time.monotonic() - begun, 3)})
        return loaded

    def _exchange(self, leaving: list[ModelQueue], name: str, location: Location) -> Loaded:
        for queue in leaving:
            queue.close()
            # It serves the requests that it accepted.
            queue.join(self.settings.deadline)
        # Free its memory before the other model is loaded.
        leaving.clear()
        model = load_checkpoint(location, as_stored=True)
        return Loaded(name, model, self.settings, self.metrics)

    def stop(self) -> None:
        for loaded in self._loaded.values():
            loaded.queue.close()
        self._loader.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> list[dict[str, Any]]:
        """The response of GET /v1/models."""
        return [self._describe(name) for name in self.names]

    def labels(self, name: str | None) -> dict[str, Any]:
        """The response of GET /v1/labels."""
        name = self._known(name)
        config = self._config(name, self._loaded.get(name))
        return {"model": name, "labels": list(config.label_names or ()) if config else []}

    def _config(self, name: str, loaded: Loaded | None) -> Config | None:
        """The config of a checkpoint; None if it is on the Hub and not loaded yet."""
        try:
            return loaded.classifier.model.config if loaded else Config.read(find(self.sources[name]) / CONFIG)
        except BknZooError:
            return None

    def _describe(self, name: str) -> dict[str, Any]:
        loaded = self._loaded.get(name)
        found: dict[str, Any] = {"name": name, "default": name == self.names[0], "loaded": loaded is not None}
        if config := self._config(name, loaded):
            fields = ("architecture", "num_classes", "default_statistics", "statistics_batch_size", "accuracy")
            found |= {field: getattr(config, field) for field in (*fields, "measured_on")}
            found["crop"] = config.preprocessing.crop if config.preprocessing else None
        if loaded:
            found |= {"revision": loaded.classifier.revision, "precision": loaded.classifier.engine.precision}
        return found


def _give_memory_back() -> None:
    """Return freed memory to the system after preparing a model."""
    time.sleep(REST)
    # Makes PyTorch's allocator on Arm release cached memory.
    torch.empty(2**25, dtype=torch.uint8)
    # Only in glibc.
    if trim := getattr(ctypes.pythonapi, "malloc_trim", None):
        trim(0)


def _public_name(source: str) -> str:
    """The name of a model for clients: of a folder only the last part, to hide paths of this machine."""
    return Path(source).expanduser().resolve().name if is_folder(source) else source
