"""A cluster over two networks, with two routers and two gateways: what is overheard there, and a cut.

Replicas are emulated and real in all else. Those beyond the cable are behind keys, TLS and a key of their own.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.networks import may_join_two

LIMIT_S = 800
"""On a busy machine; an idle one needs a fifth."""
FORKS = 16
"""More than replicas are started."""

pytestmark = [pytest.mark.e2e, pytest.mark.machine, pytest.mark.timeout(LIMIT_S + 100)]

Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    if not may_join_two():
        pytest.skip("this process may not make networks and join them (unshare -rmn, ip link add type veth)")
    forks = [fork_server.connect() for _ in range(FORKS)]
    numbers = [one.fileno() for one in forks]
    done = subprocess.run(
        ["unshare", "-rmn", sys.executable, "-m", "tests.support.far", str(tmp_path_factory.mktemp("far")),
         *map(str, numbers)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, pass_fds=numbers,
    )  # fmt: skip
    print(done.stdout[-8000:], done.stderr[-12000:])
    for one in forks:
        one.close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith('"ok"\n')
    found: Seen = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def test_without_keys_every_channel_is_readable(seen: Seen) -> None:
    """Which shows that the next test would see it."""
    found = seen["overheard without keys"]
    assert "text" in found["client"]
    assert found["replica"]
    assert "token ids" in found["router"]
    assert "text" in found["events"], "token ids of an emulated model are bytes of its text"
    assert "text" in found["replay"]


def test_with_keys_none_is(seen: Seen) -> None:
    channels = ("client", "router", "replica", "events", "replay", "load")
    assert seen["overheard"] == {channel: [] for channel in channels}


def test_a_cut_cable_leaves_each_request_one_outcome(seen: Seen) -> None:
    """That each has one, and no more is running or charged, is asserted as they end."""
    found = seen["cut"]
    assert found["failed"] > 0
    assert found["served when it was healed"] > 0


def test_routers_know_again_what_is_cached(seen: Seen) -> None:
    hits = seen["cut"]["tree"]
    pages = 16 * hits["prompts"]
    assert abs(hits["measured_predicted_tokens"] - hits["measured_cached_tokens"]) <= pages
    assert hits["measured_cached_tokens"] > hits["measured_input_tokens"] / 2
