"""From the bytes of a body to a checked request."""

from collections.abc import Callable
from typing import Any

import msgspec

from router.gateway.errors import ApiError, check
from router.gateway.request.call import Call, Names, make_call
from router.gateway.request.kinds import (
    KINDS,
    MAX_MESSAGES,
    NATIVE,
    NOT_STORED,
    WITHOUT_ENGINE,
    Common,
    Kind,
    Prompt,
    SamplingParams,
    Texts,
    TokenIdLists,
    TokenIds,
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
    goes_on: bool = True,
) -> Call:
    """The request in `raw`, for one of the models `names`, of a caller of this cache group, who may have answers of so
    many tokens. `facts` are those of a model. `goes_on`: its stream may be continued elsewhere. Raises `ApiError` with
    the reason if it is not one."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    asked = body.get("model")
    try:
        judge(KINDS[kind].path, body, facts(asked if isinstance(asked, str) else names.first))
    except Wrong as wrong:
        code = "invalid_prompt" if wrong.field in PROMPTS else None
        raise ApiError(400, str(wrong), code=code, param=wrong.field) from None
    if most_output_tokens is not None and KINDS[kind].lengths:
        body = _capped(kind, body, most_output_tokens)
    request = check(body, KINDS[kind].request)
    _check_messages(request)
    prompts, is_batch = _prompts(kind, request)
    body = body | {"model": names.asked_for(request.model)}
    if kind == "responses":
        body = _unstored(body, names)
    elif kind in NATIVE and body["model"] not in names and not body.get("lora_path"):
        body["lora_path"] = body["model"].removeprefix(f"{names.model_of(body['model'])}:")
        request = check(body, KINDS[kind].request)
    if kind in WITHOUT_ENGINE:
        group = None
    sampling = _sampling(kind, request)
    return make_call(kind, body, request, names, group, prompts, is_batch, sampling, goes_on=goes_on)


def _prompts(kind: Kind, request: Any) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts, and whether they are a list of several; none where the replica makes them, or judges."""
    match kind:
        case "chat" if request.input_ids is not None:
            return (request.input_ids,), False
        case "completions" if request.prompt is None:
            raise _no_prompt("`prompt` is missing", "prompt")
        case "completions":
            return _prompts_in(request.prompt, "prompt")
        case "embeddings" if request.input is None:
            raise ApiError(400, "`input` is missing", code="invalid_input", param="input")
        case "embeddings":
            return _prompts_in(request.input, "input")
        case "generate" | "encode" if request.text is not None:
            return _prompts_in(request.text, "text")
        case "generate" | "encode" if request.input_ids is not None:
            return _prompts_in(request.input_ids, "input_ids")
        case "generate" | "encode":
            raise ApiError(400, "`text` or `input_ids` must be given", code="invalid_prompt")
    return (), False


def _sampling(kind: Kind, request: Any) -> list[SamplingParams]:
    """One for all prompts or one for each."""
    if kind == "generate":
        given = request.sampling_params
        return given if isinstance(given, list) else [given or SamplingParams()]
    named = (getattr(request, name) for name in KINDS[kind].lengths)
    return [SamplingParams(next(filter(None, named), None), getattr(request, "n", None))]


def _capped(kind: Kind, body: dict[str, Any], most: int) -> dict[str, Any]:
    """`body` with answers of at most `most` tokens each. Raises `ApiError` 400 if it asks for more.

    One that names none gets SGLang's default, or `most` if that is shorter, in so many words: what is charged for it at
    first (`access.quota`) is read from the body.
    """
    if kind != "generate":
        return _with_length(kind, body, most)
    given = body.get("sampling_params") or {}
    if isinstance(given, list):
        return body | {"sampling_params": [_with_length(kind, one, most) for one in given]}
    return body | {"sampling_params": _with_length(kind, given, most)}


def _with_length(kind: Kind, holder: dict[str, Any], most: int) -> dict[str, Any]:
    names, default = KINDS[kind].lengths, KINDS[kind].length or most
    named = {name: holder[name] for name in names if holder.get(name) is not None}
    for name, length in named.items():
        if length > most:
            text = f"`{name}` is {length}; you may have {most}"
            raise ApiError(400, text, code="output_too_long", param=name)
    if kind == "generate" and names[0] in holder:  # a null of it is the rest of the context
        default = most
    # 0 counts as left out in a chat. Messages must name a length, which is checked with their type.
    has_length = any(named.values()) if kind == "chat" else bool(named) or kind == "messages"
    return holder if has_length else holder | {names[0]: min(most, default)}


def _unstored(body: dict[str, Any], names: Names) -> dict[str, Any]:
    """The body of a response that is not stored. Raises `ApiError` where it must be, and for an adapter, in whose place
    SGLang 0.5.23 would answer with the model itself."""
    for name in ("store", "background"):
        if body.get(name):
            text = f"`{name}` must be false, because {NOT_STORED.partition(':')[0]}"
            raise ApiError(400, text, code="not_stored", param=name)
    if body["model"] not in names:
        raise ApiError(400, "adapters are not served by /v1/responses", code="unsupported", param="model")
    return body | {"store": False}


def _check_messages(request: Common) -> None:
    for name in ("messages", "input"):
        messages = getattr(request, name, None)
        if isinstance(messages, list) and len(messages) > MAX_MESSAGES and isinstance(messages[0], dict):
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
