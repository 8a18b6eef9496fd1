"""The daemon's lines on standard error: for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One object a line: ``time``, ``level``, ``message``, and what else a line knows."""

    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        members |= {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        if record.exc_info:
            members["error"] = self.formatException(record.exc_info)
        return json.dumps(members, default=str)


class TextFormatter(logging.Formatter):
    """A line for people: paths and names may hold anything, and a terminal must not obey them."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"recorder daemon: {when} {record.levelname.lower()}: {record.getMessage()}"
        plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        return plain + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what standard error is when a line is written."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def log_to_stderr(kind: str) -> None:
    """Write the daemon's lines to standard error."""
    logger = logging.getLogger("recorder.daemon")
    handler = _Stderr()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
