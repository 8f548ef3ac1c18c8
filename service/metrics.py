"""The metrics for Prometheus at /metrics."""

import asyncio
import json
import logging
import os
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric

log = logging.getLogger("bkn_zoo.service")

# Values by family (name, documentation, type) and sample (name, labels), as JSON.
Samples = Counter[str]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


class Metrics:
    """The metrics of an app and its process, or of several, which exchange them in a folder to show the sums."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self._can_share = folder, True
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter = partial(prometheus_client.Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=SECONDS)
        self.requests = counter("bkn_requests_total", "Requests by route and status.", ["method", "route", "status"])
        self.seconds = histogram("bkn_request_seconds", "From the first byte of a request to its response.", ["route"])
        about = "Refused requests, and refused images of a batch, by reason."
        self.rejected = counter("bkn_rejected_total", about, ["reason"])
        self.connections = gauge("bkn_connections", "Open connections.")
        self.cut = counter("bkn_connections_cut_total", "Aborted connections, by reason.", ["reason"])
        self.queue_length = gauge("bkn_queue_length", "Requests in the queue of a model.", ["model"])
        self.queue_seconds = histogram("bkn_queue_seconds", "Time in the queue.", ["model"])
        by_mode = ["model", "statistics"]
        self.inference_seconds = histogram("bkn_inference_seconds", "Time in the engine, per batch.", by_mode)
        self.batch_size = histogram("bkn_batch_size", "Images per batch.", ["model"], buckets=(1, 2, 4, 8, 16, 32, 64))
        about = "Probability of the likeliest class, per image: it falls when images change."
        self.confidence = histogram("bkn_confidence", about, by_mode, buckets=CONFIDENCES)
        self.loaded = gauge("bkn_model_loaded", "Processes with the model in memory.", ["model"])

    async def share(self) -> None:
        """Save the samples for the other processes every second, until cancelled."""
        while self.folder is not None:
            await asyncio.sleep(1)
            try:
                await asyncio.to_thread(lambda folder: _save_samples(folder, os.getpid(), self._samples()), self.folder)
            except OSError as error:
                if self._can_share:
                    log.warning("the metrics of this process are not in the sums of the others: %s", error)
                self._can_share = False

    def text(self) -> bytes:
        """The metrics in the format of Prometheus."""
        if self.folder is None:
            return generate_latest(self.registry)
        total, families = self._samples(), dict[str, Metric]()
        for file in self.folder.glob("*.json"):
            if file.stem != str(os.getpid()):
                total.update(_load_samples(file))
        for key, value in total.items():
            name, documentation, kind, sample, labels = json.loads(key)
            families.setdefault(name, Metric(name, documentation, kind)).add_sample(sample, labels, value)
        return generate_latest(cast(Any, SimpleNamespace(collect=families.values)))

    def _samples(self) -> Samples:
        found = Samples()
        for family in self.registry.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_created", "_start_time_seconds")):
                    about = (family.name, family.documentation, family.type, sample.name, sample.labels)
                    found[json.dumps(about)] = cast(Any, sample.value)
        return found


def bury(folder: Path, pid: int) -> None:
    """Keep the counts of a process that has ended, but not its gauges."""
    ended = _load_samples(folder / "ended.json")
    for key, value in _load_samples(folder / f"{pid}.json").items():
        name, _, kind, *_ = json.loads(key)
        if kind in ("counter", "histogram") and not name.startswith("process_"):
            ended[key] += value
    with suppress(OSError):
        _save_samples(folder, "ended", ended)
        (folder / f"{pid}.json").unlink(missing_ok=True)


def _save_samples(folder: Path, name: str | int, samples: Samples) -> None:
    """Write a file at once, so that nobody reads a part of it. Mapped files would end the process on a full disk."""
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps(samples))
    partial.replace(folder / f"{name}.json")


def _load_samples(file: Path) -> Samples:
    """The samples of a file; none where its process has just ended."""
    try:
        return Counter(json.loads(file.read_text()))
    except (OSError, ValueError):
        return Counter()
