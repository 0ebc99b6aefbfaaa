"""From the bytes of a body to a checked request: one reader for each kind."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from router.gateway.checks import check
from router.gateway.errors import ApiError
from router.gateway.request.call import Call, make_call
from router.gateway.request.cap import capped
from router.gateway.request.kinds import PATHS, Kind
from router.gateway.request.names import Names
from router.gateway.request.schema import (
    MAX_MESSAGES,
    NOT_STORED,
    ChatRequest,
    Common,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    GenerateRequest,
    MessagesRequest,
    OpenAIRequest,
    Prompt,
    ResponsesRequest,
    SamplingParams,
    Texts,
    TokenIdLists,
    TokenIds,
    TokenizeRequest,
)
from sglang_fair.common.fields import MAX_BATCH, WIDEST, Facts, Wrong, judge

LARGE_BODY_BYTES = 1 << 16
"""Parsing more than this takes milliseconds."""
MAX_VALUES = 1 << 18
"""Strings, arrays and objects in a large body. The parser makes an object of each while nobody else is served, and
a body of 16 MiB can hold millions."""


PROMPTS = frozenset({"prompt", "input_ids", "input", "tokens"})
"""Fields that may hold token ids of a prompt."""


def check_size(raw: bytes, max_prompt_tokens: int) -> None:
    """Raises `ApiError` for a body with more values than any real request has, before they are parsed.

    Counts what is outside of strings: a long string costs only a copy.
    """
    plain = raw if b"\\" not in raw else raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings <= MAX_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        values = strings + outside.count(b"[") + outside.count(b"{")
        if values <= MAX_VALUES and outside.count(b",") <= MAX_VALUES + max_prompt_tokens:
            return
    raise ApiError(400, "the body holds too many values", code="too_many_values")


def parse(
    kind: Kind,
    raw: bytes,
    names: Names,
    group: str | None = None,
    most_output_tokens: int | None = None,
    facts: Callable[[str], Facts] = lambda _: WIDEST,
) -> Call:
    """The request in `raw`, for one of the models `names`, of a caller of this cache group, who may have answers of so
    many tokens. `facts` are those of a model. Raises `ApiError` with the reason if it is not one."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    asked = body.get("model")
    try:
        judge(PATHS[kind], body, facts(asked if isinstance(asked, str) else names.first))
    except Wrong as wrong:
        code = "invalid_prompt" if wrong.field in PROMPTS else None
        raise ApiError(400, str(wrong), code=code, param=wrong.field) from None
    if most_output_tokens is not None:
        body = capped(kind, body, most_output_tokens)
    return READERS[kind](body, names, group)


def _chat(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, ChatRequest)
    _check_number(request.messages, "messages")
    prompts: tuple[Prompt, ...] = () if request.input_ids is None else (request.input_ids,)
    limit = request.max_completion_tokens or request.max_tokens  # as SGLang reads them
    return _openai("chat", body, request, names, group, prompts, False, limit)


def _completion(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, CompletionRequest)
    if request.prompt is None:
        raise ApiError(400, "`prompt` is missing", code="invalid_prompt", param="prompt")
    prompts, is_batch = _prompts_in(request.prompt, "prompt")
    return _openai("completions", body, request, names, group, prompts, is_batch, request.max_tokens)


def _openai(
    kind: Kind,
    body: dict[str, Any],
    request: OpenAIRequest,
    names: Names,
    group: str | None,
    prompts: tuple[Prompt, ...],
    is_batch: bool,
    limit: int | None,
) -> Call:
    body = body | {"model": names.asked_for(request.model)}
    sampling = [SamplingParams(max_new_tokens=limit, n=request.n)]
    return make_call(kind, body, request, names, group, prompts, is_batch, sampling)


def _generate(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, GenerateRequest)
    if request.text is not None:
        prompts, is_batch = _prompts_in(request.text, "text")
    elif request.input_ids is not None:
        prompts, is_batch = _prompts_in(request.input_ids, "input_ids")
    else:
        raise ApiError(400, "`text` or `input_ids` must be given", code="invalid_prompt")
    given = request.sampling_params
    sampling = given if isinstance(given, list) else [given or SamplingParams()]
    asked = names.asked_for(request.model)
    if asked != names.model_of(asked) and not request.lora_path:
        body = body | {"lora_path": asked.removeprefix(f"{names.model_of(asked)}:")}
        request = check(body, GenerateRequest)
    return make_call("generate", body, request, names, group, prompts, is_batch, sampling)


def _responses(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, ResponsesRequest)
    _check_number(request.input if isinstance(request.input, list) else (), "input")
    for name in ("store", "background"):
        if body.get(name):
            text = f"`{name}` must be false, because {NOT_STORED.partition(':')[0]}"
            raise ApiError(400, text, code="not_stored", param=name)
    asked = names.asked_for(request.model)
    if asked != names.model_of(asked):
        # SGLang 0.5.23 would answer with the model itself.
        raise ApiError(400, "adapters are not served by /v1/responses", code="unsupported", param="model")
    body = body | {"model": asked, "store": False}
    sampling = [SamplingParams(max_new_tokens=request.max_output_tokens)]
    return make_call("responses", body, request, names, group, (), False, sampling)


def _messages(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, MessagesRequest)
    _check_number(request.messages, "messages")
    body = body | {"model": names.asked_for(request.model)}
    sampling = [SamplingParams(max_new_tokens=request.max_tokens)]
    return make_call("messages", body, request, names, group, (), False, sampling)


def _embeddings(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, EmbeddingsRequest)
    if request.input is None:
        raise ApiError(400, "`input` is missing", code="invalid_input", param="input")
    prompts, is_batch = _prompts_in(request.input, "input")
    body = body | {"model": names.asked_for(request.model)}
    return make_call("embeddings", body, request, names, group, prompts, is_batch, [SamplingParams()])


def _count_tokens(body: dict[str, Any], names: Names, _: str | None) -> Call:
    request = check(body, CountTokensRequest)
    _check_number(request.messages, "messages")
    return _for_the_tokenizer("count_tokens", body, request, names)


def _tokenize(body: dict[str, Any], names: Names, _: str | None) -> Call:
    return _for_the_tokenizer("tokenize", body, check(body, TokenizeRequest), names)


def _detokenize(body: dict[str, Any], names: Names, _: str | None) -> Call:
    return _for_the_tokenizer("detokenize", body, check(body, DetokenizeRequest), names)


def _for_the_tokenizer(kind: Kind, body: dict[str, Any], request: Common, names: Names) -> Call:
    body = body | {"model": names.asked_for(request.model)}
    return make_call(kind, body, request, names, None, (), False, [SamplingParams()])


def _check_number(messages: Collection[Any], name: str) -> None:
    if len(messages) > MAX_MESSAGES:
        text = f"{len(messages)} messages; at most {MAX_MESSAGES}"
        raise ApiError(400, text, code="too_many_messages", param=name)


def _prompts_in(value: Any, name: str) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts in the field `name`, and whether they are a list of several: two kinds of arrays in one field, which
    no type of msgspec can say. Raises `ApiError`."""
    if isinstance(value, str):
        return (value,), False
    if not isinstance(value, list) or not value:
        raise _no_prompt(f"`{name}` must be a text, a list of texts, or token ids", name)
    first = value[0]
    if isinstance(first, str | list) and len(value) > MAX_BATCH:
        raise ApiError(
            400,
            f"`{name}` holds {len(value)} prompts; at most {MAX_BATCH}",
            code="batch_too_large",
            param=name,
        )
    try:
        if isinstance(first, str):
            return tuple(msgspec.convert(value, Texts)), True
        if isinstance(first, list):
            return tuple(msgspec.convert(value, TokenIdLists)), True
        return (msgspec.convert(value, TokenIds),), False
    except msgspec.ValidationError as error:
        if isinstance(first, str):
            raise _no_prompt(f"`{name}` mixes texts with something else", name) from error
        if "length" in str(error):
            raise _no_prompt(f"`{name}` must hold a non-empty list of token ids", name) from error
        raise _no_prompt(f"`{name}` holds something that is no token id", name) from error


def _no_prompt(message: str, name: str) -> ApiError:
    return ApiError(400, message, code="invalid_prompt", param=name)


READERS: Mapping[Kind, Callable[[dict[str, Any], Names, str | None], Call]] = {
    "chat": _chat,
    "completions": _completion,
    "generate": _generate,
    "responses": _responses,
    "messages": _messages,
    "embeddings": _embeddings,
    "count_tokens": _count_tokens,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
}
