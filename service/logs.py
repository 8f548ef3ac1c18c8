"""Logs as JSON, one line per event, with the id of the request."""

import json
import logging
import os
import sys
import warnings
from contextvars import ContextVar
from datetime import UTC, datetime

from bkn_zoo.terminal import printable

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
ENCODER = json.JSONEncoder(default=str)  # ASCII, because other characters may break or reverse lines
MAX_FIELD = 10_000  # characters per field; a traceback may have a few thousand
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
        for name, value in line.items():
            if isinstance(value, str) and len(value) > MAX_FIELD:
                line[name] = f"{value[:MAX_FIELD]}..."
        return ENCODER.encode(line)


def set_up_logs() -> None:
    """Send all logs to standard error."""
    logging._srcfile = None  # faster, according to Python's manual, if the source line is not needed
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.root.handlers = [handler]
    logging.root.setLevel(logging.WARNING)
    chosen = os.environ.get("BKN_ZOO_LOG_LEVEL", "info").upper()
    logging.getLogger("bkn_zoo").setLevel(logging.getLevelNamesMapping().get(chosen, logging.INFO))
    warnings.simplefilter("ignore")  # libraries warn about details of untrusted images
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at the first request to the Hub


def failed(error: Exception) -> int:
    """Print why the command ends, and return its exit code."""
    print(f"bkn-zoo serve: {printable(error)}", file=sys.stderr)
    return 1
