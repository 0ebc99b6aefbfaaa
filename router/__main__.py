"""`python -m router`: the router process, from command line to clean exit."""

import argparse
import json
import logging
import signal
import sys

import zmq

from router.collector import collect_young_only
from router.core import Router
from router.descriptors import raise_limit
from router.events import WorkerUp
from router.placement import PLACEMENTS, build, parameters
from router.shell import Shell
from sglang_fair.common.processes import die_with_parent


def worker(text: str) -> WorkerUp:
    """`r0,http=URL[,kv=ADDRESS][,replay=ADDRESS][,capacity=NUMBER]` as an event.

    Raises `ArgumentTypeError` with what is wrong.
    """
    name, *pairs = text.split(",")
    values = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = sorted(set(values) - {"http", "kv", "replay", "capacity"})
    if not name or "=" in name or not values.get("http") or unknown or not all(values.values()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME,http=URL[,kv=ADDRESS][,replay=ADDRESS][,capacity=NUMBER]"
        )
    if not values["http"].startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"worker {name}: http={values['http']} is no URL")
    if "replay" in values and "kv" not in values:
        raise argparse.ArgumentTypeError(f"worker {name}: replay= is of no use without kv=")
    for key in ("kv", "replay"):
        if key in values and "://" not in values[key]:
            raise argparse.ArgumentTypeError(f"worker {name}: {key}={values[key]} is no ZMQ address")
    capacity = _positive(values.get("capacity", "1"))
    return WorkerUp(name, values["http"], values.get("kv"), values.get("replay"), capacity)


def parameter(text: str) -> tuple[str, object]:
    """`name=value`, the value in JSON or a bare word."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _weights(text: str) -> dict[str, object]:
    try:
        weights = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(weights, dict):
        raise argparse.ArgumentTypeError(f"{text!r} does not map clients to weights")
    return weights


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m router",
        description="Decides which replica serves each request. Gateways and the supervisor connect to it.",
    )
    made.add_argument(
        "--bind", required=True, metavar="tcp://HOST:PORT", help="where peers connect; port * picks one"
    )
    made.add_argument("--placement", choices=list(PLACEMENTS), default="d2lpm", help="default: %(default)s")
    made.add_argument(
        "--worker", action="append", type=worker, default=[], metavar="SPEC",
        help="NAME,http=URL[,kv=ADDRESS][,replay=ADDRESS][,capacity=NUMBER]; repeatable; more may come later",
    )  # fmt: skip
    made.add_argument(
        "--worker-quantum", type=_positive, metavar="SERVICE", help="d2lpm: credit per client and worker"
    )
    made.add_argument(
        "--quantum",
        type=_positive,
        metavar="SERVICE",
        help="centralized_dlpm: credit per client at all workers",
    )
    made.add_argument("--extend-weight", type=float, metavar="W", help="service per prompt token")
    made.add_argument("--output-weight", type=float, metavar="W", help="service per output token")
    made.add_argument(
        "--client-weights", type=_weights, metavar="JSON", help='shares per client, for example {"gold": 2}'
    )
    made.add_argument(
        "--parameter", action="append", type=parameter, default=[], metavar="NAME=VALUE",
        help="any other parameter of the placement; repeatable",
    )  # fmt: skip
    made.add_argument(
        "--page-size", type=int, default=16, metavar="TOKENS", help="the replicas' (default: %(default)s)"
    )
    made.add_argument(
        "--max-tree-tokens",
        type=int,
        default=8_000_000,
        metavar="N",
        help="memory bound (default: %(default)s)",
    )
    made.add_argument(
        "--peer-timeout", type=_positive, default=10.0, metavar="S",
        help="a gateway this long silent is dead, and what it had in flight is over (default: %(default)s)",
    )  # fmt: skip
    made.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    made.add_argument("--outlive-parent", action="store_true", help="go on when the starting process dies")
    return made


def make_router(options: argparse.Namespace) -> Router:
    """The core that the options describe. Weights go to placements that have them. Raises ValueError."""
    weights = {
        name: getattr(options, name)
        for name in ("quantum", "worker_quantum", "extend_weight", "output_weight", "client_weights")
        if getattr(options, name) is not None and name in parameters(options.placement)
    }
    placement = build(options.placement, **(weights | dict(options.parameter)))
    return Router(
        placement,
        name=options.placement,
        page_size=options.page_size,
        max_tree_tokens=options.max_tree_tokens,
    )


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    line = parser()
    options = line.parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    if not options.outlive_parent:
        die_with_parent()
    raise_limit()
    names = [up.worker for up in options.worker]
    if len(set(names)) < len(names):
        line.error(f"--worker names a worker twice: {', '.join(names)}")
    try:
        shell = Shell(make_router(options), options.bind, peer_timeout_s=options.peer_timeout)
    except ValueError as error:
        line.error(str(error))
    except zmq.ZMQError as error:
        line.error(f"cannot bind {options.bind}: {error}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: shell.stop())
    collect_young_only()
    try:
        for up in options.worker:
            shell.tell(up)
        print(f"router ready on {shell.endpoint}", file=sys.stderr, flush=True)
        shell.run()
    finally:
        shell.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
