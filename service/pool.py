"""The models that the service offers, and those of them that are in memory."""

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
from bkn_zoo.checkpoints.folder import load
from bkn_zoo.checkpoints.locate import Location, find, is_folder, locate
from bkn_zoo.checkpoints.preferred import usable_checkpoints
from bkn_zoo.cores import keep_to_quota
from bkn_zoo.errors import BknZooError, InputError
from bkn_zoo.images import image_files
from bkn_zoo.inference.classifier import Classifier
from bkn_zoo.models import Network
from bkn_zoo.modes import MODES

from .batching import Line
from .errors import OverloadedError, UnavailableError, UnknownModelError
from .metrics import Metrics
from .settings import Settings

log = logging.getLogger("bkn_zoo.service")

PAUSE = 30  # seconds before a model that could not be loaded is tried again
REST = 0.2  # seconds after which PyTorch's allocator on Arm takes what was freed for free
IDLE = 5  # seconds after which a model that nobody asks for makes room at once
HEAD_START = 1  # second that the first requests have before other modes are prepared beside them


class Loaded:
    """A model in memory, warm in its own mode, behind its queue; `warm` prepares the other modes."""

    def __init__(self, name: str, model: Network, settings: Settings, metrics: Metrics) -> None:
        how = (settings.device, settings.engine, settings.precision, settings.streams)
        self.classifier = Classifier(model, name, *how)
        if self.classifier.engine_name == "openvino":
            torch.set_num_threads(1)  # PyTorch only preprocesses then; its other threads would disturb the engine's
        else:
            keep_to_quota()
        size = self.classifier.model.config.preprocessing.size
        self._blank = torch.zeros(1, 3, size, size)
        self.classifier.scores(self._blank)
        if settings.usual_images:
            self.classifier.watch(image_files(settings.usual_images))
        self.cold = [mode for mode in MODES if mode != self.classifier.choose()]
        self.since = time.monotonic()
        # On a GPU images run together; on a CPU they gain nothing by that, and each stream takes the next.
        together = self.classifier.device.type == "cuda"
        self.line = Line(
            name, self.classifier.scores, metrics, settings.queue_length,
            max_batch=settings.max_batch if together else 1,
            max_wait=settings.max_wait_ms / 1000 if together else 0.0,
            threads=self.classifier.engine.streams, drift=self.classifier.drift,
        )  # fmt: skip

    def warm(self) -> None:
        """Prepare the modes that are left, so that no image waits for a graph to be compiled."""
        begun = time.monotonic()
        while self.cold:
            mode = self.cold.pop()  # whatever comes of it: a mode that fails is not tried again and again
            try:
                self.classifier.scores(self._blank, mode)
            except BknZooError as error:  # as a caller who asks for it will be told
                log.info("%s cannot run in mode %s: %s", self.line.name, mode, error)
            except Exception:
                log.exception("mode %s of %s could not be prepared", mode, self.line.name)
        log.info("warm", extra={"model": self.line.name, "seconds": round(time.monotonic() - begun, 3)})


class Pool:
    """Loads models at the start and on first use; the one that was used longest ago makes room."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        given = settings.models or usable_checkpoints()
        for source in filter(is_folder, given):
            Config.read(find(source) / CONFIG)  # an error if there is none, before anything is loaded
        self.sources = {_public_name(source): source for source in given}
        if len(self.sources) < len(given):
            raise InputError(f"--models names {', '.join(given)}, of which two are called the same: leave one out.")
        self.names = list(self.sources)
        self.failure: Exception | None = None
        self._loaded: dict[str, Loaded] = {}
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        self._loader = ThreadPoolExecutor(1, "loader")  # one at a time: each takes the memory of a whole model
        self._turn = asyncio.Lock()  # or two that come at once would each find room, and both stay
        self._waiting = 0
        self._failed: dict[str, float] = {}  # until when a model that could not be loaded is not tried again
        self._warming: Future[None] | None = None
        self.started = False

    @property
    def loading(self) -> bool:
        """Whether a thread loads a model, or prepares a mode of one."""
        return bool(self._loading) or not (self._warming is None or self._warming.done())

    @property
    def failing(self) -> bool:
        return not all(loaded.line.alive for loaded in self._loaded.values())

    async def start(self) -> None:
        """Load the first models."""
        # Who names models expects them; of all that are bundled, the default is enough to begin with.
        first = self.names[: self.settings.loaded_models if self.settings.models else 1]
        try:
            for name in first:
                await self._load(name)
        except Exception as error:
            expected = isinstance(error, BknZooError)
            self.failure = error if expected else InputError("a model cannot be loaded; the log says why.")
            log.error("the service cannot start: %s", error, exc_info=not expected)
        else:
            self.started = True
            log.info("ready", extra={"models": ", ".join(self.names)})

    async def watch(self) -> None:
        """Start engines that died anew, until cancelled."""
        while True:
            await asyncio.sleep(0.1)
            for loaded in list(self._loaded.values()):
                loaded.line.revive()

    async def warm(self) -> None:
        """Prepare all modes of the models that are loaded, one after another, until cancelled."""
        while True:
            await asyncio.sleep(HEAD_START)
            cold = [loaded for loaded in self._loaded.values() if loaded.cold]
            if not cold or not self.started or self._loading:
                continue
            thread = ThreadPoolExecutor(1, "warmer of a model")  # which ends, as that of the loader does
            self._warming = thread.submit(cold[0].warm)
            thread.shutdown(wait=False)
            await asyncio.wrap_future(self._warming)
            self._loader.submit(_give_memory_back)

    async def get(self, name: str | None) -> Loaded:
        """The model of that name, loaded if need be."""
        name = self._known(name)
        if not self.started:
            raise UnavailableError("the service is starting: try again in a few seconds.", retry_after=2)
        if name in self._loaded:
            return self._loaded[name]
        if time.monotonic() < self._failed.get(name, 0.0):
            raise UnavailableError(f"{name} cannot be loaded at the moment: choose another model.", PAUSE)
        if self._waiting >= self.settings.queue_length:
            raise OverloadedError(f"{self._waiting} requests wait for models to load: try again later.", PAUSE)
        self._check_room(name)
        self._waiting += 1
        try:
            return await asyncio.shield(self._load(name))
        except UnavailableError:  # others came first, and stay for a while
            raise
        except Exception as error:
            log.error("%s could not be loaded: %s", name, error, exc_info=not isinstance(error, BknZooError))
            self._failed[name] = time.monotonic() + PAUSE
            raise UnavailableError(f"{name} cannot be loaded at the moment: choose another model.", PAUSE) from None
        finally:
            self._waiting -= 1

    def _known(self, name: str | None) -> str:
        """The name of a model that is offered; the first where none is given."""
        name = self.names[0] if name is None else name
        if name not in self.names:
            raise UnknownModelError(f"there is no model {name[:100]!r} here: GET /v1/models lists those that are.")
        return name

    def _check_room(self, name: str) -> None:
        """Whether a model may leave for this one: else a client that asks for all in turn keeps everybody waiting."""
        if len(self._loaded) < self.settings.loaded_models:
            return
        left = min(map(self._may_leave, self._loaded)) - time.monotonic()
        if left > 0:
            seconds = math.ceil(left)
            raise UnavailableError(
                f"{name} is not in memory, and those that are are in use: try again in {seconds} s, or choose another.",
                seconds,
            )

    def _may_leave(self, name: str) -> float:
        """From when on a model makes room for another."""
        loaded = self._loaded[name]
        return min(loaded.since + self.settings.stay_seconds, loaded.line.used + IDLE)

    def _load(self, name: str) -> asyncio.Task[Loaded]:
        """The task that loads a model, shared by all who wait for it."""
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._make(name))
            task.add_done_callback(lambda _: self._loading.pop(name))
        return task

    async def _make(self, name: str) -> Loaded:
        async with self._turn:
            return await self._make_in_turn(name)

    async def _make_in_turn(self, name: str) -> Loaded:
        self._check_room(name)
        begun = time.monotonic()
        loop = asyncio.get_running_loop()
        # A download comes before another has to leave for it.
        location = await loop.run_in_executor(self._loader, locate, self.sources[name])
        leaving = []
        while len(self._loaded) >= self.settings.loaded_models:
            oldest = min(self._loaded, key=lambda name: (self._may_leave(name) > begun, self._loaded[name].line.used))
            leaving.append(self._loaded.pop(oldest).line)
            self.metrics.loaded.labels(oldest).set(0)
        thread = ThreadPoolExecutor(1, "loader of a model")  # which ends: allocators keep what was freed by thread
        try:
            loaded = await loop.run_in_executor(thread, self._exchange, leaving, name, location)
        finally:
            thread.shutdown(wait=False)
        self._loader.submit(_give_memory_back)
        self._loaded[name] = loaded
        self.metrics.loaded.labels(name).set(1)
        log.info("loaded", extra={"model": name, "seconds": round(time.monotonic() - begun, 3)})
        return loaded

    def _exchange(self, leaving: list[Line], name: str, location: Location) -> Loaded:
        for line in leaving:
            line.close()
            line.join(self.settings.deadline)  # what it accepted, it answers
        leaving.clear()  # its memory goes before the other's comes
        model = load(location, as_stored=True)
        return Loaded(name, model, self.settings, self.metrics)

    def stop(self) -> None:
        for loaded in self._loaded.values():
            loaded.line.close()
        self._loader.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> list[dict[str, Any]]:
        """What GET /v1/models says."""
        return [{"name": name, "default": name == self.names[0], **self._describe(name)} for name in self.names]

    def labels(self, name: str | None) -> dict[str, Any]:
        """What GET /v1/labels says."""
        name = self._known(name)
        config = self._config(name, self._loaded.get(name))
        return {"model": name, "labels": list(config.label_names or ()) if config else []}

    def _config(self, name: str, loaded: Loaded | None) -> Config | None:
        """What the checkpoint says of itself; None where it is on the Hub and not loaded yet."""
        try:
            return loaded.classifier.model.config if loaded else Config.read(find(self.sources[name]) / CONFIG)
        except BknZooError:
            return None

    def _describe(self, name: str) -> dict[str, Any]:
        loaded = self._loaded.get(name)
        config = self._config(name, loaded)
        if config is None:
            return {"loaded": False}
        return {
            "loaded": loaded is not None,
            "architecture": config.architecture,
            "num_classes": config.num_classes,
            "default_statistics": config.default_statistics,
            "statistics_batch_size": config.statistics_batch_size,
            "accuracy": config.accuracy,
            "revision": loaded.classifier.revision if loaded else None,
            "precision": loaded.classifier.engine.precision if loaded else None,
        }


def _give_memory_back() -> None:
    """To the system, what preparing a model took and left."""
    time.sleep(REST)
    torch.empty(2**25, dtype=torch.uint8)  # PyTorch's allocator on Arm looks through what it keeps when it is used
    trim = getattr(ctypes.pythonapi, "malloc_trim", None)  # glibc's; other systems have none
    if trim is not None:
        trim(0)


def _public_name(source: str) -> str:
    """What clients call a model: a folder by its last part, so that no path of this machine is shown."""
    return Path(source).expanduser().resolve().name if is_folder(source) else source
