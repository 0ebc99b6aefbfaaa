"""docs/metrics.md and the files in deploy/monitoring/, made from the tables of metrics, panels and alerts.

    python -m sglang_fair.metrics.files            says which are out of date
    python -m sglang_fair.metrics.files --write    writes them

A test compares them with the tables.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import yaml

from sglang_fair.metrics.alerts import ALERTS, WINDOW_MINUTES, Alert, rules
from sglang_fair.metrics.panels import dashboard
from sglang_fair.metrics.table import CLIENT_LABEL, Place, of
from sglang_fair.metrics.waits import SECONDS
from sglang_fair.settings.commands import Option, run

MADE = "Made by `python -m sglang_fair.metrics.files --write` from sglang_fair/metrics/; do not edit."

RULES = Path("deploy/monitoring/alerts.yaml")
DASHBOARD = Path("deploy/monitoring/grafana-dashboard.json")
SCRAPES = Path("deploy/monitoring/prometheus.yaml")
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

<!-- {MADE} -->

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
    """docs/metrics.md."""
    return HEAD + "".join(f"{line}\n" for line in _body())


def _body() -> Iterator[str]:
    for place, where in PLACES.items():
        yield f"\n### From {where}\n"
        yield "| name | labels | what it is |\n|---|---|---|"
        for metric in of(place):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            kind = "" if metric.kind == "gauge" else f" ({metric.kind})"
            yield f"| `{metric.full_name}`{kind} | {labels} | {metric.help} |"
    yield "\n## Alerts\n"
    yield f"Rates are taken over {WINDOW_MINUTES} minutes.\n"
    yield "| alert | severity | fires when |\n|---|---|---|"
    for alert in ALERTS:
        after = f", for {alert.minutes:g} min" if alert.minutes else ""
        link = f"[{alert.name}](#{alert.name.lower()})"
        yield f"| {link} | {alert.severity} | `{_one_line(alert)}`{after} |"
    for alert in ALERTS:
        yield f"\n### {alert.name}\n"
        yield _wrapped(f"**What it means.** {alert.means}") + "\n"
        yield _wrapped(f"**What to do.** {alert.do}")


def _one_line(alert: Alert) -> str:
    return alert.expression(f"{WINDOW_MINUTES}m").replace("|", "\\|")


def scrapes(
    gateways: Sequence[str],
    routers: Sequence[str],
    replicas: Sequence[str],
    *,
    admin_key: str | None = None,
    replica_key: str | None = None,
    interval_s: float = 15.0,
) -> dict[str, Any]:
    """Prometheus' configuration for processes at these addresses, HOST:PORT, with the keys in these files."""
    return {
        "global": {"scrape_interval": f"{interval_s:g}s", "evaluation_interval": f"{interval_s:g}s"},
        "rule_files": [RULES.name],
        "scrape_configs": [
            {
                "job_name": f"sglang-fair-{place}",
                **({"authorization": {"credentials_file": key}} if key else {}),
                "static_configs": [{"targets": list(targets)}],
            }
            for place, targets, key in (
                ("gateway", gateways, admin_key),
                ("router", routers, None),
                ("replica", replicas, replica_key),
            )
        ],
    }


def files() -> Mapping[Path, str]:
    """All files, by path in the repository."""
    example = scrapes(
        ["127.0.0.1:8001"], ["127.0.0.1:9001"], ["127.0.0.1:30000", "127.0.0.1:30003"],
        admin_key="admin.key", replica_key="replica.key",
    )  # fmt: skip
    return {
        PAGE: page(),
        RULES: _yaml(rules()),
        SCRAPES: _yaml(example),
        DASHBOARD: json.dumps(dashboard(), indent=1) + "\n",
    }


def _yaml(content: Mapping[str, Any]) -> str:
    return f"# {MADE}\n" + yaml.safe_dump(dict(content), sort_keys=False, width=110, allow_unicode=True)


def main(
    write: Annotated[bool, Option("--write", help="Write the files.")] = False,
) -> int:
    """Compare docs/metrics.md and the files in deploy/monitoring/ with the tables."""
    stale = 0
    for path, text in files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(path)
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 0 if write or not stale else 1


if __name__ == "__main__":
    sys.exit(run(main, "python -m sglang_fair.metrics.files"))
