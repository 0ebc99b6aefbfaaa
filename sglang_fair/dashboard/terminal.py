"""On a terminal what the page shows in a browser."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Header, Sparkline, Static

from sglang_fair.dashboard.model import SPANS
from sglang_fair.dashboard.peers import Peers
from sglang_fair.dashboard.poller import Poller
from sglang_fair.dashboard.view import ClientView, Health, Level, View

COLOURS = (
    "dodger_blue2", "dark_orange", "spring_green3", "deep_pink2",
    "medium_purple2", "dark_turquoise", "magenta", "chartreuse3",
)  # fmt: skip
BAR_CELLS = 20

WORDS: dict[Health, str] = {
    "no data": "no data yet",
    "ok": "all well",
    "trouble": "needs attention",
    "router down": "router down",
    "gateway down": "gateway down",
    "denied": "key refused",
}
STYLES: dict[Level, str] = {"bad": "bold red", "warn": "yellow", "info": "dim"}
NONE = "–"


class Top(App[None]):
    """Draws a view after each look."""

    TITLE = "sglang-fair top"
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("s", "span", "Time shown")]
    CSS = """
    #now { padding: 0 1; height: auto; }
    #notes { padding: 0 1; height: auto; }
    .title { padding: 1 1 0 1; text-style: bold; }
    DataTable { height: auto; margin: 0 1; overflow-x: auto; }
    Sparkline { height: 3; margin: 0 1; }
    """

    def __init__(self, gateway: str, every_s: float) -> None:
        super().__init__()
        self._gateway = gateway
        self._every_s = every_s
        self._span = next(iter(SPANS))
        self._poller: Poller | None = None

    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll():
            yield Static(id="now")
            yield Static(id="notes")
            yield Static(id="over", classes="title")
            yield Sparkline([], id="service", summary_function=max)
            yield Static("Clients", classes="title")
            yield DataTable(id="clients", cursor_type="none", zebra_stripes=True)
            yield Static("Replicas", classes="title")
            yield DataTable(id="replicas", cursor_type="none", zebra_stripes=True)
        yield Footer()

    async def on_mount(self) -> None:
        self.draw(None)
        self.run_worker(self._follow(), exclusive=True)

    def action_span(self) -> None:
        """The next of `SPANS`."""
        spans = list(SPANS)
        self._span = spans[(spans.index(self._span) + 1) % len(spans)]
        if self._poller is not None:
            self.draw(self._poller.view(self._span))

    async def _follow(self) -> None:
        peers = Peers(self._gateway)
        self._poller = Poller(peers, self._every_s, lambda: self.draw(self._poller_view()))
        try:
            await self._poller.run()
        finally:
            await peers.close()

    def _poller_view(self) -> View | None:
        return None if self._poller is None else self._poller.view(self._span)

    def draw(self, view: View | None) -> None:
        """Shows a view; None: nobody has looked yet."""
        self.sub_title = WORDS[view.health if view is not None else "no data"]
        if view is None:
            self.query_one("#now", Static).update(f"asking {self._gateway}")
            return
        self.query_one("#now", Static).update(_figures(view))
        notes = [Text.assemble((f"{note.about}: ", STYLES[note.level]), note.text) for note in view.notes]
        self.query_one("#notes", Static).update(Text("\n").join(notes))
        self.query_one("#over", Static).update(f"Service, the last {view.span}")
        self.query_one("#service", Sparkline).data = _all_rates(view)
        _fill(self.query_one("#clients", DataTable), *_clients(view))
        _fill(self.query_one("#replicas", DataTable), *_replicas(view))


def _figures(view: View) -> Text:
    parts = (
        (_number(view.rate), " units/s   "),
        (_number(view.running), " running   "),
        (_number(view.waiting), " waiting   "),
        (_percent(view.hit_rate), " hits   "),
        (_percent(view.of_bound), " of the bound   "),
        (str(view.clients_seen), " clients"),
    )
    return Text.assemble(*(piece for value, name in parts for piece in ((value, "bold"), (name, "dim"))))


def _all_rates(view: View) -> list[float]:
    rows = [one.rates for one in view.clients] + ([view.others.rates] if view.others is not None else [])
    return [sum(rate or 0.0 for rate in at) for at in zip(*rows, strict=True)]


Rows = list[list[str | Text]]


def _clients(view: View) -> tuple[list[str], Rows]:
    replicas = [one.name for one in view.replicas if one.policy]
    headings = ["client", "weight", "units/s", "share", "fair", "", "wait", "waiting", "running", "hits"]
    rows: Rows = []
    for one in view.clients:
        colour = COLOURS[one.slot % len(COLOURS)]
        rows.append(
            [
                Text(one.name, colour),
                f"{one.weight:g}",
                _number(one.rate),
                _percent(one.share),
                _percent(one.fair_share),
                _bar(one, colour),
                _wait(one),
                str(one.waiting),
                str(one.running),
                _percent(one.hit_rate),
                *(_number(one.deficits.get(name)) for name in replicas),
            ]
        )
    if view.others is not None:
        other = view.others
        rest = [
            "",
            _number(other.rate),
            _percent(other.share),
            "",
            "",
            "",
            str(other.waiting),
            str(other.running),
        ]
        rows.append([Text(f"{other.clients} others", "dim"), *rest, "", *("" for _ in replicas)])
    return headings + [f"deficit {name}" for name in replicas], rows


def _replicas(view: View) -> tuple[list[str], Rows]:
    headings = ["replica", "state", "policy", "units/s", "running", "waiting", "hits", "difference", "bound"]
    has_several = len({one.model for one in view.replicas}) > 1
    if has_several:
        headings.insert(1, "model")
    return headings, [
        [
            Text(one.name),
            *([Text(one.model or NONE)] if has_several else []),
            Text(
                one.state,
                "green"
                if one.state == "ok"
                else "yellow"
                if one.state in ("draining", "swapping")
                else "red",
            ),
            one.policy or NONE,
            _number(one.rate),
            _number(one.running),
            _number(one.waiting),
            _percent(one.hit_rate),
            _number(one.difference),
            _number(one.bound),
        ]
        for one in view.replicas
    ]


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


def _wait(one: ClientView) -> str:
    if one.wait_s is None:
        return NONE
    return f"{'over ' if one.wait_is_longer else ''}{one.wait_s:.1f} s"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _percent(part: float | None) -> str:
    return NONE if part is None else f"{part:.0%}"


def _fill(table: "DataTable[str | Text]", headings: Sequence[str], rows: Rows) -> None:
    """Anew: there are few rows, and columns come and go with replicas."""
    table.clear(columns=True)
    table.add_columns(*headings)
    table.add_rows(rows)
