"""A simulated cluster for several models as plain values: GPUs, models, how they are loaded, and who decides.

Weights lie in the GPU's memory, in the host's or on disk. From the host's they are loaded with 20 GB/s; from disk with
2 GB/s, and are in the host's memory then, which drops what was loaded longest ago.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sglang_fair.sim.cost_model import EFFICIENCIES, CostModel, Efficiency, Roofline, kv_tokens
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.host import HOST_BYTES_PER_S
from sglang_fair.sim.replica import Settings
from sglang_fair.sim.shapes import SHAPES

HOST_WEIGHTS_PER_S = 20e9
DISK_WEIGHTS_PER_S = 2e9
CHUNK_TOKENS = 8192
MOST_RUNNING = 1024
_LONGEST_RUN = 10_000


@dataclass(frozen=True)
class Fleet:
    """ValueError for what cannot be built."""

    placement: str = "qlm"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the placement."""
    gpus: Sequence[str] = ("a100-80g",)
    """Of each worker."""
    models: Mapping[str, str] = field(default_factory=lambda: {"m": "vicuna-13b"})
    """What requests call a model, and its shape."""
    loaded: Sequence[str] = ()
    """By worker, what it begins with; empty: the models in turn."""
    policy: str = "fcfs"
    """Of the replicas."""
    policy_options: str = ""
    evicts: bool = False
    """Replicas take requests back for more urgent ones."""
    swaps: bool = True
    """Workers may load other models."""
    warm: bool = True
    """Models that were loaded once stay in the host's memory."""
    host_weight_bytes: float = 80e9
    host_kv_bytes: float = 80e9
    plan_s: float = 0.2
    """How long a plan takes."""
    plan_work: int = 2_000_000
    """How much the search for a plan may consider."""
    quantum: float | None = None
    shares: bool = True
    """Replicas share what they do among clients. False: what a client had makes no difference, as in the paper."""
    reserves: float = 0.05
    """Of what a running request may still write, the part that replicas reserve at first, and of it in the end less
    (--schedule-conservativeness). Lengths are unknown: with little batches are large, but if answers are long, requests
    have to be taken back for want of memory."""
    throttle: str = "none"
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Who is refused while replicas are overloaded, as `--throttle` and `--limits` have it."""
    swap_tail: bool = True
    """A worker that is to load another model lets what runs end. False: it is taken back, and goes on later."""

    def __post_init__(self) -> None:
        for gpu in self.gpus:
            if gpu not in GPUS:
                raise ValueError(f"unknown GPU {gpu!r}; there are {', '.join(GPUS)}")
        for shape in self.models.values():
            if shape not in SHAPES:
                raise ValueError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
        if self.loaded and (len(self.loaded) != len(self.gpus) or not set(self.loaded) <= set(self.models)):
            raise ValueError("each worker begins with one of the models")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Fleet":
        """The inverse of `asdict`. ValueError for an unknown field."""
        unknown = sorted(set(values) - {known.name for known in fields(cls)})
        if unknown:
            raise ValueError(f"a fleet has no {', '.join(unknown)}")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @property
    def workers(self) -> tuple[str, ...]:
        """Names, in their order."""
        return tuple(f"r{place:02d}" for place in range(len(self.gpus)))

    def begins_with(self, place: int) -> str:
        """The model of a worker at the start."""
        return self.loaded[place] if self.loaded else tuple(self.models)[place % len(self.models)]

    def fits(self, place: int, model: str) -> bool:
        """Whether a worker's GPU can hold a model and a request."""
        try:
            return self.kv_tokens(place, model) > 4 * CHUNK_TOKENS // 2
        except ValueError:
            return False

    def kv_tokens(self, place: int, model: str) -> int:
        """Of a worker's cache beside a model."""
        return kv_tokens(GPUS[self.gpus[place]], SHAPES[self.models[model]])

    def cost(self, place: int, model: str) -> CostModel:
        """How long a step takes."""
        gpu = self.gpus[place]
        return Roofline(GPUS[gpu], SHAPES[self.models[model]], EFFICIENCIES.get(gpu, Efficiency()))

    def settings(self, place: int, model: str) -> Settings:
        """A replica's limits."""
        kv_bytes = SHAPES[self.models[model]].kv_bytes_per_token
        return Settings(
            kv_tokens=self.kv_tokens(place, model),
            max_running=MOST_RUNNING,
            chunked_prefill_tokens=CHUNK_TOKENS,
            ignore_eos=False,
            new_token_ratio=self.reserves,
            least_new_token_ratio=min(self.reserves, max(0.02, self.reserves / 2)),
            progress_steps=_LONGEST_RUN,
            host_tokens=int(self.host_kv_bytes / kv_bytes) if self.evicts or not self.swap_tail else 0,
            host_token_s=kv_bytes / HOST_BYTES_PER_S,
        )

    def weight_bytes(self, model: str) -> int:
        """What is loaded."""
        return SHAPES[self.models[model]].weight_bytes


class Shelf:
    """The weights in one host's memory."""

    def __init__(self, fleet: Fleet, first: str) -> None:
        self._fleet = fleet
        self._there: OrderedDict[str, int] = OrderedDict()
        self.load(first)

    def swap_s(self, model: str) -> float:
        """How long it takes to load a model now."""
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
