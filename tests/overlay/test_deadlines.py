"""By when a request's first token is due, at the replica: only a gateway says so, and it counts from the arrival."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang")]

SAID = {"x-fair-slack-ms": "1500.0", "x-fair-class": "batch-1"}


def carried(headers: dict[str, str]) -> dict[str, Any]:
    """What the HTTP side notes about the sender of a request, whose body says something of its own."""
    from sglang_fair.overlay.identity import carry_client

    obj = SimpleNamespace(sampling_params={"custom_params": {"fair": {"slack_s": -9.0, "slo_class": "x"}}})
    carry_client(obj, SimpleNamespace(headers=headers, scope={}))
    fair: dict[str, Any] = obj.sampling_params["custom_params"]["fair"]
    return fair


def test_it_is_believed_beside_a_name_of_the_gateway_s() -> None:
    fair = carried({"x-fair-client": "me", **SAID})
    assert (fair["slack_s"], fair["slo_class"]) == (1.5, "batch-1")
    for headers in (SAID, {"authorization": "Bearer k", **SAID}, {"x-tenant-id": "me", **SAID}):
        assert carried(headers).keys().isdisjoint({"slack_s", "slo_class"}), "anybody could say so"


def test_a_tier_is_believed_beside_a_name_of_the_gateway_s() -> None:
    assert carried({"x-fair-client": "me", "x-fair-tier": "1"})["tier"] == 1
    for headers in ({}, {"x-fair-client": "me"}, {"authorization": "Bearer k"}):
        for text in ("1", "0", "2", "-1", "1.0", "one", "\u0661", ""):
            if text != "1" or "x-fair-client" not in headers:
                assert "tier" not in carried({**headers, "x-fair-tier": text})


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "1e99", "1_0"])
def test_what_is_no_number_says_nothing(text: str) -> None:
    fair = carried({"x-fair-client": "me", "x-fair-slack-ms": text, "x-fair-class": "batch-1"})
    assert fair.keys().isdisjoint({"slack_s", "slo_class"})


@pytest.mark.parametrize(
    ("headers", "due"), [(SAID, 101.5), (SAID | {"x-fair-slack-ms": "-2000"}, 98.0), ({}, None)]
)
def test_it_is_due_by_the_engine_s_clock(headers: dict[str, str], due: float | None) -> None:
    from sglang_fair.overlay.books import JOB_ATTRIBUTE
    from sglang_fair.overlay.config import Config
    from sglang_fair.overlay.replica import ReplicaFairness

    fair = ReplicaFairness(Config(), "dlpm", orders=True, tree_cache=SimpleNamespace(disable=True))
    fair.now_s = 100.0
    sampling = SimpleNamespace(
        custom_params={"fair": carried({"x-fair-client": "me", **headers})}, max_new_tokens=3
    )
    request = SimpleNamespace(rid="1", origin_input_ids=[1, 2], output_ids=[], sampling_params=sampling)
    fair.arrive(request)
    job = getattr(request, JOB_ATTRIBUTE)
    assert (job.deadline_s, job.slo_class) == (due, "batch-1" if headers else "")
    assert job.tier == 0
