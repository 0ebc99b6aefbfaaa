"""How a gateway logs: text for people, or a JSON object a line, then with a line for each request that has ended."""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

FIELDS = "fields"
"""Attribute of a log record with what else its object has."""

_requests = logging.getLogger("gateway.requests")


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(level: str, form: str) -> None:
    """The process's logs, on stderr. `form` is "text" or "json"."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def request_ended(line: Mapping[str, Any]) -> None:
    _requests.info("request", extra={FIELDS: dict(line)})
