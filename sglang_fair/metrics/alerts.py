"""The table of alerts: what is asked of Prometheus, when it is too much, and what to do then.

deploy/monitoring/alerts.yaml and the runbook in docs/metrics.md are made from it.
"""

from dataclasses import dataclass
from typing import Any, Literal

WINDOW = "$window"
"""In a query: the time over which rates are taken."""

WINDOW_MINUTES = 5


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when `query` compares so with `threshold` for `minutes`."""

    name: str
    severity: Literal["critical", "warning", "info"]
    query: str
    compare: Literal["<", ">"]
    threshold: float
    minutes: float
    summary: str
    means: str
    """What is wrong then."""
    do: str
    """What to look at, and what helps."""

    def expression(self, window: str) -> str:
        """The rule's, with rates over `window`."""
        return f"{self.asked(window)} {self.compare} {self.threshold:g}"

    def asked(self, window: str) -> str:
        """Its query, with rates over `window`."""
        return self.query.replace(WINDOW, window)


ALERTS: tuple[Alert, ...] = (
    Alert(
        "SglangFairFlood", "warning",
        "sum by (client) (sglang_fair_requests_waiting) / scalar(clamp_min(sum(sglang_fair_requests_waiting), 20))",
        ">", 0.8, 5,
        "{{ $labels.client }} has {{ $value | humanizePercentage }} of all waiting requests",
        "One client sends much more than it is served. Others are served as before: their share is protected by each "
        "replica's scheduler. The client's own requests wait longer and longer.",
        "Compare its share with its fair share on the dashboard. If it may have more, raise its weight or add "
        "replicas; if it should send less, give it limits in the tenants' file (`requests_per_minute`, "
        "`concurrency`). `other` as the client means many small clients, or one that invents names: start the gateway "
        "with `--tenants`.",
    ),
    Alert(
        "SglangFairBoundExceeded", "critical",
        "max by (instance) (sglang_fair_difference_units / sglang_fair_bound_units)", ">", 1, 0,
        "The service of two waiting clients at {{ $labels.instance }} is further apart than the policy guarantees",
        "The guarantee of the policy is broken: a defect of ours, or SGLang does something that the overlay does not "
        "see.",
        "Keep the output of `GET /fair` and the replica's log, restart the replica, and report it.",
    ),
    Alert(
        "SglangFairBooksDoNotBalance", "critical",
        "min by (instance) (sglang_fair_books_balanced)", "<", 1, 0,
        "What clients were charged at {{ $labels.instance }} is not what the engine has counted",
        "Tokens were charged to nobody, or twice. Shares are no longer exact.",
        "`conservation` in `GET /fair` has the numbers of the first difference. Keep it and the replica's log, "
        "restart the replica, and report it.",
    ),
    Alert(
        "SglangFairSchedulerSilent", "critical",
        "min by (instance) (sglang_fair_scheduler_answers)", "<", 1, 1,
        "The scheduler at {{ $labels.instance }} does not answer",
        "It hangs, or one of its steps takes seconds. The gateway gives a replica up whose scheduler hangs.",
        "`GET /ready` of the replica says when its scheduler last moved. On a CPU a long prompt may take that long: "
        "give SGLang a smaller `--chunked-prefill-size`. Restart a replica that does not move.",
    ),
    Alert(
        "SglangFairRouterGone", "critical",
        "min by (instance) (sglang_fair_gateway_router_up)", "<", 1, 1,
        "The gateway at {{ $labels.instance }} does not hear a router",
        "Requests are served, but placed by consistent hashing: caches and loads do not count.",
        "See whether the router runs and `GET /healthz` answers. A cluster starts it again by itself; its log says "
        "why it ended. A router of its own: is the gateway's `--router` its address, and reachable?",
    ),
    Alert(
        "SglangFairNoReplica", "critical",
        'sum by (instance) (sglang_fair_router_workers{state="up"})', "<", 1, 1,
        "The router at {{ $labels.instance }} has no replica that takes requests",
        "Every request is refused with 503.",
        "`sglang-fair workers list` says which there are, and in which state. Their logs say why they ended.",
    ),
    Alert(
        "SglangFairReplicasShort", "warning",
        "(max by (instance) (sglang_fair_router_replicas_short) or vector(0))", ">", 0, 10,
        "{{ $value }} more replicas are needed to keep the deadlines of those within their share",
        "No order of the queues that was found meets the deadlines.",
        "`sglang-fair status` says of which model, and why. `sglang-fair workers add --model NAME` starts one; a "
        "cluster with `--scale-up N` does so by itself.",
    ),
    Alert(
        "SglangFairReplicaSick", "warning",
        'sum by (instance) (sglang_fair_router_workers{state="sick"})', ">", 0, 2,
        "{{ $value }} replicas do not answer a gateway",
        "They get no requests. If they are overloaded they come back by themselves; if their process has ended, the "
        "cluster starts it again.",
        "`GET /status` names them (`sick`). Look at their logs, and at `GET /ready` of each.",
    ),
    Alert(
        "SglangFairQuarantine", "critical",
        "max by (instance) (sglang_fair_router_quarantined_clients)", ">", 0, 0,
        "Requests of {{ $value }} clients have ended replicas",
        "Each of these requests was tried at two replicas, which both ended. The client is served one request at a "
        "time, by one replica, and refused after three such requests. Others are served as before.",
        "`GET /status` has the clients under `suspects.quarantine`, with the request's id and fingerprint; the "
        "gateway's log names the replicas, and their logs say what they died of. Report it to us, or to SGLang: a "
        "request must not do that. `DELETE /quarantine/CLIENT` ends it; `sglang-fair tenants remove` takes the "
        "client's keys.",
    ),
    Alert(
        "SglangFairRequestsFail", "critical",
        '(sum(rate(sglang_fair_requests_total{outcome="failed"}[$window])) or vector(0)) / '
        "sum(rate(sglang_fair_requests_total[$window]))",
        ">", 0.05, 5,
        "{{ $value | humanizePercentage }} of all requests fail by the server's fault",
        "Clients get 5xx, or streams that end in an error.",
        "The gateway's log has a line for each, with the reason and the replica. `sglang_fair_refusals_total` says "
        "which status: 502 is a replica that fails, 503 a router or a room that is missing.",
    ),
    Alert(
        "SglangFairSlowFirstToken", "warning",
        "histogram_quantile(0.95, sum by (client, le) (rate(sglang_fair_ttft_seconds_bucket[$window])))",
        ">", 30, 10,
        "{{ $labels.client }} waits {{ $value | humanizeDuration }} for the first token (95th percentile)",
        "Either this client asks for more than its share, or all do for more than there is.",
        "If only this client waits, see SglangFairFlood. If all wait, add replicas (`sglang_fair_waiting_tokens` says "
        "how much is waiting). If queue waits are short and first tokens late, prompts are long: look at hits.",
    ),
    Alert(
        "SglangFairBacklog", "warning",
        "max by (instance) (sglang_fair_waiting_tokens)", ">", 200_000, 10,
        "{{ $value | humanize }} prompt tokens wait at {{ $labels.instance }}",
        "The replica cannot keep up: at 10,000 tokens a second the last of them waits for 20 s.",
        "Add replicas (`sglang-fair workers add`), or have an autoscaler follow this number. If one replica has much "
        "more than the others, look at placements by reason: clients with one long shared prefix stay where it "
        "is cached.",
    ),
    Alert(
        "SglangFairHitsOverestimated", "info",
        "sum by (instance) (rate(sglang_fair_router_measured_hit_tokens_total[$window])) / "
        "sum by (instance) (rate(sglang_fair_router_measured_predicted_tokens_total[$window]))",
        "<", 0.5, 15,
        "Only {{ $value | humanizePercentage }} of the cached tokens that the router expects are found",
        "The router places by caches that are not there: replicas evict much, or their KV events do not arrive.",
        "`wire` in `GET /status` counts KV events that were lost. Are the replicas' KV pools full? Then a flood of "
        "unique prompts evicts prefixes: try `--cache-share on`.",
    ),
    Alert(
        "SglangFairTenantsFile", "warning",
        "min by (instance) (sglang_fair_gateway_tenants_ok)", "<", 1, 1,
        "The gateway at {{ $labels.instance }} cannot use the newest tenants' file",
        "The file before it stays in force: new tenants, keys and limits do not hold yet.",
        "`GET /status` has the reason under `tenants`, with line and column. `sglang-fair tenants list` reads the "
        "file as the gateway does.",
    ),
    Alert(
        "SglangFairCertificateEnds", "warning",
        "min by (instance) (sglang_fair_gateway_certificate_end_timestamp_seconds) - time()", "<", 7 * 86_400, 60,
        "The certificate of the gateway at {{ $labels.instance }} ends in {{ $value | humanizeDuration }}",
        "Once it has ended, clients refuse to connect.",
        "Write the new certificate and its key over the files of `--tls-cert` and `--tls-key`: they are read again at "
        "the next connection, and nothing is restarted. If they are new already, the gateway's log says why it cannot "
        "use them.",
    ),
    Alert(
        "SglangFairForgedHeaders", "info",
        "sum by (instance, header) (rate(sglang_fair_ignored_headers_total[$window]))", ">", 0, 5,
        "Somebody at {{ $labels.instance }} names clients in {{ $labels.header }}",
        "Headers that name a client came from elsewhere than `--trusted-proxies`, and were ignored.",
        "If they come from a proxy of yours, name its network in `--trusted-proxies`. Otherwise somebody tries to be "
        "another client, or to be many; nothing follows from it.",
    ),
    Alert(
        "SglangFairTargetDown", "critical",
        'min by (job, instance) (up{job=~"sglang-fair.*"})', "<", 1, 1,
        "{{ $labels.job }} at {{ $labels.instance }} cannot be scraped",
        "The process has ended or does not answer, or the key is wrong (401).",
        "Prometheus says which under Status, Targets. Keys: the gateway wants the one in `SGLANG_FAIR_ADMIN_KEY`, a "
        "replica that in `SGLANG_FAIR_REPLICA_KEY`.",
    ),
)  # fmt: skip


def rules(minute_s: float = 60.0) -> dict[str, Any]:
    """The rules as Prometheus reads them. A test lets a minute pass in `minute_s` seconds."""
    window = _duration(WINDOW_MINUTES * minute_s)
    return {
        "groups": [
            {
                "name": "sglang-fair",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression(window),
                        "for": _duration(alert.minutes * minute_s),
                        "labels": {"severity": alert.severity},
                        "annotations": {
                            "summary": alert.summary,
                            "description": alert.means,
                            "runbook": f"docs/metrics.md#{alert.name.lower()}",
                        },
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f}m" if seconds % 60 == 0 else f"{seconds:.0f}s"
