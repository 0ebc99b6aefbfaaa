"""docs/tenants-file.md, made from the model of the file.

    python -m sglang_fair.tenants.reference            prints the page
    python -m sglang_fair.tenants.reference --write    puts it into docs/tenants-file.md

A test compares the page with the model.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.settings.commands import Option, run
from sglang_fair.tenants.model import json_schema

PAGE = Path("docs/tenants-file.md")

HEAD = """\
# The tenants' file

<!-- Made by `python -m sglang_fair.tenants.reference --write` from sglang_fair/tenants/model.py; do not edit. -->

Every key of the file that `--tenants` names. What it does, and the commands that write it, are in
[tenants](tenants.md#tenants); `sglang-fair tenants schema` prints the same as a JSON schema. A key that is not here, or
a value of another type, is one line with file, line and column, and the file as it was before stays in force.
"""


def page() -> str:
    """The whole page."""
    schema = json_schema()
    return HEAD + "".join(
        f"\n## {title}\n\n{' '.join(about['description'].split())}\n\n{_table(about, schema['$defs'])}"
        for title, about in (
            ("The file", schema),
            ("A tenant", schema["$defs"]["Tenant"]),
            ("limits", schema["$defs"]["Limits"]),
            ("overload", schema["$defs"]["Overload"]),
        )
    )


def _table(about: dict[str, Any], known: dict[str, Any]) -> str:
    rows = "".join(
        f"| `{name}` | {_kind(one, known)} | {_default(one, name in about.get('required', ()))} "
        f"| {_meaning(one, name)} |\n"
        for name, one in about["properties"].items()
    )
    return f"| key | value | default | meaning |\n|---|---|---|---|\n{rows}"


def _kind(one: dict[str, Any], known: dict[str, Any]) -> str:
    if "anyOf" in one:
        return _kind(next(each for each in one["anyOf"] if each.get("type") != "null"), known)
    if "$ref" in one:
        return f"mapping, [below](#{one['$ref'].rsplit('/', 1)[-1].lower()})"
    match one["type"]:
        case "array":
            return f"list of: {_kind(one['items'], known)}"
        case "object":
            values = one.get("additionalProperties") or next(
                iter(one.get("patternProperties", {"": {}}).values())
            )
            inner = "tenant" if "$ref" in values else _kind(values, known)
            return f"mapping of names to: {inner}"
        case "integer":
            return "whole number, at least 1"
        case "number":
            return f"number from {one['minimum']:g} to {one['maximum']:g}"
        case _:
            return f"text, `{one['pattern']}`" if "pattern" in one else "text"


def _default(one: dict[str, Any], required: bool) -> str:
    if required:
        return "must be given"
    default = one.get("default")
    return "–" if default is None or default in ([], {}) or isinstance(default, dict) else f"`{default:g}`"


def _meaning(one: dict[str, Any], name: str) -> str:
    return str(one.get("description", f"See `{name}` below.")).replace("|", "\\|")


def main(
    write: Annotated[bool, Option("--write", help=f"Write {PAGE}; otherwise print it.")] = False,
) -> None:
    """The reference page of the tenants' file."""
    if write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    sys.exit(run(main, "python -m sglang_fair.tenants.reference"))
