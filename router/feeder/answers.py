"""What an answer, or none, means for an item. Pure.

2xx                     its result
another 4xx             its error
504, expired            its error: it did not want to be computed later
429                     later: its client has had what it may have for the moment
two replicas ended      its error, at once: it would end two more
503, quarantined        later: of its client one at a time is served
503, no gateway         later: nothing is there that could answer. Neither is the item's fault, so it is not counted
500, 502, 504, 408      again, `MOST_TRIES` times in all, then its error: it may itself be what replicas die of
401 for the key         later: the feeder's key is wrong, which is for an operator to see to
"""

from typing import NamedTuple

from router.suspects import ENDED, QUARANTINED
from sglang_fair.common.deadlines import EXPIRED_CODE

MOST_TRIES = 3
TROUBLE = (408, 500, 502, 504)
"""That an item may have caused."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
LOST_TRIES = 8
"""How often a gateway may be lost while it has the item: more than can happen by chance."""


class Answer(NamedTuple):
    """What came back for an item."""

    status: int
    """0: no gateway could be reached; 1: it was lost before its answer was whole."""
    body: bytes = b""
    request_id: str = ""
    code: str = ""
    """Of an error of the gateway's own."""
    retry_after_s: float | None = None
    took_s: float = 0.0
    """From sending the item to here."""


class Result(NamedTuple):
    """The item is over."""

    is_ok: bool
    status: int


class Again(NamedTuple):
    """It is sent again, `after_s` from now. `holds`: so long nothing else of its client, or of its model, is sent, or
    nothing at all."""

    after_s: float
    holds: str
    """"": only itself; "client", "model" or "all"."""
    counts: bool
    """As a try of the item's."""


def judge(answer: Answer, tries: int) -> Result | Again:
    """What follows from an answer to the `tries`-th try, from 1, of those that count."""
    status = answer.status
    if status == 0:
        return Again(FIRST_WAIT_S, "all", counts=False)
    if status == 429:
        return Again(_bounded(answer.retry_after_s or 1.0), "client", counts=False)
    if answer.code in (ENDED, EXPIRED_CODE):
        return Result(False, status)
    if status == 503 and answer.code == QUARANTINED:
        return Again(_bounded(answer.retry_after_s or 1.0), "client", counts=False)
    if status == 503:
        return Again(_bounded(answer.retry_after_s or 1.0), "model", counts=False)
    if status == 401 and answer.code == "invalid_feeder_key":
        return Again(LONGEST_WAIT_S, "all", counts=False)
    if status == 1:
        if tries < LOST_TRIES:
            return Again(_bounded(FIRST_WAIT_S * 2 ** (tries - 1)), "", counts=True)
        return Result(False, 502)
    if status in TROUBLE and tries < MOST_TRIES:
        return Again(_bounded(FIRST_WAIT_S * 2 ** (tries - 1)), "", counts=True)
    return Result(200 <= status < 300, status)


def _bounded(after_s: float) -> float:
    return min(LONGEST_WAIT_S, max(0.05, after_s))
