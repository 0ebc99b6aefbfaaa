"""Spans of a request through a whole cluster: a collector gets one tree, and it says what `GET /explain/ID` says."""

from typing import Any

import httpx
import pytest

from tests.support.collector import Collector, tree
from tests.support.live import Cluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("keyed")]

TIMEOUT_S = 60.0
CALLER = "cd" * 8
TENANT = {"authorization": "Bearer light"}


def ask(keyed: Cluster, trace: str, name: str, **body: Any) -> None:
    headers = {"traceparent": f"00-{trace}-{CALLER}-01", "x-request-id": name, **TENANT}
    body = {"prompt": "some words", "max_tokens": 4, **body}
    answer = httpx.post(f"{keyed.url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_one_tree_that_says_what_the_explanation_says(
    keyed: Cluster, collector: Collector, stream: bool
) -> None:
    trace = f"{1 + stream:032x}"
    ask(keyed, trace, f"mine-{stream}", stream=stream)
    wait_until(lambda: [node for node in collector.of(trace) if node.parent == CALLER], "the root")
    wait_until(lambda: len(collector.of(trace)) == 6, "all spans")
    root = tree(collector.of(trace), CALLER)
    assert root.names() == [
        "POST /v1/completions", ["attempt", ["placement"], ["waiting"], ["prefill"], ["decode"]]
    ]  # fmt: skip
    answer = httpx.get(f"{keyed.url}/explain/mine-{stream}", headers=TENANT, timeout=TIMEOUT_S).json()
    [request] = answer["requests"]
    assert request["trace_id"] == trace
    [explained] = request["attempts"]
    [record] = explained["replica"]
    [attempt] = root.children
    _, waiting, prefill, decode = attempt.children
    assert attempt.attributes["sglang_fair.worker"] == explained["worker"]
    assert decode.attributes["sglang_fair.outcome"] == "finished"
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    lengths = [(node.ended_ns - node.began_ns) / 1e9 for node in (waiting, prefill, decode)]
    told = [record["waited_s"], record["prefill_s"], record["decode_s"]]
    assert lengths == pytest.approx(told, abs=1e-4), "nothing had to be cut to lie within the attempt"
