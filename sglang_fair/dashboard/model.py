"""From readings to a view. Pure: the time comes with each reading."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf

from sglang_fair.dashboard import shown
from sglang_fair.dashboard.gains import Counters
from sglang_fair.dashboard.history import History
from sglang_fair.dashboard.reading import OTHERS, SYSTEM, ClientReading, Reading, ReplicaReport
from sglang_fair.dashboard.view import View
from sglang_fair.dashboard.window import Look, Window, add, amount
from sglang_fair.metrics.differences import Differences, Waiting

WINDOW_S = 60.0
"""Rates, shares, waits and hits are of so long."""

SPANS: Mapping[str, tuple[float, int]] = {"10 min": (5.0, 120), "2 h": (60.0, 120), "24 h": (720.0, 120)}
"""Step and length of each history."""

ROWS = 8
"""Clients with a row and a colour of their own."""

FORGOTTEN_AFTER_S = 3600.0
"""A replica that nobody has named for so long is a new one when it comes back."""


@dataclass(slots=True)
class Followed:
    """One scheduler of a replica, over time."""

    counters: Counters = field(default_factory=Counters)
    differences: Differences = field(default_factory=Differences)
    waits_since: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The number of each waiting client's backlog, and when it was first seen."""
    report: ReplicaReport | None = None
    """Its last one; None while its state is another than "ok"."""
    state: str = "silent"
    answered_s: float = -inf
    named_s: float = -inf
    restarted_s: float = -inf

    def clients(self) -> dict[str, ClientReading]:
        """Those that it names now."""
        rows = self.report.clients if self.report is not None else {}
        return {name: row for name, row in rows.items() if name not in (SYSTEM, OTHERS)}

    def note_waits(self, now_s: float, *, restarted: bool = False) -> None:
        """Who waits there, of its last report. `restarted`: nothing from before counts."""
        if restarted:
            self.differences, self.waits_since = Differences(), {}
        waiting = {
            name: Waiting(row.backlog, (row.service + row.transferred_units) / row.weight, row.weight)
            for name, row in self.clients().items()
            if row.backlog is not None
        }
        self.differences.read(now_s, waiting)
        before, self.waits_since = self.waits_since, {}
        for name, one in waiting.items():
            backlog, since_s = before.get(name, (None, now_s))
            self.waits_since[name] = one.backlog, since_s if backlog == one.backlog else now_s

    def difference(self) -> float | None:
        """In units of charges by weight, between two clients that wait there; None: no two have, for two looks."""
        return self.differences.difference if self.report is not None else None

    def lasting(self, since_s: float) -> list[str]:
        """Those who have waited there without a break since then or longer."""
        if self.report is None:
            return []
        return [name for name, (_, began_s) in self.waits_since.items() if began_s <= since_s]

    def of_bound(self) -> float | None:
        """The difference divided by the bound."""
        difference = self.difference()
        if difference is None or self.report is None or not self.report.bound:
            return None
        return difference / self.report.bound


class Model:
    """Takes readings in order of time, and tells what to show."""

    def __init__(self, every_s: float = 2.0) -> None:
        """`every_s`: how often it is meant to look, which the view says."""
        self._every_s = every_s
        self._histories = {span: History(step_s, length) for span, (step_s, length) in SPANS.items()}
        self._window = Window(WINDOW_S)
        self._followed: dict[str, Followed] = {}
        self._reading: Reading | None = None
        self._at_s = 0.0
        self._answered_s: float | None = None
        """When a replica answered last."""
        self._slots: dict[str, int] = {}

    def take(self, reading: Reading, now_s: float) -> None:
        """One reading. `now_s` is unix time; if it went back, no time has passed."""
        now_s = max(now_s, self._at_s)
        since_s = now_s if self._answered_s is None else self._answered_s
        look = Look(now_s, now_s - since_s)
        of_bound = dict[str, float]()
        for name, found in reading.replicas.items():
            replica = self._followed.setdefault(name, Followed())
            replica.named_s, replica.state, replica.report = now_s, found.state, found.report
            if found.report is None:
                continue
            self._follow(look, name, replica, found.report)
            if (part := replica.of_bound()) is not None:
                of_bound[name] = part
            self._answered_s = now_s
        if self._answered_s == now_s:
            for history in self._histories.values():
                history.look(since_s, now_s, of_bound, look.waiting.total())
            self._window.add(look)
        self._window.pass_to(now_s)
        self._reading, self._at_s = reading, now_s
        gone = [name for name, one in self._followed.items() if now_s - one.named_s > FORGOTTEN_AFTER_S]
        for name in gone:
            del self._followed[name]

    def view(self, span: str = "10 min") -> View:
        """What to show now, with the history of one of `SPANS`."""
        history, sums = self._histories[span], self._window.sums()
        named = self._reading.replicas if self._reading is not None else {}
        followed = {name: self._followed[name] for name in named}
        return shown.view(
            self._reading,
            followed,
            sums,
            history,
            self._shown(history, followed),
            at_s=self._at_s,
            every_s=self._every_s,
            window_s=WINDOW_S,
            span=span,
        )

    def _follow(self, look: Look, name: str, replica: Followed, report: ReplicaReport) -> None:
        since_s, replica.answered_s = replica.answered_s, look.at_s
        gain = replica.counters.take(report)
        clients = replica.clients()
        replica.note_waits(look.at_s, restarted=gain is not None and gain.restarted)
        for client, row in clients.items():
            look.waiting[client] += row.waiting
        if gain is None:
            return
        if gain.restarted:
            replica.restarted_s = look.at_s
        service, prompt_tokens, cached_tokens = amount(), 0.0, 0.0
        for client in clients:
            gained = gain.clients[client]
            service[client] = gained.service
            look.admitted[client] += gain.admitted[client]
            look.prompt_tokens[client] += gained.extend_tokens + gained.cached_tokens
            look.cached_tokens[client] += gained.cached_tokens
            prompt_tokens += gained.extend_tokens + gained.cached_tokens
            cached_tokens += gained.cached_tokens
        add(look.service, service)
        look.others += gain.others.service
        look.by_replica[name] = sum(service.values()) + gain.others.service, prompt_tokens, cached_tokens
        for history in self._histories.values():
            history.gained(since_s, look.at_s, service, gain.others.service, prompt_tokens, cached_tokens)

    def _shown(self, history: History, followed: Mapping[str, Followed]) -> dict[str, int]:
        """The clients with a row, most served first, and each one's colour, which it keeps while it is shown. Who
        got nothing in that time and asks for nothing has none."""
        served = amount()
        for bucket in history.buckets():
            add(served, bucket.service)
        for one in followed.values():
            for name, row in one.clients().items():
                if row.waiting or row.running:
                    served[name] += 0.0  # who has only just come
        names = nlargest(ROWS, served, key=lambda name: (served[name], name))
        kept = {name: slot for name, slot in self._slots.items() if name in names}
        free = (slot for slot in range(ROWS) if slot not in kept.values())
        self._slots = {name: kept[name] if name in kept else next(free) for name in names}
        return self._slots
