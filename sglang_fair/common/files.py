"""Reading a file that an operator names. The pure packages take what was read, never a path."""

import json
from pathlib import Path
from typing import Any


def read_json(path: str) -> Any:
    """The content of a JSON file. ValueError, in one line, if it cannot be read or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # not JSON, not text, or no path
        raise ValueError(f"{path!r} is not a JSON file: {error}") from None
