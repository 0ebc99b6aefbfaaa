"""`sglang-fair limits`: limits for the throttle, from what users did in a run without one."""

import json
import sys
from pathlib import Path
from typing import Annotated

from sglang_fair.settings.commands import Argument, Mistake, Option, run
from workloads import records
from workloads.served import limits_of

NAME = "sglang-fair limits"


def main(
    path: Annotated[
        Path, Argument(metavar="RECORDS.jsonl", help="A run's records, as --records writes them.")
    ],
    percentile: Annotated[
        float, Option(help="So many of a hundred users stay below the limit in their busiest minute.")
    ] = 99.0,
) -> None:
    """Print a file for --limits: what all but a few users need in their busiest minute."""
    try:
        print(json.dumps(limits_of(records.read(path), percentile), indent=2))
    except OSError as error:
        raise Mistake(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise Mistake(str(error)) from None


if __name__ == "__main__":
    sys.exit(run(main, NAME))
