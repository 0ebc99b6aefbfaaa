"""What follows when an attempt at serving a request has ended: another replica, the rest of the stream, or an error.

The relay makes an attempt, tells `Retries.after` how it ended and what its client has by then, and does as it says:

    the attempt           client has nothing     stream begun, continuable     stream begun, not continuable
    served                done                   done                          done
    lost                  another replica        continue elsewhere; if only   error event
                                                 [DONE] is missing, send it
    lost, a suspect       the same; an error once `MAX_ENDED` replicas have ended with the request in their hands,
                          or `max_silenced` have fallen silent
    mismatch              -                      error event                   -
    misdirected           asked again a little     the same as after a loss      error event
                          later, no try used
    cut off               asked again              continue; no try used         -
    no descriptors        503 overloaded         error event                   error event
    no router, no worker  503 unavailable        error event                   error event
    router refuses        429 or 503; 502 if     error event                   error event
                          a replica was tried
    no tries left         502                    error event                   error event

Pure: no clocks, no I/O.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import ceil
from typing import assert_never

from router.events import Refuse
from router.gateway.errors import RETRY_AFTER_S, ApiError, overloaded
from router.suspects import ENDED, KNOWN, QUARANTINED

MAX_ENDED = 2
"""A replica that ends has usually died of something else, and its requests are served by another one. But a request
that two replicas did not survive may be the cause, and gets no third one."""

REFUSED = {KNOWN: 422, QUARANTINED: 503}
"""The status of what is refused because of what is suspected of it."""

MAX_MISDIRECTED = 8
"""Attempts that may come to a replica with another model; one more counts as a loss."""

MISDIRECTED_S = 0.05
"""Before the router is asked again; twice as long each time."""

# -- how an attempt ended


@dataclass(frozen=True)
class Served:
    """The client has its whole answer."""


@dataclass(frozen=True)
class Lost:
    """The replica did not answer to the end; another one may.

    `is_suspect`: it had the request when its connection broke or it fell silent, so the request may be the reason.
    `fell_silent`: nothing came from it for too long, and nothing had come before.
    """

    worker: str
    reason: str
    is_suspect: bool = False
    fell_silent: bool = False


@dataclass(frozen=True)
class Misdirected:
    """The replica has another model by now, or is loading one. It has done nothing."""

    worker: str
    reason: str


@dataclass(frozen=True)
class CutOff:
    """The router has had it cut, because the replica is to load another model. It can be continued."""

    worker: str


@dataclass(frozen=True)
class Mismatch:
    """A replica cannot continue what the client has read, or began to continue it in other words."""

    reason: str


@dataclass(frozen=True)
class NoDescriptorsLeft:
    """This process may open no more files, so it could not connect. No fault of the replica."""

    reason: str


@dataclass(frozen=True)
class Unplaced:
    """No router answers, and the gateway knows no replica that does."""

    reason: str


AttemptOutcome = Served | Lost | Misdirected | CutOff | Mismatch | NoDescriptorsLeft
Outcome = AttemptOutcome | Unplaced | Refuse

# -- what the client has


class Sent(Enum):
    """What the client has got when an attempt ends."""

    NOTHING = auto()
    CONTINUABLE = auto()
    """The beginning of a stream that another replica could continue."""
    ALL_BUT_END = auto()
    """Everything of a stream but its `[DONE]`."""
    FIXED = auto()
    """The beginning of an answer that cannot be continued."""


# -- what follows


@dataclass(frozen=True)
class Finish:
    """Nothing is left to do."""


@dataclass(frozen=True)
class TryAnother:
    """Send the same request to another replica, or ask again after `after_s`."""

    after_s: float = 0.0


@dataclass(frozen=True)
class ContinueElsewhere:
    """Have another replica continue the stream, asked for after `after_s`."""

    after_s: float = 0.0


@dataclass(frozen=True)
class EndStream:
    """Send the `[DONE]` that is missing."""


@dataclass(frozen=True)
class GiveUp:
    """Answer with this error: as a status while the client has nothing, else as the stream's last event."""

    error: ApiError


Step = Finish | TryAnother | ContinueElsewhere | EndStream | GiveUp


class Retries:
    """The attempts at one request."""

    def __init__(self, tries: int, max_silenced: int = MAX_ENDED) -> None:
        """At most `tries` attempts, and no further one once `max_silenced` replicas have fallen silent."""
        self.ended: tuple[str, ...] = ()
        """Workers that had the request when they ended."""
        self.excluded: tuple[str, ...] = ()
        """Workers that the next attempt must not go to."""
        self._tries_left = tries
        self._silences_left = max_silenced
        self._misdirections_left = MAX_MISDIRECTED
        self._reason = ""

    def after(self, outcome: Outcome, sent: Sent) -> Step:
        """What follows now that an attempt has ended with `outcome`."""
        match outcome:
            case Served():
                return Finish()
            case Lost():
                return self._after_loss(outcome, sent)
            case Misdirected():
                return self._after_misdirection(outcome, sent)
            case CutOff():
                return self._go_on(sent)
            case Mismatch(reason):
                self._reason = f"{self._reason}; {reason}"
                return self._give_up(sent)
            case NoDescriptorsLeft(reason):
                self._reason = reason
                return self._give_up(sent, _no_descriptors())
            case Unplaced(reason):
                return self._give_up(sent, _unavailable(reason))
            case Refuse():
                # After a loss the router has nobody left to name: the loss is the better explanation.
                is_better = self.excluded and outcome.code not in REFUSED
                return self._give_up(sent, None if is_better else _refusal(outcome))
            case _:
                assert_never(outcome)

    def _after_loss(self, lost: Lost, sent: Sent) -> Step:
        self._reason = f"worker {lost.worker}: {lost.reason}"
        self._tries_left -= 1
        self._silences_left -= lost.fell_silent
        self.excluded = (*self.excluded, lost.worker)
        if lost.is_suspect:
            self.ended = (*self.ended, lost.worker)
        if sent is Sent.FIXED:
            return self._give_up(sent)
        if len(self.ended) >= MAX_ENDED and sent is not Sent.ALL_BUT_END:
            return self._give_up(sent, _convicted(self.ended))
        if self._silences_left <= 0:
            return self._give_up(sent)
        if sent is Sent.ALL_BUT_END:
            return EndStream()
        if self._tries_left <= 0:
            return self._give_up(sent)
        if sent is Sent.NOTHING:
            return TryAnother()
        # The client waits for a stream that it has begun to read, so only the worker just lost is ruled out: one that
        # failed earlier may have recovered.
        self.excluded = (lost.worker,)
        return ContinueElsewhere()

    def _after_misdirection(self, found: Misdirected, sent: Sent) -> Step:
        """The router is about to hear what the replica has, so it is asked again, the same replica not excluded."""
        if not self._misdirections_left:
            return self._after_loss(Lost(found.worker, found.reason), sent)
        self._misdirections_left -= 1
        wait_s = MISDIRECTED_S * 2.0 ** (MAX_MISDIRECTED - 1 - self._misdirections_left)
        return self._go_on(sent, wait_s)

    def _go_on(self, sent: Sent, after_s: float = 0.0) -> Step:
        """Nobody has failed, so no try is used and nobody excluded."""
        match sent:
            case Sent.NOTHING:
                return TryAnother(after_s)
            case Sent.CONTINUABLE:
                return ContinueElsewhere(after_s)
            case Sent.ALL_BUT_END:
                return EndStream()
            case Sent.FIXED:
                return self._give_up(sent)
            case _:
                assert_never(sent)

    def _give_up(self, sent: Sent, error: ApiError | None = None) -> GiveUp:
        """`error` is for a client that has nothing yet; None stands for the general one."""
        if sent is not Sent.NOTHING:
            return GiveUp(ApiError(502, f"the stream was lost midway: {self._reason}", code="replica_lost"))
        return GiveUp(error or self._no_replica())

    def _no_replica(self) -> ApiError:
        return ApiError(
            502,
            f"no replica could serve the request; tried {', '.join(self.excluded)}; the last: {self._reason}",
            code="no_replica",
            retry_after_s=RETRY_AFTER_S,
        )


def _convicted(ended: tuple[str, ...]) -> ApiError:
    names = ", ".join(ended)
    return ApiError(
        502, f"replicas ended while they had this request: {names}; it is not tried again", code=ENDED
    )


def _no_descriptors() -> ApiError:
    return ApiError(
        503, "the gateway has no room for a connection", code="overloaded", retry_after_s=RETRY_AFTER_S
    )


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, reason, code="router_unavailable", retry_after_s=RETRY_AFTER_S)


def _refusal(refuse: Refuse) -> ApiError:
    if refuse.code in REFUSED:
        after_s = None if refuse.retry_after_s is None else ceil(refuse.retry_after_s)
        status = REFUSED[refuse.code]
        return ApiError(status, refuse.reason, code=refuse.code, retry_after_s=after_s)
    if refuse.code:
        wait_s = ceil(refuse.retry_after_s or RETRY_AFTER_S)
        return ApiError(429, refuse.reason, code=refuse.code, retry_after_s=wait_s)
    if refuse.is_full:
        return overloaded(f"the router refused: {refuse.reason}")
    retry_after_s = RETRY_AFTER_S if refuse.retry else None
    return ApiError(503, f"the router refused: {refuse.reason}", code="refused", retry_after_s=retry_after_s)
