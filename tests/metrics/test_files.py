"""What is made from the tables is up to date, names metrics that there are, and is what Prometheus and Grafana read."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sglang_fair.metrics import files
from sglang_fair.metrics.alerts import ALERTS
from sglang_fair.metrics.panels import PANELS, SECTIONS, dashboard
from sglang_fair.metrics.table import METRICS, PREFIX

ROOT = Path(__file__).parents[2]
QUERIES = [query for panel in PANELS for query, _ in panel.queries] + [alert.query for alert in ALERTS]
SERIES = {
    f"{metric.full_name}{end}"
    for metric in METRICS
    for end in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
}


@pytest.mark.parametrize("path", files.files())
def test_the_files_are_current(path: Path) -> None:
    found = (ROOT / path).read_text(encoding="utf-8")
    assert found == files.files()[path], "run: python -m sglang_fair.metrics.files --write"


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_metrics_that_there_are(query: str) -> None:
    named = set(re.findall(rf"{PREFIX}\w+", query))
    assert named <= SERIES
    assert named or "up{" in query


def test_every_metric_is_on_the_dashboard() -> None:
    shown = set(re.findall(rf"{PREFIX}\w+", " ".join(QUERIES)))
    assert {metric.name for metric in METRICS
            if not any(name.startswith(metric.full_name) for name in shown)} == set()  # fmt: skip


def test_every_alert_has_its_paragraph_and_its_link_leads_there() -> None:
    page, wrapped = files.page(), " ".join(files.page().split())
    rules = yaml.safe_load(files.files()[files.RULES])["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    for rule, alert in zip(rules, ALERTS, strict=True):
        assert f"\n### {alert.name}\n" in page
        assert alert.do in wrapped
        assert rule["annotations"]["runbook"] == f"{files.PAGE}#{alert.name.lower()}"


def test_the_dashboard_s_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    shown = dashboard()["panels"]
    assert len(shown) == len(PANELS) + len(SECTIONS)
    assert len({panel["id"] for panel in shown}) == len(shown)
    for panel in shown:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_prometheus_accepts_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", "check", "rules", str(ROOT / files.RULES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
