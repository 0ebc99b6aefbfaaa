"""Why a request waited, on SGLang's real scheduler: the cause that is told is the one that made it wait."""

import json
from typing import Any

import httpx
import pytest

from sglang_fair.core.waits import CAUSES, DEFICIT, ENGINE, STEP
from sglang_fair.overlay import releases
from tests.support import fork_server
from tests.support.live import Replica

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ended = fork_server.run("-m", "tests.support.waiting_causes")
    assert ended.returncode == 0, ended.stderr[-3000:]
    records: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return records


@pytest.mark.parametrize(
    "why", [*(one for one in CAUSES if one not in (STEP, DEFICIT)), "memory, in SGLang's own order"]
)
def test_the_cause_that_is_told_is_the_one_that_made_it_wait(found: dict[str, Any], why: str) -> None:
    if why == ENGINE and not releases.has("0.5.21"):
        pytest.skip("older releases pass nobody over for how answers are read out")
    record, cause = found[why], why.partition(",")[0]
    assert record["waited_s"] > 0
    assert record["waited_for_s"] == {cause: pytest.approx(record["waited_s"])}


def ask(replica: Replica, id: str, **parameters: str) -> httpx.Response:
    return httpx.get(f"{replica.url}/explain/{id}", params=parameters, timeout=30)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({"input_ids": [7] * 16, "rid": "a" * 32, "sampling_params": {"n": 3, "max_new_tokens": 3}}, 4),
        (
            {
                "input_ids": [[8] * 16, [9] * 16],
                "rid": ["b" * 32, "c" * 32],
                "sampling_params": {"max_new_tokens": 3},
            },
            2,
        ),
    ],
)
def test_all_that_sglang_makes_of_one_attempt_is_told(
    one_at_a_time: Replica, body: dict[str, Any], number: int
) -> None:
    """Of n answers SGLang makes n requests, and one that computes the prompt."""
    attempt = f"attempt-{number}"
    headers = {"x-fair-client": "several", "x-fair-attempt": attempt}
    answer = httpx.post(f"{one_at_a_time.url}/generate", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    records = ask(one_at_a_time, attempt, client="several").json()["requests"]
    assert [one["outcome"] for one in records] == ["finished"] * number
    assert sum(one["output_tokens"] for one in records) >= 3 * len(answer.json())
