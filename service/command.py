"""The command. A process that only supervises workers does not import the modules for serving."""

import gc
import sys
from typing import TYPE_CHECKING

from bkn_zoo.errors import BknZooError

from .logs import failed, set_up_logs
from .settings import Settings, read_settings

if TYPE_CHECKING:
    from .workers import WorkerLink


def serve_command(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0, or 1 if the service could not start."""
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments)
        set_up_logs()
        if sys.stderr.isatty():
            # For a person, before seconds of imports.
            print("bkn-zoo serve: starting", file=sys.stderr, flush=True)
        if settings.workers == 1:
            return serve_alone(settings)
        # Imported here, so that --help is fast.
        from .workers import supervise

        return supervise(settings, serve_alone)
    except BknZooError as error:
        return failed(error)


def serve_alone(settings: Settings, link: "WorkerLink | None" = None) -> int:
    """Serve in this process, which may have a supervisor."""
    # Nearly all imported objects stay, and collecting them takes half a second each time.
    gc.disable()
    try:
        from .server import run_server

        gc.freeze()
    finally:
        gc.enable()
    try:
        return run_server(settings, link)
    finally:
        # Otherwise Triton reports its objects as leaked when the process ends.
        gc.unfreeze()
