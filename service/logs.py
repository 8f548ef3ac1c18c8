"""Logs as JSON, one line each, with the request that they belong to."""

import json
import logging
import os
import sys
import warnings
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from bkn_zoo.terminal import printable

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
ENCODER = json.JSONEncoder(default=str)  # in ASCII: other letters may break lines, or turn them around
MAX_FIELD = 10_000  # characters of each; a traceback may have a few thousand
PLAIN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if request_id.get() is not None:
            line["request_id"] = str(request_id.get())
        line |= {name: value for name, value in record.__dict__.items() if name not in PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return ENCODER.encode({name: _shortened(value) for name, value in line.items()})


def _shortened(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= MAX_FIELD else f"{value[:MAX_FIELD]}..."


def set_up_logs() -> None:
    """Everything goes to standard error."""
    logging._srcfile = None  # as Python's manual has it where nobody asks from which line a record came
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.root.handlers = [handler]
    logging.root.setLevel(logging.WARNING)
    chosen = os.environ.get("BKN_ZOO_LOG_LEVEL", "info").upper()  # as bkn-zoo --log-level sets it
    logging.getLogger("bkn_zoo").setLevel(logging.getLevelNamesMapping().get(chosen, logging.INFO))
    warnings.simplefilter("ignore")  # those of libraries say what is odd about a stranger's image, once per oddity
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the Hub is first asked


def failed(error: Exception) -> int:
    """Say why the command ends, and return the code with which it does."""
    print(f"bkn-zoo serve: {printable(error)}", file=sys.stderr)
    return 1
