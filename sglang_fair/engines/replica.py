"""One replica: SGLang with the fair overlay, on a GPU as installed or on a CPU with plain PyTorch.

    python -m sglang_fair.engines.replica --device cpu --model default --port 30000 --policy dlpm
    python -m sglang_fair.engines.replica --engine emulated --gpu a100-80g --model llama-3.1-8b

Arguments behind `--` go to SGLang as they are and win over ours. On a GPU this is `sglang serve` with the
overlay's arguments; nothing stops you from running that yourself.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence

from sglang_fair.common.files import read_json
from sglang_fair.common.processes import die_with_parent
from sglang_fair.core.cost import make_cost
from sglang_fair.core.payers import FIRST, RULES
from sglang_fair.engines import cpu
from sglang_fair.engines.emulated import settings as emulated
from sglang_fair.models.catalog import EMULATED, ServedModel, find
from sglang_fair.sim.emulation import MAX_RUNNING, Emulation
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.shapes import SHAPES

if os.environ.get("SGLANG_PLATFORM") == cpu.PLATFORM:
    # SGLang's spawned processes import this module again, before anything of SGLang's.
    cpu.define_torchvision_operators()

SMALL_MODEL_BYTES = 100_000_000

ENGINES = ("auto", "cuda", "cpu", "emulated")


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the rest for SGLang."""
    parser = argparse.ArgumentParser(
        prog="sglang-fair replica",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Arguments behind -- are SGLang's own.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="auto: as --device says; emulated: SGLang without a model, at the speed of --gpu",
    )
    parser.add_argument(
        "--model",
        default="default",
        help="default, tiny, bench, a folder, or a Hugging Face id (default: %(default)s); "
        f"emulated: {', '.join(SHAPES)}",
    )
    parser.add_argument("--gpu", help=f"the GPU to emulate: {', '.join(GPUS)}")
    parser.add_argument(
        "--cost-model",
        metavar="FILE",
        help="the emulated GPU's speed as sglang-fair calibrate measured it (default: from published figures)",
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="an emulated step takes so many times as long (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=30000, help="default: %(default)s")
    parser.add_argument("--name", default="r0", help="the replica's name in logs (default: %(default)s)")
    parser.add_argument(
        "--policy",
        default="dlpm",
        help="dlpm, vtc, lpm, fcfs, or sglang:NAME for SGLang's own (default: %(default)s)",
    )
    parser.add_argument(
        "--quantum",
        type=float,
        default=2000.0,
        metavar="UNITS",
        help="quantum per client of DLPM and DRR, service units (default: %(default)s)",
    )
    parser.add_argument(
        "--policy-options",
        default="",
        metavar="KEY=VALUE,...",
        help="the policy's other options, for example patience=64 for dlpm (default: its own)",
    )
    parser.add_argument(
        "--payer",
        choices=RULES,
        default=FIRST,
        help="who pays for a prefix that clients share: whoever computed it, or all its users, in equal parts or "
        "per use (default: %(default)s)",
    )
    parser.add_argument(
        "--cost",
        metavar="COST",
        help="what service costs: linear, profiled, quadratic:d=1000, tiered:threshold=4096 or "
        "flops:/path/to/the/model/config.json (default: linear)",
    )
    parser.add_argument(
        "--extend-weight",
        type=float,
        metavar="W_E",
        help="units per computed input token, with the linear cost (default: 1)",
    )
    parser.add_argument(
        "--output-weight",
        type=float,
        metavar="W_Q",
        help="units per output token, with the linear cost (default: 2)",
    )
    parser.add_argument(
        "--client-weights",
        default="{}",
        metavar="JSON",
        help='shares per client, for example {"gold": 2} (default: 1 for everybody)',
    )
    parser.add_argument(
        "--identity",
        metavar="PLACES",
        help="where the client's name is looked for, comma separated headers, api-key, user",
    )
    parser.add_argument(
        "--kv-port",
        type=int,
        metavar="PORT",
        help="publish KV events on this port and replay them on the next one",
    )
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument(
        "--kv-tokens",
        type=int,
        metavar="TOKENS",
        help="size of the KV pool (default: SGLang's choice on a GPU, 24576 on a CPU)",
    )
    parser.add_argument(
        "--max-running",
        type=int,
        metavar="REQUESTS",
        help="most requests in a batch (default: SGLang's choice on a GPU, 64 on a CPU)",
    )
    own, rest = list(arguments), []
    if "--" in own:
        split = own.index("--")
        own, rest = own[:split], own[split + 1 :]
    options = parser.parse_args(own)
    if options.engine != "auto":
        options.device = "cuda" if options.engine == "cuda" else "cpu"
    return options, rest


def emulation(options: argparse.Namespace) -> Emulation | None:
    """The GPU to emulate; None for a real engine. Raises ValueError when the options do not fit together."""
    if options.engine == "emulated":
        return Emulation(options.gpu, options.model, options.cost_model, options.time_scale)
    for option, value in (("--gpu", options.gpu), ("--cost-model", options.cost_model)):
        if value is not None:
            raise ValueError(f"{option} is for --engine emulated")
    if options.time_scale != 1.0:
        raise ValueError("--time-scale is for --engine emulated")
    return None


def server_arguments(options: argparse.Namespace, model: ServedModel, rest: Sequence[str]) -> list[str]:
    """SGLang's command line for these options. ValueError for an unknown policy or cost."""
    from sglang_fair.overlay.config import SERVER_POLICIES, STOCK_POLICIES, server_name

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
    make_cost(options.cost or "linear", options.extend_weight, options.output_weight, read=read_json)
    arguments = [
        "--model-path", model.path,
        "--served-model-name", model.served_name,
        "--load-format", model.load_format,
        "--host", options.host,
        "--port", str(options.port),
        "--page-size", str(options.page_size),
        "--schedule-policy", policy,
        "--fair-quantum", str(options.quantum),
        "--fair-options", options.policy_options,
        "--fair-payer", options.payer,
        "--fair-client-weights", options.client_weights,
        "--enable-cache-report",
        "--log-level-http", "warning",
    ]  # fmt: skip
    for argument, value in (
        ("--fair-cost", options.cost),
        ("--fair-extend-weight", options.extend_weight),
        ("--fair-output-weight", options.output_weight),
        ("--fair-identity", options.identity),
    ):
        if value is not None:
            arguments += [argument, str(value)]
    if options.kv_port is not None:
        events = {
            "publisher": "zmq",
            "topic": "kv",
            "bind": True,
            "endpoint": f"tcp://{options.host}:{options.kv_port}",
            "replay_endpoint": f"tcp://{options.host}:{options.kv_port + 1}",
        }
        arguments += ["--kv-events-config", json.dumps(events)]
    kv_tokens, max_running = options.kv_tokens, options.max_running
    if emulates := emulation(options):
        emulates.make_cost(read_json)
        kv_tokens, max_running = kv_tokens or emulates.kv_tokens, max_running or MAX_RUNNING
        arguments += emulated.server_arguments(emulates)
    elif options.device == "cpu":
        kv_tokens, max_running = kv_tokens or 24_576, max_running or 64
        is_small = model.weight_bytes is not None and model.weight_bytes < SMALL_MODEL_BYTES
        # A prefill chunk stops everybody's streams for as long as it takes.
        arguments += [*cpu.SERVER_ARGUMENTS, "--chunked-prefill-size", "2048" if is_small else "512"]
    if kv_tokens:
        arguments += ["--max-total-tokens", str(kv_tokens)]
    if max_running:
        arguments += ["--max-running-requests", str(max_running)]
    return [*arguments, *rest]


def environment(options: argparse.Namespace) -> dict[str, str]:
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
    if emulates := emulation(options):
        return {**variables, **emulated.environment(emulates)}
    return {**variables, **(cpu.environment() if options.device == "cpu" else {})}


def main(arguments: Sequence[str] | None = None) -> int:
    options, rest = parse(sys.argv[1:] if arguments is None else arguments)
    die_with_parent()
    try:
        os.environ.update(environment(options))
        name = EMULATED + options.model if options.engine == "emulated" else options.model
        model = find(name, lambda text: print(text, file=sys.stderr, flush=True))
        argv = server_arguments(options, model, rest)
        _refuse_taken_ports(options)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"sglang-fair replica: {error}", file=sys.stderr)
        return 2
    if options.device == "cpu":
        cpu.define_torchvision_operators()
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


def _refuse_taken_ports(options: argparse.Namespace) -> None:
    ports = [options.port, *((options.kv_port, options.kv_port + 1) if options.kv_port is not None else ())]
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.host, port))
            except OSError as error:
                raise ValueError(f"port {port} on {options.host} cannot be used: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
