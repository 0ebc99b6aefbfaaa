"""On whose account a request is served: what the gateway knows of its sender, and sends along with it."""

from dataclasses import dataclass


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
