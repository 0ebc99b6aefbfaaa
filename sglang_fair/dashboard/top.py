"""`sglang-fair top`: on a terminal what the page shows in a browser."""

import asyncio
import os
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_fair.dashboard.model import SPANS
from sglang_fair.dashboard.peers import Peers, Poller
from sglang_fair.dashboard.view import ClientView, Health, Level, ReplicaView, View
from sglang_fair.settings.commands import Option, run

COLOURS = (
    "dodger_blue2", "dark_orange", "spring_green3", "deep_pink2",
    "medium_purple2", "dark_turquoise", "magenta", "chartreuse3",
)  # fmt: skip
BAR_CELLS = 20
BLOCKS = " ▁▂▃▄▅▆▇█"

WORDS: dict[Health, str] = {
    "no data": "no data yet",
    "ok": "all well",
    "trouble": "needs attention",
    "router down": "router down",
    "gateway down": "gateway down",
    "denied": "key refused",
}
STYLES: dict[Level, str] = {"bad": "bold red", "warn": "yellow", "info": "dim"}
STATES = {"ok": "green", "draining": "yellow", "swapping": "yellow"}
NONE = "–"


def main(
    gateway: Annotated[
        str, typer.Argument(help="The gateway's address for operators.")
    ] = "http://127.0.0.1:8000",
    every: Annotated[float, Option(metavar="SECONDS", help="Time between two looks.", min=0.2)] = 2.0,
) -> None:
    """Show on the terminal what each client gets, and who waits. Keys: s for the time shown, q to quit."""
    asyncio.run(_follow(gateway.rstrip("/"), every))


async def _follow(gateway: str, every_s: float) -> None:
    spans, peers = deque(SPANS), Peers(gateway)

    def draw() -> None:
        live.update(screen(poller.view(spans[0])), refresh=True)

    def press(key: str) -> None:
        if key == "s":
            spans.rotate(-1)
            draw()
        elif key == "q":
            looking.cancel()

    poller = Poller(peers, every_s, draw)
    try:
        with Live(Text(f"asking {gateway}"), screen=True, auto_refresh=False) as live, _keys(press):
            looking = asyncio.ensure_future(poller.run())
            await asyncio.wait([looking])
            if not looking.cancelled():
                looking.result()
    finally:
        await peers.close()


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Calls `press` with each key, where there is a terminal to press it on; with q when that is gone."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        key = b""
        with suppress(OSError):
            key = os.read(terminal, 1)
        press(key.decode("latin-1") or "q")

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        with suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def screen(view: View) -> RenderableType:
    notes = [Text.assemble((f"{note.about}: ", STYLES[note.level]), note.text) for note in view.notes]
    figures = (
        (_number(view.rate), "units/s"),
        (_number(view.running), "running"),
        (_number(view.waiting), "waiting"),
        (_percent(view.hit_rate), "hits"),
        (_percent(view.of_bound), "of the bound"),
        (str(view.clients_seen), "clients"),
    )
    now = Text("   ").join(Text.assemble((value, "bold"), (f" {name}", "dim")) for value, name in figures)
    return Group(
        Text.assemble(
            ("sglang-fair top   ", "bold"), WORDS[view.health], ("   s: time shown   q: quit", "dim")
        ),
        now,
        *notes,
        Text(f"\nService, the last {view.span}", "bold"),
        Text(_curve(_all_rates(view)), "dodger_blue2"),
        Text("\nClients", "bold"),
        _clients(view),
        Text("\nReplicas", "bold"),
        _replicas(view),
    )


def _clients(view: View) -> Table:
    replicas = [one.name for one in view.replicas if one.policy]
    deficits = [f"deficit {name}" for name in replicas]
    table = _table(
        "client", "weight", "units/s", "share", "fair", "", "wait", "waiting", "running", "hits", *deficits
    )
    for one in view.clients:
        colour = COLOURS[one.slot % len(COLOURS)]
        wait = NONE if one.wait_s is None else f"{'over ' if one.wait_is_longer else ''}{one.wait_s:.1f} s"
        table.add_row(
            Text(one.name, colour), f"{one.weight:g}", _number(one.rate), _percent(one.share),
            _percent(one.fair_share), _bar(one, colour), wait, str(one.waiting), str(one.running),
            _percent(one.hit_rate), *(_number(one.deficits.get(name)) for name in replicas),
        )  # fmt: skip
    if (rest := view.others) is not None:
        table.add_row(
            Text(f"{rest.clients} others", "dim"), "", _number(rest.rate), _percent(rest.share), "", "", "",
            str(rest.waiting), str(rest.running),
        )  # fmt: skip
    return table


def _replicas(view: View) -> Table:
    columns: list[tuple[str, Callable[[ReplicaView], str | Text]]] = [
        ("replica", lambda one: Text(one.name)),
        ("model", lambda one: Text(one.model or NONE)),
        ("state", lambda one: Text(one.state, STATES.get(one.state, "red"))),
        ("policy", lambda one: one.policy or NONE),
        ("units/s", lambda one: _number(one.rate)),
        ("running", lambda one: _number(one.running)),
        ("waiting", lambda one: _number(one.waiting)),
        ("hits", lambda one: _percent(one.hit_rate)),
        ("difference", lambda one: _number(one.difference)),
        ("bound", lambda one: _number(one.bound)),
    ]
    if len({one.model for one in view.replicas}) < 2:
        del columns[1]
    table = _table(*(name for name, _ in columns))
    for one in view.replicas:
        table.add_row(*(of(one) for _, of in columns))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, row_styles=("", "on grey11"), header_style="bold dim", padding=(0, 1))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _bar(one: ClientView, colour: str) -> Text:
    """The share, with a mark where the fair share ends."""
    if one.share is None:
        return Text("")
    cells = ["█" if cell < one.share * BAR_CELLS else "·" for cell in range(BAR_CELLS)]
    bar = Text("".join(cells), colour)
    if one.fair_share is not None:
        due = min(BAR_CELLS - 1, max(0, round(one.fair_share * BAR_CELLS) - 1))
        bar.stylize("reverse", due, due + 1)
    return bar


def _all_rates(view: View) -> list[float]:
    rows = [one.rates for one in view.clients] + ([view.others.rates] if view.others is not None else [])
    return [sum(rate or 0.0 for rate in at) for at in zip(*rows, strict=True)]


def _curve(values: Sequence[float]) -> str:
    most = max(values, default=0.0) or 1.0
    return "".join(BLOCKS[round(value / most * (len(BLOCKS) - 1))] for value in values)


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _percent(part: float | None) -> str:
    return NONE if part is None else f"{part:.0%}"


if __name__ == "__main__":
    sys.exit(run(main, "sglang-fair top"))
