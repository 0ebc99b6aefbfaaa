"""Token ids in a stream of chat answers, which SGLang does not stream there, so that a gateway can continue the stream.

A replica with the overlay adds them to the stream of a request that has the header `HEADER`: after what each step has
to say, a comment of server-sent events, `: token_ids {"prompt_tokens":12,"ids":[5,7],"finish":null}`, with the step's
new ids. `finish` is why the answer ends with them. A client that knows nothing of it skips comments.
"""

import json
from collections.abc import Sequence

HEADER = "x-fair-token-ids"
"""The request header that asks for token ids. Any value does."""

PREFIX = b": token_ids "


def comment(prompt_tokens: int, ids: Sequence[int], finish: str | None) -> str:
    """One comment, with the empty line that ends it."""
    said = {"prompt_tokens": prompt_tokens, "ids": list(ids), "finish": finish}
    return f"{PREFIX.decode()}{json.dumps(said, separators=(',', ':'))}\n\n"
