"""Whether another site's page asks: a browser that runs here sends what any page wants to any address that it reaches,
this machine's own included. Pure.

    Host            an address, or a name that only its own network can give: in names, or one that no public DNS has. A
                    page from elsewhere can have its own name point here (DNS rebinding), and is of the same site then
    Sec-Fetch-Site  same-origin or none. A link may lead here: the page that has it does not see what comes
    Origin          absent, or Host's, where there is no Sec-Fetch-Site, as over http from another machine
    content         a body is of a type that a page may not send to another site without having asked (CORS, which we
                    do not offer)

A request without these headers comes from no browser. Whoever shows a key that no page has may call us as they like.
"""

import ipaddress
from collections.abc import Collection, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

JSON = "application/json"

SAME = ("same-origin", "none")

PRIVATE_SUFFIXES = (".localhost", ".internal", ".svc", ".cluster.local")
"""Of names that no public DNS gives."""


def objection(
    method: str,
    headers: Mapping[str, str],
    names: Collection[str],
    *,
    is_known: bool = False,
    content: str | None = JSON,
) -> str | None:
    """Why a request must be refused, in a line; None: it may come. `headers` are found whatever their case is, `names`
    are lower case. `is_known`: it shows a key, or what only the holder of one has, so it may have any Host. `content`:
    the type that a body must have; None: any."""
    host = headers.get("host", "")
    if host and not is_known and not is_ours(name := _name(host), names):
        return f"this server is not known by the name {name!r:.100}: --names says how it is called"
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_same = origin is None or _authority(origin) == host.lower() if site is None else site in SAME
    if not is_same and not _is_link(method, headers):
        return "another site's page asks this"
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content is not None and has_body and kind != content:
        return f"the body must be of content-type {content}"
    return None


def is_ours(name: str, names: Collection[str]) -> bool:
    """Whether no stranger can have `name` point here."""
    return name in names or _is_private(name)


@lru_cache(256)
def _is_private(name: str) -> bool:
    if "." not in name or name.endswith(PRIVATE_SUFFIXES):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def named(text: str) -> frozenset[str]:
    """The names in `gateway.example.com,llm.example.com`."""
    return frozenset(filter(None, (part.strip().lower().rstrip(".") for part in text.split(","))))


def _is_link(method: str, headers: Mapping[str, str]) -> bool:
    is_page = headers.get("sec-fetch-dest") == "document"
    return method in ("GET", "HEAD") and is_page and headers.get("sec-fetch-mode") == "navigate"


@lru_cache(256)
def _name(host: str) -> str:
    """Without the port. What is no host is returned as it is."""
    try:
        return (urlsplit(f"//{host}").hostname or host).rstrip(".")
    except ValueError:
        return f".{host}"


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
