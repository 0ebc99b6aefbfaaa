"""`python -m router.gateway`: the command line of the gateway."""

import argparse
import gc
import logging
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path

import uvicorn

from router.descriptors import raise_limit
from router.gateway.app import CONFIG_VARIABLE, Config, create_app
from router.gateway.limits import DEFAULTS, MEANING, Limits, fit, option, wrong
from router.gateway.listener import Listener
from router.gateway.request.tokens import TokenizerError, Tokens
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.common.processes import die_with_parent

FACTORY = "router.gateway.app:create_app_from_environment"


def parser() -> argparse.ArgumentParser:
    """The command line. Its bounds are the fields of `Limits`."""
    made = argparse.ArgumentParser(
        prog="python -m router.gateway",
        description="OpenAI API and /generate in front of the replicas; the router says which one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--host", default="127.0.0.1", help="address to listen on")
    made.add_argument("--port", type=int, required=True, help="port to listen on")
    made.add_argument("--router", required=True, metavar="tcp://HOST:PORT", help="the router's address")
    made.add_argument("--model-name", required=True, help='the served model; clients may also say "default"')
    made.add_argument("--tokenizer", required=True, metavar="DIR", help="folder with tokenizer.json")
    made.add_argument("--workers", type=int, default=1, metavar="N", help="processes")
    made.add_argument(
        "--router-timeout", type=float, default=5.0, metavar="S", help="longest wait for the router"
    )
    for name, text in MEANING.items():
        value = getattr(DEFAULTS, name)
        made.add_argument(
            f"--{option(name)}", dest=name, type=type(value), default=value, metavar="N", help=text
        )
    made.add_argument(
        "--drain", type=int, default=30, metavar="S", help="time for open requests after SIGTERM"
    )
    made.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="of our own log"
    )
    made.add_argument(
        "--identity",
        default=",".join(DEFAULT_ORDER),
        metavar="PLACES",
        help="where a client's name is looked for: headers, api-key, user; comma separated, first match wins",
    )
    made.add_argument("--outlive-parent", action="store_true", help="go on when the starting process dies")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    line = parser()
    options = line.parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    if not options.outlive_parent:
        die_with_parent()
    values = {one.name: getattr(options, one.name) for one in fields(Limits)}
    for name, value in values.items():
        if (error := wrong(name, value)) is not None:
            line.error(f"--{option(name)} {error}")
    if options.workers < 1 or options.router_timeout <= 0:
        line.error("must be positive: --workers, --router-timeout")
    asked, descriptors = Limits(**values), raise_limit()
    limits = fit(asked, descriptors)
    if limits != asked:
        logging.getLogger("gateway").warning(
            "only %d open files (ulimit -Hn): %d requests and %d connections at a time, not %d and %d",
            descriptors, limits.max_in_flight, limits.max_connections, asked.max_in_flight, asked.max_connections,
        )  # fmt: skip
    places = tuple(place.strip().lower() for place in options.identity.split(",") if place.strip())
    config = Config(
        options.router,
        options.model_name,
        options.tokenizer,
        options.router_timeout,
        limits,
        places,
    )
    shared = {
        "host": options.host,
        "port": options.port,
        "http": Listener,
        "access_log": False,
        "proxy_headers": False,  # `App` looks at them where they matter
        "log_level": "warning",
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": options.drain,
    }
    # uvicorn drains, then raises the signal again for whoever handled it before: that is the end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        if options.workers == 1:
            app = create_app(config)
            gc.freeze()  # what was made so far stays: no need to look through it again and again
            uvicorn.run(app, **shared)
        else:
            Tokens(Path(config.tokenizer))  # fail here, not over and over in the workers
            os.environ[CONFIG_VARIABLE] = config.to_json()
            uvicorn.run(FACTORY, factory=True, workers=options.workers, **shared)
    except TokenizerError as error:
        line.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
