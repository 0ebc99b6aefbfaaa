"""Replicas that are added to a running cluster: with its own settings, and with ports and GPUs that are free."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_fair.cluster import gpus
from sglang_fair.cluster.gpus import GpusTaken
from sglang_fair.cluster.models import fewest
from sglang_fair.cluster.options import ConfigError, Device, Options
from sglang_fair.cluster.plan import Machine, Model, Process, build, check_memory, each_model
from sglang_fair.cluster.ports import Ports, Reservations, choose_replica
from sglang_fair.common.marks import Marks


class AddedReplicas:
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
        self._models = {model.served_name: model for model in each_model(options, models)}
        self._first = ports
        self._ports = {f"r{index}": one for index, one in enumerate(ports.replicas)}
        self._reservations = reservations
        self._gpu_marks = gpu_marks
        self._look = look
        self._swaps = tuple(swaps)
        self._models |= {model.served_name: model for model in self._swaps}
        self._agents: dict[str, Process] = {}

    def plan(self, number: int, model: str | None = None, has: Sequence[str] = ()) -> Process:
        """The replica with this number, of the model of this name, or of the one that the fewest have, where `has` is
        what each has. Raises `ConfigError`, `PortTaken` or `GpusTaken` if there is no such model, or no room for it."""
        machine = self._look()
        if model is not None and model not in self._models:
            raise ConfigError(f"there is no model {model[:100]!r} here; there are {', '.join(self._models)}")
        chosen = self._models[model or fewest(list(self._models), has)]
        check_memory(replace(self._options, replicas=1), self._device, machine, [chosen])
        ports = choose_replica(self._reservations.take, loads=self._options.needs_loads())
        as_many = replace(self._options, replicas=number + 1)
        all_ports = replace(self._first, replicas=(ports,) * (number + 1))
        try:
            taken = gpus.take(replace(self._options, replicas=1), self._device, machine.gpus, self._gpu_marks)
        except (ConfigError, GpusTaken):
            self._reservations.give_back(ports)
            raise
        models = [chosen] * (number + 1)
        can_load = [chosen, *(model for model in self._swaps if model != chosen)]
        swaps = {number: can_load} if self._swaps else {}
        specs = build(as_many, self._device, machine, models, all_ports, taken * (number + 1), swaps)
        spec = specs.of("replica")[number]
        for agent in specs.of("agent"):
            self._agents[spec.name] = agent
        self._ports[spec.name] = ports
        return spec

    def agent_of(self, spec: Process) -> Process | None:
        """The agent beside a replica that was planned here; None: it keeps its model."""
        return self._agents.get(spec.name)

    def freed(self, spec: Process) -> None:
        """Frees the ports and GPUs of a replica that is gone for good."""
        self._reservations.give_back(self._ports.pop(spec.name))
        self._gpu_marks.give_back(*(gpu.uuid for gpu in spec.gpus))
