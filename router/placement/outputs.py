"""How long an answer will be, for loads in tokens: what the client's past answers let expect.

A mean that forgets, per client; before a client's first answer, that of all clients; never more than the
request's own limit. Bounded: the client that has not finished anything for the longest time is forgotten.
"""

from collections import OrderedDict

_SHARE = 0.2
"""Of the latest answer in the mean."""

_SHARE_OF_ALL = 0.01

_FIRST_GUESS_TOKENS = 128.0


class ExpectedOutputs:
    """Learns from every answer; a guess moves loads, never what a request costs."""

    def __init__(self, max_clients: int = 10_000) -> None:
        self._max_clients = max_clients
        self._all = _FIRST_GUESS_TOKENS
        self._means: OrderedDict[str, float] = OrderedDict()

    def of(self, client: str, limit_tokens: int) -> float:
        """Output tokens of the client's next answer; `limit_tokens` 0: it named none."""
        mean = self._means.get(client, self._all)
        return min(mean, limit_tokens) if limit_tokens else mean

    def learn(self, client: str, output_tokens: int) -> None:
        """An answer of `client` is complete."""
        mean = self._means.get(client, self._all)
        self._means[client] = mean + _SHARE * (output_tokens - mean)
        self._means.move_to_end(client)
        self._all += _SHARE_OF_ALL * (output_tokens - self._all)
        if len(self._means) > self._max_clients:
            self._means.popitem(last=False)
