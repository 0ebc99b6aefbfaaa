"""Reading traces: JSON lines, and errors that name the line."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

ParsedT = TypeVar("ParsedT")


def read_lines(path: Path, convert: Callable[[Mapping[str, Any]], ParsedT]) -> list[ParsedT]:
    """`convert` of each line's JSON object. What it raises as ValueError names file and line."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for place, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise ValueError("not a JSON object")
                rows.append(convert(fields))
            except ValueError as error:
                raise ValueError(f"{path}:{place}: {error}") from error
    return rows


def number(fields: Mapping[str, Any], name: str) -> float:
    """A number of a line. Raises ValueError where it is missing or something else."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"`{name}` must be a number, not {value!r}")
    return value


def whole(fields: Mapping[str, Any], name: str) -> int:
    """A whole number of a line. Raises ValueError where it is missing or something else."""
    value = number(fields, name)
    if value != value // 1:
        raise ValueError(f"`{name}` must be a whole number, not {value!r}")
    return int(value)
