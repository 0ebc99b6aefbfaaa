"""docs/metrics.md, made from the table of metrics and the rules in deploy/monitoring/alerts.yaml.

    python -m sglang_fair.metrics.reference            prints the page
    python -m sglang_fair.metrics.reference --write    puts it into docs/metrics.md

A test compares the page with them, and the queries of rules and dashboard with the table.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from sglang_fair.metrics.table import CLIENT_LABEL, SECONDS, Place, of
from sglang_fair.settings.reference import publish

RULES = Path("deploy/monitoring/alerts.yaml")
PAGE = Path("docs/metrics.md")

PLACES: Mapping[Place, str] = {
    "gateway": "the gateway, where `/status` is (with `--admin-port` there, with the admin key)",
    "router": "the router's HTTP server (`--http-port`; `router_http` in `cluster --json`), without a key",
    "replica": "each replica, with SGLang's `--api-key` (`SGLANG_FAIR_REPLICA_KEY`), as `/fair`",
}

LABELS = (
    "How many others: `--metrics-clients` (20). A label is kept while the process lives, and a client without one that "
    "comes to have twice as much as they gets one too: the number of labels grows with the logarithm of what clients "
    "are served, and not with their number. What a client was counted as before it had a label stays with `other`: no "
    "counter falls, and nothing counts twice. With tenants nobody else is served, so `other` is 0 but for refused "
    "requests. With several processes of a gateway each scrape has the sum of all, at most a second old."
)


def _wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


HEAD = f"""\
# Metrics, dashboard and alerts

<!-- Made by `python -m sglang_fair.metrics.reference --write`; do not edit. -->

Gateway, router and replicas have `GET /metrics` for Prometheus. With SGLang's `--enable-metrics` a replica's page has
SGLang's own numbers too.

In `deploy/monitoring/`:

- [prometheus.yaml](../deploy/monitoring/prometheus.yaml): what to scrape, to be completed with your addresses;
- [alerts.yaml](../deploy/monitoring/alerts.yaml): [alert rules](#alerts);
- [grafana-dashboard.json](../deploy/monitoring/grafana-dashboard.json): a dashboard; in Grafana: Dashboards, New,
  Import.

The router also answers `GET /healthz`, whether its loop runs, and `GET /readyz`, whether it has a replica that takes
requests.

## Who has a label

{_wrapped(CLIENT_LABEL + " " + LABELS)}

Histograms have the buckets {", ".join(f"{one:g}" for one in SECONDS)} s.

## Metrics
"""


def page() -> str:
    """docs/metrics.md. Run it in the repository's root."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]
    return HEAD + "".join(f"{line}\n" for line in (*_metrics(), *_alerts(rules)))


def _metrics() -> Iterator[str]:
    for place, where in PLACES.items():
        yield f"\n### From {where}\n"
        yield "| name | labels | what it is |\n|---|---|---|"
        for metric in of(place):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            kind = "" if metric.kind == "gauge" else f" ({metric.kind})"
            yield f"| `{metric.full_name}`{kind} | {labels} | {metric.help} |"


def _alerts(rules: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Alerts\n"
    yield "Rates are taken over 5 minutes.\n"
    yield "| alert | severity | fires when |\n|---|---|---|"
    for rule in rules:
        name, expression = rule["alert"], rule["expr"].replace("|", "\\|")
        after = "" if rule["for"] == "0m" else f", for {rule['for'].removesuffix('m')} min"
        yield f"| [{name}](#{name.lower()}) | {rule['labels']['severity']} | `{expression}`{after} |"
    for rule in rules:
        yield f"\n### {rule['alert']}\n"
        yield _wrapped(f"**What it means.** {rule['annotations']['description']}") + "\n"
        yield _wrapped(f"**What to do.** {rule['annotations']['action']}")


if __name__ == "__main__":
    name = "python -m sglang_fair.metrics.reference"
    sys.exit(publish(page, PAGE, name, "The reference page of all metrics and alerts."))
