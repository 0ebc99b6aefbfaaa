"""`sglang-fair cluster`, from options to exit code: check, look, reserve, plan, supervise."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import msgspec

from router.client import RouterClient
from router.replica_lists import specs
from sglang_fair.cluster import gpus, models, on_ray
from sglang_fair.cluster.console import ConsoleReporter, addresses, example, make_console, show
from sglang_fair.cluster.control import Control, socket_path
from sglang_fair.cluster.gpus import GpusTaken, Machine
from sglang_fair.cluster.local import Additions, Local
from sglang_fair.cluster.options import ConfigError, Device, Options
from sglang_fair.cluster.plan import (
    FleetFiles,
    Model,
    Plan,
    admin_url,
    build,
    choose_device,
    dashboard_url,
    replicas_for,
    router_address,
    served_url,
)
from sglang_fair.cluster.ports import Marks, Ports, PortTaken, Reservations
from sglang_fair.cluster.scale import ScaleUp
from sglang_fair.cluster.supervisor import StartFailed, Supervisor
from sglang_fair.cluster.workers import Workers, router_state, scale_up
from sglang_fair.common import curve
from sglang_fair.common.curve import Keys
from sglang_fair.common.files import read_json
from sglang_fair.common.installed import missing_engine
from sglang_fair.common.service_keys import feeder_key, replica_key
from sglang_fair.models import checkpoint
from sglang_fair.models.__main__ import for_gateway, showing
from sglang_fair.models.catalog import EMULATED

STOPPED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: stopped as asked; could not start or go on; bad input; stopped before it was ready."""


def run_cluster(options: Options) -> int:
    """Runs a cluster, whose options were checked, until a signal. What goes wrong is one line on stderr."""
    for number in _signals():  # until the event loop has them
        signal.signal(number, _interrupt)
    try:
        on_ray.check(options)
        if options.ray is not None and find_spec("ray") is None:
            raise ConfigError(on_ray.MISSING, "ray")
        return _run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError as error:
        print(f"sglang-fair: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except (PortTaken, GpusTaken, StartFailed) as error:
        print(f"sglang-fair: {error}", file=sys.stderr, flush=True)
        return FAILED


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _run(options: Options) -> int:
    if missing := missing_engine():
        raise ConfigError(missing)
    keys = _keys(options.keys)
    machine = gpus.look()
    wanted = {"auto": options.device, "emulated": "cpu"}.get(options.engine, options.engine)
    device = choose_device(wanted, machine) if options.ray is None else on_ray.device(wanted)
    with (
        tempfile.TemporaryDirectory(prefix="sglang-fair-") as folder,
        contextlib.closing(Reservations(options.host)) as reservations,
        contextlib.closing(Marks("gpu")) as gpu_marks,
    ):
        options = _with_ports(options, reservations)
        _make_service_keys(options)
        dealt = models.deal(options)
        names = dealt.first
        options = replace(options, replicas=len(names))
        taken = gpus.take(options, device, machine.gpus, gpu_marks) if options.ray is None else ()
        found = _find_models(options)
        each = tuple(found[called] for called in names)
        swaps = {
            index: tuple(found[called] for called in can_load) for index, can_load in dealt.loadable.items()
        }
        for can_load in set(swaps.values()):
            _check_alike(can_load)
        here = options.replicas if options.ray is None else 0
        ports = reservations.choose(options.port, here, loads=options.needs_loads())
        files = None if options.ray is None else _fleet_files(options, device, machine, each, ports, folder)
        plan = build(options, device, machine, each, ports, taken, swaps, files)
        reporter = _reporter(options, device, found, names, plan, files, ports)
        added = Additions(
            options, device, each, ports, reservations, gpu_marks, gpus.look,
            tuple(found.values()) if options.swap == models.ALL else (),
        )  # fmt: skip
        # With --ray, replicas are changed where they are known: in the fleet.
        control = socket_path(ports.gateway) if files is None else None
        return asyncio.run(_supervise(plan, reporter, added, gpu_marks, control, options.scale_up, keys))


def _with_ports(options: Options, reservations: Reservations) -> Options:
    """With the ports of the cluster's HTTP servers, reserved. Raises `PortTaken`."""
    if options.port:
        reservations.one(options.port, "--port, or --port 0 for a free one")
    if options.tenants is not None or options.admin_port is not None:
        options = replace(options, admin_port=reservations.one(options.admin_port, "--admin-port"))
    router = reservations.one(options.router_http_port, "--router-http-port")
    has_page = options.dashboard == "on"
    page = reservations.one(options.dashboard_port, "--dashboard-port") if has_page else None
    return replace(options, router_http_port=router, dashboard_port=page)


def _make_service_keys(options: Options) -> None:
    """So that replicas answer the gateway alone. All processes that are started get them."""
    for is_needed, key in ((options.tenants, replica_key), (options.batches, feeder_key)):
        if is_needed is not None and not key.key():
            os.environ[key.variable] = secrets.token_urlsafe(32)


def _find_models(options: Options) -> dict[str, Model]:
    """By name, each prepared where it is missing. Raises ConfigError."""
    found: dict[str, Model] = {}
    kind = "" if options.emulation() is None else EMULATED
    for called, wanted in options.model_names().items():
        try:
            with showing(kind + wanted) as say:
                folder, own_name = for_gateway(kind + wanted, say)
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(" ".join(str(error).split())) from None
        found[called] = Model(folder, called or own_name, wanted)
    return found


def _fleet_files(
    options: Options, device: Device, machine: Machine, each: Sequence[Model], ports: Ports, folder: str
) -> FleetFiles:
    files = FleetFiles(Path(folder, "fleet.json"), Path(folder, "replicas"), socket_path(ports.gateway))
    replicas = replicas_for(options, device, machine, each)
    files.listed.touch()
    fleet = on_ray.fleet_settings(options, device, replicas, files, router_address(ports))
    files.settings.write_bytes(msgspec.json.encode(fleet))
    return files


def _reporter(
    options: Options,
    device: Device,
    found: Mapping[str, Model],
    names: Sequence[str],
    plan: Plan,
    files: FleetFiles | None,
    ports: Ports,
) -> ConsoleReporter:
    """Shows the cluster, and begins with what is started."""
    emulation, gateway = options.emulation(), served_url(options, options.host, ports.gateway)
    what = " and ".join(f"{names.count(called)} x {one.served_name}" for called, one in found.items())
    if emulation is not None and not options.models:
        what = f"{options.replicas} x {emulation}"
    else:
        what += f" on {'emulated ' + emulation.gpu if emulation else device}"
    title = f"{what}, scheduler {options.policy}, placement {options.placement}"
    console = make_console(to_stderr=options.json)

    def when_up(pids: dict[str, int]) -> None:
        replicas = replicas_of(plan, files)
        facts = describe(options, device, tuple(found.values()), plan, gateway, pids, replicas.values())
        if options.json:
            _print_json(facts)
            return
        show(console, "")
        show(console, addresses(facts, title, replicas))
        model = next(iter(options.model_names())) or "default"
        show(console, example(gateway, model, has_tenants=options.tenants is not None))

    reporter = ConsoleReporter(console, plan, quiet=options.quiet_replicas, when_up=when_up)
    reporter.say(f"starting {title}")
    return reporter


def _keys(folder: str | None) -> Keys | None:
    """Those with which the router is asked, of a folder in which all are made if there is none. Raises ConfigError."""
    if folder is None:
        return None
    try:
        curve.make_if_none(Path(folder))
        for role in curve.ROLES:
            Keys.read(folder, role)
        return Keys.read(folder, "gateway")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--keys: {error}", "keys") from None


def _check_alike(models: Sequence[Model]) -> None:
    try:
        checkpoint.alike({model.served_name: model.folder for model in models})
    except (ValueError, OSError) as error:
        raise ConfigError(f"--swap: {error}", "swap") from None


def _signals() -> list[signal.Signals]:
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


async def _supervise(
    plan: Plan,
    reporter: ConsoleReporter,
    added: Additions,
    gpu_marks: Marks,
    control_path: Path | None,
    most: int,
    keys: Keys | None,
) -> int:
    assert plan.router is not None
    loop, was_up = asyncio.get_running_loop(), False
    link = RouterClient(plan.router, keys, beats=False)
    link.start()
    with contextlib.closing(link), contextlib.closing(reporter):
        # A replica has its GPUs as long as it lives, even if we are killed before it.
        supervisor = Supervisor(
            plan, reporter, link=link, known=partial(router_state, plan.router, "workers", keys=keys),
            inherited=lambda spec: gpu_marks.descriptors(gpu.uuid for gpu in spec.gpus),
        )  # fmt: skip

        def on_signal() -> None:
            reporter.close()
            again = supervisor.stop()
            reporter.say("killing" if again else "stopping: gateway, router, replicas (again: at once)")

        for number in _signals():
            loop.add_signal_handler(number, on_signal)
        workers = Workers(Local(supervisor, link, added.plan, added.freed), plan.router, keys)
        control = None if control_path is None else Control(control_path, workers.handle)
        try:
            if control is not None:
                await control.start()
        except OSError as error:
            reporter.say(f"replicas cannot be added or drained here: {error}")
        queues = partial(router_state, plan.router, "queues", keys=keys)
        scaling = scale_up(ScaleUp(most), queues, workers.add, reporter.say) if most else None
        scales = None if scaling is None else asyncio.create_task(scaling)
        try:
            was_stopped = await supervisor.run()
        finally:
            if scales is not None:
                scales.cancel()
                await asyncio.gather(scales, return_exceptions=True)
            if control is not None:
                await control.close()
        was_up = supervisor.was_up
    if not was_stopped:
        raise StartFailed("the cluster cannot go on and has been stopped")
    reporter.say("stopped")
    return STOPPED if was_up else INTERRUPTED


def replicas_of(plan: Plan, files: FleetFiles | None) -> dict[str, str]:
    """The replicas' addresses by name: those of the plan, or those that a fleet lists."""
    if files is not None:
        return {up.worker: up.url for up in specs.lines(files.listed.read_text())}
    return {process.name: process.worker.url for process in plan.of("replica") if process.worker}


def describe(
    options: Options,
    device: Device,
    served: Sequence[Model],
    plan: Plan,
    gateway: str,
    pids: dict[str, int],
    replicas: Iterable[str],
) -> dict[str, object]:
    """A running cluster for programs: its addresses and what it is."""
    emulation = options.emulation()
    return {
        "gateway": gateway,
        "admin": admin_url(options),
        "dashboard": dashboard_url(options),
        "router": plan.router,
        "router_http": plan.router_http,
        "replicas": list(replicas),
        "pids": {"cluster": os.getpid(), **pids},
        "policy": options.policy,
        "placement": options.placement,
        "model": served[0].served_name,
        "models": [model.served_name for model in served],
        "device": device,
        "emulated": None if emulation is None else emulation.describe(read_json),
    }


def _print_json(facts: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(facts), flush=True)
