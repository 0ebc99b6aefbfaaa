"""`python -m router.gateway`: the gateway process, from command line to clean exit."""

import logging
import os
import signal
import sys
import tempfile
from functools import partial
from typing import Any

import msgspec
import uvicorn
from uvicorn.supervisors import Multiprocess

from router.batches.folder import check as check_batches
from router.gateway import logs
from router.gateway.access.quota import MEMORY
from router.gateway.address import SharedPort, check_free, shown
from router.gateway.app import SETTINGS_VARIABLE, create_app
from router.gateway.guard import KEY_VARIABLE
from router.gateway.listener import Listener
from router.gateway.metrics import FOLDER_VARIABLE
from router.gateway.request.intake import TokenizerError, read_tokens
from router.gateway.settings import check, fit, folders
from router.process import collect_seldom, raise_limit
from sglang_fair.common.listening import is_loopback
from sglang_fair.common.processes import die_with_parent
from sglang_fair.common.service_keys import feeder_key
from sglang_fair.settings import table
from sglang_fair.settings.commands import Mistake
from sglang_fair.settings.program import run_program
from sglang_fair.settings.setting import SettingError

FACTORY = "router.gateway.app:create_app_from_environment"


def fitted(settings: table.Gateway) -> table.Gateway:
    """With lower limits where this process may open few files."""
    descriptors = raise_limit()
    found = fit(settings, descriptors)
    if found != settings:
        logging.getLogger("gateway").warning(
            "only %d open files (ulimit -Hn): %d requests and %d connections at a time, not %d and %d",
            descriptors, found.max_in_flight, found.max_connections, settings.max_in_flight, settings.max_connections,
        )  # fmt: skip
    return found


def warn(settings: table.Gateway) -> None:
    """Says loudly what an operator would not want to find out later."""
    log = logging.getLogger("gateway")
    if (certificate := shown(settings)) is not None:
        certificate().warn()
    if settings.tenants is None and not is_loopback(settings.host):
        log.warning(
            "ANYBODY WHO REACHES %s MAY ASK, AND AS WHOM THEY LIKE: k made-up names get k shares. "
            "Make keys with `sglang-fair tenants add NAME` and start with --tenants FILE.",
            settings.host or "this machine",
        )
    if settings.tenants is not None and settings.admin_port is None:
        log.warning(
            "/status and /workers are served nowhere: --admin-port gives them an address of their own"
        )
    if settings.tenants is not None and not os.environ.get(KEY_VARIABLE):
        log.warning("nobody may ask for /status and /workers: there is no admin key in %s", KEY_VARIABLE)
    if settings.tenants is not None and settings.workers > 1 and settings.limit_store == MEMORY:
        log.warning(
            "each of the %d processes counts tenants' limits by itself: --limit-store redis://… has one count",
            settings.workers,
        )
    if settings.batches is not None and not feeder_key.key():
        log.warning(
            "nothing of batches will run: gateway and feeder need the same key in %s", feeder_key.variable
        )


def serve(settings: table.Gateway) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    logs.configure(settings.log_level, settings.log_format)
    if not settings.outlive_parent:
        die_with_parent()
    settings = fitted(settings)
    warn(settings)
    try:  # a line now, and no traceback later
        if settings.batches is not None:
            check_batches(settings.batches, settings.batch_files)
        if settings.admin_port is not None:
            check_free(settings.admin_host, settings.admin_port, shared=settings.workers > 1)
    except (ValueError, OSError) as error:
        raise Mistake(str(error)) from None
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "http": Listener,
        "access_log": False,
        "proxy_headers": False,  # `App` looks at them where they matter
        "log_level": "warning",
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": settings.drain_s,
        "ssl_context_factory": shown(settings),
    }
    # uvicorn drains, then raises the signal again for whoever handled it before: that is the end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        if settings.workers == 1:
            app = create_app(settings)
            collect_seldom()
            uvicorn.run(app, **options)
        else:
            read_tokens(folders(settings))  # fail here, not over and over in the workers
            os.environ[SETTINGS_VARIABLE] = msgspec.json.encode(settings).decode()
            with tempfile.TemporaryDirectory(prefix="sglang-fair-metrics-") as folder:
                os.environ[FOLDER_VARIABLE] = folder
                several = uvicorn.Config(FACTORY, factory=True, workers=settings.workers, **options)
                try:
                    port = SharedPort(settings.host, settings.port)
                except OSError as error:
                    where = f"{settings.host}:{settings.port}"
                    raise Mistake(f"--port: {where}: {error.strerror}") from None
                with port:
                    Multiprocess(several, sockets=[port]).run()
    except (TokenizerError, SettingError) as error:
        raise Mistake(str(error)) from None
    return 0


main = partial(run_program, "gateway", serve, check=check)
"""The command; it takes a command line and returns the exit code."""

if __name__ == "__main__":
    sys.exit(main())
