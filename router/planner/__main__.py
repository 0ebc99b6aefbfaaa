"""`sglang-fair planner`: orders the queues of a router with placement `qlm`, from command line to clean exit."""

import logging
import signal
import sys
from functools import partial
from typing import cast

from sglang_fair.common.installed import missing_extra
from sglang_fair.common.processes import die_with_parent
from sglang_fair.settings import protection
from sglang_fair.settings.commands import Mistake
from sglang_fair.settings.program import run_program
from sglang_fair.settings.setting import SettingError
from sglang_fair.settings.table import Planner


def check(settings: Planner) -> None:
    """Raises SettingError for an address that is none, and where what it counts with is not installed."""
    if "://" not in settings.router or not settings.router.split("://")[1]:
        raise SettingError(
            f"--router must be an address as tcp://127.0.0.1:9000, not {settings.router!r:.80}", "router"
        )
    protection.read_keys(settings.keys, "gateway")
    if missing := missing_extra("scipy"):
        raise SettingError(missing, "solver")


def serve(settings: Planner) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    import zmq

    from router.planner.link import Link
    from router.queues.plan import Solver

    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    if not settings.outlive_parent:
        die_with_parent()
    try:
        keys = protection.read_keys(settings.keys, "gateway")
        link = Link(settings.router, cast(Solver, settings.solver), keys)
    except zmq.ZMQError as error:
        raise Mistake(f"--router {settings.router}: {error}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: link.stop())
    try:
        link.run(
            lambda: print(f"planner ready for the router at {settings.router}", file=sys.stderr, flush=True)
        )
    finally:
        link.close()
    return 0


main = partial(run_program, "planner", serve, check=check)
"""The command; it takes a command line and returns the exit code."""

if __name__ == "__main__":
    sys.exit(main())
