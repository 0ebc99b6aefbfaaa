"""The processes of a cluster, decided before any is started: from options and facts to command lines. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from router.batches.folder import absolute
from router.events import WorkerUp
from router.gateway.settings import limits_in
from router.replica_lists import specs
from sglang_fair.cluster.gpus import Gpu, Machine, environment
from sglang_fair.cluster.options import ConfigError, Device, Options, extra_argument, page_tokens
from sglang_fair.cluster.ports import Ports, ReplicaPorts
from sglang_fair.core.cost import Cost, Linear, describe
from sglang_fair.core.policy import DEFAULT_QUANTUM
from sglang_fair.settings import table
from sglang_fair.settings.program import shared
from sglang_fair.settings.setting import command_line

Role = Literal["fork-server", "replica", "fleet", "router", "agent", "gateway", "dashboard", "feeder"]

STAGES: tuple[tuple[Role, ...], ...] = (
    ("fork-server",), ("replica", "fleet", "router"), ("agent",), ("gateway", "dashboard"), ("feeder",)
)  # fmt: skip
"""The order in which they are started, and backwards stopped. The gateway comes after what it needs, so that its port
opens only when there is something behind it."""

VITAL: tuple[Role, ...] = ("fork-server", "fleet", "router", "gateway")
"""Without one of these a cluster cannot go on."""

GATEWAY_DRAIN_S = 5
"""Time for open requests when the cluster is stopped."""


@dataclass(frozen=True)
class Program:
    """What a role runs: `python -m module`, with settings of that class."""

    module: str
    settings: type
    stop_grace_s: float
    ready: str = ""
    """As `Process.ready`; "": an address."""
    start_s: float = 120.0
    """Longest wait for that."""


PROGRAMS: Mapping[Role, Program] = {
    "fork-server": Program(
        "sglang_fair.engines.fork_server", table.Replica, 5.0, "ready to fork replicas", 300.0
    ),
    "replica": Program("sglang_fair.engines.replica", table.Replica, 10.0),
    # It waits for its replicas on other machines.
    "fleet": Program("sglang_fair.cluster.on_ray", table.Replica, 20.0, "all replicas are ready"),
    "router": Program("router", table.Router, 3.0, "router ready"),
    "agent": Program("sglang_fair.agent", table.AgentSettings, 3.0, "agent ready"),
    "gateway": Program("router.gateway", table.Gateway, GATEWAY_DRAIN_S + 2.0),
    "dashboard": Program("sglang_fair.dashboard", table.Dashboard, 3.0),
    "feeder": Program("router.feeder", table.Feeder, 5.0, "feeder ready"),
}

LOCAL = "127.0.0.1"
"""Replicas and router listen here only: they believe the names that a gateway gives clients."""

LOADS_S = {"cpu": 600.0, "cuda": 9_600.0}
"""Longest wait for weights from a cold disk, and on GPUs for kernels: SGLang 0.5.23 gives the compilation of DeepGEMM's
"typically 10-20 mins" (compile_utils.py, at its start); 400 GB at 50 MB/s take 8,000 s."""

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Model:
    """A model on disk."""

    folder: Path
    served_name: str
    wanted: str | None = None
    """What --model is for a replica that has it; None: as the operator says."""


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
    """Which of several it has, or begins with; "": the only one, which gateways may call as they like."""
    models: tuple[str, ...] = ()
    """Those that it can load in turn, the first one first; its agent says which it has. (): it keeps its own."""

    def renamed(self, name: str) -> "Replica":
        return replace(self, name=name, settings={**self.settings, "name": name})


@dataclass(frozen=True)
class FleetFiles:
    """Where the process that has the replicas on other machines reads its settings, where it lists them, and where it
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
    ready: str
    """It is when a line of its output has this, or when GET answers 200 there."""
    ready_timeout_s: float
    stop_grace_s: float
    env: Mapping[str, str] = field(default_factory=UNBUFFERED.copy)
    """On top of the supervisor's own environment."""
    certificate: str | None = None
    """The file with the certificate that it must show at `ready`, where that is an https:// address."""
    worker: WorkerUp | None = None
    """For a replica: what the router must know of it."""
    fork_server: str | None = None
    """The abstract socket of the fork server that starts this process with the arguments `argv`.
    None: `argv` is a command line."""
    gpus: tuple[Gpu, ...] = ()
    """For a replica: the GPUs that it uses alone."""
    ports: ReplicaPorts | None = None
    """Those that it listens at."""
    lists: int = 0
    """Replicas in a list of its own: it is not ready before the router has read it."""
    says_why: bool = False
    """Whether its last line says, by itself, why it ended."""

    @property
    def models(self) -> tuple[str, ...]:
        """Those that a replica has or can load, the first one first; "" is the only one of a cluster."""
        return (self.worker.models if self.worker is not None else ()) or ("",)


@dataclass(frozen=True)
class Plan:
    """All processes of a cluster. `router` is the router's address, `router_http` that of its HTTP server; None in a
    plan without one."""

    processes: tuple[Process, ...]
    router: str | None = None
    router_http: str | None = None

    def of(self, *roles: Role) -> tuple[Process, ...]:
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
    router, certificate = router_address(ports), shared(options, table.Certified)["tls_cert"]
    gateway = served_url(options, options.host, ports.gateway)
    found: list[Process] = []
    if (fork_server := fork_server_name(device, ports)) and fleet is None:
        engine = shared(options, table.Engine) | {"device": device, "model": each[0].wanted or options.model}
        one = _process(options, machine, "fork-server", engine, fork_server)
        found.append(replace(one, env={**one.env, "OPENBLAS_NUM_THREADS": "1"}))  # a fork would lose threads
    replicas = [
        local(options, device, machine, index, model, own, ports, gpus[index] if gpus else (), swaps.get(index, ()))
        for index, (model, own) in enumerate(zip(each, ports.replicas, strict=False))
    ]  # fmt: skip
    found += replicas
    if fleet:
        one = _process(options, machine, "fleet", {}, str(fleet.settings))
        start_s = options.ray_wait_s + ready_timeout_s(options, device, machine) + one.stop_grace_s
        found.append(replace(one, ready_timeout_s=start_s, says_why=True, lists=len(each)))
    settings = _router_settings(options, router) | {"replicas_file": fleet and str(fleet.listed)}
    workers = tuple(one.worker for one in replicas if one.worker is not None)
    found.append(with_workers(_process(options, machine, "router", settings), workers))
    found += [
        agent(options, machine, replicas[index], can_load, router)
        for index, can_load in sorted(swaps.items())
    ]
    settings = _gateway_settings(options, _served(options, each, swaps), router, ports.gateway)
    one = _process(options, machine, "gateway", settings, ready=f"{gateway}/health")
    found.append(replace(one, certificate=certificate))
    if options.dashboard_port:
        found.append(_process(options, machine, "dashboard", {  # on this machine: what shows it to others has a key
            "gateway": admin_url(options) or gateway, "gateway_cert": certificate, "port": options.dashboard_port,
        }, ready=f"{dashboard_url(options)}/health"))  # fmt: skip
    if options.batches:
        found.append(_process(options, machine, "feeder", {
            **shared(options, table.Feeder), "batches": absolute(options.batches), "gateway": gateway,
            "gateway_cert": certificate,
        }))  # fmt: skip
    http = options.router_http_port
    return Plan(tuple(found), router, None if http is None else f"http://{LOCAL}:{http}")


def router_address(ports: Ports) -> str:
    """A name on this machine, which needs no port; that of the router is nobody else's."""
    return f"ipc://@sglang-fair/router/{ports.router}"


def fork_server_name(device: Device, ports: Ports) -> str | None:
    """The socket of the fork server of a cluster whose replicas compute on this device."""
    return f"sglang-fair/fork-server/{ports.router}" if device == "cpu" else None


def _process(
    options: Options, machine: Machine, role: Role, values: Mapping[str, Any], *before: str, ready: str = ""
) -> Process:
    program = PROGRAMS[role]
    return Process(
        name=role, role=role,
        argv=(machine.python, "-m", program.module, *before, *command_line(program.settings, values)),
        ready=ready or program.ready,
        ready_timeout_s=options.start_timeout_s or program.start_s, stop_grace_s=program.stop_grace_s,
    )  # fmt: skip


def local(
    options: Options,
    device: Device,
    machine: Machine,
    number: int,
    model: Model,
    own: ReplicaPorts,
    ports: Ports,
    gpus: tuple[Gpu, ...],
    can_load: Sequence[Model],
) -> Process:
    """A replica on this machine."""
    (one,) = replicas_for(options, device, machine, (model,), {0: can_load}, first=number)
    return placed(one, LOCAL, own, machine.python, gpus, fork_server_name(device, ports))


def agent(
    options: Options, machine: Machine, replica: Process, can_load: Sequence[Model], router: str
) -> Process:
    """Of a replica that can load several models."""
    assert replica.worker is not None
    settings = {
        "worker": replica.name, "replica": replica.worker.url, "router": router,
        "keys": shared(options, table.Keyed)["keys"],
        "models": ",".join(f"{model.served_name}={model.folder}" for model in can_load),
    }  # fmt: skip
    return replace(_process(options, machine, "agent", settings), name=agent_name(replica.name))


def _router_settings(options: Options, router: str) -> dict[str, Any]:
    cost = options.service_cost()  # of which the router knows the linear part
    return shared(options, table.Router) | {
        "bind": router,
        "extend_weight": cost.extend_weight,
        "output_weight": cost.output_weight,
        "client_weights": options.client_weights or None,
        "quantum": DEFAULT_QUANTUM if options.quantum is None else options.quantum,
        "parameter": [f"{name}={json.dumps(value)}" for name, value in options.placement_parameters().items()],
        "page_size": page_tokens(options.extra),
        "http_host": LOCAL,
        "http_port": options.router_http_port,
        "notice_s": 0.0,
        "tls_cert": None,  # on this machine it is served over http
        "tls_key": None,
    }  # fmt: skip


def _gateway_settings(options: Options, models: Sequence[Model], router: str, port: int) -> dict[str, Any]:
    first, *more = models
    return {
        **shared(options, table.Gateway),
        "port": port,
        "router": (router,),
        "model_name": first.served_name,
        "tokenizer": str(first.folder),
        "more_models": ",".join(f"{one.served_name}={one.folder}" for one in more) or None,
        "workers": options.gateway_workers,
        "drain_s": GATEWAY_DRAIN_S,
        "notice_s": 0.0,
        "batches": absolute(options.batches),
        **limits_in(options.gateway_options),
    }


def _served(
    options: Options, each: Sequence[Model], swaps: Mapping[int, Sequence[Model]]
) -> tuple[Model, ...]:
    found = {model.served_name: model for models in (each, *swaps.values()) for model in models}
    names = [name for name in options.model_names() if name in found]
    return tuple(found[name] for name in (names if options.models else found))


def agent_name(replica: str) -> str:
    return "a" + replica.removeprefix("r")


def with_workers(router: Process, workers: Sequence[WorkerUp]) -> Process:
    """The router process, started with these replicas."""
    argv = list(router.argv)
    while "--worker" in argv:
        at = argv.index("--worker")
        del argv[at : at + 2]
    known = command_line(table.Router, {"worker": [specs.written(worker) for worker in workers]})
    return replace(router, argv=(*argv, *known))


def ready_timeout_s(options: Options, device: Device, machine: Machine) -> float:
    """Longest wait for a replica that neither answers nor ends: for its imports on shared cores, for weights, and on
    GPUs for kernels and graphs that are made at the first start."""
    sharing = math.ceil(options.replicas / machine.cores)
    return options.start_timeout_s or 300.0 + 120.0 * sharing + LOADS_S[device]


def replicas_for(
    options: Options,
    device: Device,
    machine: Machine,
    models: Sequence[Model],
    swaps: Mapping[int, Sequence[Model]] = MappingProxyType({}),
    first: int = 0,
) -> tuple[Replica, ...]:
    """The replicas of a cluster, one for each of `models`, from the number `first` on; `swaps` by the model's place."""
    known = {
        **shared(options, table.Replica),
        "device": device,
        **_cost(options.service_cost()),
        "identity": None,  # the gateway has put the name into a header
        "apps": None,  # and that, too
    }
    return tuple(
        Replica(
            name=f"r{first + index}",
            settings={
                "name": f"r{first + index}",  # the first word: a forked replica's title has it
                **known,
                "model": model.wanted or options.model,
                "served_name": model.served_name if options.models else None,
            },
            log_level=options.log_level,
            ready_timeout_s=ready_timeout_s(options, device, machine),
            model=model.served_name if options.models else "",
            models=tuple(one.served_name for one in swaps.get(index, ())),
        )
        for index, model in enumerate(models)
    )


def _cost(cost: Cost) -> dict[str, Any]:
    """The replica's settings for this cost. A linear cost's weights stay apart, so that they win over the ones in the
    environment."""
    if isinstance(cost, Linear):
        return {"cost": Linear.name, "extend_weight": cost.extend_weight, "output_weight": cost.output_weight}
    return {"cost": describe(cost), "extend_weight": None, "output_weight": None}


def placed(
    replica: Replica,
    host: str,
    ports: ReplicaPorts,
    python: str,
    gpus: tuple[Gpu, ...] = (),
    fork_server: str | None = None,
) -> Process:
    """The replica on the machine with the address `host`."""
    program, extra = PROGRAMS["replica"], replica.settings["extra"]
    at = f"[{host}]" if ":" in host else host
    scheme = "https" if extra_argument(extra, "--ssl-certfile") else "http"
    worker = WorkerUp(
        replica.name,
        f"{scheme}://{at}:{ports.http}",
        f"tcp://{at}:{ports.kv}",
        f"tcp://{at}:{ports.kv + 1}",
        load=None if ports.load is None else f"tcp://{at}:{ports.load}",
        models=replica.models or ((replica.model,) if replica.model else ()),
        loaded="" if replica.models else replica.model,
    )
    ours = ("--log-level", replica.log_level, "--nccl-port", str(ports.rendezvous))
    values = {
        **replica.settings,
        "host": host,
        "port": ports.http,
        "kv_port": ports.kv,
        "load_port": ports.load,
        "extra": (*ours, *extra),
    }
    command = () if fork_server else (python, "-m", program.module)
    return Process(
        name=replica.name,
        role="replica",
        argv=(*command, *command_line(program.settings, values)),
        ready=f"{worker.url}/ready",
        ready_timeout_s=replica.ready_timeout_s,
        stop_grace_s=program.stop_grace_s,
        env={**UNBUFFERED, **environment(gpus)},
        worker=worker,
        fork_server=fork_server,
        gpus=gpus,
        ports=ports,
    )


def served_url(options: Options, host: str, port: int) -> str:
    """Where this machine reaches what a cluster's gateway serves at `host`."""
    return gateway_url(host, port, is_secure=options.tls_cert is not None)


def gateway_url(host: str, port: int, *, is_secure: bool = False) -> str:
    """Where to send requests from this machine."""
    host = {"0.0.0.0": LOCAL, "::": "::1", "": LOCAL}.get(host, host)
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def admin_url(options: Options) -> str | None:
    return None if options.admin_port is None else served_url(options, options.admin_host, options.admin_port)


def dashboard_url(options: Options) -> str | None:
    return None if options.dashboard_port is None else gateway_url(LOCAL, options.dashboard_port)
