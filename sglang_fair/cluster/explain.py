"""`sglang-fair explain ID`: what gateway, router and replica remember of a request, in words."""

import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from sglang_fair.cluster.status import fetch
from sglang_fair.common.service_keys import admin_key, bearer
from sglang_fair.core.waits import CAUSES
from sglang_fair.metrics.table import REASONS

MOST_GROUPS = 6
"""Before a request's own that are shown."""

TENANT_KEY_VARIABLE = "OPENAI_API_KEY"
"""Where OpenAI's clients have their key."""

WHY = {**REASONS, "told": "it had the request already when this router came to know of it"}


def read(gateway: str, request: str) -> dict[str, Any]:
    key = admin_key.key() or os.environ.get(TENANT_KEY_VARIABLE) or ""
    return fetch(f"{gateway.rstrip('/')}/explain/{quote(request, safe='')}", bearer(key))


def in_words(answer: Mapping[str, Any]) -> str:
    parts = ["\n".join(_request(request)) for request in answer["requests"]]
    if answer.get("router"):
        parts.append(f"The router could not be asked: {answer['router']}.")
    return "\n\n".join(parts)


def _request(request: Mapping[str, Any]) -> Iterator[str]:
    head = f"request {request['request'] or '?'} of client {request['client']}"
    if not request["gateway"]:
        yield head + "; this gateway process knows nothing of it, others may"
    else:
        yield f"{head}, {request['kind']}, model {request['model'] or '?'}: {request['outcome'] or 'under way'}"
        if request["error"]:
            yield f"  {request['error']}"
        tokens = request["tokens"]
        yield (
            f"  {_seconds(request['duration_s'])} in all, first token after {_seconds(request['ttft_s'])}; tokens: "
            f"{_count(tokens['input'])} in, {_count(tokens['cached'])} of them cached, {_count(tokens['output'])} out; "
            f"{request['retries']} retries, {request['resumes']} resumes"
            + (", placed without a router" if request["fallback"] else "")
        )
        if request.get("slo"):
            yield _deadline(request["slo"])
    for attempt in request["attempts"]:
        yield from _attempt(attempt)


def _deadline(slo: Mapping[str, Any]) -> str:
    words = f"  class {slo['class']}: first token within {_seconds(slo['slo_s'])}"
    if slo["slo_s"] - slo["due_s"] > 0.001:
        words += f", due after {_seconds(slo['due_s'])} as a later call of its interaction"
    return words + (f": {slo['attained']}" if slo["attained"] else "")


def _attempt(attempt: Mapping[str, Any]) -> Iterator[str]:
    outcome = attempt.get("outcome")
    yield (
        f"  attempt {attempt['id']} at {attempt['worker'] or 'no replica'}"
        + (f": {outcome}" if outcome else "")
        + (f", {attempt['reason']}" if attempt.get("reason") else "")
    )
    if attempt["router"] is not None:
        yield from _placement(attempt["router"])
    if attempt["replica_error"]:
        yield f"    {attempt['replica_error']}"
    for record in attempt["replica"] or ():
        yield from _record(record)


def _placement(placement: Mapping[str, Any]) -> Iterator[str]:
    if placement["refused"]:
        yield f"    router: refused, {placement['refused']}"
        return
    if placement["waited_for"]:
        yield f"    router: held for {_seconds(placement['waited_s'])}, because {placement['waited_for']}"
    if placement.get("standing"):
        yield from ("      " + line for line in _standing(placement["standing"], "when it came:"))
    if placement.get("stands"):
        yield from ("      " + line for line in _standing(placement["stands"], "it waits"))
    if placement["worker"] is None:
        return
    yield f"    router: {_figures(placement['worker'])}, because {WHY.get(placement['why'], placement['why'])}"
    if placement["next_best"] is not None:
        yield f"    next best: {_figures(placement['next_best'])}"


def _standing(standing: Mapping[str, Any], when: str) -> Iterator[str]:
    """Where a request stands, or stood, in lines. `when` begins the first."""
    tier = "within its client's share" if standing["tier"] == 0 else "ahead of its client's share"
    model = f"model {standing['model']}, " if standing["model"] else ""
    yield (
        f"{when} in group {standing['group']} ({model}class {standing['class']}, tier {standing['tier']}: {tier}) with "
        f"{standing['with']:,} others"
    )
    if standing.get("worker") is None:
        if "worker" in standing:
            yield "  no replica can serve that group"
        return
    swaps = standing["swaps_before"]
    yield (
        f"  at {standing['worker']} behind {standing['groups_before']:,} groups of {standing['requests_before']:,} "
        f"requests" + (f", {swaps} of another model to be loaded" if swaps else "")
    )
    if standing["wait_s"] is not None:
        wait, likely = _seconds(standing["wait_s"]), _seconds(standing["likely_s"])
        yield f"  expected to wait {wait}, at most {likely} 99 times in 100"
    for row in standing["before"][:MOST_GROUPS]:
        yield (
            f"    group {row['group']}: {row['model'] or 'the model'}, {row['class']}, tier {row['tier']}, "
            f"{row['waiting']:,} waiting, {_seconds(row['slack_s'])} left"
        )


def _figures(worker: Mapping[str, Any]) -> str:
    cost = worker.get("cost")
    return (
        f"{worker['worker']} with {worker['matched_tokens']:,} tokens of the prompt and {worker['load']:g} requests "
        f"for its capacity" + ("" if cost is None else f", cost {cost:,.0f}")
    )


def _record(record: Mapping[str, Any]) -> Iterator[str]:
    state = record["outcome"] or record["state"]
    yield f"    replica: waited {_seconds(record['waited_s'])}, {state}" + (
        f": {record['reason']}" if record["reason"] else ""
    )
    for cause, spent_s in record["waited_for_s"].items():
        yield f"      {_seconds(spent_s):>9} for {CAUSES.get(cause, cause)}"
    yield (
        f"      when it came {record['waiting_at_arrival']:,} waited and {record['running_at_arrival']:,} ran; "
        f"{record['overtaken_by']:,} later ones went first, in {record['overtaken_in_batches']:,} batches"
    )
    if record["counter_at_arrival"] is not None or record["counter_at_admission"] is not None:
        refills = "" if record["refills"] is None else f", {record['refills']:,} refills between"
        yield (
            f"      its client's counter: {_count(record['counter_at_arrival'])} when it came, "
            f"{_count(record['counter_at_admission'])} when it was admitted{refills}"
        )
    if record["prefill_s"] is not None:
        yield (
            f"      prompt computed in {_seconds(record['prefill_s'])} ({record['extend_tokens']:,} tokens, "
            f"{record['cached_tokens']:,} more from the cache), answer in {_seconds(record['decode_s'])} "
            f"({record['output_tokens']:,} tokens), taken back {record['retractions']} times"
        )
    for one in record.get("evicted_for", ()):
        whose = "its own client" if one["same_client"] else "another client"
        yield f"      taken back for a request of {whose}, {_urgency(one)}"


def _urgency(one: Mapping[str, Any]) -> str:
    tier, slack_s = f"of tier {one['tier']}", one["slack_s"]
    if slack_s is None:
        return tier
    return f"{tier}, " + (
        f"due in {_seconds(slack_s)}" if slack_s >= 0 else f"overdue for {_seconds(-slack_s)}"
    )


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _count(count: float | None) -> str:
    return "?" if count is None else f"{count:,.0f}"
