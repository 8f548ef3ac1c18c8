"""The command. What serving takes is imported by who serves: not by the process that only has others do it."""

import gc
import sys
import warnings

from bkn_zoo.errors import BknZooError

from .logs import failed, set_up_logs
from .settings import OLD_PREFIX, Settings, read_settings
from .workers import supervise


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 0 then, 1 where the service could not start."""
    warnings.filterwarnings("default", OLD_PREFIX, DeprecationWarning)  # Python shows none otherwise
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments)
        set_up_logs()
        return serve(settings) if settings.workers == 1 else supervise(settings, serve)
    except BknZooError as error:
        return failed(error)


def serve(settings: Settings) -> int:
    """The same in this process alone."""
    gc.disable()  # nearly all that is imported stays: to look through it again and again takes half a second
    try:
        from . import app
    finally:
        gc.enable()
    return app.serve(settings)
