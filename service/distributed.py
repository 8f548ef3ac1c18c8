"""The service on many machines, with Ray Serve: `serve deploy deploy/ray.yaml` (docs/ray.md)."""

from typing import Any

from fastapi import FastAPI
from ray import serve

from .app import create_app
from .logs import set_up_logs
from .settings import Settings, read_settings

SPARE = 32  # requests without a place in a queue, for pages, health and metrics


def application(arguments: dict[str, Any]) -> serve.Application:
    """Build the application with these settings. `import_path` of a `serve deploy` file refers to this function.

    Other settings, including API keys, come from the environment of each replica.
    """
    settings = _settings(arguments)
    # Ray must send a replica more requests than fit into its queue, so that the replica refuses them with 429 and
    # Retry-After. Otherwise requests would pile up in Ray's proxy.
    most = settings.loaded_models * (settings.queue_length + max(settings.max_batch, settings.streams)) + SPARE

    def build() -> FastAPI:
        set_up_logs()
        return create_app(_settings(arguments), one_of_many=True)

    # A function, because a built application cannot be sent to a replica.
    deployment = serve.deployment(
        serve.ingress(build)(Replica),
        name="bkn-zoo",
        max_ongoing_requests=most,
        max_queued_requests=most,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=settings.deadline + 5,
    )
    return deployment.bind()


class Replica:
    """What Ray's ingress makes a replica of. It has started when its application has loaded its models."""


def _settings(arguments: dict[str, Any]) -> Settings:
    return read_settings([f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()])
