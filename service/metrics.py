"""What Prometheus can read at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One set for each app; the process's own (memory, processor time, files) come with it."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "bkn_requests_total", "Requests by route and status.", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "bkn_request_seconds", "From a request's first byte to its answer.", ["route"], registry=registry,
            buckets=SECONDS,
        )  # fmt: skip
        self.rejected = Counter("bkn_rejected_total", "Requests refused, by reason.", ["reason"], registry=registry)
        self.connections = Gauge("bkn_connections", "Connections that are open.", registry=registry)
        self.cut = Counter(
            "bkn_connections_cut_total", "Connections given up, by reason.", ["reason"], registry=registry
        )
        self.queue_length = Gauge("bkn_queue_length", "Requests that wait for a model.", ["model"], registry=registry)
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
        self.loaded = Gauge("bkn_model_loaded", "1 while the model is in memory.", ["model"], registry=registry)
        self.restarts = Counter("bkn_engine_restarts_total", "Engines started anew.", ["model"], registry=registry)
