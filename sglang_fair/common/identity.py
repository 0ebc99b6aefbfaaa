"""Who sent a request, and what it announces about itself, from its headers and body.

A client is whatever the operator wants to be fair to: a tenant, a user, an API key. The gateway and a replica without a
gateway apply the same rule. Behind the gateway the name travels in `HEADER_CLIENT`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from urllib.parse import quote

HEADER_CLIENT = "x-fair-client"
HEADER_APP = "x-fair-app"
HEADER_INTERACTION = "x-fair-interaction"
HEADER_STAGE = "x-fair-stage"
HEADER_LAST = "x-fair-last"
HEADER_CALL = "x-fair-call"
"""The number of a call in its interaction, which the gateway says."""
HEADER_SESSION = "x-fair-session"
SESSION_HEADERS = (
    HEADER_SESSION,
    "x-parent-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
)
"""Where a session's name is looked for: what coding agents send. opencode names an agent's own session in the third and
the one that it was started from in the second; in Claude Code's and in Codex's (the last two) both have the same name.

Anybody is believed: a session is one of its client's, whatever it is called, and has nothing of its own."""
HEADER_SYSTEM_TOKENS = "x-fair-system-tokens"
"""Tokens of a chat's system messages, which the gateway counts."""
HEADER_EXPECTED_OUTPUT = "x-fair-expected-output-tokens"
HEADER_UNBLOCKS = "x-fair-unblocks"
HEADER_ATTEMPT = "x-fair-attempt"
"""The gateway's id of what it sends to a replica, where SGLang makes several requests of it, with ids of their own."""

ANNOUNCEMENTS: Mapping[str, str] = {
    HEADER_EXPECTED_OUTPUT: "expected_output_tokens",
    HEADER_UNBLOCKS: "unblocks",
}
"""Headers by which a sender says what it knows about its request in advance, and the field of `Job` that each sets."""

MOST_ANNOUNCED = 1_000_000
"""Largest number that an announcement may carry."""

ANONYMOUS = "anonymous"
"""The client of all requests without a name."""

MAX_NAME_CHARS = 128
"""Longer names are cut and made unique by a digest, so that nobody can fill our memory with one."""

_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F))

API_KEY = "api-key"
USER = "user"

DEFAULT_ORDER: tuple[str, ...] = (
    HEADER_CLIENT,
    "x-tenant-id",
    "x-smg-tenant-id",
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
    API_KEY,
    USER,
)
"""Where to look for a name; the first match wins: header names, `api-key`, or `user` (the field of OpenAI's API, and
`metadata.user_id` of Anthropic's).

Headers are believed. If clients reach the gateway directly, list only what a proxy in front of it sets, or `api-key`.
"""


HEADER_KEY = "x-api-key"
"""Where Anthropic's clients send their key."""


def api_key(headers: Mapping[str, str]) -> str:
    """The key in `Authorization: Bearer`, or in `HEADER_KEY`; "" if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    given = key.strip() if scheme.lower() == "bearer" else ""
    return given or headers.get(HEADER_KEY, "").strip()


def identify(
    headers: Mapping[str, str], user: str | None = None, order: Sequence[str] = DEFAULT_ORDER
) -> str:
    """The client's name; `ANONYMOUS` if no place of `order` has one.

    `headers` maps lower-case names to values. An API key itself is never shown: its client is `key:` and twelve
    hexadecimal digits of the key's SHA-256.
    """
    for place in order:
        if place == USER:
            name = user or ""
        elif place == API_KEY:
            key = api_key(headers)
            name = "key:" + hashlib.sha256(key.encode()).hexdigest()[:12] if key else ""
        else:
            name = headers.get(place, "")
        if name.strip():
            return bounded(name.strip())
    return ANONYMOUS


def announced(headers: Mapping[str, str]) -> dict[str, int]:
    """What a request announces, by field of `Job`: whole numbers from 0 to `MOST_ANNOUNCED`.

    Anything else is ignored: no request fails because of a hint.
    """
    found = {}
    for header, field in ANNOUNCEMENTS.items():
        text = headers.get(header, "").strip()
        if text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= MOST_ANNOUNCED:
            found[field] = int(text)
    return found


def bounded(name: str) -> str:
    """`name` as it can stand in headers, logs and tables.

    What is not printable ASCII is percent-encoded; a name longer than `MAX_NAME_CHARS` becomes its beginning and a
    digest. Idempotent.
    """
    if len(name) <= MAX_NAME_CHARS and name.isascii() and name.isprintable() and not name.startswith("("):
        return name
    name = quote(name, safe=_PRINTABLE, errors="surrogatepass")
    if name.startswith("("):  # the accounts of a queue's own have such names
        name = "%28" + name[1:]
    if len(name) <= MAX_NAME_CHARS:
        return name
    return name[: MAX_NAME_CHARS - 13] + "~" + hashlib.sha256(name.encode()).hexdigest()[:12]
