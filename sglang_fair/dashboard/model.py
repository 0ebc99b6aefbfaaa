"""From readings to a view. Pure: the time comes with each reading."""

from collections import defaultdict
from collections.abc import Mapping
from heapq import nlargest

from sglang_fair.dashboard import shown
from sglang_fair.dashboard.followed import Followed
from sglang_fair.dashboard.history import SERVICE, History, Sums
from sglang_fair.dashboard.reading import OTHERS, Reading
from sglang_fair.dashboard.view import View

SPANS: Mapping[str, tuple[float, int]] = {"10 min": (5.0, 120), "2 h": (60.0, 120), "24 h": (720.0, 120)}
"""Step and length of each history."""

WINDOW = 12
"""Rates, shares, waits and hits are of so many buckets of the finest history, the newest not full yet."""
WINDOW_S = WINDOW * SPANS["10 min"][0]

ROWS = 8
"""Clients with a row and a colour of their own."""

FORGOTTEN_AFTER_S = 3600.0
"""A replica that no reading has named for so long is a new one when it comes back."""


class Model:
    """Takes readings in order of time, and tells what to show."""

    def __init__(self, every_s: float = 2.0) -> None:
        """`every_s`: how often it is meant to look, which the view says."""
        self._every_s = every_s
        self._finest = next(iter(SPANS))
        self._histories = {
            span: History(*of, whole=WINDOW if span == self._finest else 0) for span, of in SPANS.items()
        }
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
        of_bound = dict[str, float]()
        for name, found in reading.replicas.items():
            one = self._followed.setdefault(name, Followed())
            one.named_s, one.state, one.report = now_s, found.state, None
            if found.report is None:
                continue
            replica_since_s, self._answered_s = one.answered_s, now_s
            gain = one.take(found.report, now_s)
            if gain is not None:
                clients = {client: gain.clients[client] for client in one.clients} | {OTHERS: gain.others}
                for history in self._histories.values():
                    history.gained(replica_since_s, now_s, name, clients)
            if (part := one.difference_over_bound) is not None:
                of_bound[name] = part
        if self._answered_s == now_s:
            for history in self._histories.values():
                history.look(since_s, now_s, of_bound)
        self._reading, self._at_s = reading, now_s
        gone = [name for name, one in self._followed.items() if now_s - one.named_s > FORGOTTEN_AFTER_S]
        for name in gone:
            del self._followed[name]

    def view(self, span: str = "10 min") -> View:
        """What to show now, with the history of one of `SPANS`."""
        history, recent = self._histories[span], self._histories[self._finest]
        oldest = self._at_s // recent.step_s - WINDOW
        named = self._reading.replicas if self._reading is not None else {}
        followed = {name: self._followed[name] for name in named}
        return shown.view(
            self._reading,
            followed,
            Sums(bucket for bucket in recent.buckets() if bucket.number > oldest),
            history,
            self._shown(history, followed),
            at_s=self._at_s,
            answered_s=self._answered_s or 0.0,
            every_s=self._every_s,
            window_s=WINDOW_S,
            span=span,
        )

    def _shown(self, history: History, followed: Mapping[str, Followed]) -> dict[str, int]:
        """The clients with a row, most served first, and each one's colour, which it keeps while it is shown. One that
        got nothing in that time and asks for nothing has none."""
        served = defaultdict[str, float](float)
        for bucket in history.buckets():
            for name, units in bucket.clients.items():
                served[name] += units[SERVICE]
        for one in followed.values():
            for name, row in one.clients.items():
                if row.waiting or row.running:
                    served[name] += 0.0  # a client that has only just come
        served.pop(OTHERS, None)
        names = nlargest(ROWS, served, key=lambda name: (served[name], name))
        kept = {name: slot for name, slot in self._slots.items() if name in names}
        free = (slot for slot in range(ROWS) if slot not in kept.values())
        self._slots = {name: kept[name] if name in kept else next(free) for name in names}
        return self._slots
