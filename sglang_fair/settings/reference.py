"""docs/settings.md, made from the table.

    python -m sglang_fair.settings.reference            prints the page
    python -m sglang_fair.settings.reference --write    puts it into docs/settings.md

A test compares the page with the table.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from sglang_fair.settings.commands import Option, run
from sglang_fair.settings.setting import Setting, settings_of, shown_default
from sglang_fair.settings.table import SECTIONS, VARIABLES, Fairness

PAGE = Path("docs/settings.md")

HEAD = """\
# Settings

<!-- Made by `python -m sglang_fair.settings.reference --write` from sglang_fair/settings/table.py; do not edit. -->

Every setting of `sglang-fair cluster`, `replica`, `router`, `gateway`, `picker`, `dashboard`, `agent` and `feeder`:
its option on the command line, and its key in a configuration file. The options of single policies and placements are
in [policies](policies.md).

## Where a value comes from

The command line wins over the configuration file, and that over the default. `--print-config` prints what is in force,
as a file that can be given back with `--config`, and starts nothing.

SGLang's own processes also read the environment variables [below](#sglangs-server): an argument wins over a variable,
and a variable over the default. `sglang-fair cluster` gives its replicas all of these as arguments but the identity, so
there a variable changes nothing else; `sglang-fair replica` gives what it was given and those with a default.

## The configuration file

YAML with a section for each program. All of them may stand in one file; each program reads its own. Keys may be
written with `-` or `_`. A mistake in any section is one line with file, line and column, exit code 2, and nothing is
started.

```yaml
cluster:
  replicas: 4
  engine: emulated
  gpu: a100-80g
  model: llama-3.1-8b
  policy: dlpm
  policy_options: {patience: 64}        # or the text patience=64
  client_weights: {gold: 2}
  gateway_options: {max_in_flight: 1024}
  sglang_arguments: [--max-running-requests, 128]    # what stands behind -- on the command line
```

`sglang-fair cluster --config fair.yaml --port 8080` starts it on another port.
"""


def page() -> str:
    parts = [HEAD]
    for section, table in SECTIONS.items():
        parts.append(f"\n## sglang-fair {section}\n\n{(table.__doc__ or '').strip()}\n\n{_table(table)}")
    parts.append(f"\n## SGLang's server\n\n{_arguments()}\n## Other environment variables\n\n{_variables()}")
    return "".join(parts)


def _table(table: type) -> str:
    head = "| option | key | value | default | meaning |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(_cells(setting))} |\n" for setting in settings_of(table).values())


def _cells(setting: Setting) -> Iterator[str]:
    yield "`-- …`" if setting.about.behind_dashes else f"`{setting.flag}`"
    yield f"`{setting.key}`"
    yield _value(setting)
    default = shown_default(setting)
    if setting.required:
        yield "must be given"
    elif default and (setting.default is None or setting.default in ("", (), {})):
        yield default
    else:
        yield f"`{default}`" if default else "off" if setting.kind is bool else "–"
    yield _escaped(setting.help)


def _value(setting: Setting) -> str:
    if known := setting.choices():
        return ", ".join(f"`{name}`" for name in known) + (
            f", `{setting.about.prefix}NAME`" if setting.about.prefix else ""
        )
    kind = "`KEY=VALUE,...` or mapping" if setting.about.pairs else setting.words[2]
    return ", ".join(filter(None, (kind, setting.allowed(), setting.about.unit)))


def _arguments() -> str:
    text = (
        "Where SGLang is started without `sglang-fair`, its server takes these arguments, and the policy after\n"
        "`--schedule-policy`. They mean what the settings of the replica mean.\n\n"
        "| argument | environment variable | setting |\n|---|---|---|\n"
    )
    for setting in settings_of(Fairness).values():
        if setting.argument:
            text += f"| `{setting.argument}` | `{setting.variable}` | `{setting.flag}` |\n"
    return text


def _variables() -> str:
    rows = "".join(f"| `{name}` | {_escaped(text)} |\n" for name, text in VARIABLES.items())
    return f"| variable | meaning |\n|---|---|\n{rows}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def publish(page: Callable[[], str], path: Path, name: str, about: str) -> int:
    """The exit code of command `name`, which prints the page or, with --write, puts it into `path`."""

    def main(
        write: Annotated[bool, Option("--write", help=f"Write {path}; otherwise print it.")] = False,
    ) -> None:
        if write:
            path.write_text(page(), encoding="utf-8")
        else:
            sys.stdout.write(page())

    main.__doc__ = about
    return run(main, name)


if __name__ == "__main__":
    sys.exit(
        publish(page, PAGE, "python -m sglang_fair.settings.reference", "The reference page of all settings.")
    )
