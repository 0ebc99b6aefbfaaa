"""`python -m sglang_fair.models resolve NAME` prepares a model where it is missing and prints its folder.

Exit code 2 and one line on stderr when there is no such model or it cannot be prepared.
"""

import argparse
import sys
from collections.abc import Sequence

from sglang_fair.models.catalog import names, resolve


def main(arguments: Sequence[str] | None = None) -> int:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(prog="python -m sglang_fair.models")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("resolve", help="print a model's folder; prepare it when it is missing")
    show.add_argument("name", help=f"{', '.join(names())} or a folder")
    name = parser.parse_args(arguments).name
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"model {name}", total=None)
            folder = resolve(name, lambda text: bar.update(task, description=text))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"sglang-fair: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
