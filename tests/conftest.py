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
from sglang_fair.overlay import releases
from tests.support import budget, fork_server
from tests.support.live import Replica
from tests.support.wheel import Built, Installed, build, install

settings.load_profile(budget.PUSH)  # which --hypothesis-profile=nightly replaces
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
fork_server.announce()
# `make test &` in a script: children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """All workers of pytest-xdist share one fork server. This process, which outlives them, starts it beside the
    collection."""
    is_gate = session.config.getoption("markexpr").startswith("not engine")
    if session.config.getoption("numprocesses", None) and not is_gate:
        fork_server.launch()


NEEDS = ("machine", "browser", "e2e", "engine", "slow")
"""What a test may need, by its mark. What waits longest begins first; what only computes fills the gaps at the end."""

COMPUTE = (
    "tests/core/",
    "tests/router/",
    "tests/sim/",
    "tests/whole/test_faults",
    "tests/whole/test_several_routers",
)
"""Where slow tests share nothing that was started, so that each may run in any worker."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share servers run in one worker (`--dist loadgroup`): those of a group, or else of a file."""

    def rank(item: pytest.Item) -> int:
        return next((rank for rank, mark in enumerate(NEEDS) if item.get_closest_marker(mark)), len(NEEDS))

    first: dict[str, int] = {}
    groups = []
    for item in items:
        file, _, _ = item.nodeid.partition("::")
        mark = item.get_closest_marker("xdist_group")
        if mark is None and not (file.startswith(COMPUTE) and rank(item) >= NEEDS.index("slow")):
            item.add_marker(mark := pytest.mark.xdist_group(file))
        groups.append(mark.args[0] if mark else file)
        first[groups[-1]] = min(first.get(groups[-1], len(NEEDS)), rank(item))
    order = sorted(range(len(items)), key=lambda place: first[groups[place]])
    items[:] = [items[place] for place in order]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Replicas and clusters of whatever a test starts come from one process that has imported SGLang."""
    if any(item.get_closest_marker(mark) for mark in ("engine", "e2e", "machine")):
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
        releases.adapt()
        importlib.import_module("sglang_fair.overlay.hooks")
    gc.freeze()  # or the collector looks through all of SGLang and torch again and again in the tests that follow


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(built.wheel, tmp_path_factory.mktemp("venv") / "v")
