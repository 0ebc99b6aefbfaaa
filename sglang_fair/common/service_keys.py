"""Keys that a cluster's processes and its operators have in their environment, for everybody on a machine sees command
lines."""

import hmac
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceKey:
    """The key that is in the environment variable `variable`, read anew at each call."""

    variable: str

    def key(self) -> str:
        return os.environ.get(self.variable, "")

    def headers(self) -> dict[str, str]:
        """What a request with this key needs besides."""
        return bearer(self.key())


def bearer(key: str) -> dict[str, str]:
    """The header of a request with `key`; none without."""
    return {"authorization": f"Bearer {key}"} if key else {}


def is_same(given: str, key: str) -> bool:
    """Whether `given`, which came with a request, is `key`. Takes as long wherever they begin to differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), key.encode())


admin_key = ServiceKey("SGLANG_FAIR_ADMIN_KEY")
"""With which operators ask a gateway, and open its page."""

replica_key = ServiceKey("SGLANG_FAIR_REPLICA_KEY")
"""With which gateway, cluster and operators ask replicas: SGLang's `--api-key`."""

feeder_key = ServiceKey("SGLANG_FAIR_FEEDER_KEY")
"""With which the feeder of batches asks gateways, on behalf of clients."""
