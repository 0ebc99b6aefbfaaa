"""`sglang-fair dashboard`: the page for operators."""

import asyncio
import signal
import socket
import ssl
import sys
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from router import bounded
from sglang_fair.common import tls
from sglang_fair.common.guard import named
from sglang_fair.common.listening import is_loopback
from sglang_fair.common.processes import begin
from sglang_fair.common.service_keys import admin_key
from sglang_fair.settings import protection
from sglang_fair.settings.program import run_program
from sglang_fair.settings.setting import SettingError
from sglang_fair.settings.table import Dashboard

if TYPE_CHECKING:
    from aiohttp import web


def check(settings: Dashboard) -> None:
    """Raises SettingError for an address that is none."""
    try:
        parts = urlsplit(settings.gateway)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise SettingError(
            f"--gateway must be an address as http://127.0.0.1:8001, not {settings.gateway!r:.80}", "gateway"
        )
    if not admin_key.key() and not is_loopback(settings.host):
        raise SettingError(
            f"--host {settings.host}: without {admin_key.variable} the page is for this machine alone", "host"
        )
    protection.check(settings, "host")


def serve(settings: Dashboard) -> int:
    from sglang_fair.dashboard.server import application

    begin("info", outlives_parent=settings.outlive_parent)
    gateway_tls = tls.believed(settings.gateway_ca, settings.gateway_cert)
    app = application(
        settings.gateway, settings.every_s, admin_key.key(), gateway_tls, tls.believed(settings.replica_ca),
        named(settings.names),
    )  # fmt: skip
    try:
        listener = bounded.listen(settings.host, settings.port)
    except OSError as error:
        print(f"sglang-fair dashboard: {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)
        return 1
    asyncio.run(_serve(app, listener, tls.server(settings.tls_cert, settings.tls_key)))
    return 0


async def _serve(app: "web.Application", listener: socket.socket, shown: ssl.SSLContext | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with bounded.serving(app, listener, shown, shutdown_timeout_s=1.0):
        await stop.wait()


main = partial(run_program, "dashboard", serve, check=check)
"""The command; it takes a command line and returns the exit code."""

if __name__ == "__main__":
    sys.exit(main())
