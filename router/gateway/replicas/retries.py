"""What follows when an attempt at serving a request has failed: a further attempt, or an error.

    the attempt           client has nothing        stream begun, continuable     answer begun, not continuable
    lost                  another replica           continued elsewhere           error event
    lost, a suspect       the same; an error once `MAX_ENDED` replicas have ended with the request in their hands,
                          or `max_silenced` have fallen silent
    mismatch              -                         error event                   -
    misdirected           asked again a little later, no try used                 error event
    cut                   asked again, no try used                                -
    no descriptors        503 overloaded            error event                   error event
    unplaced              503 unavailable           error event                   error event
    router refuses        429 or 503; 502 if        error event                   error event
                          a replica was tried
    no tries left         502                       error event                   error event

A stream that lacks its [DONE] alone is ended with it, whatever has failed. Pure: no clocks, no I/O.
"""

from math import ceil
from typing import Literal

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

How = Literal["lost", "misdirected", "cut", "mismatch", "no descriptors", "refused", "unplaced"]
"""How an attempt fails.

    lost             the replica did not answer to the end; another one may
    misdirected      the replica has another model by now, or is loading one. It has done nothing
    cut              the router has had it cut, because the replica is to load another model. It can be continued
    mismatch         a replica cannot continue what the client has read, or began to continue it in other words
    no descriptors   this process may open no more files, so it could not connect. No fault of the replica
    refused          a router refuses it
    unplaced         no router answers, and the gateway knows no replica that does
"""


class Failed(Exception):
    """An attempt failed."""

    def __init__(
        self,
        how: How,
        reason: str = "",
        worker: str = "",
        is_suspect: bool = False,
        fell_silent: bool = False,
        refuse: Refuse | None = None,
    ) -> None:
        """`is_suspect`: the replica had the request when its connection broke or it fell silent, so the request may be
        the reason. `fell_silent`: nothing came from it for too long, and nothing had come before."""
        super().__init__(how, reason)
        self.how, self.reason, self.worker = how, reason, worker
        self.is_suspect, self.fell_silent, self.refuse = is_suspect, fell_silent, refuse


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

    def after(self, failed: Failed, *, has_begun: bool, can_go_on: bool = False) -> float:
        """Seconds after which another attempt is to be made. `has_begun`: the client has the beginning of an answer,
        which another replica can continue, or cannot.

        Raises `ApiError` if there is to be none: for the status while the client has nothing, else for the last event.
        """
        wait_s, error = self._judged(failed, has_begun)
        if has_begun and (error is not None or not can_go_on):
            raise ApiError(502, f"the stream was lost midway: {self._reason}", code="replica_lost")
        if error is not None:
            raise error
        return wait_s

    def _judged(self, failed: Failed, has_begun: bool) -> tuple[float, ApiError | None]:
        if failed.refuse is not None:
            # After a loss the router has nobody left to name: the loss is the better explanation.
            is_better = self.excluded and failed.refuse.code not in REFUSED
            return 0.0, self._no_replica() if is_better else _refusal(failed.refuse)
        error: ApiError | None = None
        match failed.how:
            case "unplaced":
                error = ApiError(503, failed.reason, code="router_unavailable", retry_after_s=RETRY_AFTER_S)
            case "no descriptors":
                self._reason = failed.reason
                text = "the gateway has no room for a connection"
                error = ApiError(503, text, code="overloaded", retry_after_s=RETRY_AFTER_S)
            case "mismatch":
                self._reason = f"{self._reason}; {failed.reason}"
                error = self._no_replica()
            case "misdirected" if self._misdirections_left:
                # The router is about to hear what the replica has, so it is asked again, and nobody is excluded.
                self._misdirections_left -= 1
                return MISDIRECTED_S * 2.0 ** (MAX_MISDIRECTED - 1 - self._misdirections_left), None
            case "misdirected" | "lost":
                error = self._after_loss(failed, has_begun)
        return 0.0, error

    def _after_loss(self, lost: Failed, has_begun: bool) -> ApiError | None:
        self._reason = f"worker {lost.worker}: {lost.reason}"
        self._tries_left -= 1
        self._silences_left -= lost.fell_silent
        # A client that waits for a stream which it has begun to read may get one that failed earlier and may have
        # recovered: only the worker just lost is ruled out.
        self.excluded = (lost.worker,) if has_begun else (*self.excluded, lost.worker)
        if lost.is_suspect:
            self.ended = (*self.ended, lost.worker)
        if len(self.ended) >= MAX_ENDED:
            names = ", ".join(self.ended)
            text = f"replicas ended while they had this request: {names}; it is not tried again"
            return ApiError(502, text, code=ENDED)
        return self._no_replica() if self._silences_left <= 0 or self._tries_left <= 0 else None

    def _no_replica(self) -> ApiError:
        return ApiError(
            502,
            f"no replica could serve the request; tried {', '.join(self.excluded)}; the last: {self._reason}",
            code="no_replica",
            retry_after_s=RETRY_AFTER_S,
        )


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
