"""Replicas on the nodes of a Ray cluster: `sglang-fair cluster --ray ADDRESS`.

The supervisor starts one process more, the fleet, which is Ray's driver: `python -m sglang_fair.cluster.on_ray FILE`.
It keeps a bundle free for each replica, all of them in one placement group, and has an actor in each: a process on that
node which runs our replica's, and ends when that ends. Ray starts actors again (`max_restarts`), perhaps on another
node. The fleet looks at all of them each second, and lists those that are ready in a file, which the router follows.

A replica's bundle is a GPU for each of its ranks and one CPU, unless `--ray-resources CPU=8,GPU=2,memory=64e9,NAME=1`
says otherwise, resource by resource. Neither actors nor the group are detached: they end with the driver.
"""

import asyncio
import contextlib
import io
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from router.events import WorkerUp
from router.replica_lists import specs
from sglang_fair.cluster.child import kill_session
from sglang_fair.cluster.console import TROUBLE
from sglang_fair.cluster.control import Control, Refused, Say
from sglang_fair.cluster.models import fewest
from sglang_fair.cluster.options import ConfigError, Device, Options, gpus_per_replica
from sglang_fair.cluster.plan import (
    PROGRAMS,
    FleetFiles,
    Replica,
    placed,
)
from sglang_fair.cluster.ports import Reservations
from sglang_fair.cluster.workers import ReplicaState, Workers, number
from sglang_fair.common.curve import Keys
from sglang_fair.common.pairs import split_pairs
from sglang_fair.common.processes import PARENT, child_environment, die_with_parent
from sglang_fair.common.service_keys import admin_key, feeder_key
from sglang_fair.common.tls import believed

CPU, GPU, MEMORY = "CPU", "GPU", "memory"

CARRIED = ("SGLANG_", "HF_")
"""Replicas get the variables that begin so from the cluster's environment; all others are their node's."""

KEPT = (PARENT, admin_key.variable, feeder_key.variable)
"""Of these, what is no replica's business."""

LOOK_S = 1.0
PROBE_S = 5.0
MISSED_S = 5.0
"""How long an actor may be silent before its replica is listed no more. Gateways notice by themselves that one is dead;
a link between Ray's nodes that hangs for a moment is no reason to send its requests elsewhere."""

STOP_S = PROGRAMS["fleet"].stop_grace_s - 5.0
CONNECT_S = 5.0
MISSING = "--ray needs the package ray: pip install 'sglang-fair[ray]'"

OF_A_REPLICA = re.compile(r"\((r\d+) pid=[^)]*\) ?(.*)")
"""A line of an actor's output, as Ray prints it in the driver."""


class FleetFailed(RuntimeError):
    """The fleet cannot start or go on, or Ray cannot do what is asked of it; the text is one line."""


class Gone(RuntimeError):
    """An actor does not answer; Ray starts it again."""


class FleetSettings(msgspec.Struct, frozen=True):
    """What the fleet reads from its file. `listed` is the file of replicas, `control` the socket on which changes are
    asked for, `router` the address of the one that follows the list."""

    address: str
    bundle: dict[str, float]
    wait_s: float
    replicas: tuple[Replica, ...]
    loads: bool
    """Whether replicas say how much they have to do."""
    listed: str
    control: str
    quiet: bool
    """Whether only warnings and errors of the replicas' output are shown."""
    keys: str | None
    replica_ca: str | None
    router: str


def fleet_settings(
    options: Options, device: Device, replicas: tuple[Replica, ...], files: FleetFiles, router: str
) -> FleetSettings:
    assert options.ray is not None
    return FleetSettings(
        address=options.ray, bundle=bundle(options, device), wait_s=options.ray_wait_s, replicas=replicas,
        loads=options.needs_loads(), listed=str(files.listed), control=str(files.control),
        quiet=options.quiet_replicas, keys=options.keys, replica_ca=options.replica_ca, router=router,
    )  # fmt: skip


def device(wanted: str) -> Device:
    """What replicas on the nodes compute on: GPUs, unless --device or --engine says otherwise."""
    return "cpu" if wanted == "cpu" else "cuda"


def bundle(options: Options, device: Device) -> dict[str, float]:
    ranks = gpus_per_replica(options.extra)
    found = {CPU: 1.0} | ({GPU: float(ranks)} if device == "cuda" else {})
    try:
        for name, text in split_pairs(options.ray_resources, "resource"):
            if not re.fullmatch(r"\d+(\.\d*)?(e\+?\d{1,2})?", text):
                raise ValueError(f"{name}={text} is not an amount")
            found[name] = float(text)
    except ValueError as error:
        raise ConfigError(f"--ray-resources: {error}", "ray_resources") from None
    if device == "cuda" and found[GPU] != ranks:
        raise ConfigError(
            f"--ray-resources: a replica with these arguments has {ranks} ranks, each with a GPU of its own, not "
            f"{found[GPU]:g}",
            "ray_resources",
        )
    return {name: amount for name, amount in found.items() if amount}


def check(options: Options) -> None:
    """Raises ConfigError for options that do not go together with or without --ray."""
    if options.ray is None:
        for field in ("ray_resources", "replica_ca"):
            if getattr(options, field):
                raise ConfigError(f"--{field.replace('_', '-')} is for --ray", field)
        return
    if options.ray.startswith("ray://"):
        raise ConfigError(
            "--ray takes auto or HOST:PORT of a cluster that this machine is a node of (ray start --address HOST:PORT "
            "--num-cpus 0 makes it one that runs no replica), not Ray Client's ray://",
            "ray",
        )
    if options.swap != "none":
        raise ConfigError("--swap is not there with --ray: agents run beside replicas on one machine", "swap")
    if options.scale_up:
        raise ConfigError("--scale-up is not there with --ray: use sglang-fair workers add", "scale_up")
    wanted = {"auto": options.device, "emulated": "cpu"}.get(options.engine, options.engine)
    bundle(options, device(wanted))


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the cluster's environment, what a replica on another machine gets."""
    return {
        name: value for name, value in environment.items() if name.startswith(CARRIED) and name not in KEPT
    }


def amounts(resources: Mapping[str, float]) -> str:
    """Resources in words. Ray's own marks of nodes are left out."""
    return ", ".join(
        f"{name} {amount:g}"
        for name, amount in sorted(resources.items(), key=lambda one: (one[0] not in (CPU, GPU), one[0]))
        if name != "object_store_memory" and not name.startswith("node:")
    ) or "nothing"  # fmt: skip


class Place(msgspec.Struct, frozen=True):
    """Where a replica's process is."""

    worker: WorkerUp
    node: str
    pid: int
    is_restart: bool = False


class Host:
    """The body of an actor: one replica's process on its node. It dies with the actor, and the actor with it."""

    def __init__(self, replica: Replica, environment: Mapping[str, str], loads: bool) -> None:
        """`environment` is added to the node's; `loads` as in `Reservations.choose`. Raises OSError, `PortTaken`."""
        ray: Any = import_module("ray")
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        self._name = replica.name
        self._reservations = Reservations(address)  # until this process ends
        ports = self._reservations.replica(loads)
        spec = placed(replica, address, ports, sys.executable)
        assert spec.worker is not None
        self._process = subprocess.Popen(
            spec.argv, env={**child_environment(), **environment, **spec.env}, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        node = f"{address} ({context.get_node_id()[:8]})"
        self._place = Place(spec.worker, node, self._process.pid, context.was_current_actor_reconstructed)
        self._is_stopping = False
        threading.Thread(target=self._follow, daemon=True).start()

    def __repr__(self) -> str:
        """Stands before each line of its output."""
        return self._name

    def place(self) -> Place:
        return self._place

    def stop(self) -> None:
        """Stops the replica, gently at first."""
        self._is_stopping = True
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PROGRAMS["replica"].stop_grace_s)
        asyncio.run(kill_session(self._process.pid))

    def _follow(self) -> None:
        code = self._process.wait()
        if not self._is_stopping:
            print(f"ended: exit code {code}", flush=True)
            asyncio.run(kill_session(self._process.pid))
            os._exit(1)


class Ray:
    """The nodes of a Ray cluster; this process is its driver."""

    def __init__(self, settings: FleetSettings, environment: Mapping[str, str]) -> None:
        """Connects, which takes seconds. `environment` is the replicas'. Raises `FleetFailed`."""
        _check_reachable(settings.address)
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_COLOR_PREFIX="0", RAY_DEDUP_LOGS="0")
        # Ray warns of its own future ways, which we do not use.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        ray: Any = import_module("ray")  # what mypy finds in it is typed in part
        self._ray, self._settings, self._environment = ray, settings, dict(environment)
        try:
            ray.init(address=settings.address, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
            raise FleetFailed(
                f"the Ray cluster at {settings.address} cannot be used: {_line(error)}"
            ) from None

    async def bundles(self, count: int) -> list[Any]:
        """What is kept free for so many replicas, on as many nodes as there are. Raises `FleetFailed` without room in
        time; waits in steps, so that a process that is to stop need not wait for it."""
        util: Any = import_module("ray.util.placement_group")
        wait_s, one = self._settings.wait_s, self._settings.bundle
        group = util.placement_group([one] * count, strategy="SPREAD")
        is_there = False
        try:
            until_s = asyncio.get_running_loop().time() + wait_s
            while not is_there and (left_s := until_s - asyncio.get_running_loop().time()) > 0:
                is_there = await asyncio.to_thread(group.wait, min(left_s, LOOK_S))
        finally:
            if not is_there:
                nodes = [node for node in self._ray.nodes() if node["Alive"]]
                free = self._ray.available_resources()
                with contextlib.suppress(Exception):  # it is gone with its cluster
                    util.remove_placement_group(group)
        if not is_there:
            has = "; ".join(
                f"{node['NodeManagerAddress']} has {amounts(node['Resources'])}" for node in nodes
            )
            left = amounts({name: free.get(name, 0) for name in one})
            raise FleetFailed(
                f"the Ray cluster at {self._settings.address} has no room for {count} x ({amounts(one)}) within "
                f"{wait_s:g} s: {has or 'it has no nodes'}; free are {left} in all "
                "(--replicas, --ray-resources, --ray-wait)"
            )
        return [(group, index) for index in range(count)]

    def actor(self, bundle: Any, replica: Replica) -> "Actor":
        """Ray starts it, again and again."""
        strategies: Any = import_module("ray.util.scheduling_strategies")
        one = self._settings.bundle
        rest = {name: amount for name, amount in one.items() if name not in (CPU, GPU, MEMORY)}
        made = self._ray.remote(Host).options(
            num_cpus=one.get(CPU, 0), num_gpus=one.get(GPU, 0), max_restarts=-1,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(*bundle),
            **({"memory": one[MEMORY]} if MEMORY in one else {}), **({"resources": rest} if rest else {}),
        )  # fmt: skip
        return Actor(self._ray, made.remote(replica, self._environment, self._settings.loads))

    def close(self) -> None:
        self._ray.shutdown()


class Actor:
    """A `Host` somewhere. Its methods raise `Gone`, and `FleetFailed` if Ray will not start it again."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray = ray
        self._handle = handle

    async def place(self) -> Place:
        found: Place = await self._call(self._handle.place)
        return found

    async def stop(self) -> None:
        await self._call(self._handle.stop)

    def kill(self) -> None:
        self._ray.kill(self._handle, no_restart=True)

    async def _call(self, method: Any) -> Any:
        raised = self._ray.exceptions
        try:
            return await method.remote()
        except raised.ActorUnavailableError as error:
            raise Gone(_line(error)) from None
        except raised.RayError as error:
            raise FleetFailed(f"Ray gives a replica up: {_line(error)}") from None


@dataclass
class Member:
    """A replica of the fleet."""

    replica: Replica
    bundle: Any
    actor: "Actor"
    place: Place | None = None
    is_up: bool = False
    is_draining: bool = False


class Fleet:
    """The replicas on the nodes: the crew that `Workers` changes, and the list that the router follows."""

    def __init__(self, settings: FleetSettings, nodes: Ray, say: Callable[[str], None]) -> None:
        """ValueError for authorities that cannot be read."""
        self._settings = settings
        self._nodes = nodes
        self._say = say
        self._tls = believed(settings.replica_ca)
        self._members: dict[str, Member] = {}
        self._free: list[Any] = []
        """Bundles of replicas that were drained."""
        self._kinds = {one.model: one for one in settings.replicas}
        self.was_up = False

    async def run(self) -> None:
        replicas = self._settings.replicas
        self._write()
        self._say(f"asks Ray at {self._settings.address} for room for {len(replicas)} replicas")
        connector = aiohttp.TCPConnector(ssl=self._tls or True)
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            try:
                bundles = await self._nodes.bundles(len(replicas))
                for replica, bundle in zip(replicas, bundles, strict=True):
                    self._begin(replica, bundle)
                while True:
                    await asyncio.gather(*(self._look(one, session) for one in [*self._members.values()]))
                    self._write()
                    if not self.was_up and all(one.is_up for one in self._members.values()):
                        self.was_up = True
                        self._say(PROGRAMS["fleet"].ready)
                    await asyncio.sleep(LOOK_S)
            finally:
                await asyncio.gather(*(self._stop(one) for one in self._members.values()))

    def rows(self) -> list[ReplicaState]:
        return [
            ReplicaState(
                one.replica.name,
                one.place.worker.url if one.place else "",
                one.place.pid if one.place else None,
                "up" if one.is_up else "starting" if one.place else "waits",
                one.replica.model,
                one.place.node if one.place else "",
            )
            for one in sorted(self._members.values(), key=lambda one: number(one.replica.name))
        ]

    async def start(self, number: int, model: str | None, say: Say) -> None:
        """One more replica, in the bundle of one that was drained if there is one; returns when it is ready."""
        if not self.was_up:
            raise Refused("the cluster is not up yet")
        if model is not None and model not in self._kinds:
            raise Refused(
                f"there is no model {model[:100]!r} here; there are {', '.join(filter(None, self._kinds))}"
            )
        has = [one.replica.model for one in self._members.values()]
        kind = self._kinds[fewest(list(self._kinds), has) if model is None else model]
        try:
            bundle = self._free.pop() if self._free else (await self._nodes.bundles(1))[0]
        except FleetFailed as error:
            raise Refused(str(error)) from None
        one = self._begin(kind.renamed(f"r{number}"), bundle)
        try:
            async with asyncio.timeout(one.replica.ready_timeout_s):
                while not one.is_up:
                    if one.place is not None and one.place.is_restart:
                        raise Refused(f"r{number} ended before it was ready")
                    await asyncio.sleep(LOOK_S / 4)
        except BaseException as error:
            await self.stop(one.replica.name)
            if isinstance(error, TimeoutError):
                raise Refused(f"r{number} was not ready in time (--start-timeout)") from None
            raise

    async def let_go(self, name: str) -> None:
        """It is listed no more, so that the router drains it."""
        self._members[name].is_draining = True
        self._write()

    def remind(self, name: str, known: Mapping[str, Any]) -> None:
        """The router follows the list."""

    async def stop(self, name: str) -> None:
        """Ends a replica for good, and keeps its bundle for the next."""
        one = self._members.pop(name)
        self._write()
        await self._stop(one)
        self._free.append(one.bundle)

    def _begin(self, replica: Replica, bundle: Any) -> Member:
        self._members[replica.name] = Member(replica, bundle, self._nodes.actor(bundle, replica))
        return self._members[replica.name]

    async def _stop(self, one: Member) -> None:
        with contextlib.suppress(TimeoutError, Gone, FleetFailed):
            async with asyncio.timeout(STOP_S):
                await one.actor.stop()
        one.actor.kill()

    async def _look(self, one: Member, session: aiohttp.ClientSession) -> None:
        """Finds out where a replica is, and whether it is ready there."""
        name = one.replica.name
        try:
            async with asyncio.timeout(MISSED_S):
                place = await one.actor.place()
        except (TimeoutError, Gone):
            place = None
        except FleetFailed:
            if name in self._members:
                raise
            return  # it has been stopped meanwhile
        if place != one.place:
            before, one.place, one.is_up = one.place, place, False
            if not self.was_up and (before is not None or (place is not None and place.is_restart)):
                raise FleetFailed(f"{name} ended before all were ready")
            if before is not None:
                self._say(f"{name} is gone from node {before.node}; Ray starts it again where there is room")
            if place is not None:
                self._say(f"{name} starts on node {place.node}, process {place.pid}: {place.worker.url}")
        if place is None or one.is_up:
            return
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with session.get(f"{place.worker.url}/ready") as response:
                one.is_up = response.status == 200
        if one.is_up:
            self._say(f"{name} is ready on node {place.node}")

    def _write(self) -> None:
        """Lists those that may get requests."""
        lines = "".join(
            f"{specs.written(one.place.worker)}\n"
            for one in self._members.values()
            if one.place is not None and one.is_up and not one.is_draining
        )
        path = Path(self._settings.listed)
        if not path.exists() or path.read_text() != lines:
            beside = path.with_name(f".{path.name}")
            beside.write_text(lines)
            beside.replace(path)


def _check_reachable(address: str) -> None:
    """Raises `FleetFailed` if nothing listens there. Ray itself would try for more than a minute."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # "auto", or what Ray refuses by itself
    if not port.isdecimal():
        raise FleetFailed(f"--ray {address} is not auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise FleetFailed(f"no Ray cluster answers at {address}: {why}") from None


def _line(error: BaseException) -> str:
    """What Ray says over many lines, in one."""
    return " ".join(str(error).split())[:600] or type(error).__name__


class Output(io.TextIOBase):
    """What Ray prints in the driver: the replicas' lines, behind their names, and what happens to its nodes, each time
    with many indented lines of a log below, which are left out."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if of_a_replica := OF_A_REPLICA.match(line):
                if not self._quiet or TROUBLE.search(of_a_replica[2]):
                    say(f"{of_a_replica[1]}: {of_a_replica[2]}")
            elif line.strip() and not line.startswith(" "):
                say(line)
        return len(text)


def say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.__stdout__, flush=True)


async def serve(settings: FleetSettings, nodes: Ray) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, stop.set)
    fleet = Fleet(settings, nodes, say)
    workers = Workers(fleet, settings.router, Keys.read_if(settings.keys, "gateway"))
    control = Control(Path(settings.control), workers.handle)
    try:
        await control.start()
    except OSError as error:
        say(f"replicas cannot be added or drained here: {error}")
    running = asyncio.create_task(fleet.run())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    await control.close()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main(arguments: list[str]) -> int:
    """The fleet as a process. Exit code 0 after SIGTERM, 1 if it could not go on; then its last line says why."""
    die_with_parent()
    settings = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=FleetSettings)
    output = Output(settings.quiet)
    try:
        ray = Ray(settings, carried(os.environ))
        with contextlib.closing(ray), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            asyncio.run(serve(settings, ray))
    except (FleetFailed, ValueError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":  # by its name, because the nodes import what they unpickle
    sys.exit(import_module("sglang_fair.cluster.on_ray").main(sys.argv[1:]))
