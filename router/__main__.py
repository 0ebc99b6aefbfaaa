"""`python -m router`: the router process, from command line to clean exit."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import zmq

from router import http
from router.bounded import listen
from router.core import Router
from router.events import WorkerUp
from router.placement import build, parameters, parse_value
from router.process import collect_young_only, raise_limit
from router.replica_lists import specs
from router.replica_lists.follow import Source, follow
from router.shell import Shell
from router.suspects import Suspects
from router.throttling import SETTLE_S, Kind, Throttling
from sglang_fair.common import tls
from sglang_fair.common.files import read_json
from sglang_fair.common.guard import named
from sglang_fair.common.processes import begin
from sglang_fair.core.throttle import make_rules
from sglang_fair.settings import protection, table
from sglang_fair.settings.commands import Mistake
from sglang_fair.settings.program import run_program
from sglang_fair.settings.setting import SettingError


def parameter(text: str) -> tuple[str, object]:
    """`name=value`, the value in JSON or a bare word. Raises SettingError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SettingError(f"--parameter: {text!r} is not NAME=VALUE", "parameter")
    return name, parse_value(value)


def workers(settings: table.Router) -> list[WorkerUp]:
    """The replicas that the router knows from the start. Raises SettingError."""
    try:
        return specs.all_of(specs.worker(text) for text in settings.worker)
    except ValueError as error:
        raise SettingError(f"--worker: {error}", "worker") from None


def sources(settings: table.Router) -> list[Source]:
    """Where further replicas are listed. Raises SettingError; not for a file that is not there yet."""
    found: list[Source] = []
    if settings.replicas_file is not None:
        path = Path(settings.replicas_file)
        try:
            specs.lines(path.read_text() if path.exists() else "")
        except (OSError, ValueError) as error:
            raise SettingError(f"--replicas-file: {path}: {error}", "replicas_file") from None
        found.append(Source(path))
    for text in settings.replicas_dns:
        try:
            found.append(Source(specs.name(text), settings.replicas_every_s))
        except ValueError as error:
            raise SettingError(f"--replicas-dns: {error}", "replicas_dns") from None
    called = [str(one) for one in found]
    if twice := next((one for one in called if called.count(one) > 1), None):
        raise SettingError(f"--replicas-dns: {twice} is given twice", "replicas_dns")
    return found


def make_router(settings: table.Router) -> Router:
    """The core that the settings describe. Weights go to placements that have them. Raises SettingError."""
    weights = {
        name: getattr(settings, name)
        for name in ("quantum", "worker_quantum", "extend_weight", "output_weight", "client_weights")
        if getattr(settings, name) is not None and name in parameters(settings.placement)
    }
    try:
        placement = build(settings.placement, **(weights | dict(map(parameter, settings.parameter))))
        return Router(
            placement,
            name=settings.placement,
            page_size=settings.page_size,
            max_tree_tokens=settings.max_tree_tokens,
            throttling=make_throttling(settings),
            swap_finish_s=settings.swap_finish_s,
            suspects=Suspects(settings.quarantine_s),
        )
    except SettingError:
        raise
    except ValueError as error:
        raise SettingError(str(error)) from None


def make_throttling(settings: table.Throttling) -> Throttling:
    """Raises SettingError."""
    kind = cast(Kind, settings.throttle)
    if settings.limits is None:
        return Throttling(kind, settle_s=SETTLE_S)
    if kind == "none":
        raise SettingError("--limits are for --throttle oit or rpm", "limits")
    try:
        rules = make_rules(read_json(settings.limits), f"--limits {settings.limits}")
        return Throttling(kind, rules, SETTLE_S)
    except ValueError as error:
        raise SettingError(str(error), "limits") from None


def check(settings: table.Router) -> None:
    """Raises SettingError for settings that cannot be served with."""
    check_protection(settings)
    workers(settings)
    sources(settings)
    make_router(settings)


def check_protection(settings: table.Router) -> None:
    """Raises SettingError for keys and certificates that cannot be used, and where others could reach it
    unprotected."""
    keys = protection.read_keys(settings.keys, "router")
    protection.check(settings, *(("http_host",) if settings.http_port is not None else ()))
    protection.check_address(settings, "bind", is_protected=keys is not None, remedy=protection.GIVE_KEYS)


def serve(settings: table.Router) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    begin(settings.log_level, outlives_parent=settings.outlive_parent)
    raise_limit()
    try:
        listener = None if settings.http_port is None else listen(settings.http_host, settings.http_port)
    except OSError as error:
        raise Mistake(
            f"--http-port: cannot listen on {settings.http_host}:{settings.http_port}: {error}"
        ) from None
    try:
        shell = Shell(
            make_router(settings),
            settings.bind,
            peer_timeout_s=settings.peer_timeout_s,
            keys=protection.read_keys(settings.keys, "router"),
        )
    except (ValueError, OSError, zmq.ZMQError) as error:
        raise Mistake(f"cannot bind {settings.bind}: {error}") from None
    leaving = asyncio.Event()

    def end(number: int, _: object) -> None:
        has_notice = number == signal.SIGTERM and not leaving.is_set() and listener is not None
        leaving.set()
        shell.stop(settings.notice_s if has_notice else 0.0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    collect_young_only()
    try:
        for up in workers(settings):
            shell.tell(up)
        jobs: list[Coroutine[Any, Any, None]] = []
        if listener is not None:
            tls_of = tls.server(settings.tls_cert, settings.tls_key)
            jobs.append(http.serve(listener, shell, tls_of, leaving, named(settings.names)))
        if listed := sources(settings):
            jobs.append(follow(listed, shell, tls.believed(settings.replica_ca)))
        print(f"router ready on {shell.endpoint}", file=sys.stderr, flush=True)
        shell.run(*jobs)
    finally:
        shell.close()
    return 0


main = partial(run_program, "router", serve, check=check)
"""The command; it takes a command line and returns the exit code."""

if __name__ == "__main__":
    sys.exit(main())
