"""The throttle as the router applies it: one decision for all gateways, for each call once.

A call is judged with its first `Arrive`. What was decided is remembered by the message's id, so that a question that is
repeated gets the same answer; further attempts at a call, and later parts of its stream, only join their
interaction. `core.throttle` decides; without a throttle the calls of interactions are numbered all the same, because
replicas put calls of interactions first that have begun.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

import msgspec

from router.events import MOST_SECONDS, Arrive, Begun, Due, Load, Posted, Running, SetLimits
from sglang_fair.common.deadlines import Promise
from sglang_fair.core.interactions import Interaction
from sglang_fair.core.throttle import BadLoad, Refusal, Rules, Throttle, make_rules

Kind = Literal["none", "oit", "rpm"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NO_THROTTLE, BAD_LIMITS = "no_throttle", "invalid_limits"
"""Why limits that an operator has set do not hold (`events.SetLimits`)."""

SETTLE_S = 10.0
"""Within that every gateway notices that the router is another one: it compares tables every 5 s
(`gateway.routing.links`)."""

MOST_JUDGED = 10_000
"""Decisions that are remembered for questions that come again."""


@dataclass
class Throttling:
    """`kind`: whether and how calls are refused. ValueError for an unknown one.

    For `settle_s` from the first load on, loads are ignored: gateways report to a router that was restarted which
    interactions are under way, and a call of another gateway's may come before that.
    """

    kind: Kind = "none"
    rules: Rules = field(default_factory=Rules)
    settle_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"throttle is one of {', '.join(KINDS)}, not {self.kind!r}")
        self.bad_loads = 0
        self.posted: Posted | None = None
        """What an operator has set while it ran, if anything."""
        self._start = hashlib.sha256(json.dumps(self.rules.to_json(), sort_keys=True).encode()).hexdigest()
        self._believes_s = inf
        self._throttle = Throttle(self.rules, always=self.kind == "rpm")
        self._overload, self._interactions = self._throttle.overload, self._throttle.interactions
        self._judged: OrderedDict[str, int | Refusal] = OrderedDict()
        self._under_way: dict[str, tuple[Interaction, bool]] = {}
        """Calls that wait or run, by id; whether each is the last of its interaction."""

    # ---- what the router does

    def judge(self, event: Arrive, workers: Sequence[str], now_s: float) -> int | Refusal:
        """The number of a call that came, which is under way from now on, or why it is refused. `workers` are those
        that take requests, by name."""
        if self.kind == "none" and not event.interaction:
            return 1
        name = _name(event)
        known = self._judged.get(event.id)
        if isinstance(known, Refusal):
            return known
        self._interactions.tick(now_s)
        if event.attempt or known is not None:
            verdict: int | Refusal = self._interactions.again(name, max(event.begun, known or 0))
        elif self.kind == "none":
            verdict = self._interactions.accept(name, event.begun)
        else:
            own = event.most_calls, event.app_calls
            taking = workers if now_s >= self._believes_s else ()
            verdict = self._throttle.judge(name, taking, now_s, begun=event.begun, own=own)
        self._judged[event.id] = verdict
        if len(self._judged) > MOST_JUDGED:
            self._judged.popitem(last=False)
        if name.id and not isinstance(verdict, Refusal):
            self._under_way[event.id] = name, event.last
        return verdict

    def promised(self, event: Arrive, due: Due, now_s: float) -> Promise:
        """What holds for a call that was let in, for which its gateway has promised `due`."""
        promise = due.promise(now_s)
        return self._interactions.promise(_name(event), promise) if event.interaction else promise

    def running(self, event: Running, now_s: float) -> None:
        """A gateway has a call at a worker that this router has not placed."""
        if event.interaction:
            self._interactions.tick(now_s)
            self._interactions.again(_name(event), event.begun)
            self._under_way[event.id] = _name(event), event.last

    def begun(self, event: Begun, now_s: float) -> None:
        """What a gateway remembers, which this router has not met before."""
        self._interactions.tick(now_s)
        for client, app, interaction, calls, due in event.interactions:
            name = Interaction(client, app, interaction)
            self._interactions.resume(name, calls)
            if due is not None and self._interactions.promised(name) is None:
                self._interactions.promise(name, due.promise(now_s))

    def ended(self, request: str, now_s: float, *, is_served: bool = False) -> None:
        """A call waits and runs no more, if it did."""
        known = self._under_way.pop(request, None)
        if known is not None:
            name, is_last = known
            self._interactions.tick(now_s)
            self._interactions.end(name, is_answered=is_last and is_served)

    def load(self, event: Load, now_s: float) -> None:
        """A worker's report."""
        self._believes_s = min(self._believes_s, now_s + self.settle_s)
        try:
            self._overload.report(
                event.worker, event.used_tokens, event.waiting_tokens, event.size_tokens, now_s
            )
        except BadLoad:
            self.bad_loads += 1

    def predicted(self, workers: Collection[str], now_s: float) -> None:
        """At these workers, and no others, deadlines of clients within their share will be missed: that is overload."""
        self._overload.predict(workers, now_s)

    def worker_gone(self, worker: str) -> None:
        """Its reports no longer count."""
        self._overload.forget(worker)

    def post(self, event: SetLimits) -> None:
        """An operator sets limits. ValueError, or msgspec's errors, if they are none; then the old ones hold."""
        at_s = event.at_s if self.posted is None else max(event.at_s, self.posted.at_s + 1e-3)
        at_s = min(at_s, 2 * MOST_SECONDS)
        self._follow(Posted(event.rules, at_s, self._start))

    def resume_limits(self, event: Posted) -> bool:
        """An operator has set limits before a restart. They hold if the router was started as before and nobody has set
        others later; whether they do."""
        if self.posted == event:
            return True
        is_late = self.posted is not None and self.posted.at_s >= event.at_s
        if self.kind == "none" or event.start != self._start or is_late:
            return False
        try:
            self._follow(event)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            return False
        return True

    # ---- what people read

    def state(self, pools: Sequence[Sequence[str]], now_s: float) -> dict[str, object]:
        """JSON-ready. `pools` are those that take requests, by name, of each model; what is said of them all is what
        holds for the model that is worst off."""
        self._interactions.tick(now_s)
        taking = pools if now_s >= self._believes_s else ()
        of_pools = [self._overload.overloaded_since_s(names, now_s) for names in taking]
        since_s = min((since_s for since_s in of_pools if since_s is not None), default=None)
        return {
            "kind": self.kind,
            "rules": self.rules.to_json(),
            "posted_s": None if self.posted is None else self.posted.at_s,
            "pressure": round(
                max((self._overload.pressure(names, now_s) for names in pools), default=0.0), 4
            ),
            "pressures": {
                name: round(self._overload.pressure([name], now_s), 4) for names in pools for name in names
            },
            "overloaded_for_s": None if since_s is None else round(now_s - since_s, 3),
            "open_interactions": len(self._interactions),
            "refused": dict(self._throttle.refused),
            "nearest": [
                {"client": user, "calls": calls, "limit": limit}
                for user, calls, limit in ([] if self.kind == "none" else self._throttle.nearest(now_s))
            ],
            "bad_loads": self.bad_loads,
        }

    def _follow(self, posted: Posted) -> None:
        self.rules = make_rules(msgspec.json.decode(posted.rules), "limits")
        self._throttle.follow(self.rules)
        self.posted = posted


def _name(event: Arrive | Running) -> Interaction:
    return Interaction(event.client, event.app, event.interaction)
