"""On whose account a request is served: what the gateway knows of its sender, and sends along with it.

The weight goes to the replica in a header and to the router in its message. The gateway passes no such header of a
client on. A replica believes the one it gets as far as it believes the name beside it.

The cache group goes as a salt, which SGLang has as a part of its cache's keys, and the router as a part of its tree's.
A sender's own salt stays beside it. `salted` maps no two different pairs to one salt, so nobody can name a salt that
reaches into a group, and nobody in a group reaches out of it.
"""

from dataclasses import dataclass
from urllib.parse import quote, unquote

from sglang_fair.common.weights import MOST_WEIGHT

HEADER_WEIGHT = "x-fair-weight"
"""`3.0@1763809200000000000`: the client's weight, and the version of the tenants' file that says so."""

HEADER_SALT = "x-fair-cache-salt"
"""The cache salt, percent-encoded, of requests whose body has no field for it."""

GROUP_MARK = "\x1d"
"""ASCII's group separator, around the name of a group in a salt."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A request's client, with what its tenant's entry says of its share and of its cache.

    `client` is a name as `common.identity.bounded` makes it.
    """

    client: str
    weight: float | None = None
    """The client's share. None: nobody has said; routers and replicas use the weight that they know."""
    group: str | None = None
    """Requests share cached prefixes only within one group. None: with all others that have none."""
    version: int = 0
    """Of the tenants' file: of two that differ about a client, the later holds, whichever request comes first."""

    def headers(self) -> dict[str, str]:
        """For the replica, beside the client's name."""
        return {} if self.weight is None else {HEADER_WEIGHT: f"{self.weight!r}@{self.version}"}


def read_weight(text: str) -> tuple[float, int] | None:
    """The weight and version in a header; None for anything else, and for a weight that nobody can have."""
    weight, at, version = text.partition("@")
    if not (at and version.isascii() and version.isdecimal() and len(version) <= 20 and len(text) <= 64):
        return None
    try:
        found = float(weight)
    except ValueError:
        return None
    return (found, int(version)) if 1 / MOST_WEIGHT <= found <= MOST_WEIGHT else None


def salted(group: str | None, salt: str | None) -> str | None:
    """The cache salt of a request of `group` whose own salt is `salt`; None: neither. A group's name is without
    `GROUP_MARK`."""
    if group is None and not (salt or "").startswith(GROUP_MARK):
        return salt or None
    return f"{GROUP_MARK}{group or ''}{GROUP_MARK}{salt or ''}"


def salt_header(salt: str) -> str:
    """`salt` as it travels in `HEADER_SALT`."""
    return quote(salt, safe="", errors="surrogatepass")


def read_salt(text: str) -> str | None:
    """The salt in a header; None if there is none."""
    return unquote(text, errors="surrogatepass") or None
