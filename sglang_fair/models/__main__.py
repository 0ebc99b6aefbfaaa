"""`python -m sglang_fair.models NAME` prepares a model where it is missing and prints its folder."""

import sys
from typing import Annotated

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sglang_fair.models.catalog import names, resolve
from sglang_fair.settings.commands import Argument, Mistake, run


def main(
    name: Annotated[str, Argument(metavar="NAME", help=f"{', '.join(names())}, or a folder.")],
) -> None:
    """Print a model's folder; prepare the model first when it is missing."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"model {name}", total=None)
            folder = resolve(name, lambda text: bar.update(task, description=text))
    except (ValueError, OSError, RuntimeError) as error:
        raise Mistake(str(error)) from None
    print(folder)


if __name__ == "__main__":
    sys.exit(run(main, "sglang-fair"))
