"""The processes of a cluster, decided before any is started: from options and facts to command lines. Pure."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from router.batches.folder import absolute
from router.gateway import limits
from sglang_fair.cluster.gpus import Gpu, environment
from sglang_fair.cluster.options import ConfigError, Device, Options, extra_argument, page_tokens
from sglang_fair.cluster.ports import Ports, ReplicaPorts
from sglang_fair.core.cost import Cost, Linear, describe
from sglang_fair.core.policy import DEFAULT_QUANTUM
from sglang_fair.settings import table
from sglang_fair.settings.setting import command_line, shared

Role = Literal["fork-server", "replica", "fleet", "router", "agent", "gateway", "dashboard", "feeder"]

START_ORDER: tuple[tuple[Role, ...], ...] = (
    ("fork-server",),
    ("replica", "fleet", "router"),
    ("agent",),
    ("gateway", "dashboard"),
    ("feeder",),
)
"""The gateway comes last, so that its port opens only when there is something behind it."""

STOP_ORDER: tuple[tuple[Role, ...], ...] = (
    ("feeder",),
    ("gateway", "dashboard"),
    ("agent",),
    ("router",),
    ("replica", "fleet"),
    ("fork-server",),
)

DISPENSABLE: tuple[Role, ...] = ("dashboard", "agent", "feeder")
"""Without these a cluster goes on."""

LOCAL = "127.0.0.1"
"""Replicas and router listen here only: they believe the names that a gateway gives clients."""

REPLICA_GRACE_S = 10.0
"""Time for a replica to finish when it is stopped."""

FLEET_GRACE_S = REPLICA_GRACE_S + 10.0
"""The same for the process that has replicas on other machines: it waits for theirs."""

GATEWAY_DRAIN_S = 5
"""Time for open requests when the cluster is stopped."""

REPLICA_OVERHEAD_BYTES = 1_000_000_000
"""Private memory of a CPU replica's three processes and its KV pool, besides the weights."""

FORK_SERVER_BYTES = 1_000_000_000
"""What replicas on a CPU share: everything that a replica imports."""

FRONT_BYTES = 600_000_000
"""Router, gateway and supervisor together."""

LOAD_BYTES_PER_S = 50e6
"""Of a slow network disk, or a download."""

KERNELS_S = 1200.0
"""SGLang 0.5.23 gives the compilation of DeepGEMM's kernels "typically 10-20 mins" (compile_utils.py, at its start)."""

UNKNOWN_BYTES = 400_000_000_000
"""Weights of a model that does not say how heavy it is: as of 200 billion parameters in 16 bits."""

FEEDER_READY = "feeder ready"
"""The same of the feeder: it looks for batches."""

FLEET_READY = "all replicas are ready"
"""The same of the process that has replicas on other machines."""

FORK_SERVER_READY = "ready to fork replicas"
"""A line of the fork server's output that contains this says that it listens."""

AGENT_READY = "agent ready"
"""The same of an agent's output: the router knows what its replica has."""


@dataclass(frozen=True)
class Machine:
    """What a cluster can run on. `gpus` are those that CUDA_VISIBLE_DEVICES allows, also where others use them."""

    cores: int
    available_bytes: int
    gpus: tuple[Gpu, ...]
    cuda_build: bool
    """Whether the SGLang that is installed has its GPU kernels."""
    python: str


@dataclass(frozen=True)
class Model:
    """A model on disk. `weights_bytes` is its size in the precision that it is stored in."""

    folder: Path
    served_name: str
    weights_bytes: int
    asked: str | None = None
    """What --model is for a replica that has it; None: as the operator says."""


@dataclass(frozen=True)
class HttpReady:
    """Ready when GET `url` answers 200."""

    url: str
    certificate: str | None = None
    """A file with the certificate that it must show, where it is served over https."""


@dataclass(frozen=True)
class LineReady:
    """Ready when a line of its output contains `text`."""

    text: str


@dataclass(frozen=True)
class RouterReady:
    """Ready when the router at `endpoint` answers a query."""

    endpoint: str
    keys: str | None = None
    """The folder with the keys that it is asked with."""


@dataclass(frozen=True)
class FleetReady:
    """Ready when it has said so, and the router at `endpoint` knows as many replicas as are asked of it."""

    endpoint: str
    replicas: int
    keys: str | None = None
    """The folder with the keys that the router is asked with."""


Ready = HttpReady | LineReady | RouterReady | FleetReady


@dataclass(frozen=True)
class Worker:
    """A replica as the router knows it."""

    name: str
    url: str
    kv: str
    replay: str
    load: str | None = None
    """Where it says how much it has to do, if the router wants to know."""
    model: str = ""
    """Which of several it has, or begins with; "": the only one, which gateways may call as they like."""
    models: tuple[str, ...] = ()
    """Those that it can load in turn; its agent says which it has. (): it keeps its own."""

    @property
    def all_models(self) -> tuple[str, ...]:
        """The one that it has or begins with, and those that it can load."""
        return self.model, *self.models


@dataclass(frozen=True)
class Replica:
    """A replica before it has an address: all but its host, its ports and its GPUs."""

    name: str
    settings: Mapping[str, Any]
    """Of `table.Replica`; values that JSON has."""
    log_level: str
    """SGLang's."""
    ready_timeout_s: float
    model: str = ""
    models: tuple[str, ...] = ()
    """As those of `Worker`."""

    @property
    def all_models(self) -> tuple[str, ...]:
        """As those of `Worker`."""
        return self.model, *self.models

    def renamed(self, name: str) -> "Replica":
        """Another one like it."""
        settings = dict(self.settings)
        if settings.get("normal") is not None:
            settings["normal"] = settings["normal"].removesuffix(self.name) + name
        return replace(self, name=name, settings=settings | {"name": name})


@dataclass(frozen=True)
class FleetFiles:
    """Where the process that has the replicas on other machines reads what they are, where it lists them, and where it
    is asked for changes."""

    settings: Path
    listed: Path
    control: Path


@dataclass(frozen=True)
class Process:
    """One process: what to run, how to see that it is ready, and how long to wait for that and for its end."""

    name: str
    role: Role
    argv: tuple[str, ...]
    ready: Ready
    ready_timeout_s: float
    stop_grace_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the supervisor's own environment."""
    worker: Worker | None = None
    """For a replica: what the router must know of it."""
    fork_server: str | None = None
    """The abstract socket of the fork server that starts this process with the arguments `argv`.
    None: `argv` is a command line."""
    gpus: tuple[Gpu, ...] = ()
    """For a replica: the GPUs that it uses alone."""
    says_why: bool = False
    """Whether its last line says, by itself, why it ended."""


@dataclass(frozen=True)
class Plan:
    """All processes of a cluster. `router` is the router's address, `router_http` that of its HTTP server; None in a
    plan without one. Raises ValueError when two processes have one name."""

    processes: tuple[Process, ...]
    router: str | None = None
    router_http: str | None = None

    def __post_init__(self) -> None:
        names = [process.name for process in self.processes]
        if len(set(names)) < len(names):
            raise ValueError(f"two processes of one name: {', '.join(names)}")

    def of(self, *roles: Role) -> tuple[Process, ...]:
        """The processes of these roles, in the plan's order."""
        return tuple(process for process in self.processes if process.role in roles)


def choose_device(wanted: str, machine: Machine) -> Device:
    """`cpu` or `cuda` for `auto`; raises `ConfigError` if the machine does not have what is wanted."""
    if wanted == "cpu":
        return "cpu"
    if machine.gpus and machine.cuda_build:
        return "cuda"
    if wanted == "auto":
        return "cpu"
    if not machine.gpus:
        raise ConfigError(
            "--device cuda: no GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES); try --device cpu"
        )
    raise ConfigError("--device cuda: this installation is for CPUs; run: sglang-fair install cuda")


def each_model(options: Options, models: Model | Sequence[Model]) -> tuple[Model, ...]:
    """Each replica's, where `models` is one for all of them, or is that already."""
    return (models,) * options.replicas if isinstance(models, Model) else tuple(models)


def check_memory(options: Options, device: Device, machine: Machine, models: Model | Sequence[Model]) -> None:
    """Raises `ConfigError` when the replicas cannot fit in memory. On GPUs SGLang checks itself. `models` as in
    `each_model`."""
    if device != "cpu":
        return
    each = each_model(options, models)
    overhead = REPLICA_OVERHEAD_BYTES if options.emulation() is None else 0
    needs, shared = [model.weights_bytes + overhead for model in each], FRONT_BYTES + FORK_SERVER_BYTES
    needed = sum(needs) + shared
    if needed > machine.available_bytes:
        fit = sum(total <= machine.available_bytes - shared for total in accumulate(needs))
        which = ", ".join(dict.fromkeys(model.asked or options.model for model in each))
        raise ConfigError(
            f"too little memory: {len(each)} replicas of {which} need about {_gb(needed)}, "
            f"{_gb(machine.available_bytes)} are available; {fit} would fit (--replicas)"
        )


def build(
    options: Options,
    device: Device,
    machine: Machine,
    models: Model | Sequence[Model],
    ports: Ports,
    gpus: Sequence[tuple[Gpu, ...]] = (),
    swaps: Mapping[int, Sequence[Model]] = MappingProxyType({}),
    fleet: FleetFiles | None = None,
) -> Plan:
    """The processes of the cluster. `models` are as in `each_model`, `gpus` those of each replica, if it computes on
    any, `swaps` the models that a replica can load, by its number. With a `fleet` replicas run on other machines."""
    each = each_model(options, models)
    router = f"tcp://{LOCAL}:{ports.router}"
    fork_server = f"sglang-fair/fork-server/{ports.router}" if device == "cpu" and fleet is None else None
    replicas = tuple(
        placed(one, LOCAL, port, machine.python, gpus[index] if gpus else (), fork_server)
        for index, (one, port) in enumerate(
            zip(replicas_for(options, device, machine, each, swaps), ports.replicas, strict=False)
        )
    )
    workers = tuple(one.worker for one in replicas if one.worker is not None)
    return Plan(
        processes=(
            *((_fork_server(options, machine, each[0], fork_server),) if fork_server else ()),
            *replicas,
            *((_fleet(options, device, machine, each, fleet, router),) if fleet else ()),
            _router(options, machine, router, workers, None if fleet is None else fleet.listed),
            *(
                _agent(options, machine, workers[index], can_load, router)
                for index, can_load in sorted(swaps.items())
            ),
            _gateway(options, machine, _served(options, each, swaps), router, ports.gateway),
            *((_dashboard(options, machine, ports.gateway),) if options.dashboard_port else ()),
            *((_feeder(options, machine, ports.gateway),) if options.batches else ()),
        ),
        router=router,
        router_http=None if (port := options.router_http_port) is None else f"http://{LOCAL}:{port}",
    )  # fmt: skip


def agent_name(replica: str) -> str:
    """What the agent beside a replica is called."""
    return "a" + replica.removeprefix("r")


def _served(
    options: Options, each: Sequence[Model], swaps: Mapping[int, Sequence[Model]]
) -> tuple[Model, ...]:
    """All models, in the order of --models."""
    found = {model.served_name: model for models in (each, *swaps.values()) for model in models}
    names = [name for name in options.model_names() if name in found]
    return tuple(found[name] for name in (names if options.models else found))


def with_workers(router: Process, workers: Sequence[Worker]) -> Process:
    """The router process, started with these replicas."""
    argv = list(router.argv)
    while "--worker" in argv:
        at = argv.index("--worker")
        del argv[at : at + 2]
    return replace(router, argv=(*argv, *_worker_arguments(workers)))


def ready_timeout_s(options: Options, device: Device, machine: Machine, model: Model) -> float:
    """Longest wait for a replica that neither answers nor ends: for its imports on shared cores, for weights from a
    cold disk, and on GPUs for kernels and graphs that are made at the first start."""
    if options.start_timeout_s is not None:
        return options.start_timeout_s
    sharing = math.ceil(options.replicas / machine.cores)
    if device == "cpu":
        return 300.0 + 120.0 * sharing + model.weights_bytes / LOAD_BYTES_PER_S
    return 600.0 + 60.0 * sharing + KERNELS_S + (model.weights_bytes or UNKNOWN_BYTES) / LOAD_BYTES_PER_S


def gateway_url(host: str, port: int, *, is_secure: bool = False) -> str:
    """Where to send requests from this machine."""
    host = {"0.0.0.0": LOCAL, "::": "::1", "": LOCAL}.get(host, host)
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def served_url(options: Options, host: str, port: int) -> str:
    """Where this machine reaches what a cluster's gateway serves at `host`."""
    return gateway_url(host, port, is_secure=options.tls_cert is not None)


def curl_example(url: str, model: str = "default", *, has_tenants: bool = False) -> str:
    """A request to paste into a shell."""
    who = "authorization: Bearer KEY" if has_tenants else "x-fair-client: alice"
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
            "max_tokens": 32,
        }
    )
    return (
        f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"  -H '{who}' -d {shlex.quote(body)}"
    )


def replicas_for(
    options: Options,
    device: Device,
    machine: Machine,
    models: Sequence[Model],
    swaps: Mapping[int, Sequence[Model]] = MappingProxyType({}),
) -> tuple[Replica, ...]:
    """The replicas of a cluster, one for each of `models`; `swaps` as in `build`."""
    return tuple(
        Replica(
            name=f"r{index}",
            settings={
                "name": f"r{index}",
                **shared(options, table.Replica),
                "model": model.asked or options.model,
                "served_name": model.served_name if options.models else None,
                "device": device,
                "extra": options.extra,
                **_cost(options.service_cost()),
                "keys": _path(options.keys),
                "identity": None,  # the gateway has put the name into a header
                "normal": None if options.normal is None else f"{Path(options.normal).absolute()}.r{index}",
                "apps": None,  # the gateway has put that into a header, too
            },
            log_level=options.log_level,
            ready_timeout_s=ready_timeout_s(options, device, machine, model),
            model=model.served_name if options.models else "",
            models=tuple(one.served_name for one in swaps.get(index, ())),
        )
        for index, model in enumerate(models)
    )


def placed(
    replica: Replica,
    host: str,
    ports: ReplicaPorts,
    python: str,
    gpus: tuple[Gpu, ...] = (),
    fork_server: str | None = None,
) -> Process:
    """The replica on the machine with the address `host`."""
    at = f"[{host}]" if ":" in host else host
    worker = Worker(
        name=replica.name,
        url=f"{scheme(replica.settings['extra'])}://{at}:{ports.http}",
        kv=f"tcp://{at}:{ports.kv}",
        replay=f"tcp://{at}:{ports.kv + 1}",
        load=None if ports.load is None else f"tcp://{at}:{ports.load}",
        model=replica.model,
        models=replica.models,
    )
    values = {
        **replica.settings,
        "host": host,
        "port": ports.http,
        "kv_port": ports.kv,
        "load_port": ports.load,
        "extra": (
            "--log-level",
            replica.log_level,
            "--nccl-port",
            str(ports.rendezvous),
            *replica.settings["extra"],
        ),
    }
    command = () if fork_server else (python, "-m", "sglang_fair.engines.replica")
    return Process(
        name=replica.name,
        role="replica",
        argv=(*command, *command_line(table.Replica, values)),
        ready=HttpReady(f"{worker.url}/ready"),
        ready_timeout_s=replica.ready_timeout_s,
        stop_grace_s=REPLICA_GRACE_S,
        env={
            "PYTHONUNBUFFERED": "1",
            **environment(gpus),
        },
        worker=worker,
        fork_server=fork_server,
        gpus=gpus,
    )


def scheme(extra: Sequence[str]) -> str:
    """How a replica with these arguments is spoken to."""
    return "https" if extra_argument(extra, "--ssl-certfile") else "http"


def _fleet(
    options: Options,
    device: Device,
    machine: Machine,
    models: Sequence[Model],
    files: FleetFiles,
    router: str,
) -> Process:
    slowest_s = max(ready_timeout_s(options, device, machine, model) for model in models)
    return Process(
        name="fleet",
        role="fleet",
        argv=(machine.python, "-m", "sglang_fair.cluster.on_ray", str(files.settings)),
        ready=FleetReady(router, len(models), _path(options.keys)),
        ready_timeout_s=options.ray_wait_s + slowest_s + FLEET_GRACE_S,
        stop_grace_s=FLEET_GRACE_S,
        env={"PYTHONUNBUFFERED": "1"},
        says_why=True,
    )


def _fork_server(options: Options, machine: Machine, model: Model, name: str) -> Process:
    known = shared(options, table.Engine) | {"device": "cpu", "model": model.asked or options.model}
    engine = command_line(table.Replica, known)
    return Process(
        name="fork-server",
        role="fork-server",
        argv=(machine.python, "-m", "sglang_fair.engines.fork_server", name, *engine),
        ready=LineReady(FORK_SERVER_READY),
        ready_timeout_s=options.start_timeout_s or 300.0,
        stop_grace_s=5.0,
        env={
            "PYTHONUNBUFFERED": "1",
            "OPENBLAS_NUM_THREADS": "1",  # numpy's threads, which a fork would lose
        },
    )


def _cost(cost: Cost) -> dict[str, Any]:
    """The replica's settings for this cost. A linear cost's weights stay apart, so that they win over the ones in the
    environment."""
    if isinstance(cost, Linear):
        return {"cost": Linear.name, "extend_weight": cost.extend_weight, "output_weight": cost.output_weight}
    return {"cost": describe(cost), "extend_weight": None, "output_weight": None}


def _router(
    options: Options, machine: Machine, router: str, workers: tuple[Worker, ...], listed: Path | None
) -> Process:
    cost = options.service_cost()  # of which the router knows the linear part
    values = shared(options, table.Router) | {
        "bind": router,
        "extend_weight": cost.extend_weight,
        "output_weight": cost.output_weight,
        "client_weights": options.client_weights or None,
        "quantum": DEFAULT_QUANTUM if options.quantum is None else options.quantum,
        "parameter": [
            f"{name}={json.dumps(value)}" for name, value in options.placement_parameters().items()
        ],
        "page_size": page_tokens(options.extra),
        "swap_finish_s": options.swap_finish_s,
        "replicas_file": None if listed is None else str(listed),
        "replica_ca": _path(options.replica_ca),
        "limits": _path(options.limits),
        "http_host": LOCAL,
        "http_port": options.router_http_port,
        "keys": _path(options.keys),
        "tls_cert": None,  # on this machine it is served over http
        "tls_key": None,
    }
    return Process(
        name="router",
        role="router",
        argv=(
            machine.python,
            "-m",
            "router",
            *command_line(table.Router, values),
            *_worker_arguments(workers),
        ),
        ready=RouterReady(router, _path(options.keys)),
        ready_timeout_s=options.start_timeout_s or 120.0,
        stop_grace_s=3.0,
        env={"PYTHONUNBUFFERED": "1"},
    )


def _worker_arguments(workers: Sequence[Worker]) -> list[str]:
    return command_line(table.Router, {"worker": [written(worker) for worker in workers]})


def written(worker: Worker) -> str:
    """A replica in words, as routers' command lines and lists have it (`router.replica_lists.specs`)."""
    return (
        f"{worker.name},http={worker.url},kv={worker.kv},replay={worker.replay}"
        + (f",load={worker.load}" if worker.load else "")
        + (f",model={'|'.join(worker.models) or worker.model}" if worker.model else "")
    )


def _agent(
    options: Options, machine: Machine, worker: Worker, can_load: Sequence[Model], router: str
) -> Process:
    values = {
        "worker": worker.name,
        "replica": worker.url,
        "router": router,
        "models": ",".join(f"{model.served_name}={model.folder}" for model in can_load),
        "keys": _path(options.keys),
    }
    return Process(
        name=agent_name(worker.name),
        role="agent",
        argv=(machine.python, "-m", "sglang_fair.agent", *command_line(table.AgentSettings, values)),
        ready=LineReady(AGENT_READY),
        ready_timeout_s=options.start_timeout_s or 120.0,
        stop_grace_s=3.0,
        env={"PYTHONUNBUFFERED": "1"},
    )


def _gateway(options: Options, machine: Machine, models: Sequence[Model], router: str, port: int) -> Process:
    first, *more = {model.served_name: model for model in models}.values()
    values = {
        "host": options.host,
        "port": port,
        "router": (router,),
        "model_name": first.served_name,
        "tokenizer": str(first.folder),
        "more_models": ",".join(f"{one.served_name}={one.folder}" for one in more) or None,
        "workers": options.gateway_workers,
        "drain_s": GATEWAY_DRAIN_S,
        "notice_s": 0.0,
        "log_level": options.log_level,
        "log_format": options.log_format,
        "identity": options.identity,
        "metrics_clients": options.metrics_clients,
        "apps": _path(options.apps),
        **shared(options, table.Access),
        **shared(options, table.Tracing),
        **shared(options, table.Deadlines),
        **shared(options, table.Exposed),
        **shared(options, table.Fields),
        "names": options.names,
        "keys": _path(options.keys),
        "replica_ca": _path(options.replica_ca),
        "tls_cert": _path(options.tls_cert),
        "tls_key": _path(options.tls_key),
        "tenants": _path(options.tenants),
        **shared(options, table.Files),
        "batches": absolute(options.batches),
        "batch_files": absolute(options.batch_files),
        **limits.parse(options.gateway_options),
    }
    return Process(
        name="gateway",
        role="gateway",
        argv=(machine.python, "-m", "router.gateway", *command_line(table.Gateway, values)),
        ready=HttpReady(f"{served_url(options, options.host, port)}/health", _path(options.tls_cert)),
        ready_timeout_s=options.start_timeout_s or 120.0,
        stop_grace_s=GATEWAY_DRAIN_S + 2.0,
        env={"PYTHONUNBUFFERED": "1"},
    )


def _feeder(options: Options, machine: Machine, gateway_port: int) -> Process:
    assert options.batches is not None
    values = {
        **shared(options, table.Feeder),
        "batches": absolute(options.batches),
        "batch_files": absolute(options.batch_files),
        "gateway": served_url(options, options.host, gateway_port),
        "gateway_cert": _path(options.tls_cert),
    }
    return Process(
        name="feeder",
        role="feeder",
        argv=(machine.python, "-m", "router.feeder", *command_line(table.Feeder, values)),
        ready=LineReady(FEEDER_READY),
        ready_timeout_s=options.start_timeout_s or 120.0,
        stop_grace_s=5.0,
        env={"PYTHONUNBUFFERED": "1"},
    )


def _dashboard(options: Options, machine: Machine, gateway_port: int) -> Process:
    """Listens on this machine: whoever shows the page to others does so with a key, by itself."""
    assert options.dashboard_port is not None
    values = {
        "gateway": admin_url(options) or served_url(options, options.host, gateway_port),
        "gateway_cert": _path(options.tls_cert),
        "port": options.dashboard_port,
    }
    return Process(
        name="dashboard",
        role="dashboard",
        argv=(machine.python, "-m", "sglang_fair.dashboard", *command_line(table.Dashboard, values)),
        ready=HttpReady(f"{gateway_url(LOCAL, options.dashboard_port)}/health"),
        ready_timeout_s=options.start_timeout_s or 120.0,
        stop_grace_s=3.0,
        env={"PYTHONUNBUFFERED": "1"},
    )


def admin_url(options: Options) -> str | None:
    """Where operators ask; None: where clients do."""
    return None if options.admin_port is None else served_url(options, options.admin_host, options.admin_port)


def dashboard_url(options: Options) -> str | None:
    """Where the page is; None: nowhere."""
    return None if options.dashboard_port is None else gateway_url(LOCAL, options.dashboard_port)


def _path(given: str | None) -> str | None:
    return None if given is None else str(Path(given).absolute())


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
