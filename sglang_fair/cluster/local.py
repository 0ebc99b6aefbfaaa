"""Replicas that run beneath our supervisor: added with the cluster's own settings, on ports and GPUs that are free."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Additions:
    """Plans replicas for one cluster, and takes back the ports and GPUs of those that are gone."""

    options: Options
    device: Device
    models: Model | Sequence[Model]
    """As the first replicas', and so are `ports`."""
    ports: Ports
    reservations: Reservations
    """From which the cluster has its ports."""
    gpu_marks: Marks
    look: Callable[[], Machine]
    """Has the machine's resources at the moment."""
    swaps: Sequence[Model] = ()
    """What each that is added can load."""

    def plan(self, number: int, model: str | None = None, has: Sequence[str] = ()) -> Addition:
        """The replica with this number, of the model of this name, or of the one that the fewest have, where `has` is
        what each has. Raises `ConfigError`, `PortTaken` or `GpusTaken` if there is no such model, or no room for it."""
        machine = self.look()
        models = {one.served_name: one for one in (*each_model(self.options, self.models), *self.swaps)}
        if model is not None and model not in models:
            raise ConfigError(f"there is no model {model[:100]!r} here; there are {', '.join(models)}")
        chosen = models[model or fewest(list(models), has)]
        ports = self.reservations.replica(self.options.needs_loads())
        try:
            taken = gpus.take(replace(self.options, replicas=1), self.device, machine.gpus, self.gpu_marks)
        except (ConfigError, GpusTaken):
            self.reservations.give_back(ports)
            raise
        can_load = (chosen, *(model for model in self.swaps if model != chosen)) if self.swaps else ()
        options = replace(self.options, replicas=number + 1)
        (own,) = taken or ((),)
        spec = local(options, self.device, machine, number, chosen, ports, self.ports, own, can_load)
        router = router_address(self.ports)
        return spec, agent(options, machine, spec, can_load, router) if can_load else None

    def freed(self, spec: Process) -> None:
        """Frees the ports and GPUs of a replica that is gone for good."""
        if spec.ports is not None:
            self.reservations.give_back(spec.ports)
        self.gpu_marks.give_back(*(gpu.uuid for gpu in spec.gpus))


@dataclass
class Local:
    """The crew of a supervisor. A router that is restarted starts with the replicas of that moment."""

    supervisor: Supervisor
    link: RouterClient
    plan: Callable[[int, str | None, Sequence[str]], Addition]
    """As that of `Additions`, and so is `freed`."""
    freed: Callable[[Process], None]
    _apart: set[str] = field(default_factory=set)
    """Those that are being added or drained, and take no requests."""

    def rows(self) -> list[ReplicaState]:
        return [self._row(spec) for spec in sorted(self._specs(), key=lambda spec: number(spec.name))]

    async def start(self, number: int, model: str | None, say: Say) -> None:
        has = [one.models[0] for one in self._specs()]
        try:
            spec, agent = self.plan(number, model, has)
        except (ConfigError, PortTaken, GpusTaken) as error:
            raise Refused(str(error)) from None
        self._apart.add(spec.name)
        try:
            await self.supervisor.add(spec)
        except StartFailed as error:
            self.freed(spec)
            raise Refused(str(error)) from None
        finally:
            self._apart.discard(spec.name)
        self._respec_router()
        if agent is not None:
            try:
                await self.supervisor.add(agent)
            except StartFailed as error:
                raise Refused(f"{spec.name} is up, and its agent is not: {error}") from None

    async def let_go(self, name: str) -> None:
        """It is not restarted, and a restarted router does not start with it."""
        self._apart.add(name)
        self._respec_router()
        await self._changed(self.supervisor.let_go(name))

    def remind(self, name: str, known: Mapping[str, Any]) -> None:
        """The router drains it, or forgets it if it has died meanwhile."""
        if self.supervisor.state(name) != "up":
            self.link.tell(WorkerDown(name))  # it is not watched any more, so nothing else reports this
        elif known.get("state") != "draining":
            self.link.tell(WorkerDrain(name))

    async def stop(self, name: str) -> None:
        spec = self._spec(name)
        await self._changed(self.supervisor.remove(name))
        for one in self.supervisor.plan.of("agent"):
            if one.name == agent_name(name):
                await self._changed(self.supervisor.let_go(one.name))
                await self._changed(self.supervisor.remove(one.name))
        self._apart.discard(name)
        self.freed(spec)

    async def _changed(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StartFailed as error:
            raise Refused(str(error)) from None

    def _specs(self) -> tuple[Process, ...]:
        return self.supervisor.plan.of("replica")

    def _spec(self, name: str) -> Process:
        return next(spec for spec in self._specs() if spec.name == name)

    def _respec_router(self) -> None:
        workers = [spec.worker for spec in self._specs() if spec.worker and spec.name not in self._apart]
        for router in self.supervisor.plan.of("router"):
            self.supervisor.respec(with_workers(router, workers))

    def _row(self, spec: Process) -> ReplicaState:
        assert spec.worker is not None
        state, pid = self.supervisor.state(spec.name), self.supervisor.pids.get(spec.name)
        return ReplicaState(spec.name, spec.worker.url, pid, state, spec.models[0])
