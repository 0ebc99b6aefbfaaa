"""Which requests are suspected of ending replicas, where they are tried once more, and which clients are in quarantine.

A request is *clear* at a replica once the first byte of its answer has come, it has ended, or `CLEAR_S` have passed.
One that was not clear when its connection broke or its replica fell silent is a *suspect*. Rules:

1. A suspect is tried at one more replica, and never at a third. It is on *trial* there: it goes where all else is
   clear, and nothing else goes there until it is, as long as another replica takes requests. At most half of the
   replicas have a trial, and a client has one at a time.
2. If that replica ends too, the suspect is *convicted*: the same request of that client is refused from then on. Where
   something else was there that was not clear, it counts as a doubt, unless its client is in quarantine.
3. A client is in *quarantine* from its first conviction, or its `MOST_DOUBTS`-th doubt, until `quarantine_s` after the
   last: each of its requests is on trial from the outset. After `MOST_CONVICTIONS` they are refused until then.
4. After the conviction of a client that had finished no request before, all clients that have finished none are one in
   quarantine together, each until its first request is served.

Bound: a request ends at most two replicas. Of a client's k requests that do, those placed before its first conviction
end one each; that conviction one more, and all the others together `MOST_CONVICTIONS` - 1. Nothing that ends no replica
is convicted, unless replicas die by themselves during two of its attempts. Leaks: docs/security.md.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple, TypeVar

from router.events import Arrive, Done, Suspicion

ENDED = "replicas_ended"
"""Two replicas ended while they had the request."""
KNOWN = "ends_replicas"
"""The same request was convicted before."""
QUARANTINED = "quarantined"

QUARANTINE_S = 600.0
CLEAR_S = 15.0
"""More than the silence after which a gateway gives a replica up."""
RECENT_S = 3.0
"""A replica that has ended is known to be sick, or is back, after so long."""
PATIENCE_S = 60.0
"""Longest wait for a replica while there is none that takes requests."""
MOST_CONVICTIONS = 3
MOST_DOUBTS = 3
DOUBT_S = 5.0
"""Of all doubts in so long one counts: they are of one death."""
MOST_WAITING = 32
"""Requests of one client in quarantine."""
MOST_NAMES = 10_000
"""Clients and fingerprints that are remembered, of each kind; beyond, the oldest are forgotten."""
MOST_LISTED = 100

NEWCOMERS = "(newcomers)"
"""All clients that have finished no request, while these are one in quarantine."""

V = TypeVar("V")


def fingerprint(client: str, body: bytes) -> str:
    """Of what a replica is sent for `client`."""
    name = client.encode()
    return sha256(b"%d:%s%s" % (len(name), name, body)).hexdigest()[:32]


class Denial(NamedTuple):
    """Why a request is refused, and when another of its client may be let in."""

    code: str
    reason: str
    retry_after_s: float | None = None


@dataclass(slots=True)
class Case:
    """What is known against a client."""

    until_s: float
    """When its quarantine ends, or, without one, what is known of it is forgotten."""
    convictions: int = 0
    doubts: int = 0
    doubted_s: float = float("-inf")
    request: str = ""
    fingerprint: str = ""
    worker: str = ""
    """Of the last conviction or doubt: the request's last attempt, and where that was."""

    @property
    def is_quarantined(self) -> bool:
        return self.convictions > 0 or self.doubts >= MOST_DOUBTS


@dataclass(slots=True)
class Waiting:
    """A request that waits for its trial, as `peer` has asked."""

    event: Arrive
    peer: bytes
    since_s: float


@dataclass(slots=True)
class Trial(Waiting):
    """A request on trial, as long as it is under way."""

    worker: str
    has_company: bool
    """Something else was there that was not clear."""
    has_begun: bool = False
    is_void: bool = False
    """The replica drains: what happens there is no evidence."""
    is_gone: bool = False
    """The replica is."""

    def is_clear(self, now_s: float) -> bool:
        return self.has_begun or now_s - self.since_s >= CLEAR_S


@dataclass(slots=True)
class Suspects:
    """State and decisions. Times are of one clock."""

    quarantine_s: float = QUARANTINE_S
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """In the order in which they came."""
    trials: dict[str, Trial] = field(default_factory=dict)
    """Requests that are under way as suspects."""
    counts: Counter[str] = field(default_factory=Counter)
    _emptying: set[str] = field(default_factory=set)
    """Workers that get nothing else until a suspect can go there."""
    _ended_s: dict[str, float] = field(default_factory=dict)
    """When each worker ended last."""
    _lost: "OrderedDict[str, float]" = field(default_factory=OrderedDict)
    """Fingerprints of suspects, and since when."""
    _convicted: "OrderedDict[str, float]" = field(default_factory=OrderedDict)
    _cases: "OrderedDict[str, Case]" = field(default_factory=OrderedDict)
    _served: "OrderedDict[str, None]" = field(default_factory=OrderedDict)
    """Clients that have finished a request."""
    _newcomers_until_s: float = float("-inf")

    # -- a request arrives

    def are_there(self, now_s: float) -> bool:
        """Whether anything is known that `judge` or `held` depends on."""
        return (
            bool(self._lost or self._convicted or self._cases or self.trials or self._emptying)
            or now_s < self._newcomers_until_s
        )

    def judge(self, event: Arrive, now_s: float) -> Denial | bool:
        """Whether it is to `wait` for a trial, or why it is refused."""
        denial = self._denied(event, now_s)
        if denial is None and self._is_quarantined(event.client, now_s):
            subject = self._subject(event.client, now_s)
            waiting = sum(self._subject(one.event.client, now_s) == subject for one in self.waiting.values())
            if waiting < MOST_WAITING:
                return True
            who = "new clients" if subject == NEWCOMERS else "this client"
            why = (
                f"requests of {who} have ended replicas: one at a time is served, and {waiting} wait already"
            )
            denial = Denial(QUARANTINED, why, CLEAR_S)
        if denial is not None:
            self.counts["refused"] += 1
            return denial
        is_known = now_s - self._lost.get(event.fingerprint, float("-inf")) < self.quarantine_s
        return not event.goes_on and (is_known or event.lost > 0)

    def wait(self, event: Arrive, peer: bytes, now_s: float) -> None:
        """It waits until it is in `due`."""
        self.counts["on trial"] += 1
        self.waiting[event.id] = Waiting(event, peer, now_s)

    def due(
        self, able: Callable[[Arrive], Sequence[str] | None], unclear: Mapping[str, int], now_s: float
    ) -> list[tuple[Waiting, str | Denial]]:
        """Those whose trial begins, each with the worker, and those that are refused. They no longer wait.

        `able` are the workers that a request may go to, in the order of names; None: nor will there be any. `unclear`
        says how many requests at each are not clear, those on trial left out.
        """
        self._emptying.clear()
        self.trials = {  # the end of one that its worker has not survived may be lost
            name: one
            for name, one in self.trials.items()
            if not one.is_gone or now_s - one.since_s < self.quarantine_s
        }
        held = {one.worker for one in self.trials.values() if not one.is_clear(now_s)}
        busy = {
            self._subject(one.event.client, now_s)
            for one in self.trials.values()
            if not one.is_clear(now_s) or (self._is_quarantined(one.event.client, now_s) and not one.is_gone)
        }
        found: list[tuple[Waiting, str | Denial]] = []
        for name, one in list(self.waiting.items()):
            subject, may = self._subject(one.event.client, now_s), able(one.event)
            denial = self._denied(one.event, now_s)
            if denial is None and (may is None or (not may and now_s - one.since_s >= PATIENCE_S)):
                denial = Denial("", "there is no other worker to try it once more")
            if denial is not None:
                found.append((self.waiting.pop(name), denial))
                continue
            names = [at for at in may or () if now_s - self._ended_s.get(at, float("-inf")) >= RECENT_S]
            if self._is_quarantined(one.event.client, now_s):
                names = names[:1]
            free = [at for at in names if at not in held]
            if subject in busy or not free or len(names) - len(free) >= max(1, len(names) // 2):
                continue
            worker = min(free, key=lambda at: (unclear.get(at, 0), at))
            held.add(worker)
            busy.add(subject)
            if unclear.get(worker, 0) and now_s - one.since_s < CLEAR_S:
                self._emptying.add(worker)
                continue
            found.append((self.waiting.pop(name), worker))
            others = any(trial.worker == worker for trial in self.trials.values())
            self.trials[name] = Trial(
                one.event, one.peer, now_s, worker, others or bool(unclear.get(worker, 0))
            )
        return found

    def held(self, now_s: float) -> set[str]:
        """Workers that get nothing else, if there are others."""
        if not self.trials and not self._emptying:
            return set()
        return self._emptying | {one.worker for one in self.trials.values() if not one.is_clear(now_s)}

    # -- what happens to requests

    def placed(self, name: str, worker: str) -> None:
        for other, trial in self.trials.items():
            if trial.worker == worker and other != name:
                trial.has_company = True

    def begun(self, name: str) -> None:
        """The first byte of its answer has come."""
        if name in self.trials:
            self.trials[name].has_begun = True

    def leaves(self, worker: str, *, is_gone: bool) -> None:
        for trial in self.trials.values():
            if trial.worker == worker:
                trial.is_gone |= is_gone
                trial.is_void |= not is_gone

    def forget(self, name: str) -> None:
        """It is under way no more, whatever its worker does."""
        self.trials.pop(name, None)

    def peer_gone(self, peer: bytes) -> None:
        """Nothing more will be known of what `peer` had on trial."""
        self.trials = {name: one for name, one in self.trials.items() if one.peer != peer}

    def ended(self, done: Done, worker: str | None, now_s: float) -> None:
        """A request is over at `worker`; None: that is gone."""
        trial, lost = self.trials.pop(done.id, None), done.lost
        if lost is None:
            if trial is not None and done.outcome == "ok":
                self._lost.pop(trial.event.fingerprint, None)
            elif trial is not None and done.outcome == "aborted":
                lost = Suspicion(trial.event.client, trial.event.fingerprint, 1)
                self._accuse(lost, done.id, trial.worker, now_s, is_certain=False)
            return
        if worker is not None:
            self._ended_s[worker] = now_s
        if trial is None and lost.ended < 2:
            self.counts["suspects"] += 1
            _remember(self._lost, lost.fingerprint, now_s)
            return
        if trial is not None and trial.is_void:
            return
        where = trial.worker if trial is not None else worker or ""
        is_certain = trial is not None and not (trial.has_company or trial.is_clear(now_s))
        is_certain = is_certain or self._is_quarantined(lost.client, now_s)
        self._accuse(lost, done.id, where, now_s, is_certain=is_certain)

    def served(self, client: str) -> None:
        _remember(self._served, client, None)

    # -- what operators see and do

    def lift(self, client: str) -> bool:
        """An operator ends the quarantine of a client, or of newcomers; whether there was one."""
        if client == NEWCOMERS:
            self._newcomers_until_s = float("-inf")
        return self._cases.pop(client, None) is not None

    def state(self, now_s: float) -> dict[str, object]:
        """For people, as plain maps, lists, numbers and strings."""
        rows = {
            client: {
                "left_s": round(case.until_s - now_s, 1),
                "convictions": case.convictions,
                "doubts": case.doubts,
                "request": case.request,
                "fingerprint": case.fingerprint,
                "worker": case.worker,
                "is_refused": case.convictions >= MOST_CONVICTIONS,
            }
            for client, case in self._cases.items()
            if case.is_quarantined and case.until_s > now_s
        }
        return {
            "clients": len(rows),
            "quarantine": dict(list(rows.items())[-MOST_LISTED:]),
            "newcomers": now_s < self._newcomers_until_s,
            "waiting": len(self.waiting),
            "trials": {one.worker: name for name, one in self.trials.items()},
            "counts": {name: self.counts[name] for name in ("suspects", "convictions", "doubts", "refused")},
        }

    # -- inside

    def _case(self, client: str, now_s: float) -> Case | None:
        case = self._cases.get(client)
        if case is not None and case.until_s <= now_s:
            del self._cases[client]
            return None
        return case

    def _is_quarantined(self, client: str, now_s: float) -> bool:
        case = self._case(client, now_s)
        return (case is not None and case.is_quarantined) or self._subject(client, now_s) == NEWCOMERS

    def _subject(self, client: str, now_s: float) -> str:
        """As whom it has its turn."""
        return NEWCOMERS if now_s < self._newcomers_until_s and client not in self._served else client

    def _denied(self, event: Arrive, now_s: float) -> Denial | None:
        if now_s - self._convicted.get(event.fingerprint, float("-inf")) < self.quarantine_s:
            return Denial(KNOWN, "replicas ended while they had this very request: it is not tried again")
        case = self._case(event.client, now_s)
        if case is None or case.convictions < MOST_CONVICTIONS:
            return None
        left_s = max(1.0, case.until_s - now_s)
        why = f"{case.convictions} requests of this client have ended replicas: none is served for {left_s:.0f} s"
        return Denial(QUARANTINED, why, left_s)

    def _accuse(self, lost: Suspicion, request: str, worker: str, now_s: float, *, is_certain: bool) -> None:
        """A conviction if it `is_certain`, else a doubt."""
        client, case = lost.client, self._case(lost.client, now_s)
        if is_certain:
            self.counts["convictions"] += 1
            _remember(self._convicted, lost.fingerprint, now_s)
            if client not in self._served:
                self._newcomers_until_s = now_s + self.quarantine_s
        else:
            self.counts["doubts"] += 1
            if case is not None and now_s - case.doubted_s < DOUBT_S:
                return
        case = case or Case(0.0)
        case.until_s = now_s + self.quarantine_s
        if is_certain:
            case.convictions += 1
        else:
            case.doubts, case.doubted_s = case.doubts + 1, now_s
        case.request, case.fingerprint, case.worker = request, lost.fingerprint, worker
        _remember(self._cases, client, case)


def _remember(known: "OrderedDict[str, V]", name: str, value: V) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > MOST_NAMES:
        known.popitem(last=False)
