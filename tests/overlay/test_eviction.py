"""On SGLang's scheduler and tree, clients keep what they use beside one that streams."""

import json
from typing import Any

import pytest

from sglang_fair.overlay import releases
from tests.support import fork_server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not releases.has("0.5.22"), reason="older caches are not shared out"),
]


def crowded(cache_share: str) -> dict[str, Any]:
    done = fork_server.run("-m", "tests.support.crowded_cache", cache_share)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["mismatches"] == told["corrections"] == 0
    return told


def test_three_clients_with_a_fifth_of_the_pool_each_keep_it_beside_a_stream() -> None:
    """All but the last page of a prompt, whose last token is always computed."""
    told = crowded("on")
    assert told["core"] == "FairTreeCore"
    assert told["found"] == {f"chat {k}": 784 / 800 for k in range(3)}
    assert [told["holds"][f"chat {k}"] for k in range(3)] == [3200] * 3


def test_with_the_rule_off_sglangs_own_order_lets_the_stream_take_all() -> None:
    told = crowded("off")
    assert told["core"] == "RustUnifiedTreeCore"
    assert told["found"] == {f"chat {k}": 0.0 for k in range(3)}
