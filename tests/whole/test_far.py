"""A cluster over two networks, with two routers and two gateways: what is cut, killed and overheard there.

Replicas are emulated and real in all else. Those beyond the cable are behind keys, TLS and a key of their own. The
programs are those of the wheel, in an environment of its own.

What is promised of a gateway that dies: whoever waits for the head of an answer is served by the other one, when the
client's library asks again, as the official ones do by themselves. A stream that had begun breaks, and is served when
the application asks for it once more. What dies behind a gateway is noticed by nobody, but for streams of /v1/messages:
one whose replica dies ends with an error event, and is asked for once more, too.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.networks import may_join_two
from tests.support.wheel import ROOT, Installed, clean_environment

LIMIT_S = 800
"""On a busy machine; an idle one needs a fifth."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(LIMIT_S + 100)]

Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Seen:
    if not may_join_two():
        pytest.skip("this process may not make networks and join them (unshare -rmn, ip link add type veth)")
    installed: Installed = request.getfixturevalue("installed")
    folder = tmp_path_factory.mktemp("far")
    done = subprocess.run(
        ["unshare", "-rmn", sys.executable, "-m", "tests.support.far", str(folder), installed.python],
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
        cwd=ROOT, env=clean_environment(),
    )  # fmt: skip
    print(done.stdout[-8000:], done.stderr[-12000:])
    found: Seen = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith('"ok"\n')
    assert installed.read_from_the_checkout() == []
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


def test_strangers_are_refused_and_counted(seen: Seen) -> None:
    found = seen["strangers"]
    assert found["refused"]["router"] >= 3
    assert found["refused"]["replica"] >= 9
    assert found["heard"] == 0
    assert found["a replica without its key"] == 401
    assert found["believed"] is False


def test_nothing_is_lost_when_a_replica_a_router_and_a_gateway_die(seen: Seen) -> None:
    found = seen["kills"]
    assert found["applications"] == 8
    assert found["router0"] == {"retried by the client": 0, "streams asked for again": {}}
    assert found["r0"]["retried by the client"] == 0
    assert "OpenAI" not in found["r0"]["streams asked for again"]


def test_a_cut_cable_leaves_each_request_one_outcome_and_shares_inside_the_bound(seen: Seen) -> None:
    """That each has one, and what is in its answer, and that shares keep to the bound, is asserted as they come."""
    found = seen["cut"]
    assert found["until it was healed"].keys() <= {"served", "refused", "broken off"}
    assert found["outcomes"]["served"] > found["until it was healed"]["served"]
    for name, bound in found["bounds"].items():
        assert found["least service by weight"][name] > 4 * bound


def test_routers_know_again_what_is_cached(seen: Seen) -> None:
    hits = seen["cut"]["tree"]
    pages = 16 * hits["prompts"]
    assert abs(hits["measured_predicted_tokens"] - hits["measured_cached_tokens"]) <= pages
    assert hits["measured_cached_tokens"] > hits["measured_input_tokens"] / 2
