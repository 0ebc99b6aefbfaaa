"""Real servers, started once per session, and stopped by their process ids."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.live import Cluster, Replica

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def one_at_a_time() -> Iterator[Replica]:
    """DLPM, a quantum of 100 units and room for one running request: admissions come one by one."""
    with Replica("--policy", "dlpm", "--quantum", "100", "--max-running", "1") as replica:
        yield replica


@pytest.fixture(scope="session")
def under_pressure() -> Iterator[Replica]:
    """DLPM with 64-token chunks mixed into decode steps, and a KV pool so small that it retracts."""
    with Replica(
        "--policy", "dlpm", "--quantum", "500", "--kv-tokens", "2048",
        "--", "--chunked-prefill-size", "64", "--enable-mixed-chunk", "--schedule-conservativeness", "0.1",
    ) as replica:  # fmt: skip
        yield replica


SMALL_REPLICAS = ("--", "--max-running-requests", "4", "--max-total-tokens", "4096")


@pytest.fixture(scope="session")
def clusters() -> Iterator[tuple[Cluster, Cluster]]:
    """D2LPM over DLPM, and round robin over LPM, side by side."""
    fair = Cluster("--quantum", "100", "--worker-quantum", "1000", *SMALL_REPLICAS).start()
    greedy = Cluster("--policy", "lpm", "--placement", "round_robin", *SMALL_REPLICAS).start()
    with fair, greedy:
        yield fair, greedy


@pytest.fixture(scope="session")
def fair_cluster(clusters: tuple[Cluster, Cluster]) -> Cluster:
    return clusters[0]
