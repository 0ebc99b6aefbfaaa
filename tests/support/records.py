"""Records of requests as tests write them down."""

from dataclasses import replace
from typing import Any

from workloads.records import RequestRecord


def request(
    client: str, sent_s: float, first_s: float | None, done_s: float, **changes: Any
) -> RequestRecord:
    """40 prompt tokens, half of them cached, and 5 output tokens that come with the first one."""
    times = () if first_s is None else ((first_s, 5),)
    given = RequestRecord(
        client, 0, 0, "", sent_s, sent_s, first_s, done_s, "ok",
        prompt_tokens=40, cached_tokens=20, output_tokens=5, token_times=times, worker="r0",
    )  # fmt: skip
    return replace(given, **changes)
