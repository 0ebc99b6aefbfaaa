"""What a simulated cluster has that serves several models, as plain values: models, unlike GPUs, and how models are
loaded.

Weights lie in the GPU's memory, in the host's or on disk. From the host's they are loaded with 20 GB/s; from disk with
2 GB/s, and are in the host's memory then, which drops what was loaded longest ago.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_fair.sim.cost_model import CostModel, kv_tokens, make_cost_model
from sglang_fair.sim.evictions import HOST_BYTES_PER_S
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.shapes import SHAPES

HOST_WEIGHTS_PER_S = 20e9
DISK_WEIGHTS_PER_S = 2e9

LEAST_KV_TOKENS = 16_384
"""A GPU that has less beside a model does not serve it."""


@dataclass(frozen=True)
class Fleet:
    """ValueError for what cannot be built."""

    models: Mapping[str, str]
    """What requests call a model, and its shape."""
    gpus: Sequence[str] = ("a100-80g",)
    """Of the replicas, in turn."""
    swaps: bool = True
    """Replicas may load other models than the one that they begin with: the models in turn."""
    warm: bool = True
    """Models that were loaded once stay in the host's memory."""
    host_weight_bytes: float = 80e9
    host_kv_bytes: float = 0.0
    """Of the host's memory, for what requests had computed that are taken back."""
    finish_s: float | None = None
    """How long what runs may go on at a replica that is to load another model (--swap-finish-s); None: to its end."""
    new_token_ratio: float = 0.05
    """Of what a running request may still write, the part that replicas reserve at first, and half of it in the end
    (--schedule-conservativeness). Lengths are unknown: with little batches are large, but if answers are long, requests
    have to be taken back for want of memory."""
    plan_s: float = 0.2
    """How long a plan takes, for placements that ask for one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", tuple(self.gpus))
        for gpu in self.gpus:
            if gpu not in GPUS:
                raise ValueError(f"unknown GPU {gpu!r}; there are {', '.join(GPUS)}")
        for shape in self.models.values():
            if shape not in SHAPES:
                raise ValueError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
        if not self.models or not self.gpus:
            raise ValueError("a fleet has models and GPUs")

    def begins_with(self, place: int) -> str:
        return tuple(self.models)[place % len(self.models)]

    def loadable(self, place: int) -> tuple[str, ...]:
        if not self.swaps:
            return (self.begins_with(place),)
        return tuple(model for model in self.models if self._fits(place, model))

    def kv_tokens(self, place: int, model: str) -> int:
        return kv_tokens(GPUS[self._gpu(place)], SHAPES[self.models[model]])

    def cost(self, place: int, model: str) -> CostModel:
        return make_cost_model(f"{self._gpu(place)}/{self.models[model]}")

    def host_tokens(self, model: str) -> tuple[int, float]:
        """That the host's memory holds, and how long the link takes for one."""
        kv_bytes = SHAPES[self.models[model]].kv_bytes_per_token
        return int(self.host_kv_bytes / kv_bytes), kv_bytes / HOST_BYTES_PER_S

    def weight_bytes(self, model: str) -> int:
        return SHAPES[self.models[model]].weight_bytes

    def _gpu(self, place: int) -> str:
        return self.gpus[place % len(self.gpus)]

    def _fits(self, place: int, model: str) -> bool:
        try:
            return self.kv_tokens(place, model) > LEAST_KV_TOKENS
        except ValueError:
            return False


class Shelf:
    """The weights in the memory of one replica's host."""

    def __init__(self, fleet: Fleet, first: str) -> None:
        self._fleet = fleet
        self._there: OrderedDict[str, int] = OrderedDict()
        self.load(first)

    def swap_s(self, model: str) -> float:
        """How long it takes to load a model from where it lies."""
        size = self._fleet.weight_bytes(model)
        return size / (HOST_WEIGHTS_PER_S if model in self._there else DISK_WEIGHTS_PER_S)

    def load(self, model: str) -> None:
        """It is loaded, and in the host's memory then if it fits."""
        if not self._fleet.warm:
            return
        self._there[model] = self._fleet.weight_bytes(model)
        self._there.move_to_end(model)
        while sum(self._there.values()) > self._fleet.host_weight_bytes and self._there:
            self._there.popitem(last=False)
