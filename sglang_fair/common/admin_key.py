"""The key with which operators ask a gateway, and open its page. It is in the environment, as the replicas' key."""

import os

VARIABLE = "SGLANG_FAIR_ADMIN_KEY"


def key() -> str:
    """The key; "" where there is none."""
    return os.environ.get(VARIABLE, "")


def headers() -> dict[str, str]:
    """What a request of an operator needs besides."""
    return {"authorization": f"Bearer {key()}"} if key() else {}
