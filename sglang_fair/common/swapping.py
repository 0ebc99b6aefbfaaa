"""What gateway, agent and replica say to each other of the model that a replica has loaded.

A replica's gate says which model it has, and whether it lets requests in:

    serves   it has `loaded`; requests for another one get status 421
    empties  the same, and all new requests get 421
    loads    its weights are being exchanged: only its agent's own requests are let in

Pure.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

HEADER_MODEL = "x-fair-model"
"""The model that a request must be answered by, from the gateway to a replica that may have another one."""

HEADER_PROBE = "x-fair-probe"
"""On an agent's own requests: the name of the replica's run."""

PATH = "/fair/model"
"""Where a replica tells what its gate says, and its agent sets it."""

MISDIRECTED = 421
"""HTTP's Misdirected Request: the same request may be answered elsewhere, or here later."""

State = Literal["serves", "empties", "loads"]


class Seen(msgspec.Struct, frozen=True):
    """A replica's gate as it was when it was asked."""

    run: str
    """Names the replica's process: another one has its first model again."""
    state: State
    loaded: str
    """"" while it loads."""
    target: str = ""
    """What it is to have."""
    in_flight: int = 0
    """Requests inside."""


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to set a gate."""

    state: State
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


def seen(answer: Any) -> Seen:
    """From a replica's answer. ValueError for anything else."""
    try:
        return msgspec.convert(answer, Seen)
    except msgspec.ValidationError as error:
        raise ValueError(f"not what a replica says of its model: {error}") from None


class Gate:
    """Which requests a replica lets in. Counts those inside: a model is exchanged when there are none."""

    def __init__(self, run: str, loaded: str) -> None:
        """Serves `loaded`."""
        self.run = run
        self.state: State = "serves"
        self.loaded = loaded
        self.target = ""
        self.inside = 0

    def refuses(self, headers: Mapping[str, str]) -> str | None:
        """Why a request with these headers, by lower-case names, is not let in; None: it is."""
        if headers.get(HEADER_PROBE) == self.run:
            return None
        if self.state != "serves":
            return f"this replica is to load model {self.target}"
        asked = headers.get(HEADER_MODEL, "")
        if asked and asked != self.loaded:
            return f"this replica has model {self.loaded}, not {asked}"
        return None

    def set(self, body: Any) -> None:
        """`{"state": ..., "model": ...}`: serves that model, or is to have it. ValueError for anything else."""
        asked = msgspec.convert(body, _Asked)
        if asked.state == "empties" and not self.loaded:
            raise ValueError("nothing is loaded: it cannot go back to that")
        self.state = asked.state
        self.target = "" if asked.state == "serves" else asked.model
        if asked.state != "empties":
            self.loaded = asked.model if asked.state == "serves" else ""

    def says(self, others: int = 0) -> dict[str, str | int]:
        """What `seen` reads. `others` are requests that the engine knows of, which may be the same ones."""
        return {
            "run": self.run,
            "state": self.state,
            "loaded": self.loaded,
            "target": self.target,
            "in_flight": max(self.inside, others),
        }
