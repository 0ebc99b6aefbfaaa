"""Measurements of this package's own cost, on SGLang's real data structures."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_fair.settings.commands import Mistake

Show = Callable[[str], None]


def carry_out(
    run: Callable[[Show], dict[str, Any]],
    file: Path | None,
    refused: tuple[type[Exception], ...] = (ValueError, OSError),
) -> dict[str, Any]:
    """Run a bench: what it shows goes to stderr, its result is the last line of stdout, and of `file`.

    Raises Mistake in place of one of `refused`, and where `file` cannot be written: the result has been printed then.
    """
    try:
        result = run(lambda text: print(text, file=sys.stderr, flush=True))
        line = json.dumps(result, separators=(",", ":"))
        print(line, flush=True)
        if file:
            file.write_text(line + "\n")
    except refused as error:
        raise Mistake(str(error)) from None
    return result
