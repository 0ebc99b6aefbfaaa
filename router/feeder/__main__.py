"""`python -m router.feeder`: the feeder's process, from command line to clean exit."""

import asyncio
import signal
import sys
from functools import partial

from router.batches.folder import check as check_batches
from router.batches.model import StoreError
from sglang_fair.common.deadlines import make_classes
from sglang_fair.common.processes import begin
from sglang_fair.common.service_keys import feeder_key
from sglang_fair.settings import protection, table
from sglang_fair.settings.commands import Mistake
from sglang_fair.settings.program import run_program
from sglang_fair.settings.setting import SettingError

READY = "feeder ready"
"""A line of its output that contains this says that it looks for batches."""


def check(settings: table.Feeder) -> None:
    """Raises SettingError for what it cannot serve with."""
    if not feeder_key.key():
        raise SettingError(f"gateway and feeder need the same key in {feeder_key.variable}")
    if not settings.gateway.startswith(("http://", "https://")):
        raise SettingError(f"--gateway: {settings.gateway} is no URL", "gateway")
    protection.check(settings)
    try:
        make_classes(settings.slo_classes, "--slo-classes")
    except ValueError as error:
        raise SettingError(str(error), "slo_classes") from None


def serve(settings: table.Feeder) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    begin(settings.log_level, outlives_parent=settings.outlive_parent)
    try:
        check_batches(settings.batches, settings.batch_files)
    except ValueError as error:
        raise Mistake(str(error)) from None
    try:
        asyncio.run(_serve(settings))
    except StoreError as error:
        raise Mistake(str(error)) from None
    return 0


async def _serve(settings: table.Feeder) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    from router.feeder.shell import Shell  # of an extra, which was looked for

    shell = Shell(settings)
    print(f"{READY}: {shell.store_name} through {settings.gateway}", file=sys.stderr, flush=True)
    await shell.run(stop)


main = partial(run_program, "feeder", serve, check=check)
"""The command; it takes a command line and returns the exit code."""

if __name__ == "__main__":
    sys.exit(main())
