"""One replica: SGLang with the fair overlay, on a GPU as installed or on a CPU with plain PyTorch.

    python -m sglang_fair.engines.replica --device cpu --model default --port 30000 --policy dlpm
    python -m sglang_fair.engines.replica --engine emulated --gpu a100-80g --model llama-3.1-8b

Arguments behind `--` go to SGLang as they are and win over ours. On a GPU this is `sglang serve` with the
overlay's arguments; nothing stops you from running that yourself.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sglang_fair.common.curve import KEYS_VARIABLE, PUBLISHER
from sglang_fair.common.files import read_json
from sglang_fair.common.installed import missing_engine
from sglang_fair.common.processes import die_with_supervisor
from sglang_fair.common.service_keys import replica_key
from sglang_fair.engines import cpu, emulated
from sglang_fair.models.catalog import EMULATED, ServedModel, find
from sglang_fair.overlay.releases import UNSUPPORTED
from sglang_fair.settings import protection
from sglang_fair.settings.setting import SettingError
from sglang_fair.settings.table import Replica
from sglang_fair.sim.emulation import MAX_RUNNING, Emulation

SMALL_MODEL_BYTES = 100_000_000


def parse(arguments: Sequence[str]) -> Replica:
    """The settings on a command line. SystemExit for a bad one."""
    from sglang_fair.settings import program

    return settled(program.parse("replica", arguments))


def settled(settings: Replica) -> Replica:
    """The same with the device that the engine computes on: --engine, if it is given, wins over --device."""
    if settings.engine == "auto":
        return settings
    return replace(settings, device="cuda" if settings.engine == "cuda" else "cpu")


def emulation(options: Replica) -> Emulation | None:
    """The GPU to emulate; None for a real engine. Raises ValueError when the options do not fit together."""
    if options.engine == "emulated":
        return Emulation(options.gpu or "", options.model, options.cost_model, options.time_scale)
    for option, value in (("--gpu", options.gpu), ("--cost-model", options.cost_model)):
        if value is not None:
            raise ValueError(f"{option} is for --engine emulated")
    if options.time_scale != 1.0:
        raise ValueError("--time-scale is for --engine emulated")
    return None


def server_arguments(options: Replica, model: ServedModel) -> list[str]:
    """SGLang's command line for these options. ValueError for an unknown policy or cost."""
    from sglang_fair.overlay.config import SERVER_POLICIES, SETTINGS, STOCK_POLICIES, check, read, server_name

    stock = options.policy.removeprefix("sglang:")
    if options.policy.startswith("sglang:"):
        if stock not in STOCK_POLICIES:
            raise ValueError(f"unknown policy {options.policy!r}; SGLang has {', '.join(STOCK_POLICIES)}")
        policy = stock
    else:
        policy = server_name(options.policy)
        if policy not in SERVER_POLICIES:
            raise ValueError(
                f"unknown policy {options.policy!r}; there are {', '.join(SERVER_POLICIES.values())}, "
                "and sglang:NAME for SGLang's own"
            )
    fair = {
        name: json.dumps(dict(value)) if setting.is_mapping else str(value)
        for name, setting in SETTINGS.items()
        if (value := getattr(options, name)) is not None
    }
    check(read({SETTINGS[name].variable: text for name, text in fair.items()}), policy)
    arguments = [
        "--model-path", model.path,
        "--served-model-name", options.served_name or model.served_name,
        "--load-format", model.load_format,
        "--host", options.host,
        "--port", str(options.port),
        "--page-size", str(options.page_size),
        "--schedule-policy", policy,
        "--enable-cache-report",
        "--log-level-http", "warning",
    ]  # fmt: skip
    for name, text in fair.items():
        arguments += [SETTINGS[name].argument, text]
    if options.kv_port is not None:
        events = {
            "publisher": "zmq" if options.keys is None else PUBLISHER,
            "topic": "kv",
            "bind": True,
            "endpoint": f"tcp://{options.host}:{options.kv_port}",
            "replay_endpoint": f"tcp://{options.host}:{options.kv_port + 1}",
        }
        arguments += ["--kv-events-config", json.dumps(events)]
    if options.load_port is not None:
        if options.kv_port is None:
            raise ValueError("--load-port needs --kv-port")
        # SGLang takes no other address for this than all of them; the overlay publishes beside the KV events.
        arguments += ["--load-publish-endpoint", f"tcp://*:{options.load_port}"]
    kv_tokens, max_running = options.kv_tokens, options.max_running
    if emulates := emulation(options):
        emulates.make_cost(read_json)
        kv_tokens, max_running = kv_tokens or emulates.kv_tokens, max_running or MAX_RUNNING
        arguments += emulated.server_arguments(emulates)
    elif options.device == "cpu":
        kv_tokens, max_running = kv_tokens or 24_576, max_running or 64
        is_small = model.weight_bytes is not None and model.weight_bytes < SMALL_MODEL_BYTES
        # A prefill chunk stops all streams for as long as it takes.
        arguments += [*cpu.SERVER_ARGUMENTS, "--chunked-prefill-size", "2048" if is_small else "512"]
        # Each size of a mixed batch would be compiled, and its attention is redundant.
        if options.mixed_chunk is None:
            arguments += [SETTINGS["mixed_chunk"].argument, "off"]
    if kv_tokens:
        arguments += ["--max-total-tokens", str(kv_tokens)]
    if max_running:
        arguments += ["--max-running-requests", str(max_running)]
    if replica_key.key():
        arguments += ["--api-key", replica_key.key()]
    return [*arguments, *options.extra]


def environment(options: Replica) -> dict[str, str]:
    """Variables that must be set before SGLang is imported. ValueError for a GPU that cannot be emulated."""
    variables = {
        # /health answers by itself instead of sending a request through the model each time.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # A scheduler that dies takes its server along at once, so that requests can be tried elsewhere.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # Seconds between two looks at whether the client of an answer that is not streamed is still there.
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    }
    if options.unsupported_sglang:
        variables[UNSUPPORTED] = os.environ.get(UNSUPPORTED) or "1"
    if options.keys is not None:
        variables[KEYS_VARIABLE] = str(Path(options.keys).absolute())
    if emulates := emulation(options):
        return {**variables, **emulated.environment(emulates)}
    return {**variables, **(cpu.environment() if options.device == "cpu" else {})}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is ended; the exit code."""
    from sglang_fair.settings.program import run_program

    return run_program(
        "replica", lambda settings: serve(settled(settings)), arguments, check=check_protection,
        epilog="Arguments behind -- are SGLang's own.",
    )  # fmt: skip


LEAST_NAME = len("--ho")
"""What is shorter begins several arguments of SGLang, which refuses it."""


def check_protection(options: Replica) -> None:
    """Raises SettingError for keys that cannot be used, and where others could reach it unprotected, by SGLang's own
    arguments too."""
    keys = protection.read_keys(options.keys, "replica")
    has_key = bool(replica_key.key()) or _value(options.extra, "--api-key") is not None
    has_tls = _value(options.extra, "--ssl-certfile") is not None
    tls = f"give it a key in {replica_key.variable} and TLS with -- --ssl-certfile and --ssl-keyfile"
    host = _value(options.extra, "--host", shortened=True) or options.host
    addresses = [("--host", host, has_key and has_tls, tls)]
    if (events := _value(options.extra, "--kv-events-config", shortened=True)) is not None:
        addresses += [
            ("--kv-events-config", address, publisher == PUBLISHER and keys is not None, protection.GIVE_KEYS)
            for publisher, address in _published(events)
        ]
    elif options.kv_port is not None:
        remedy = "give its KV events --keys DIR, which sglang-fair keys makes"
        addresses.append(("--host", options.host, keys is not None, remedy))
    for option, address, is_protected, remedy in addresses:
        protection.check_listening(options, option, address, is_protected, remedy)


def _published(config: str) -> list[tuple[str, str]]:
    """Publisher and addresses in SGLang's configuration of KV events; its own defaults are at all addresses."""
    try:
        found = json.loads(config)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SettingError("--kv-events-config: SGLang reads a JSON object there", "extra")
    publisher = str(found.get("publisher", ""))
    if publisher in ("", "null"):
        return []
    addresses = [found.get("endpoint", "tcp://*"), found.get("replay_endpoint")]
    return [(publisher, str(address)) for address in addresses if address is not None]


def _value(arguments: Sequence[str], option: str, *, shortened: bool = False) -> str | None:
    """What SGLang takes for an argument's value: the last one given; None: none is. `shortened`: also by the beginning
    of its name, which SGLang takes where no other argument begins so."""
    found = None
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == option or (shortened and len(name) >= LEAST_NAME and option.startswith(name)):
            found = value if equals else next(iter(arguments[at + 1 :]), "")
    return found


def serve(options: Replica) -> int:
    """Runs the server until it is ended; the exit code."""
    die_with_supervisor()
    try:
        if missing := missing_engine():
            raise ValueError(missing)
        os.environ.update(environment(options))
        name = EMULATED + options.model if options.engine == "emulated" else options.model
        model = find(name, lambda text: print(text, file=sys.stderr, flush=True))
        argv = server_arguments(options, model)
        _refuse_taken_ports(options)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"sglang-fair replica: {error}", file=sys.stderr)
        return 2
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _refuse_taken_ports(options: Replica) -> None:
    ports = [options.port, *((options.kv_port, options.kv_port + 1) if options.kv_port is not None else ())]
    for port in (*ports, *((options.load_port,) if options.load_port is not None else ())):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.host, port))
            except OSError as error:
                raise ValueError(f"port {port} on {options.host} cannot be used: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
