"""What a cluster shows on a terminal: what it waits for, the processes' output, and where to send requests."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from sglang_fair.cluster.plan import Plan

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
OWN_STYLE = "bold"
PLAIN_PROGRESS_S = 15.0
"""Seconds between two lines of progress where the output is no terminal."""

TROUBLE = re.compile(r"\b(?<!Ignore import )(error|exception|traceback|critical|warning)\b", re.IGNORECASE)
"""Lines that are shown even of quiet processes. SGLang logs each model file that this platform cannot import; that is
no trouble."""


class ConsoleReporter:
    """Shows what a `Supervisor` reports, on one rich console.

    With `quiet`, only lines that look like trouble are shown of replicas. `when_up` prints the addresses.
    """

    def __init__(
        self,
        console: Console,
        plan: Plan,
        *,
        quiet: bool = False,
        when_up: Callable[[dict[str, int]], None],
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._when_up = when_up
        self._width = max(len(process.name) for process in plan.processes)
        replicas = [process.name for process in plan.of("replica")]
        self._styles = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(replicas)}
        self._status: Status | None = None
        self._progress_s = 0.0

    def line(self, name: str, line: str) -> None:
        if not self._is_quiet(name) or TROUBLE.search(line):
            self._print(name, line)

    def waiting(self, names: Sequence[str], elapsed_s: float, limit_s: float) -> None:
        """These processes are not ready yet, twice a second: a spinner, or without a terminal a line now and then."""
        text = f"waiting for {', '.join(names)}: {elapsed_s:.0f} s of at most {limit_s:.0f} s"
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            self._status.update(text)
            return
        if elapsed_s < self._progress_s:  # the next stage began
            self._progress_s = 0.0
        if elapsed_s - self._progress_s >= PLAIN_PROGRESS_S:
            self._progress_s = elapsed_s
            self.say(text)

    def is_ready(self, name: str, after_s: float) -> None:
        self.say(f"{name} is ready after {after_s:.1f} s")

    def died(self, name: str, how: str, tail: Iterable[str]) -> None:
        """Shows how it ended, and its last lines if it is a quiet process."""
        if self._is_quiet(name):
            for line in tail:
                self._print(name, line)
        self.say(f"{name} ended: {how}")

    def say(self, text: str) -> None:
        self._write(Text.assemble((f"{'cluster':>{self._width + 2}}", OWN_STYLE), " ", text))

    def up(self, pids: dict[str, int]) -> None:
        self.close()
        self._when_up(pids)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _is_quiet(self, name: str) -> bool:
        return self._quiet and name.startswith("r") and name[1:].isdecimal()

    def _print(self, name: str, line: str) -> None:
        tag = f"[{name}]"
        self._write(
            Text.assemble((f"{tag:>{self._width + 2}}", self._styles.get(name, OWN_STYLE)), " ", line)
        )

    def _write(self, text: Text) -> None:
        show(self._console, text)


def show(console: Console, what: Text | Table | str) -> None:
    """Prints without cutting lines. A reader that is gone does not end the cluster."""
    try:
        console.print(what, soft_wrap=True, markup=False, highlight=False)
    except (BrokenPipeError, ValueError):
        console.quiet = True


def make_console(to_stderr: bool) -> Console:
    """A console on stdout or stderr. Where that is no terminal, it is wide enough for whole addresses."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 140)


def addresses(facts: Mapping[str, Any], title: str, replicas: Mapping[str, str]) -> Table:
    """A table of the processes' addresses and what each is for. `facts` as in `run.describe`, `replicas` by name."""
    table = Table(title=title, title_style="bold", title_justify="left", show_edge=False, pad_edge=False)
    for heading in ("", "address", "pid", "for"):
        table.add_column(heading, no_wrap=True, overflow="fold")
    has_admin = facts["admin"] is not None
    rows = (
        (
            "gateway",
            facts["gateway"],
            "send requests here" + "; /status shows the placement" * (not has_admin),
        ),
        ("", facts["admin"], "for operators: /status, /workers and /metrics"),
        ("dashboard", facts["dashboard"], "open this in a browser"),
        *((name, url, "/fair shows each client's service and deficit") for name, url in replicas.items()),
        ("router", facts["router"], "gateways"),
        ("", facts["router_http"], "/healthz, /readyz and /metrics"),
    )
    for name, address, purpose in rows:
        if address is not None:
            style = "bold green" if name == "gateway" else ""
            table.add_row(name, Text(address, style), str(facts["pids"].get(name, "")), purpose)
    return table


def example(gateway: str, model: str = "default", *, has_tenants: bool = False) -> str:
    """A first request to paste into a shell, for the model of this name."""
    client = "authorization: Bearer KEY" if has_tenants else "x-fair-client: alice"
    question = {"role": "user", "content": "What is the capital of Italy?"}
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 32})
    return (
        f"\nTry it:\n\ncurl -s {gateway}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"  -H '{client}' -d {shlex.quote(body)}\n\nCtrl-C stops everything.\n"
    )
