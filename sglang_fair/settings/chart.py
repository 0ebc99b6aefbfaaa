"""The part of the Helm chart's schema that says which settings there are, made from the table.

    python -m sglang_fair.settings.chart            says whether deploy/helm/sglang-fair/values.schema.json is current
    python -m sglang_fair.settings.chart --write    makes it so

The chart's `settings` become a configuration file. What the chart itself says on a command line is left out of them:
addresses, ports, keys, certificates, models, and where replicas are.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.settings.commands import Option, run
from sglang_fair.settings.setting import Setting, settings_of
from sglang_fair.settings.table import SECTIONS

SCHEMA = Path("deploy/helm/sglang-fair/values.schema.json")

PROGRAMS = ("replica", "router", "gateway", "feeder", "dashboard")
"""Those whose settings are the chart's values."""

OF_THE_CHART = frozenset({
    "admin_host", "admin_port", "batch_files", "batches", "bind", "device", "drain_s", "extra", "gateway", "gateway_ca",
    "gateway_cert", "host", "http_host", "http_port", "insecure", "keys", "kv_port", "load_port", "model",
    "model_name", "more_models", "name", "notice_s", "outlive_parent", "port", "replica_ca", "replicas_dns",
    "replicas_file", "router", "served_name", "tenants", "tls_cert", "tls_key", "tokenizer", "worker",
})  # fmt: skip
"""Fields that it gives its containers, or has no use for."""

KINDS: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def sections() -> dict[str, Any]:
    """The schema of `settings`. A name of a policy that SGLang has is any text."""
    programs = {
        program: _closed(
            {
                setting.key: _of(setting)
                for field, setting in settings_of(SECTIONS[program]).items()
                if field not in OF_THE_CHART and not (program == "router" and field == "page_size")
            }
        )
        for program in PROGRAMS
    }
    return _closed(programs)


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


def _of(setting: Setting) -> dict[str, Any]:
    about = setting.about
    if setting.is_mapping:
        found: dict[str, Any] = {"type": "object"}
    elif setting.is_list:
        found = {"type": "array", "items": {"type": "string"}}
    elif about.pairs:
        found = {"type": ["string", "object"]}
    else:
        found = {"type": KINDS[setting.kind]}
        if (choices := setting.choices()) and not about.prefix:
            found["enum"] = list(choices)
    for bound, name in (
        (about.at_least, "minimum"),
        (about.at_most, "maximum"),
        (about.above, "exclusiveMinimum"),
    ):
        if bound is not None:
            found[name] = bound
    return found


def text(before: str) -> str:
    """The schema `before`, with the settings of the table in it."""
    schema = json.loads(before)
    schema["properties"]["settings"] = sections()
    return json.dumps(schema, indent=1) + "\n"


def main(write: Annotated[bool, Option("--write", help="Write the file.")] = False) -> int:
    """Compare the chart's schema with the table of settings."""
    before = SCHEMA.read_text(encoding="utf-8")
    after = text(before)
    if write:
        SCHEMA.write_text(after, encoding="utf-8")
    elif after != before:
        print(SCHEMA)
    return 0 if write or after == before else 1


if __name__ == "__main__":
    sys.exit(run(main, "python -m sglang_fair.settings.chart"))
