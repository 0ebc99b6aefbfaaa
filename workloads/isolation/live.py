"""The stacks on this machine, and a run of one scene on one of them.

Both are emulated GPUs behind a router: ours is `sglang-fair cluster`. *Stock* is SGLang's own scheduler behind
sglang-router: its replicas are those of such a cluster, whose own gateway has nothing to do. Where sglang-router is not
installed, that gateway stands in for it, with the same rule.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_fair.bench.children import Children, free_ports, start_sglang_router, until_served
from workloads.clients import client_facts
from workloads.clusters import Cluster, SpawnCluster, drive, verify
from workloads.isolation.attacks import Scene
from workloads.isolation.measures import STOCK, Stack
from workloads.programs import PackedCodec
from workloads.records import Manifest, Run, stamp
from workloads.session import Plan

STREAM_INTERVAL_TOKENS = 16
"""Tokens in each chunk of a stream but the first: every chunk is work for this machine's cores, and none of ours."""
_FIRST_REQUEST = (
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 64\r\n\r\n"
    + b'{"input_ids":[1,2,3,4],"sampling_params":{"max_new_tokens":1}}'.ljust(64)
)


@dataclass(frozen=True, slots=True)
class Lab:
    """What all runs of a measurement have in common. Times are seconds of the engine; on this machine they take
    `pace` times as long."""

    ours: SpawnCluster
    stock: SpawnCluster
    sglang_router: str | None
    """The program, None if there is none."""
    warm_up_s: float
    seconds: float
    drain_s: float
    period_s: float

    @property
    def pace(self) -> float:
        """The clusters' time scale."""
        return self.stock.settings.time_scale

    @contextmanager
    def start(self, stack: Stack) -> Iterator[tuple[Cluster, dict[str, Any]]]:
        """The stack until the context ends, and what its processes say that they are.

        Raises ClusterError and DidNotStart.
        """
        spawn = self.stock if stack.name == STOCK else self.ours
        with spawn(stack.placement, stack.policy) as cluster:
            reported = verify(cluster, stack.placement, stack.policy)
            if stack.name != STOCK or self.sglang_router is None:
                yield cluster, reported
                return
            children = Children()
            try:
                port, metrics = free_ports(2)
                engines = [int(url.rpartition(":")[2]) for url in cluster.replicas]
                router = start_sglang_router(children, self.sglang_router, port, metrics, engines)
                asyncio.run(until_served(port, _FIRST_REQUEST, router))
                yield (
                    replace(cluster, gateway=f"http://127.0.0.1:{port}"),
                    {**reported, "placement": "sglang-router's cache_aware"},
                )
            finally:
                children.close()

    def run(
        self,
        cluster: Cluster,
        stack: Stack,
        scene: Scene,
        *,
        seed: str,
        repeat: int,
        reported: Mapping[str, Any],
        path: Path | None,
    ) -> tuple[Run, list[Mapping[str, float]]]:
        """One run, and what each emulated GPU's clock says. When load has ended, light clients' programs are waited
        for."""
        clients, at_once = scene.load(
            PackedCodec(),
            seed,
            replicas=len(cluster.replicas),
            period_s=self.period_s,
            pace=self.pace,
        )
        plan = Plan(
            (self.warm_up_s + self.seconds) * self.pace,
            at_once=at_once,
            drain_s=self.drain_s * self.pace,
            drain_for="well-behaved",
            connections_per_client=max([256, *at_once.values()]),
        )
        manifest = Manifest(
            workload=scene.name,
            scheduler=f"{stack.placement}+{stack.policy}",
            clients=client_facts(clients),
            duration_s=plan.duration_s,
            workers=len(cluster.replicas),
            seed=seed,
            repeat=repeat,
            reported=reported,
            case={"scene": asdict(scene), "plan": asdict(plan), "time_scale": self.pace},
            **stamp(),
        )
        return drive(cluster, clients, plan, manifest, tag=f"@{scene.name}.{repeat}", path=path)
