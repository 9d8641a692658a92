"""Logs on stderr, as text or as a JSON object per line. Requests are logged without their text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tfexport.serving.options import LogFormat

FIELDS = "tfexport_fields"
"""The attribute of a log record with further fields."""

REQUESTS = logging.getLogger("tfexport.requests")
NOTES = logging.getLogger("tfexport.serving")


class JsonFormatter(logging.Formatter):
    """A JSON object for each record: `time` (UTC), `level`, `message`, and further fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A line for each record, with further fields after its message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        more = " ".join(f"{name}={value}" for name, value in getattr(record, FIELDS, {}).items())
        return f"{super().formatMessage(record)} {more}".rstrip()


def log(logger: logging.Logger, message: str, fields: Mapping[str, object], level: int = logging.INFO) -> None:
    """Log a record with fields, without those that are None."""
    present = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, message, extra={FIELDS: present})


def log_config(form: LogFormat) -> dict[str, Any]:
    """The argument of `logging.config.dictConfig` for the server's and uvicorn's loggers on stderr."""
    formatter = JsonFormatter if form == "json" else TextFormatter
    logger = {"handlers": ["stderr"], "level": "INFO", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "tfexport": logger,
            "uvicorn": logger,
            "asyncio": {**logger, "level": "WARNING"},
            "python_multipart": {**logger, "level": "CRITICAL"},
        },
    }
