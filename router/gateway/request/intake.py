"""From the bytes of a body to a checked request and its tokens; large ones in threads, the clients in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from router.events import TOKEN_BYTES
from router.gateway.errors import ApiError
from router.gateway.request.call import Call, Names
from router.gateway.request.kinds import Kind
from router.gateway.request.parse import LARGE_BODY_BYTES, check_size, parse
from router.gateway.request.schema import Prompt
from router.gateway.request.tokens import Tokens, TooLong
from router.gateway.sharing import FairThreadPool
from sglang_fair.common.fields import WIDEST, Facts

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
        tokens: Mapping[str, Tokens],
        max_prompt_tokens: int,
        context_tokens: Callable[[str], int | None],
        allowed: Facts = WIDEST,
    ) -> None:
        """`tokens` are the tokenizers of the models, the first one first. `context_tokens` says how long a prompt for a
        model may be; None while that is unknown. `allowed` is what the operator allows."""
        self._facts = {
            name: allowed._replace(vocabulary=one.vocabulary) if one.vocabulary else allowed
            for name, one in tokens.items()
        }
        self._allowed = allowed
        self.names = Names(*tokens)
        self._tokens = tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._context_tokens = context_tokens
        self._threads = FairThreadPool(THREADS)

    def close(self) -> None:
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
            return parse(kind, raw, self.names, group, most_output_tokens, self._facts_of)

        def steps() -> Iterator[Call | None]:
            check_size(raw, self._most_tokens(*self.names))
            yield None
            yield parse(kind, raw, self.names, group, most_output_tokens, self._facts_of)

        _, call = await self._threads.run(share, steps())
        assert call is not None
        return call

    async def routed_tokens(self, call: Call, share: str) -> bytes:
        """The request's tokens for the router. Long texts take their turn as work of `share`.

        Empty for what no engine computes: it has no prefix. Raises `ApiError` for a prompt that is too
        long for the model.
        """
        if not call.needs_engine:
            return b""
        context_tokens, tokens = self._context_tokens(call.model), self._tokens[call.model]
        try:
            if len(call.encoded) > LARGE_BODY_BYTES:
                pieces = await self._threads.run(share, self._pieces(call, context_tokens))
            else:
                prompts = tokens.prompts(call)
                self._check_length(call, prompts, context_tokens)
                made = tokens.pieces(call, prompts, context_tokens)
                if tokens.has_few_uncached(prompts, LONG_TEXT_CHARS):
                    pieces = list(made)
                else:
                    pieces = await self._threads.run(share, made)
        except TooLong:
            raise _too_long(call, context_tokens) from None
        return b"".join(pieces)[: MAX_ROUTED_TOKENS * TOKEN_BYTES]

    async def system_tokens(self, call: Call, share: str) -> int:
        """Tokens of a chat's system messages, without what the template adds. A long text takes its turn as work of
        `share`."""
        tokens = self._tokens[call.model]
        text = tokens.system_text(call)
        if not text:
            return 0
        counts = tokens.counts(text)
        if len(text) <= LARGE_BODY_BYTES and tokens.has_few_uncached((text,), LONG_TEXT_CHARS):
            return sum(counts)
        return sum(await self._threads.run(share, counts))

    def _facts_of(self, asked: str) -> Facts:
        return self._facts.get(self.names.model_of(asked) or self.names.first, self._allowed)

    def decoder(self, call: Call) -> Callable[[Sequence[int], bool], str]:
        """Makes text of token ids of the model of `call`; the flag leaves special tokens out."""
        return self._tokens[call.model].text

    def _most_tokens(self, *models: str) -> int:
        """Of all prompts together of a request for one of `models`."""
        return max(self._max_prompt_tokens, *(2 * (self._context_tokens(model) or 0) for model in models))

    def _pieces(self, call: Call, context_tokens: int | None) -> Iterator[bytes]:
        tokens = self._tokens[call.model]
        prompts = tokens.prompts(call)
        self._check_length(call, prompts, context_tokens)
        yield from tokens.pieces(call, prompts, context_tokens)

    def _check_length(self, call: Call, prompts: tuple[Prompt, ...], context_tokens: int | None) -> None:
        """Refuses what is too long by its length alone, so that it is not tokenized."""
        tokens = self._tokens[call.model]
        if context_tokens is not None and any(tokens.least_tokens(one) > context_tokens for one in prompts):
            raise TooLong
        most = self._most_tokens(call.model)
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
