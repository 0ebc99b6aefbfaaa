"""Who may open the page: whoever has the admin key. No tenant's key opens it.

A browser gives the key once and gets a cookie that says until when it holds, with a digest that only the key can make.
So nothing is kept here, and the page stays open when this process is started again. Without a key the page is for this
machine alone. That no page from elsewhere asks is `common.guard`'s matter.
"""

import hashlib
import hmac
import time
from collections.abc import Mapping

HOLDS_S = 24 * 3600
LOCAL = ("127.0.0.1", "::1")


class Session:
    """For one key; "" if there is none."""

    def __init__(self, key: str, port: int, *, is_secure: bool = False) -> None:
        """`port` is the page's: browsers send a cookie to all ports of a machine. `is_secure`: it is served over https,
        and the cookie is sent over nothing else."""
        self.is_secure = is_secure
        self._key = key.encode()
        self.cookie = f"sglang-fair-{port}"

    @property
    def needs_key(self) -> bool:
        """Whether there is a key to give."""
        return bool(self._key)

    def is_key(self, given: str) -> bool:
        """Whether that is the key."""
        return self.needs_key and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self._key)

    def issue(self) -> str:
        """A cookie that holds for `HOLDS_S`."""
        until = str(int(time.time()) + HOLDS_S)
        return f"{until}.{self._digest(until)}"

    def may(self, peer: str | None, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        """Whether a request may see and change the cluster."""
        if not self.needs_key:
            return peer in LOCAL
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_key(given.strip())
        until, _, digest = cookies.get(self.cookie, "").partition(".")
        is_ours = hmac.compare_digest(digest.encode("utf-8", "surrogatepass"), self._digest(until).encode())
        return is_ours and until.isdecimal() and time.time() < int(until)

    def _digest(self, until: str) -> str:
        return hmac.new(
            self._key, f"page until {until}".encode("utf-8", "surrogatepass"), hashlib.sha256
        ).hexdigest()
