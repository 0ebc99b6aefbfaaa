"""Replicas that run beneath our supervisor: added with the cluster's own settings, on ports and GPUs that are free."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.client import RouterClient
from router.events import WorkerDown, WorkerDrain
from sglang_fair.cluster import gpus
from sglang_fair.cluster.control import Refused, Say
from sglang_fair.cluster.gpus import GpusTaken, Machine
from sglang_fair.cluster.models import fewest
from sglang_fair.cluster.options import ConfigError, Device, Options
from sglang_fair.cluster.plan import (
    Model,
    Process,
    agent,
    agent_name,
    each_model,
    local,
    router_address,
    with_workers,
)
from sglang_fair.cluster.ports import Marks, Ports, PortTaken, Reservations
from sglang_fair.cluster.supervisor import StartFailed, Supervisor
from sglang_fair.cluster.workers import ReplicaState, number

Addition = tuple[Process, Process | None]
"""A replica, and the agent beside one that can load several models."""


class Additions:
    """Plans replicas for one cluster, and takes back the ports and GPUs of those that are gone."""

    def __init__(
        self,
        options: Options,
        device: Device,
        models: Model | Sequence[Model],
        ports: Ports,
        reservations: Reservations,
        gpu_marks: Marks,
        look: Callable[[], Machine],
        swaps: Sequence[Model] = (),
    ) -> None:
        """`models` and `ports` are those of the first replicas; `look` returns the machine's resources at the moment,
        `swaps` are what each that is added can load.

        The cluster has its ports from `reservations`, and its GPUs from `gpu_marks`.
        """
        self._options = options
        self._device = device
        self._swaps = tuple(swaps)
        self._models = {model.served_name: model for model in (*each_model(options, models), *swaps)}
        self._first = ports
        self._ports = {f"r{index}": one for index, one in enumerate(ports.replicas)}
        self._reservations = reservations
        self._gpu_marks = gpu_marks
        self._look = look

    def plan(self, number: int, model: str | None = None, has: Sequence[str] = ()) -> Addition:
        """The replica with this number, of the model of this name, or of the one that the fewest have, where `has` is
        what each has. Raises `ConfigError`, `PortTaken` or `GpusTaken` if there is no such model, or no room for it."""
        machine = self._look()
        if model is not None and model not in self._models:
            raise ConfigError(f"there is no model {model[:100]!r} here; there are {', '.join(self._models)}")
        chosen = self._models[model or fewest(list(self._models), has)]
        ports = self._reservations.replica(self._options.needs_loads())
        try:
            taken = gpus.take(replace(self._options, replicas=1), self._device, machine.gpus, self._gpu_marks)
        except (ConfigError, GpusTaken):
            self._reservations.give_back(ports)
            raise
        can_load = (chosen, *(model for model in self._swaps if model != chosen)) if self._swaps else ()
        options = replace(self._options, replicas=number + 1)
        (own,) = taken or ((),)
        spec = local(options, self._device, machine, number, chosen, ports, self._first, own, can_load)
        self._ports[spec.name] = ports
        router = router_address(self._first)
        return spec, agent(options, machine, spec, can_load, router) if can_load else None

    def freed(self, spec: Process) -> None:
        """Frees the ports and GPUs of a replica that is gone for good."""
        self._reservations.give_back(self._ports.pop(spec.name))
        self._gpu_marks.give_back(*(gpu.uuid for gpu in spec.gpus))


class Local:
    """The crew of a supervisor. A router that is restarted starts with the replicas of that moment."""

    def __init__(
        self,
        supervisor: Supervisor,
        link: RouterClient,
        plan: Callable[[int, str | None, Sequence[str]], Addition],
        freed: Callable[[Process], None],
    ) -> None:
        """`plan` and `freed` as those of `Additions`."""
        self._supervisor = supervisor
        self._link = link
        self._plan = plan
        self._freed = freed
        self._apart: set[str] = set()
        """Those that are being added or drained, and take no requests."""

    def rows(self) -> list[ReplicaState]:
        return [self._row(spec) for spec in sorted(self._specs(), key=lambda spec: number(spec.name))]

    async def start(self, number: int, model: str | None, say: Say) -> None:
        has = [one.models[0] for one in self._specs()]
        try:
            spec, agent = self._plan(number, model, has)
        except (ConfigError, PortTaken, GpusTaken) as error:
            raise Refused(str(error)) from None
        self._apart.add(spec.name)
        try:
            await self._supervisor.add(spec)
        except StartFailed as error:
            self._freed(spec)
            raise Refused(str(error)) from None
        finally:
            self._apart.discard(spec.name)
        self._respec_router()
        if agent is not None:
            try:
                await self._supervisor.add(agent)
            except StartFailed as error:
                raise Refused(f"{spec.name} is up, and its agent is not: {error}") from None

    async def let_go(self, name: str) -> None:
        """It is not restarted, and a restarted router does not start with it."""
        self._apart.add(name)
        self._respec_router()
        await self._changed(self._supervisor.let_go(name))

    def remind(self, name: str, known: Mapping[str, Any]) -> None:
        """The router drains it, or forgets it if it has died meanwhile."""
        if self._supervisor.state(name) != "up":
            self._link.tell(WorkerDown(name))  # it is not watched any more, so nothing else reports this
        elif known.get("state") != "draining":
            self._link.tell(WorkerDrain(name))

    async def stop(self, name: str) -> None:
        spec = self._spec(name)
        await self._changed(self._supervisor.remove(name))
        for one in self._supervisor.plan.of("agent"):
            if one.name == agent_name(name):
                await self._changed(self._supervisor.let_go(one.name))
                await self._changed(self._supervisor.remove(one.name))
        self._apart.discard(name)
        self._freed(spec)

    async def _changed(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StartFailed as error:
            raise Refused(str(error)) from None

    def _specs(self) -> tuple[Process, ...]:
        return self._supervisor.plan.of("replica")

    def _spec(self, name: str) -> Process:
        return next(spec for spec in self._specs() if spec.name == name)

    def _respec_router(self) -> None:
        workers = [spec.worker for spec in self._specs() if spec.worker and spec.name not in self._apart]
        for router in self._supervisor.plan.of("router"):
            self._supervisor.respec(with_workers(router, workers))

    def _row(self, spec: Process) -> ReplicaState:
        assert spec.worker is not None
        state, pid = self._supervisor.state(spec.name), self._supervisor.pids.get(spec.name)
        return ReplicaState(spec.name, spec.worker.url, pid, state, spec.models[0])
