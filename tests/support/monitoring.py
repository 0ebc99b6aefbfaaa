"""What stands in deploy/monitoring/."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"

RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS: list[dict[str, Any]] = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
DRAWN: list[str] = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
WATCHED: list[str] = [re.sub(r" [<>] [\d.e+]+$", "", rule["expr"]) for rule in RULES]
"""What rules compare."""
QUERIES = DRAWN + WATCHED
