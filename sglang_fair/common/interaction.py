"""What a call to the model says of the interaction that it belongs to: all calls behind one answer to a user.

A sender says it in headers, or where one is missing in OpenAI's body field `metadata`:

    header               key            what it is
    x-fair-app           app            the application; calls of one need about as much
    x-fair-interaction   interaction    the interaction's id, of the client's choice
    x-fair-stage         stage          which of its calls this is, as "plan" or "merge"
    x-fair-last          last           1: the user sees this call's answer
    x-fair-session       session        the conversation or agent that sends it, of the client's choice; the headers of
                                        coding agents are read as well (`SESSION_HEADERS`)

An interaction is closed a minute after its last call, and while it lasts its calls go first; a session may last for
days, and has no more rights than its client's others: these take turns.

The names are believed as far as `Apps` does not bind them. No request fails for what it says here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sglang_fair.common.identity import (
    HEADER_APP,
    HEADER_INTERACTION,
    HEADER_LAST,
    HEADER_SESSION,
    HEADER_STAGE,
    SESSION_HEADERS,
    bounded,
)

OTHER = "(other)"
"""The application of calls that name one which their client is not bound to. No sender can name it (`bounded`)."""

MOST_CHARS = 512
"""OpenAI's own limit for a value in `metadata`. Longer ones are no names."""

MOST_COUNTED = 10_000_000
"""Largest number of a gateway's that is believed."""


class Part(NamedTuple):
    """What one call says. Names are as `identity.bounded` makes them; "" is one that it does not say."""

    app: str = ""
    interaction: str = ""
    stage: str = ""
    is_last: bool = False
    session: str = ""

    def headers(self) -> dict[str, str]:
        """For the replica."""
        last = "1" if self.is_last else ""
        names = (HEADER_APP, self.app), (HEADER_INTERACTION, self.interaction), (HEADER_STAGE, self.stage)
        more = (HEADER_LAST, last), (HEADER_SESSION, self.session)
        return {header: value for header, value in (*names, *more) if value}


def part_of(headers: Mapping[str, str], metadata: object = None) -> Part:
    """What a request with these headers (lower-case names) and this `metadata` says."""
    keys = metadata if isinstance(metadata, Mapping) else {}

    def read(header: str, key: str, *others: str) -> str:
        text = next((found for one in (header, *others) if (found := headers.get(one, "").strip())), "")
        if not text and isinstance(value := keys.get(key), str) and len(value) <= MOST_CHARS:
            text = value.strip()
        return text

    return Part(
        bounded(read(HEADER_APP, "app")),
        bounded(read(HEADER_INTERACTION, "interaction")),
        bounded(read(HEADER_STAGE, "stage")),
        read(HEADER_LAST, "last") == "1",
        bounded(read(HEADER_SESSION, "session", *SESSION_HEADERS[1:])),
    )


def read_count(text: str) -> int | None:
    """The number, from 1, in a gateway's `HEADER_CALL` or `HEADER_SYSTEM_TOKENS`; None for anything else."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_COUNTED))
    return int(text) if is_number and 1 <= int(text) <= MOST_COUNTED else None


class Apps:
    """Which applications a client may name. With none bound, any; else an app that its client is not bound to counts
    as `OTHER`."""

    def __init__(self, bound: Mapping[str, Sequence[str]] | None = None) -> None:
        self._bound = None if bound is None else {client: frozenset(apps) for client, apps in bound.items()}

    def of(self, client: str, app: str) -> str:
        """What `app`, which `client` names, counts as."""
        if self._bound is None or not app or app in self._bound.get(client, ()):
            return app
        return OTHER


def make_apps(content: Any, where: str) -> Apps:
    """The binding that `content`, which stood in `where`, says: clients to lists of applications. ValueError, in one
    line that names `where` and the key, for anything else."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must map clients to lists of applications")
    for client, apps in content.items():
        if not isinstance(apps, list) or not all(isinstance(app, str) and app for app in apps):
            raise ValueError(
                f"{where}: {client!r:.80} must have a list of applications' names, not {apps!r:.80}"
            )
    return Apps({bounded(client): [bounded(app) for app in apps] for client, apps in content.items()})
