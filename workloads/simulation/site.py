"""A simulated cluster as plain values, and the objects that are built from them.

Names, options and defaults are those of `sglang-fair cluster`, so a simulated cluster and a live one are described
alike. The router knows the linear part of the cost of service, as it does there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, cast

from router.core import Router
from router.events import WorkerUp
from router.placement import PLACEMENTS, build, parameters
from router.placement.contract import Placement
from router.throttling import KINDS, Kind, Throttling
from sglang_fair.common.files import read_json
from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES
from sglang_fair.core import options as policy_options
from sglang_fair.core.cost import Cost, make_cost
from sglang_fair.core.payers import make_payers
from sglang_fair.core.policy import DEFAULT_QUANTUM, Policy, checked_quantum
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.steps import checked_stall_ms, checked_target_tpot_ms, make_steps
from sglang_fair.core.throttle import make_rules
from sglang_fair.settings import table
from sglang_fair.sim.cost_model import CostModel, kv_tokens, make_cost_model
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.replica import Replica, Settings
from sglang_fair.sim.shapes import SHAPES
from workloads.simulation.baselines import BASELINES
from workloads.simulation.fleet import Fleet
from workloads.simulation.rivals import RIVALS, TailLru

_LONGEST_RUN = 10_000
"""Decode steps that a replica may take at once: whoever wants to know of progress looks at the queue's jobs."""


@dataclass(frozen=True)
class Site:
    """One cluster. ValueError, in one line, for what cannot be built.

    Quanta and weights are in service units. None: the default of whoever uses the value.
    """

    gpu: str = "a100-80g"
    model: str = "llama-3.1-8b"
    cost_model: str | None = None
    """How long an engine's step takes, as `make_cost_model` reads it. None: by `gpu` and `model`."""
    replicas: int = 1
    placement: str = "d2lpm"
    placement_options: Mapping[str, Any] = field(default_factory=dict)
    """Other parameters of the placement, by name."""
    policy: str = table.Cluster.policy
    policy_options: str = ""
    quantum: float | None = None
    worker_quantum: float | None = None
    cost: str = "linear"
    extend_weight: float | None = None
    output_weight: float | None = None
    client_weights: Mapping[str, float] = field(default_factory=dict)
    payer: str = table.Cluster.payer
    stall_ms: float = table.Cluster.stall_ms
    """Longest prefill step while others have requests, under the policies that share steps; 0: prompts go first."""
    target_tpot_ms: float | None = 0.0
    """Time of an output token from which on clients above their share are held back; 0: none is."""
    kv_tokens: int | None = None
    """Tokens that one replica's cache holds. None: what is left on the GPU beside the model."""
    page_tokens: int = 16
    max_running: int | None = None
    chunked_prefill_tokens: int | None = None
    mixed_chunk: bool | None = None
    """Batches of prompts have a token for each running request (--enable-mixed-chunk). None: where there is a stall
    bound, as `cluster` has it."""
    cache_share: bool = False
    """Replicas evict fairly among clients, where the policy has shares (--cache-share). False:
    by plain LRU, as in the papers."""
    tail_tokens: int = 0
    """Replicas evict the last so many tokens of each conversation first (`rivals.TailLru`). 0: by plain LRU."""
    ignore_eos: bool = True
    """Every answer runs to its limit, and memory is reserved for that. False where answers may be shorter."""
    ingress: tuple[float, ...] = (1.0,)
    """One router for each number, which is its share of all programs. Routers do not know each other."""
    hop_s: float = 0.0
    """Network time of a request and its answer between client and replica, all of it before the request arrives."""
    throttle: str = table.Cluster.throttle
    limits: Mapping[str, Any] = field(default_factory=dict)
    """The rules of throttling, as `--limits` has them."""
    fleet: Fleet | None = None
    """Several models, or unlike GPUs, in place of `gpu`, `model`, `cost_model` and `kv_tokens`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ingress", tuple(self.ingress))
        if self.placement not in PLACEMENTS and self.placement not in BASELINES:
            raise ValueError(f"no placement {self.placement!r}: there are {', '.join(PLACEMENTS)}")
        if self.policy not in POLICIES and self.policy not in RIVALS:
            raise ValueError(f"unknown policy {self.policy!r}; there are {', '.join(sorted(POLICIES))}")
        if self.throttle not in KINDS:
            raise ValueError(f"unknown throttle {self.throttle!r}; there are {', '.join(KINDS)}")
        make_rules(self.limits, "limits")
        if self.replicas < 1:
            raise ValueError(f"a cluster has at least 1 replica, not {self.replicas}")
        if not self.ingress or min(self.ingress) < 0 or not sum(self.ingress) > 0:
            raise ValueError(f"the routers' parts of the programs must be positive numbers: {self.ingress}")
        checked_target_tpot_ms(self.target_tpot_ms, checked_stall_ms(self.stall_ms))
        if self.hop_s < 0:
            raise ValueError(f"hop_s cannot be negative: {self.hop_s}")
        if self.fleet is not None and len(self.ingress) > 1:
            raise ValueError("a replica loads models for one router: a fleet has no others")

    @classmethod
    def calibrated(cls, path: Path, **others: Any) -> "Site":
        """A site of replicas like the one that `sglang-fair calibrate` measured: its times, memory and limits.

        `others` are further fields; those that are not None overrule what was measured. Raises OSError, and
        ValueError for a file that is no calibration.
        """
        try:
            calibration = json.loads(path.read_text(encoding="utf-8"))
            limits = calibration["limits"]
            measured = {
                "kv_tokens": limits["pool_tokens"],
                "page_tokens": limits["page_tokens"],
                "max_running": limits["running"],
                "chunked_prefill_tokens": limits["chunk_tokens"],
                "hop_s": calibration["hop_s"],
            }
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not what sglang-fair calibrate writes: {error!r}") from None
        overruling = {name: value for name, value in others.items() if value is not None}
        return cls(cost_model=str(path), **(measured | overruling))

    @property
    def engine(self) -> str:
        """Its replicas in a word: the cost model's file, or GPU and model."""
        return self.cost_model or f"{self.gpu}/{self.model}"

    @property
    def scheduler(self) -> str:
        """PLACEMENT+POLICY."""
        return f"{self.placement}+{self.policy}"

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(f"r{place}" for place in range(self.replicas))

    def service_cost(self) -> Cost:
        return make_cost(self.cost, self.extend_weight, self.output_weight)

    def make_policy(self) -> Policy:
        quantum = None if self.quantum is None else checked_quantum(self.quantum)
        weights = Weights(self.client_weights)
        if (rival := RIVALS.get(self.policy)) is not None:
            return rival(quantum or DEFAULT_QUANTUM, weights)
        policy = policy_options.make(self.policy, self.policy_options, quantum=quantum, weights=weights)
        policy_options.check_together(policy, self.service_cost(), self.payer)
        return policy

    @property
    def mixes(self) -> bool:
        """Whether its replicas mix steps."""
        if self.mixed_chunk is None:
            return self.stall_ms > 0 and self.make_policy().shares_steps
        return self.mixed_chunk

    def make_cost_model(self) -> CostModel:
        return make_cost_model(self.engine, read_json)

    def make_replica(self, place: int, *, events: bool = True) -> Replica:
        """A new replica with an empty cache. `events`: it says what it caches."""
        first = "" if self.fleet is None else self.fleet.begins_with(place)
        queue = FairQueue(self.make_policy(), self.service_cost(), payers=make_payers(self.payer))
        made = Replica(
            queue,
            self.cost_of(place, first),
            self.settings(place, first),
            steps=make_steps(queue.policy, self.stall_ms, self.target_tpot_ms, mixes=self.mixes),
            events=events,
            place=place,
            places=self.replicas,
        )
        if self.tail_tokens:
            made.cache.order = TailLru(self.tail_tokens)
        return made

    def cost_of(self, place: int, model: str) -> CostModel:
        """How long a step takes on a replica that has this model."""
        return self.make_cost_model() if self.fleet is None else self.fleet.cost(place, model)

    def settings(self, place: int = 0, model: str = "") -> Settings:
        given: dict[str, Any] = {
            "max_running": self.max_running,
            "chunked_prefill_tokens": self.chunked_prefill_tokens,
        }
        if self.fleet is not None:
            given["new_token_ratio"] = ratio = self.fleet.new_token_ratio
            given["least_new_token_ratio"] = min(ratio, max(0.02, ratio / 2))
            given["host_tokens"], given["host_token_s"] = self.fleet.host_tokens(model)
        return Settings(
            kv_tokens=self.kv_tokens_of(place, model),
            page_tokens=self.page_tokens,
            ignore_eos=self.ignore_eos,
            cache_share=self.cache_share,
            mixed_chunk=self.mixes,
            progress_steps=_LONGEST_RUN,
            **{name: value for name, value in given.items() if value is not None},
        )

    def make_router(self) -> Router:
        cost = self.service_cost()
        given = {
            "quantum": self.quantum,
            "worker_quantum": self.worker_quantum,
            "extend_weight": cost.extend_weight,
            "output_weight": cost.output_weight,
            "client_weights": dict(self.client_weights),
        }
        throttling = Throttling(cast(Kind, self.throttle), make_rules(self.limits, "limits"))
        finish_s = None if self.fleet is None else self.fleet.finish_s
        router = Router(
            self._make_placement(given),
            name=self.placement,
            page_size=self.page_tokens,
            throttling=throttling,
            swap_finish_s=inf if finish_s is None else finish_s,
        )
        for place, worker in enumerate(self.workers):
            models = () if self.fleet is None else self.fleet.loadable(place)
            first = "" if self.fleet is None else self.fleet.begins_with(place)
            up = WorkerUp(
                worker,
                "",
                kv="simulated",
                models=models,
                loaded=first,
                kv_tokens=self.kv_tokens_of(place, first),
                chunk_tokens=self.chunked_prefill_tokens or 0,
            )
            router.handle(up, 0.0)
        return router

    def _make_placement(self, given: Mapping[str, Any]) -> Placement:
        if self.placement in BASELINES:
            return BASELINES[self.placement](**self.placement_options)
        known = parameters(self.placement)
        values = {name: value for name, value in given.items() if value is not None and name in known}
        return build(self.placement, **(values | dict(self.placement_options)))

    @property
    def kind(self) -> type[Placement]:
        return {**PLACEMENTS, **BASELINES}[self.placement]

    @property
    def tells_caches(self) -> bool:
        """Whether what is cached can make a difference to the router. Where there is one replica, only if requests wait
        at the router for their turn."""
        uses_caches = self.kind.uses_caches and self.placement_options.get("prefixes", True)
        return uses_caches and (self.replicas > 1 or self.kind.holds)

    def kv_tokens_of(self, place: int, model: str) -> int:
        """Tokens of the cache of a replica that has this model."""
        if self.fleet is not None:
            return self.fleet.kv_tokens(place, model)
        if self.kv_tokens is not None:
            return self.kv_tokens
        for name, known in ((self.gpu, GPUS), (self.model, SHAPES)):
            if name not in known:
                raise ValueError(f"unknown {name!r}; there are {', '.join(known)}")
        return kv_tokens(GPUS[self.gpu], SHAPES[self.model])
