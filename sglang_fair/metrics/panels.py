"""The table of the dashboard's panels. deploy/monitoring/grafana-dashboard.json is made from it."""

from dataclasses import dataclass
from typing import Any

SECTIONS = ("Clients", "Fairness", "Replicas and router", "Gateway")

CLIENT = 'client=~"$client"'
RATE = "$__rate_interval"

WIDTH, HEIGHT, COLUMNS = 8, 8, 24


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over time. `queries` are what is drawn: (PromQL, the legend's text)."""

    section: str
    title: str
    unit: str
    """Grafana's name of it."""
    queries: tuple[tuple[str, str], ...]
    about: str = ""


def _rate(metric: str, by: str, only: str = "") -> str:
    return f"sum by ({by}) (rate(sglang_fair_{metric}{{{only}}}[{RATE}]))".replace("{}", "")


def _p95(metric: str) -> str:
    return f"histogram_quantile(0.95, {_rate(f'{metric}_bucket', 'client, le', CLIENT)})"


_WAITS = "sglang_fair_weight and (sglang_fair_requests_waiting > 0)"

PANELS: tuple[Panel, ...] = (
    Panel("Clients", "Service", "short", ((_rate("service_units_total", "client", CLIENT), "{{client}}"),),
          "Units of the cost function a second."),
    Panel("Clients", "Share beside fair share", "percentunit",
          ((f"{_rate('service_units_total', 'client', CLIENT)} / "
            f"scalar(sum(rate(sglang_fair_service_units_total[{RATE}])))", "{{client}}"),
           (f"avg by (client) ({_WAITS}) / scalar(sum(avg by (client) ({_WAITS})))", "fair share of {{client}}")),
          "Of all service. The fair share is that of a client among those with waiting requests, by weight."),
    Panel("Clients", "Tokens", "short", ((_rate("tokens_total", "kind", CLIENT), "{{kind}}"),),
          "Computed input, input from the cache, output; a second."),
    Panel("Clients", "Time to first token", "s", ((_p95("ttft_seconds"), "{{client}}"),),
          "95th percentile, of streams."),
    Panel("Clients", "Wait in the queue", "s", ((_p95("queue_wait_seconds"), "{{client}}"),), "95th percentile."),
    Panel("Clients", "Whole requests", "s", ((_p95("request_seconds"), "{{client}}"),), "95th percentile."),
    Panel("Clients", "Requests by outcome", "reqps", ((_rate("requests_total", "outcome", CLIENT), "{{outcome}}"),)),
    Panel("Clients", "Waiting requests", "short",
          ((f"sum by (client) (sglang_fair_requests_waiting{{{CLIENT}}})", "{{client}}"),)),
    Panel("Clients", "Running requests", "short",
          ((f"sum by (client) (sglang_fair_requests_running{{{CLIENT}}})", "{{client}}"),)),
    Panel("Clients", "Requests admitted", "reqps",
          ((_rate("admitted_requests_total", "client", CLIENT), "{{client}}"),)),
    Panel("Fairness", "Difference beside bound", "short",
          (("sglang_fair_difference_units", "difference {{instance}}"),
           ("sglang_fair_bound_units", "bound {{instance}}")),
          "How far the service of two waiting clients is apart, and how far it may be."),
    Panel("Fairness", "Deficits", "short",
          ((f"sglang_fair_deficit_units{{{CLIENT}}}", "{{client}} {{instance}}"),),
          "Under DLPM who is above 0 may be served."),
    Panel("Fairness", "Jain's index", "percentunit", (("sglang_fair_jain_index", "{{instance}}"),),
          "Of the clients that have waited for the last minute; 1 is equal."),
    Panel("Fairness", "Refills", "short", ((f"rate(sglang_fair_refills_total[{RATE}])", "{{instance}}"),),
          "How often a second all waiting clients had used up their quanta."),
    Panel("Fairness", "Books", "short",
          (("sglang_fair_books_balanced", "balanced {{instance}}"),
           ("sglang_fair_books_corrections_total", "corrections {{instance}}"))),
    Panel("Fairness", "Refused by the policy", "reqps",
          ((f"rate(sglang_fair_policy_refusals_total[{RATE}])", "{{instance}}"),)),
    Panel("Fairness", "Taken back for urgent requests", "reqps",
          ((f"rate(sglang_fair_evictions_total[{RATE}])", "{{instance}}"),)),
    Panel("Replicas and router", "Cached prompts, predicted and measured", "percentunit",
          (("sum(rate(sglang_fair_router_measured_predicted_tokens_total[$__rate_interval])) / "
            "sum(rate(sglang_fair_router_measured_prompt_tokens_total[$__rate_interval]))", "predicted"),
           ("sum(rate(sglang_fair_router_measured_hit_tokens_total[$__rate_interval])) / "
            "sum(rate(sglang_fair_router_measured_prompt_tokens_total[$__rate_interval]))", "measured"),
           ("sum(rate(sglang_fair_router_predicted_hit_tokens_total[$__rate_interval])) / "
            "sum(rate(sglang_fair_router_prompt_tokens_total[$__rate_interval]))", "predicted, of all"))),
    Panel("Replicas and router", "Placements by reason", "reqps",
          ((_rate("router_placements_total", "reason"), "{{reason}}"),),
          "prefix: it has the longest; new: nobody has any; load: another has more but is busier; only: there is one; "
          "retry: another failed."),
    Panel("Replicas and router", "Placements by replica", "reqps",
          ((_rate("router_placements_total", "worker"), "{{worker}}"),)),
    Panel("Replicas and router", "Requests in flight", "short",
          (("sum by (worker) (sglang_fair_router_requests_in_flight)", "{{worker}}"),
           ("sum(sglang_fair_router_requests_waiting)", "held by the router"))),
    Panel("Replicas and router", "Waiting work", "short",
          (("sglang_fair_waiting_tokens", "queue {{instance}}"),
           ("sum by (worker) (sglang_fair_router_prefill_tokens_left)", "prefill {{worker}}"),
           ("sum by (worker) (sglang_fair_router_decode_tokens_left)", "decode {{worker}}")),
          "Tokens; for autoscalers."),
    Panel("Replicas and router", "Replicas", "short",
          (("sum by (state) (sglang_fair_router_workers)", "{{state}}"),
           ("count by (model) (sglang_fair_router_worker_info)", "with {{model}}"))),
    Panel("Replicas and router", "Models loaded", "short",
          ((f"sum by (worker, outcome) (rate(sglang_fair_router_swaps_total[{RATE}])) or vector(0)",
            "{{worker}} {{outcome}} a second"),
           (f"sum by (worker) (rate(sglang_fair_router_swap_seconds_total[{RATE}])) or vector(0)",
            "{{worker}} part of the time")),
          "Replicas that load one model after the other (--swap)."),
    Panel("Replicas and router", "Waiting in groups", "short",
          (("sum by (model, slo_class, tier) (sglang_fair_router_queue_requests) or vector(0)",
            "{{model}} {{slo_class}} tier {{tier}}"),
           ("sum(sglang_fair_router_queue_late_requests) or vector(0)", "predicted late"),
           ("sum(sglang_fair_router_queue_groups) or vector(0)", "groups")),
          "Placement qlm: tier 0 is within the share of its client."),
    Panel("Replicas and router", "Plans", "short",
          ((f"sum(rate(sglang_fair_router_plans_asked_total[{RATE}])) or vector(0)", "asked a second"),
           (f"sum(rate(sglang_fair_router_plan_entries_ignored_total[{RATE}])) or vector(0)", "entries ignored"),
           ("min(sglang_fair_router_wait_r2) or vector(0)", "R² of waits"),
           (f"sum by (outcome) (rate(sglang_fair_router_plans_total[{RATE}])) or vector(0)", "{{outcome}} a second"),
           ("sum by (tier) (sglang_fair_router_planned_lateness) or vector(0)", "seconds late, tier {{tier}}"),
           ("max(sglang_fair_router_replicas_short) or vector(0)", "replicas short")),
          "Placement qlm: what becomes of plans, and how late the last one is."),
    Panel("Replicas and router", "Tokens in the router's tree", "short",
          (("sum by (worker) (sglang_fair_router_tree_tokens)", "{{worker}}"),)),
    Panel("Replicas and router", "Ends", "reqps", ((_rate("router_ended_total", "outcome"), "{{outcome}}"),
                                                   (f"rate(sglang_fair_router_refusals_total[{RATE}])", "refused"))),
    Panel("Gateway", "Retries, resumed streams, placements in fallback", "reqps",
          ((f"sum(rate(sglang_fair_retries_total[{RATE}]))", "retries"),
           (f"sum(rate(sglang_fair_resumes_total[{RATE}]))", "resumed"),
           (f"sum(rate(sglang_fair_cuts_total[{RATE}]))", "cut"),
           (f"sum(rate(sglang_fair_fallback_placements_total[{RATE}]))", "fallback"))),
    Panel("Gateway", "Errors", "reqps", ((_rate("refusals_total", "status"), "{{status}}"),
                                         (_rate("ignored_headers_total", "header"), "ignored {{header}}"))),
    Panel("Gateway", "First tokens in time, by class", "percentunit",
          ((f'sum by (slo_class) (rate(sglang_fair_slo_requests_total{{attained="met"}}[{RATE}])) / '
            f'sum by (slo_class) (rate(sglang_fair_slo_requests_total{{attained!="neither"}}[{RATE}]))',
            "{{slo_class}}"),),
          "Of the requests that met or missed what their class promises."),
    Panel("Gateway", "Requests by model", "reqps",
          ((_rate("model_requests_total", "model"), "{{model}}"),)),
    Panel("Gateway", "Batches", "short",
          (('max by (client, state) (sglang_fair_batch_items{client=~"$client"})', "{{client}} {{state}}"),)),
    Panel("Gateway", "Requests that end replicas", "short",
          (("increase(sglang_fair_router_suspects_total[5m])", "{{event}} in 5 min"),
           ("sglang_fair_router_suspects_waiting", "suspects that wait"),
           ("sglang_fair_router_quarantined_clients", "clients in quarantine"))),
    Panel("Gateway", "In flight", "short",
          (("sglang_fair_gateway_requests_in_flight", "requests {{instance}}"),
           ("sglang_fair_gateway_connections", "connections {{instance}}"))),
    Panel("Gateway", "Bodies in memory", "bytes", (("sglang_fair_gateway_held_bytes", "{{instance}}"),)),
    Panel("Gateway", "Who is there", "short",
          (("sglang_fair_gateway_router_up", "router, of {{instance}}"),
           ("sglang_fair_gateway_routers_up", "routers, of {{instance}}"),
           ("sglang_fair_gateway_tenants_ok", "tenants' file of {{instance}}"),
           ("sglang_fair_router_peers", "gateways of the router"),
           ("increase(sglang_fair_router_refused_peers_total[5m])", "peers refused in 5 min"),
           ("sglang_fair_scheduler_answers", "scheduler of {{instance}}"))),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it. The data source is asked for there."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    shown: list[dict[str, Any]] = []
    top = 0
    for section in SECTIONS:
        panels = [panel for panel in PANELS if panel.section == section]
        shown.append({"type": "row", "title": section, "collapsed": False, "panels": [], "id": len(shown) + 1,
                      "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}})  # fmt: skip
        top += 1
        for at, panel in enumerate(panels):
            down, across = divmod(at * WIDTH, COLUMNS)
            place = {"x": across, "y": top + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            shown.append(_drawn(panel, len(shown) + 1, place, source))
        top += -(-len(panels) * WIDTH // COLUMNS) * HEIGHT
    return {
        "title": "sglang-fair",
        "uid": "sglang-fair",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["sglang", "fairness"],
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "client",
                    "label": "Client",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(sglang_fair_tokens_total, client)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": shown,
    }


def _drawn(panel: Panel, number: int, place: dict[str, int], source: dict[str, str]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": None if "Deficit" in panel.title else 0,
                                     "custom": {"fillOpacity": 5, "showPoints": "never"}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": query, "legendFormat": legend}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip
