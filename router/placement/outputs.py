"""How long an answer will be, estimated from the client's past answers. Loads in tokens are computed with it.

The estimate is an exponentially decaying mean for each client; before a client's first answer, that of all clients.
It is never more than the request's own limit. Bounded: the client whose last answer is the oldest is forgotten.
"""

from collections import OrderedDict

_SHARE = 0.2
"""Weight of the latest answer in a client's mean, and below in the mean of all clients."""

_SHARE_OF_ALL = 0.01

_FIRST_GUESS_TOKENS = 128.0


class ExpectedOutputs:
    """Learns from every answer. The estimates enter loads, never what a request costs."""

    def __init__(self, max_clients: int = 10_000) -> None:
        self._max_clients = max_clients
        self._all = _FIRST_GUESS_TOKENS
        self._means: OrderedDict[str, float] = OrderedDict()

    def of(self, client: str, limit_tokens: int) -> float:
        """Expected output tokens of the client's next answer. `limit_tokens` is 0 if the request names no limit."""
        mean = self._means.get(client, self._all)
        return min(mean, limit_tokens) if limit_tokens else mean

    def learn(self, client: str, output_tokens: int) -> None:
        """An answer of `client` is complete, with `output_tokens` tokens."""
        mean = self._means.get(client, self._all)
        self._means[client] = mean + _SHARE * (output_tokens - mean)
        self._means.move_to_end(client)
        self._all += _SHARE_OF_ALL * (output_tokens - self._all)
        if len(self._means) > self._max_clients:
            self._means.popitem(last=False)
