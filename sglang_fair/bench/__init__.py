"""Measurements of this package's own cost, on SGLang's real data structures."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Show = Callable[[str], None]


def carry_out(
    name: str,
    run: Callable[[Show], dict[str, Any]],
    file: Path | None,
    refused: tuple[type[Exception], ...] = (ValueError, OSError),
) -> dict[str, Any] | None:
    """Run the bench `name`: what it shows goes to stderr, its result is the last line of stdout, and of `file`.

    None, and one line on stderr, if it raised one of `refused`.
    """
    try:
        result = run(lambda text: print(text, file=sys.stderr, flush=True))
        line = json.dumps(result, separators=(",", ":"))
        if file:
            file.write_text(line + "\n")
    except refused as error:
        print(f"sglang-fair bench {name}: {error}", file=sys.stderr)
        return None
    print(line, flush=True)
    return result
