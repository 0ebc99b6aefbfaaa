"""How many lines may be in flight so that tokens come in time. Pure.

Lines run in the same steps of the engine as everything else there, so how long their tokens take is how long those of
interactive requests beside them take; and a line whose prompt waits says that prompts wait. From each answer:

    token time   seconds from sending to the answer, over tokens: those of the output, and a hundredth of the prompt's,
                 which take about as long to compute. Over about the last answers in flight at once
    in time      one more at a time: with each answer, until tokens were late once, then with as many answers as may be
                 in flight
    late         as many less as tokens are late, half of them at most; again when as many have been answered as were in
                 flight then: what comes from there on was sent since
"""

import msgspec

from router.feeder.answers import Answer

PROMPT_TOKENS = 100
"""Take an engine about as long as a token of output: a decode step reads the weights, which a GPU can do in the time in
which it multiplies them by 100 to 300 tokens."""

LEAST_ANSWERS = 8
"""Over so many a token's time is taken, where fewer are in flight."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class Pace:
    """Of one model. `most_s` is how long a token may take."""

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._seconds = self._tokens = 0.0
        self._was_late = False
        self._older = 0
        """Of what is in flight: what was sent before the limit was lowered last."""

    @property
    def token_s(self) -> float:
        """How long a token took lately; 0 before the first answer."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def limit(self, limit: float, in_flight: int, answer: Answer) -> float:
        """How many may be in flight, after an answer: `limit` could be before, and `in_flight` were, with this one."""
        tokens = _tokens(answer)
        if not tokens:
            return limit
        kept = 1 - 1 / max(LEAST_ANSWERS, in_flight)
        self._seconds = kept * self._seconds + answer.took_s
        self._tokens = kept * self._tokens + tokens
        self._older = max(0, self._older - 1)
        if self.token_s > self.most_s:
            if self._older:
                return limit
            self._was_late, self._older = True, in_flight
            return max(1.0, limit * max(0.5, self.most_s / self.token_s))
        if 2 * in_flight < limit:
            return limit  # it is not what holds lines back
        return limit + (1 / limit if self._was_late else 1)


def _tokens(answer: Answer) -> float:
    """0 for what is no answer with tokens."""
    if answer.status != 200:
        return 0.0
    try:
        usage = msgspec.json.decode(answer.body, type=_Body).usage
    except msgspec.MsgspecError:
        return 0.0
    return 0.0 if usage is None else usage.completion_tokens + usage.prompt_tokens / PROMPT_TOKENS
