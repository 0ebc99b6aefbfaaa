"""`python -m router.picker`: the picker's process, from command line to clean exit."""

import asyncio
import logging
import signal
import sys
from functools import partial

import uvloop

from router.gateway import logs
from router.gateway import settings as front
from router.gateway.__main__ import fitted, warn
from router.gateway.admin import Admin
from router.gateway.app import operators_address
from router.gateway.gateway import Gateway
from router.gateway.guard import Guard
from router.gateway.operations import routes_of
from router.gateway.pages import Private, Public
from router.gateway.request.intake import TokenizerError
from router.process import collect_seldom
from sglang_fair.common.guard import named
from sglang_fair.common.installed import missing_extra
from sglang_fair.common.processes import die_with_parent
from sglang_fair.settings import table
from sglang_fair.settings.commands import Mistake
from sglang_fair.settings.program import run_program, shared
from sglang_fair.settings.setting import SettingError

READY = "picker ready"
"""A line of its output that contains this says that it listens."""


def as_gateway(settings: table.Picker) -> table.Gateway:
    """The same for the parts of a gateway."""
    return table.Gateway(**shared(settings, table.Gateway))


def check(settings: table.Picker) -> None:
    """Raises SettingError for what it cannot serve with."""
    if settings.plaintext and settings.tls_cert is not None:
        raise SettingError("--plaintext and --tls-cert: give one of them", "plaintext")
    front.check(as_gateway(settings))


def serve(settings: table.Picker) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    if (missing := missing_extra("grpclib")) is not None:
        raise Mistake(missing)
    logs.configure(settings.log_level, settings.log_format)
    logging.getLogger("grpclib").setLevel(logging.WARNING)  # it tells of each client that leaves
    if not settings.outlive_parent:
        die_with_parent()
    made = fitted(as_gateway(settings))
    warn(made)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, made))
    except (TokenizerError, SettingError, OSError, ValueError) as error:
        raise Mistake(str(error)) from None
    return 0


async def _serve(settings: table.Picker, made: table.Gateway) -> None:
    from router.picker.server import Server  # of an extra, which was looked for

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(made, hands_over=True)
    guard = Guard(has_tenants=made.tenants is not None, names=named(made.names))
    owners = Private(gateway), Admin(gateway.link, gateway.replicas, gateway.names)
    pages = None
    if made.admin_port is not None:
        pages = operators_address(gateway, guard, owners, routes_of(Public(gateway)))
    server = Server(gateway, settings)
    await gateway.start()
    try:
        if pages is not None:
            await pages.start()
        port = await server.start()
        collect_seldom()
        print(f"{READY} on {settings.host}:{port}", file=sys.stderr, flush=True)
        await stop.wait()
        await server.close(settings.notice_s, settings.drain_s)
    finally:
        if pages is not None:
            await pages.close()
        await gateway.close()


main = partial(run_program, "picker", serve, check=check)
"""The command; it takes a command line and returns the exit code."""

if __name__ == "__main__":
    sys.exit(main())
