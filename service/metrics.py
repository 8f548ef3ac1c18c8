"""The metrics for Prometheus at /metrics."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's variable for the folder of shared counters
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

DRIFTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


class Metrics:
    """The metrics of an app, including those of the process (memory, CPU time, files).

    With several processes, a folder in the environment has the counts of each, and every process shows the sums.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        gauge: Any = {"registry": registry, "multiprocess_mode": "livesum"}
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
        self.connections = Gauge("bkn_connections", "Open connections.", **gauge)
        self.cut = Counter(
            "bkn_connections_cut_total", "Aborted connections, by reason.", ["reason"], registry=registry
        )
        self.queue_length = Gauge("bkn_queue_length", "Requests in the queue of a model.", ["model"], **gauge)
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
        self.loaded = Gauge("bkn_model_loaded", "Processes with the model in memory.", ["model"], **gauge)
        self.restarts = Counter("bkn_engine_restarts_total", "Engines restarted.", ["model"], registry=registry)

    def text(self) -> bytes:
        """The metrics in the format of Prometheus."""
        folder = os.environ.get(FOLDER)
        return generate_latest(self.registry if folder is None else _sums(Path(folder)))


def _sums(folder: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)
    registry.register(_Processes(folder))
    return registry


class _Processes(Collector):
    """Sums of the process metrics over all processes that use a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for file in self.folder.glob("gauge_livesum_*.db"):
            pid = file.stem.rpartition("_")[2]
            for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                if metric.name in found:
                    (total,), (more,) = found[metric.name].samples, metric.samples
                    found[metric.name].samples = [total._replace(value=total.value + more.value)]
                else:
                    found[metric.name] = metric
        found.pop("process_start_time_seconds", None)
        yield from found.values()
