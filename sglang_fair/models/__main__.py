"""`python -m sglang_fair.models NAME` prepares a model where it is missing and prints its folder."""

import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sglang_fair.models.catalog import names, resolve
from sglang_fair.models.hub import copy_tokenizer
from sglang_fair.settings.commands import Argument, Mistake, Option, run


def main(
    name: Annotated[str, Argument(metavar="NAME", help=f"{', '.join(names())}, or a folder.")],
    tokenizer_to: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Copy what a gateway needs of the model, which may be on the hub, to this folder.",
        ),
    ] = None,
) -> None:
    """Print a model's folder; prepare the model first when it is missing."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"model {name}", total=None)

            def say(text: str) -> None:
                bar.update(task, description=text)

            if tokenizer_to is None:
                folder = resolve(name, say)
            else:
                copy_tokenizer(name, tokenizer_to, say)
                folder = tokenizer_to
    except (ValueError, OSError, RuntimeError) as error:
        raise Mistake(" ".join(str(error).split())) from None
    print(folder)


if __name__ == "__main__":
    sys.exit(run(main, "sglang-fair"))
