"""The page is current; rules and dashboard name metrics that there are, and are what Prometheus and Grafana read."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_fair.metrics import reference
from sglang_fair.metrics.table import METRICS, PREFIX
from tests.support.monitoring import PANELS, QUERIES, RULES

ROOT = Path(__file__).parents[2]
SERIES = {
    f"{metric.full_name}{end}"
    for metric in METRICS
    for end in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
}


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = reference.PAGE.read_text(encoding="utf-8")
    assert page == reference.page(), "run: python -m sglang_fair.metrics.reference --write"
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"{reference.PAGE}#{rule['alert'].lower()}"


def test_queries_name_metrics_that_there_are_and_the_dashboard_has_all() -> None:
    named = set(re.findall(rf"{PREFIX}\w+", " ".join(QUERIES)))
    assert named <= SERIES
    assert [metric.name for metric in METRICS
            if not any(name.startswith(metric.full_name) for name in named)] == []  # fmt: skip


def test_the_dashboard_s_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in PANELS}) == len(PANELS) > 30
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, json.dumps(at)
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)
def test_prometheus_accepts_the_rules() -> None:
    rules = [str(ROOT / reference.RULES)]
    done = subprocess.run(["promtool", "check", "rules", *rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
