"""The same service on many machines, by Ray Serve: `serve deploy deploy/ray.yaml`, as docs/ray.md says."""

from typing import Any

from fastapi import FastAPI
from ray import serve

from .app import create_app
from .logs import set_up_logs
from .settings import Settings, read_settings

SPARE = 32  # requests that take no place in a queue: those for pages, health and metrics


def application(arguments: dict[str, Any]) -> serve.Application:
    """What `import_path` of a `serve deploy` file names.

    Args:
        arguments: settings of the service (`queue_length: 64`), but for those of its own HTTP server, since Ray's proxy
            takes its place. What is not among them comes from the environment of each replica: so should API keys.
    """
    settings = _settings(arguments)
    # Ray must send a replica more than it has room for: only then is it the replica that refuses, with 429 and with a
    # time to come back, rather than Ray's proxy that lets requests pile up.
    most = settings.loaded_models * (settings.queue_length + max(settings.max_batch, settings.streams)) + SPARE

    def build() -> FastAPI:
        set_up_logs()
        return create_app(_settings(arguments), one_of_many=True)

    # A function: an application that is built already cannot be sent to a replica.
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
    """What Ray asks a replica beside requests; it counts as started once the application has, with its models warm."""

    app: FastAPI

    async def check_health(self) -> None:
        if self.app.state.service.pool.failing:
            raise RuntimeError("an engine died, and did not come back")


def _settings(arguments: dict[str, Any]) -> Settings:
    return read_settings([f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()])
