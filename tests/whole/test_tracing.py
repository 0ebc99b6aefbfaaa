"""Spans of a request through a whole cluster: a collector gets one tree, and it says what `GET /explain/ID` says."""

import httpx
import pytest

from tests.support.collector import Collector, tree
from tests.support.live import Cluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("keyed")]

TIMEOUT_S = 60.0
CALLER = "cd" * 8
TENANT = {"authorization": "Bearer light"}
OF_A_STREAM = [["first token"], ["answer"]]


@pytest.mark.parametrize("stream", [False, True])
def test_one_tree_that_says_what_the_explanation_says(
    keyed: Cluster, collector: Collector, stream: bool
) -> None:
    trace, name = f"{1 + stream:032x}", f"mine-{stream}"
    headers = {"traceparent": f"00-{trace}-{CALLER}-01", "x-request-id": name, **TENANT}
    body = {"prompt": "some words", "max_tokens": 4, "stream": stream}
    served = httpx.post(f"{keyed.url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    assert served.status_code == 200, served.text
    parts = [["placement"], *(OF_A_STREAM if stream else [])]
    wait_until(lambda: len(collector.of(trace)) == 2 + len(parts), "all spans")
    root = tree(collector.of(trace), CALLER)
    assert root.names() == ["POST /v1/completions", ["attempt", *parts]]
    answer = httpx.get(f"{keyed.url}/explain/{name}", headers=TENANT, timeout=TIMEOUT_S).json()
    [request] = answer["requests"]
    assert request["trace_id"] == trace
    [explained] = request["attempts"]
    [attempt] = root.children
    assert attempt.attributes["sglang_fair.worker"] == explained["worker"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    [replica] = explained["replica"]
    length_s = (attempt.ended_ns - attempt.began_ns) / 1e9
    assert length_s > replica["waited_s"] + replica["prefill_s"] + replica["decode_s"], (
        "it lies within the attempt"
    )
