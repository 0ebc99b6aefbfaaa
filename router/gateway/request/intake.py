"""From the bytes of a body to a checked request, and to the token ids that its replica will see, so that the router can
compare prefixes. Large ones are worked at in threads, the clients in turn.

The tokenizer's folder is read without `transformers`, whose import takes 2.4 s and 340 MB: `tokenizer.json` by the
`tokenizers` library, the chat template by jinja2 (`request.template`). Requests of other APIs become chats first, as
they do in SGLang (`request.messages`, `request.responses`).
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from router.events import TOKEN_BYTES
from router.gateway.errors import ApiError
from router.gateway.request import messages, responses
from router.gateway.request.call import Call, Names
from router.gateway.request.chunks import ChunkedTokenizer
from router.gateway.request.kinds import CHATS, Kind, Prompt
from router.gateway.request.parse import LARGE_BODY_BYTES, check_size, parse
from router.gateway.request.template import ChatTemplate, flat
from router.gateway.sharing import FairThreadPool
from router.wire import pack_tokens, unpack_tokens
from sglang_fair.common.fields import WIDEST, Facts

log = logging.getLogger("gateway")

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenized in a thread, because they would block the event loop for more than a millisecond. For
shorter ones the thread costs more than it saves: it has to wait for the interpreter twice."""
MAX_ROUTED_TOKENS = 1 << 22
"""The router gets at most this many tokens of a request; the rest is neither counted nor compared."""
CHARS_PER_TOKEN = 4
"""How `max_prompt_tokens` counts text that has not been tokenized."""
THREADS = 2
_PROBE_CHARS = 4096
_PROBES = (" ", "\n", "a", "ab ", "é", "e\N{COMBINING ACUTE ACCENT}", "東", "\0")
"""Texts that some normalizers and models shorten to nothing, or to one token, however long they are."""


class TokenizerError(ValueError):
    """The folder holds no tokenizer that the gateway can use: the operator's mistake."""


class TooLong(ValueError):
    """A prompt has more tokens than the model's context."""


def read_tokens(folders: Mapping[str, str]) -> dict[str, "Tokens"]:
    """The tokenizers of models, by name; models with one folder share it. Raises `TokenizerError`."""
    read: dict[Path, Tokens] = {}
    for folder in folders.values():
        path = Path(folder)
        if path.resolve() not in read:
            read[path.resolve()] = Tokens(path)
    return {name: read[Path(folder).resolve()] for name, folder in folders.items()}


class Tokens:
    """A tokenizer and its chat template. Thread-safe; encoding releases the GIL."""

    def __init__(self, folder: Path) -> None:
        """Reads `folder`. Raises `TokenizerError`."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._chunks = ChunkedTokenizer(self._tokenizer)
        self._before, self._after = self._around()
        self._longest_chars = self._longest_token()
        self.vocabulary = _vocabulary(_read_json(folder / "config.json"))
        """Of the model, in tokens, if its configuration is beside the tokenizer."""
        self._template = ChatTemplate.of(folder, _read_json(folder / "tokenizer_config.json"))
        self.plain_chats = 0
        """Chats that were routed by their plain text, because they could not be rendered."""

    def prompts(self, call: Call) -> tuple[Prompt, ...]:
        """The prompts of `call`: texts as they will be tokenized, or ids."""
        return (self._text_of_chat(call),) if call.is_chat else call.prompts

    def _text_of_chat(self, call: Call) -> str:
        try:
            return self._template.render(self._chat(call))
        except Exception as error:  # a template may raise anything, and the chat is its input
            self.plain_chats += 1
            if self.plain_chats == 1:
                log.warning("a chat is routed by its plain text (said once): %s", error)
            said = call.body[call.param]
            return said if isinstance(said, str) else "\n".join(flat(one.get("content")) for one in said)

    def _chat(self, call: Call) -> Mapping[str, Any]:
        match call.kind:
            case "messages":
                return messages.chat_of(call.body, self._template.inline_system)
            case "responses":
                return responses.chat_of(call.body, self._template.inline_system)
        return call.body

    def has_few_uncached(self, prompts: Sequence[Prompt], most: int) -> bool:
        """Whether `pieces` would have to tokenize at most so many characters."""
        texts = [one for one in prompts if isinstance(one, str)]
        return sum(map(len, texts)) <= most or sum(map(self._chunks.uncached_chars, texts)) <= most

    def least_tokens(self, prompt: Prompt) -> int:
        """A lower bound of its tokens, from its length alone."""
        if not isinstance(prompt, str):
            return len(prompt)
        return 0 if self._longest_chars is None else len(prompt) // self._longest_chars

    def pieces(
        self, call: Call, prompts: tuple[Prompt, ...], most_tokens: int | None = None
    ) -> Iterator[bytes]:
        """The request's tokens for the router, a piece at a time: its prompts, one after the other.

        A batch goes to one worker as a whole. Its prompts are joined so that placement counts all its work; found
        in caches is then its first prompt, or the same batch. Raises `TooLong` as soon as a prompt has more than
        `most_tokens`.
        """
        for prompt in prompts:
            tokens = 0
            for piece in self._pieces(call, prompt):
                tokens += len(piece) // TOKEN_BYTES
                if most_tokens is not None and tokens > most_tokens:
                    raise TooLong
                yield piece

    def _pieces(self, call: Call, prompt: Prompt) -> Iterator[bytes]:
        if not isinstance(prompt, str):
            yield pack_tokens(prompt)
            return
        if self._before and call.kind not in CHATS:
            yield self._before
        yield from self._chunks.pieces(prompt)
        if self._after and call.kind not in CHATS:
            yield self._after

    def system_text(self, call: Call) -> str:
        """What the chat's messages of role system say. "" where the body brings its prompt's token ids."""
        if not call.is_chat:
            return ""
        try:
            chat = self._chat(call)["messages"]
        except (AttributeError, KeyError, TypeError):  # what it says is the replica's to judge
            return ""
        return "\n".join(flat(one.get("content")) for one in chat if one.get("role") == "system")

    def counts(self, text: str) -> Iterator[int]:
        """How many tokens the pieces of `text` have, without what a template adds."""
        return (len(piece) // TOKEN_BYTES for piece in self._chunks.pieces(text))

    def ids(self, call: Call) -> list[int]:
        return unpack_tokens(b"".join(self.pieces(call, self.prompts(call))))

    def text(self, ids: Sequence[int], hide_special: bool = True) -> str:
        """The text of `ids`; `hide_special` leaves special tokens out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=hide_special))

    def _around(self) -> tuple[bytes, bytes]:
        """The special tokens that the tokenizer adds before and after a text."""
        inner, whole = (
            list(self._tokenizer.encode("a", add_special_tokens=add).ids) for add in (False, True)
        )
        at = next((at for at in range(len(whole)) if whole[at : at + len(inner)] == inner), None)
        if at is None:
            return b"", b""
        return pack_tokens(whole[:at]), pack_tokens(whole[at + len(inner) :])

    def _longest_token(self) -> int | None:
        """How many characters of a text one token can stand for at most; None if there is no bound."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if any(one.lstrip or one.rstrip for one in added):  # they take all space around them
            return None
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=0)
        for probe in _PROBES:
            [encoding] = self._tokenizer.encode_batch_fast([probe * _PROBE_CHARS], add_special_tokens=False)
            if len(encoding.ids) * longest < len(probe) * _PROBE_CHARS:
                return None
        return longest


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
    return found if isinstance(found, dict) else {}


def _vocabulary(config: dict[str, Any]) -> int | None:
    """The size that a model's configuration says, where it is that of a text model or has one in it."""
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return size if type(size) is int and size > 0 else None


class Intake:
    """Parsing and tokenizing. Belongs to one event loop."""

    def __init__(
        self,
        tokens: Mapping[str, Tokens],
        max_prompt_tokens: int,
        context_tokens: Callable[[str], int | None],
        allowed: Facts = WIDEST,
        *,
        goes_on: bool = True,
    ) -> None:
        """`tokens` are the tokenizers of the models, the first one first. `context_tokens` says how long a prompt for a
        model may be; None while that is unknown. `allowed` is what the operator allows. `goes_on`: streams may be
        continued elsewhere."""
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
        self._goes_on = goes_on

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
            return parse(kind, raw, self.names, group, most_output_tokens, self._facts_of, self._goes_on)

        def steps() -> Iterator[Call | None]:
            check_size(raw, self._most_tokens(*self.names))
            yield None
            yield parse(kind, raw, self.names, group, most_output_tokens, self._facts_of, self._goes_on)

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
