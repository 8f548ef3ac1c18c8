"""The metrics for Prometheus at /metrics."""

import asyncio
import itertools
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric

log = logging.getLogger("bkn_zoo.service")

# Name, documentation and type of a family; name, labels and value of a sample.
Samples = list[tuple[str, str, str, str, dict[str, str], float]]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
DRIFTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


class Metrics:
    """The metrics of an app, including those of the process (memory, CPU time, files).

    Args:
        folder: where several processes exchange their metrics, so that each shows the sums.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self._can_share = folder, True
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "bkn_requests_total", "Requests by route and status.", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "bkn_request_seconds", "From the first byte of a request to its response.", ["route"], registry=registry,
            buckets=SECONDS,
        )  # fmt: skip
        self.rejected = Counter(
            "bkn_rejected_total",
            "Refused requests, and refused images of a batch, by reason.",
            ["reason"],
            registry=registry,
        )
        self.connections = Gauge("bkn_connections", "Open connections.", registry=registry)
        self.cut = Counter(
            "bkn_connections_cut_total", "Aborted connections, by reason.", ["reason"], registry=registry
        )
        self.queue_length = Gauge("bkn_queue_length", "Requests in the queue of a model.", ["model"], registry=registry)
        self.queue_seconds = Histogram(
            "bkn_queue_seconds", "Time in the queue.", ["model"], registry=registry, buckets=SECONDS
        )
        self.inference_seconds = Histogram(
            "bkn_inference_seconds", "Time in the engine, per batch.", ["model", "statistics"], registry=registry,
            buckets=SECONDS,
        )  # fmt: skip
        self.batch_size = Histogram(
            "bkn_batch_size", "Images per batch.", ["model"], registry=registry, buckets=(1, 2, 4, 8, 16, 32, 64)
        )
        self.confidence = Histogram(
            "bkn_confidence", "Probability of the likeliest class, per image: it falls when images change.",
            ["model", "statistics"], registry=registry, buckets=CONFIDENCES,
        )  # fmt: skip
        self.drift = Histogram(
            "bkn_drift", "Share of usual images that are less unusual, per image: 0.5 on average until images change.",
            ["model"], registry=registry, buckets=DRIFTS,
        )  # fmt: skip
        self.loaded = Gauge("bkn_model_loaded", "Processes with the model in memory.", ["model"], registry=registry)
        self.restarts = Counter("bkn_engine_restarts_total", "Engines restarted.", ["model"], registry=registry)

    async def share(self) -> None:
        """Save the samples for the other processes every second, until cancelled."""
        while self.folder is not None:
            await asyncio.sleep(1)
            try:
                await asyncio.to_thread(_save_samples, self.folder, str(os.getpid()), self._samples())
            except OSError as error:
                if self._can_share:
                    log.warning("the metrics of this process are not in the sums of the others: %s", error)
                self._can_share = False

    def text(self) -> bytes:
        """The metrics in the format of Prometheus."""
        if self.folder is None:
            return generate_latest(self.registry)
        others = [_load_samples(file) for file in self.folder.glob("*.json") if file.stem != str(os.getpid())]
        return generate_latest(cast(Any, SimpleNamespace(collect=lambda: _sum_samples([self._samples(), *others]))))

    def _samples(self) -> Samples:
        families = [family for family in self.registry.collect() if family.name != "process_start_time_seconds"]
        return [
            (family.name, family.documentation, family.type, sample.name, sample.labels, sample.value)
            for family in families for sample in family.samples if not sample.name.endswith("_created")
        ]  # fmt: skip


def bury(folder: Path, pid: int) -> None:
    """Keep the counts of a process that has ended, but not its gauges."""
    with suppress(OSError):
        counts = [sample for sample in _load_samples(folder / f"{pid}.json") if _is_count(sample)]
        families = _sum_samples([_load_samples(folder / "ended.json"), counts])
        total = [(f.name, f.documentation, f.type, s.name, s.labels, s.value) for f in families for s in f.samples]
        _save_samples(folder, "ended", total)
        (folder / f"{pid}.json").unlink(missing_ok=True)


def _is_count(sample: Any) -> bool:
    return sample[2] in ("counter", "histogram") and not sample[0].startswith("process_")


def _save_samples(folder: Path, name: str, samples: Samples) -> None:
    """Write a file at once, so that nobody reads a part of it. Mapped files would end the process on a full disk."""
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps(samples))
    partial.replace(folder / f"{name}.json")


def _load_samples(file: Path) -> Samples:
    """The samples of a file; none where its process has just ended."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return []


def _sum_samples(parts: list[Samples]) -> list[Metric]:
    families: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for name, documentation, kind, sample, labels, value in itertools.chain(*parts):
        families.setdefault(name, Metric(name, documentation, kind))
        key = (name, sample, tuple(labels.items()))
        values[key] = values.get(key, 0.0) + value
    for (name, sample, pairs), value in values.items():
        families[name].add_sample(sample, dict(pairs), value)
    return list(families.values())
