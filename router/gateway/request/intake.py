"""From the bytes of a body to a checked request and its tokens; large ones in threads, the clients in turn."""

from collections.abc import Callable, Iterator, Sequence

from router.events import TOKEN_BYTES
from router.gateway.errors import ApiError
from router.gateway.request.call import LARGE_BODY_BYTES, Call, check_size, parse
from router.gateway.request.schema import Kind, Prompt
from router.gateway.request.tokens import Tokens, TooLong
from router.gateway.sharing.thread_pool import FairThreadPool

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenized in a thread, because they would block the event loop for more than a millisecond. For
shorter ones the thread costs more than it saves: it has to wait for the interpreter twice."""
MAX_ROUTED_TOKENS = 1 << 22
"""The router gets at most this many tokens of a request; the rest is neither counted nor compared."""
CHARS_PER_TOKEN = 4
"""How `max_prompt_tokens` counts text that has not been tokenized."""
THREADS = 2


class Intake:
    """Parsing and tokenizing. Belongs to one event loop."""

    def __init__(
        self,
        model_name: str,
        tokens: Tokens,
        max_prompt_tokens: int,
        context_tokens: Callable[[], int | None],
    ) -> None:
        """`context_tokens` says how long a prompt may be; None while that is unknown."""
        self._model_name = model_name
        self._tokens = tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._context_tokens = context_tokens
        self._threads = FairThreadPool(THREADS)

    def close(self) -> None:
        """Drops the work that waits for a thread."""
        self._threads.close()

    async def parsed(
        self,
        kind: Kind,
        raw: bytes,
        share: str,
        group: str | None = None,
        most_output_tokens: int | None = None,
    ) -> Call:
        """The request in `raw`, of a caller of this cache group, who may have answers of so many tokens. A large
        body takes its turn as work of `share`. Raises `ApiError`."""
        if len(raw) <= LARGE_BODY_BYTES:
            return parse(kind, raw, self._model_name, group, most_output_tokens)

        def steps() -> Iterator[Call | None]:
            check_size(raw, self._most_tokens)
            yield None
            yield parse(kind, raw, self._model_name, group, most_output_tokens)

        _, call = await self._threads.run(share, steps())
        assert call is not None
        return call

    async def routed_tokens(self, call: Call, share: str) -> bytes:
        """The request's tokens for the router. Long texts take their turn as work of `share`.

        Raises `ApiError` for a prompt that is too long for the model.
        """
        context_tokens = self._context_tokens()
        try:
            if len(call.encoded) > LARGE_BODY_BYTES:
                pieces = await self._threads.run(share, self._pieces(call, context_tokens))
            else:
                prompts = self._tokens.prompts(call)
                self._check_length(call, prompts, context_tokens)
                made = self._tokens.pieces(call, prompts, context_tokens)
                if self._tokens.uncached_chars(prompts) <= LONG_TEXT_CHARS:
                    pieces = list(made)
                else:
                    pieces = await self._threads.run(share, made)
        except TooLong:
            raise _too_long(call, context_tokens) from None
        return b"".join(pieces)[: MAX_ROUTED_TOKENS * TOKEN_BYTES]

    async def system_tokens(self, call: Call, share: str) -> int:
        """Tokens of a chat's system messages, without what the template adds. A long text takes its turn as work of
        `share`."""
        text = self._tokens.system_text(call)
        if not text:
            return 0
        counts = self._tokens.counts(text)
        if len(text) <= LARGE_BODY_BYTES and self._tokens.uncached_chars((text,)) <= LONG_TEXT_CHARS:
            return sum(counts)
        return sum(await self._threads.run(share, counts))

    def text(self, ids: Sequence[int], hide_special: bool) -> str:
        """The text of token ids."""
        return self._tokens.text(ids, hide_special)

    @property
    def _most_tokens(self) -> int:
        """Of all prompts of a request together."""
        return max(self._max_prompt_tokens, 2 * (self._context_tokens() or 0))

    def _pieces(self, call: Call, context_tokens: int | None) -> Iterator[bytes]:
        prompts = self._tokens.prompts(call)
        self._check_length(call, prompts, context_tokens)
        yield from self._tokens.pieces(call, prompts, context_tokens)

    def _check_length(self, call: Call, prompts: tuple[Prompt, ...], context_tokens: int | None) -> None:
        """Refuses what is too long by its length alone, so that it is not tokenized."""
        if context_tokens is not None and any(
            self._tokens.least_tokens(one) > context_tokens for one in prompts
        ):
            raise TooLong
        most = self._most_tokens
        if sum(len(one) / (CHARS_PER_TOKEN if isinstance(one, str) else 1) for one in prompts) > most:
            raise ApiError(
                400,
                f"all prompts together have more than {most} tokens or {CHARS_PER_TOKEN * most} characters",
                code="prompt_too_large",
                param=call.param,
            )


def _too_long(call: Call, context_tokens: int | None) -> ApiError:
    return ApiError(
        400,
        f"this model's maximum context length is {context_tokens} tokens, and `{call.param}` is longer",
        code="context_length_exceeded",
        param=call.param,
    )
