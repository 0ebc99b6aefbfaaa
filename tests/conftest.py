"""Real servers, started once per session, and stopped by their process ids."""

import gc
import importlib
import json
import os
import signal
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import settings

from sglang_fair.engines import cpu
from tests.support import budget, fork_server
from tests.support.live import Cluster, Replica
from tests.support.wheel import Built, Installed, build, install

settings.load_profile(budget.PUSH)  # which --hypothesis-profile=nightly replaces
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
fork_server.announce()
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # `make test &` in a script: children would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = ("workloads/test_experiments", "whole/test_faults", "whole/test_swaps", "overlay/test_preempt")
"""Files of tests that begin first where files are shared out among workers, or the last of them would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files only change places: tests of one file share what they have started."""
    order = {f"tests/{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Replicas and clusters of whatever a test starts come from one process that has imported SGLang."""
    if item.get_closest_marker("engine") or item.get_closest_marker("e2e"):
        fork_server.start()


@pytest.fixture(scope="session")
def one_at_a_time() -> Iterator[Replica]:
    """The paper's DLPM, a quantum of 100 units and room for one running request: admissions come one by one."""
    printed = ("--policy", "dlpm", "--policy-options", "newcomers=0", "--quantum", "100")
    with Replica(*printed, "--max-running", "1") as replica:
        yield replica


PRESSURE = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--schedule-conservativeness", "0.1")
"""With a small KV pool: prompts in chunks of 64 tokens mixed into decode steps, and requests are retracted."""


@pytest.fixture(scope="session")
def under_pressure() -> Iterator[Replica]:
    """DLPM with 64-token chunks mixed into decode steps, and a KV pool so small that it retracts."""
    with Replica("--policy", "dlpm", "--quantum", "500", "--kv-tokens", "2048", "--", *PRESSURE) as replica:
        yield replica


@pytest.fixture(scope="session")
def overlapping() -> Iterator[Replica]:
    """The same with overlap scheduling, under a limit of 2 requests a minute, which a, b, c and d need not mind."""
    unlimited = json.dumps(dict.fromkeys(("a", "b", "c", "d"), 1000))
    with Replica(
        "--policy", "rpm", "--policy-options", "limit=2", "--client-weights", unlimited, "--kv-tokens", "2048",
        "--", *PRESSURE, module="tests.support.odd_replica",
    ) as replica:  # fmt: skip
        yield replica


@pytest.fixture(scope="session")
def sglang() -> None:
    """SGLang is imported in this process, as on the CPU engine."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in cpu.environment().items():
            patch.setenv(name, value)
        cpu.define_torchvision_operators()
        importlib.import_module("sglang_fair.overlay.hooks")
    gc.freeze()  # or the collector looks through all of SGLang and torch again and again in the tests that follow


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


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(built.wheel, tmp_path_factory.mktemp("venv") / "v")
