"""The table of metrics: name, kind, labels, meaning, once. What is exported, and docs/metrics.md, are made from it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglang_fair.metrics.labels import OTHER

Kind = Literal["counter", "gauge", "histogram"]
Place = Literal["gateway", "router", "replica"]

PREFIX = "sglang_fair_"

TOKEN_KINDS = ("extend", "cached", "output")
OUTCOMES = ("ok", "refused", "failed", "left")
REASONS = {
    "prefix": "none has more of the prompt cached",
    "new": "none has any of the prompt cached, and the placement preferred it",
    "load": "another one has more of the prompt cached, and the placement preferred it all the same",
    "only": "no other replica could take it",
    "retry": "another replica had failed it",
}
"""Why a request went to a replica, in words."""
PLAN_OUTCOMES = ("answered", "stale", "failed", "unanswered")
STATES = ("up", "draining", "sick", "swapping")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series. Its unit is in its name; counters end in `_total`."""

    name: str
    place: Place
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As Prometheus knows it."""
        return PREFIX + self.name

    @property
    def series(self) -> str:
        """A name that has samples of its own."""
        return self.full_name + ("_count" if self.kind == "histogram" else "")


CLIENT = ("client",)

METRICS: tuple[Metric, ...] = (
    # ---- gateway
    Metric("requests_total", "gateway", "counter",
           "Requests that have ended: answered (ok); refused, by the gateway or the replica (4xx); failed, of the "
           "server's fault (5xx, or a stream that broke off); left by their client.", ("client", "outcome")),
    Metric("ttft_seconds", "gateway", "histogram",
           "From a request's arrival to the first piece of its answer, of streams.", CLIENT),
    Metric("request_seconds", "gateway", "histogram",
           "From arrival to the end of an answer, of requests with the outcome ok.", CLIENT),
    Metric("model_requests_total", "gateway", "counter",
           "The same requests by model, those that came so far that it was known.", ("model", "outcome")),
    Metric("slo_requests_total", "gateway", "counter",
           "Requests that have ended, by the class whose time to first token they were promised: met; missed, failed "
           "ones among them; neither, those that were refused or that their client left before.",
           ("slo_class", "attained")),
    Metric("retries_total", "gateway", "counter",
           "Further attempts at another replica before the client had anything."),
    Metric("resumes_total", "gateway", "counter", "Streams that went on from another replica."),
    Metric("cuts_total", "gateway", "counter",
           "Streams that were cut and continued because their replica was to load another model."),
    Metric("fallback_placements_total", "gateway", "counter",
           "Requests that the gateway placed by itself, because no router answered."),
    Metric("refusals_total", "gateway", "counter", "Error answers of the gateway itself.", ("status",)),
    Metric("ignored_headers_total", "gateway", "counter",
           "Headers that name a client and came from elsewhere than a trusted proxy.", ("header",)),
    Metric("gateway_requests_in_flight", "gateway", "gauge", "Requests that are being served."),
    Metric("gateway_connections", "gateway", "gauge", "Open connections of clients."),
    Metric("gateway_held_bytes", "gateway", "gauge", "Request bodies in memory."),
    Metric("gateway_router_up", "gateway", "gauge", "1: a router answers; 0: requests are placed by hashing."),
    Metric("gateway_routers_up", "gateway", "gauge", "Routers that answer and decide for clients."),
    Metric("batch_items", "gateway", "gauge",
           "Items of the batches that are kept: left, of these running, completed, failed.", ("client", "state")),
    Metric("gateway_tenants_ok", "gateway", "gauge",
           "1: the newest tenants' file is in force, or there is none; 0: it cannot be used."),
    Metric("gateway_certificate_end_timestamp_seconds", "gateway", "gauge",
           "When the certificate that clients are shown ends, in seconds since 1970; +Inf: there is none."),
    # ---- router
    Metric("router_placements_total", "router", "counter",
           "Requests that were given to a replica, because: it has the longest cached prefix (prefix); nobody has any "
           "of it (new); another one has more of it but more to do (load); there was no other (only); the attempt "
           "before failed (retry).", ("worker", "reason")),
    Metric("router_ended_total", "router", "counter", "Placed requests that have ended: ok, aborted, failed.",
           ("outcome",)),
    Metric("router_refusals_total", "router", "counter", "Requests for which there was no replica, or no room."),
    Metric("router_prompt_tokens_total", "router", "counter", "Prompt tokens of placed requests."),
    Metric("router_predicted_hit_tokens_total", "router", "counter",
           "Of these, what the router expected to be cached at the replica."),
    Metric("router_measured_prompt_tokens_total", "router", "counter",
           "Prompt tokens of requests whose replica said how many were cached."),
    Metric("router_measured_predicted_tokens_total", "router", "counter", "Of these, what the router had expected."),
    Metric("router_measured_hit_tokens_total", "router", "counter", "Of these, what was cached."),
    Metric("router_workers", "router", "gauge", "Replicas: up, draining, swapping (their model), or sick (silent).",
           ("state",)),
    Metric("router_worker_info", "router", "gauge", "1 for each replica, with the model that it has.",
           ("worker", "model")),
    Metric("router_swaps_total", "router", "counter", "Models that a replica was ordered to load: ok, or failed.",
           ("worker", "outcome")),
    Metric("router_swap_seconds_total", "router", "counter", "Seconds in which a replica loaded and served nobody.",
           ("worker",)),
    Metric("router_requests_in_flight", "router", "gauge", "Requests that a replica has.", ("worker",)),
    Metric("router_requests_waiting", "router", "gauge", "Requests that the placement holds until a replica has room."),
    Metric("router_queue_requests", "router", "gauge",
           "Requests that wait in groups (placement qlm), by model, class and tier: 0 within the share of its client, "
           "1 ahead of it. Class `(late)`: whose deadline has passed.", ("model", "slo_class", "tier")),
    Metric("router_queue_late_requests", "router", "gauge", "Of these, in groups that will miss a deadline.",
           ("model", "slo_class", "tier")),
    Metric("router_queue_groups", "router", "gauge", "Groups in which they wait."),
    Metric("router_plans_asked_total", "router", "counter", "Plans that were asked for (placement qlm)."),
    Metric("router_plans_total", "router", "counter",
           "What became of them: applied (answered); given up because they took too long (unanswered), and come after "
           "that (stale); ended with an error or their process (failed).", ("outcome",)),
    Metric("router_plan_entries_ignored_total", "router", "counter",
           "Groups in applied plans that were not there any more, or could not be where the plan had them."),
    Metric("router_planned_lateness", "router", "gauge",
           "Seconds of lateness in the last plan, summed over groups, by tier.", ("tier",)),
    Metric("router_replicas_short", "router", "gauge",
           "Replicas that would have to be added so that nobody within its share is late; 0: none, or not known."),
    Metric("router_wait_r2", "router", "gauge",
           "R² of predicted waiting times, of the last thousand: 1 is exact. Left out while there are few."),
    Metric("router_prefill_tokens_left", "router", "gauge",
           "Prompt tokens of the requests that a replica has, still to be computed: waiting work.", ("worker",)),
    Metric("router_decode_tokens_left", "router", "gauge",
           "Output tokens that the requests of a replica are expected to make yet.", ("worker",)),
    Metric("router_tree_tokens", "router", "gauge", "Tokens that the router takes to be cached.", ("worker",)),
    Metric("router_suspects_total", "router", "counter",
           "Requests that a replica had when it ended (suspects), those that have ended two (convictions, or doubts "
           "where something else can be the cause), and those refused because of that.", ("event",)),
    Metric("router_suspects_waiting", "router", "gauge",
           "Requests that wait to be tried once more, one at a time, at another replica."),
    Metric("router_quarantined_clients", "router", "gauge",
           "Clients that are served one request at a time, because requests of theirs have ended replicas."),
    Metric("router_peers", "router", "gauge", "Gateways that are connected."),
    Metric("router_refused_peers_total", "router", "counter",
           "Connections that were refused, because the peer had no key or a wrong one."),
    # ---- replica
    Metric("tokens_total", "replica", "counter",
           "Tokens that a client was given: computed input (extend), input from the cache (cached), output.",
           ("client", "kind")),
    Metric("service_units_total", "replica", "counter", "Service by the cost function.", CLIENT),
    Metric("admitted_requests_total", "replica", "counter", "Requests that have begun to run.", CLIENT),
    Metric("queue_wait_seconds", "replica", "histogram",
           "From a request's arrival at the replica to its first admission into a batch.", CLIENT),
    Metric("deficit_units", "replica", "gauge",
           "The policy's counter of a client: under DLPM its deficit, who is above 0 may be served.", CLIENT),
    Metric("weight", "replica", "gauge", "A client's share beside the others'.", CLIENT),
    Metric("requests_waiting", "replica", "gauge", "Requests in the queue.", CLIENT),
    Metric("requests_running", "replica", "gauge", "Requests in the batch.", CLIENT),
    Metric("waiting_tokens", "replica", "gauge",
           "Prompt tokens of waiting requests that are not cached: waiting work, for autoscalers."),
    Metric("refills_total", "replica", "counter", "How often all waiting clients had used up their quanta."),
    Metric("evictions_total", "replica", "counter",
           "Running requests that were taken back for a more urgent one, under policy slo."),
    Metric("policy_refusals_total", "replica", "counter", "Requests that the policy refused (429)."),
    Metric("expired_requests_total", "replica", "counter",
           "Requests that were dropped because they had not begun within their time to live (504)."),
    Metric("difference_units", "replica", "gauge",
           "Largest difference of the service, divided by weight, of two labelled clients that wait, since a reading "
           "in the last minute at which both did; 0 if no two have waited. Compare with the bound."),
    Metric("bound_units", "replica", "gauge", "What the policy guarantees that difference to be at most."),
    Metric("jain_index", "replica", "gauge",
           "Jain's index of the service, divided by weight, of the labelled clients that have waited for the last "
           "minute: 1 is equal; 1 too if no two have."),
    Metric("books_balanced", "replica", "gauge",
           "1: all that was charged to clients is what the engine has counted, after every batch so far."),
    Metric("books_corrections_total", "replica", "counter",
           "How often the books were corrected because they did not agree with SGLang."),
    Metric("scheduler_answers", "replica", "gauge",
           "1: these numbers are the scheduler's; 0: it has not answered in time, and all others are left out."),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}

CLIENT_LABEL = (
    f"Label `client`: tenants of the tenants' file, of all others those that get most, then `{OTHER}`; "
    "`(system)` is the server's own work."
)


def of(place: Place) -> tuple[Metric, ...]:
    """Those that are exported there."""
    return tuple(metric for metric in METRICS if metric.place == place)


SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper ends of the buckets of every histogram of ours; one more has no end."""


class Histogram:
    """Seconds. `observe` costs O(log buckets)."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum_s += seconds

    def plain(self) -> Mapping[str, Any]:
        return {"counts": list(self.counts), "sum_s": self.sum_s}


def cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    """As Prometheus has them: (upper end, how many up to there)."""
    total, found = 0, []
    for end, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
        total += count
        found.append((end, float(total)))
    return found
