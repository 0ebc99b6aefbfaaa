"""The key with which gateway, cluster and operators ask replicas: SGLang's `--api-key`.

It is in the environment, because everybody on a machine sees command lines.
"""

import os

VARIABLE = "SGLANG_FAIR_REPLICA_KEY"


def key() -> str:
    """The key; "" where replicas ask for none."""
    return os.environ.get(VARIABLE, "")


def headers() -> dict[str, str]:
    """What a request to a replica needs besides."""
    return {"authorization": f"Bearer {key()}"} if key() else {}
