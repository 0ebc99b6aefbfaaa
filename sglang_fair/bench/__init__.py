"""Measurements of this package's own cost, on SGLang's real data structures."""

import argparse
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

    None, and one line on stderr, if it raised one of `refused`, or if `file` cannot be written: the result has been
    printed then. Ctrl-C ends the process with 130.
    """
    try:
        result = run(lambda text: print(text, file=sys.stderr, flush=True))
        line = json.dumps(result, separators=(",", ":"))
        print(line, flush=True)
        if file:
            file.write_text(line + "\n")
    except refused as error:
        print(f"sglang-fair bench {name}: {error}", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(f"sglang-fair bench {name}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    return result


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers, separated by commas: the value of a command line option."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be positive numbers, not {text!r}")
    return values
