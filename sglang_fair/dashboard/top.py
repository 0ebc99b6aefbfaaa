"""`sglang-fair top`: on a terminal what the page shows in a browser."""

import sys
from typing import Annotated

import typer

from sglang_fair.common.installed import missing_extra
from sglang_fair.settings.commands import Mistake, Option, run


def main(
    gateway: Annotated[
        str, typer.Argument(help="The gateway's address for operators.")
    ] = "http://127.0.0.1:8000",
    every: Annotated[float, Option(metavar="SECONDS", help="Time between two looks.", min=0.2)] = 2.0,
) -> None:
    """Show on the terminal what each client gets, and who waits. Keys: s for the time shown, q to quit."""
    if missing := missing_extra("textual"):
        raise Mistake(missing)
    from sglang_fair.dashboard.terminal import Top

    Top(gateway.rstrip("/"), every).run()


if __name__ == "__main__":
    sys.exit(run(main, "sglang-fair top"))
