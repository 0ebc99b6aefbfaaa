"""A client's request: what the gateway must know of it, and the body that goes to the replica.

The replica gets the client's own body, except for `rid` (ours, to cancel by), the model's name when it was "default",
which SGLang's /generate does not know and does not get, `stream_options.include_usage` (to learn a stream's usage),
`return_token_ids` (to continue a stream elsewhere) and `custom_params.fair`, which names a client inside a replica and
which nobody outside may set. Its `cache_salt` becomes that of its caller's cache group, with its own inside
(`common.caller`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.gateway.errors import ApiError
from router.gateway.request.cap import capped
from router.gateway.request.continuation import Way, continuation
from router.gateway.request.names import Names, model_not_found
from router.gateway.request.schema import (
    MAX_MESSAGES,
    ChatRequest,
    Common,
    CompletionRequest,
    GenerateRequest,
    Kind,
    OpenAIRequest,
    Prompt,
    SamplingParams,
    check,
    check_prompts,
)
from router.wire import namespace
from sglang_fair.common.caller import salted

BY_TOKENS = ("tokens", "sample")
"""The ways to continue a stream for which its token ids must be known."""

LARGE_BODY_BYTES = 1 << 16
"""Parsing more than this takes milliseconds."""
MAX_VALUES = 1 << 18
"""Strings, arrays and objects in a large body. The parser makes an object of each while nobody else is served, and
a body of 16 MiB can hold millions."""


@dataclass(frozen=True)
class Call:
    """A checked request: enough to route it, to account for it and to send it on."""

    kind: Kind
    body: dict[str, Any]
    encoded: bytes
    """`body` as replicas get it, without the `rid`: encoded once for all attempts."""
    prompts: tuple[Prompt, ...]
    """Texts or token ids, one a prompt. Empty for a chat without `input_ids`: the template makes its text."""
    stream: bool
    samples: int
    """Answers asked for, over all prompts."""
    is_batch: bool
    """The body holds a list of prompts, so the replica answers with a list."""
    wants_usage: bool
    """The client asked for the usage of its stream."""
    max_output_tokens: int
    """Over all answers; 0 where the client names no limit."""
    namespace: str
    user: str | None
    model: str
    """Which of the served models answers it; `body` may name an adapter of that."""
    resume: Way | None = None
    """How another replica could continue this stream."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The object in the body that holds the sampling options, unless they are a list."""
        return (self.body.get("sampling_params") or {}) if self.kind == "generate" else self.body

    @property
    def param(self) -> str:
        """The field of the body that holds the prompt."""
        if self.kind == "completions":
            return "prompt"
        if self.body.get("input_ids") is not None and (self.kind == "chat" or self.body.get("text") is None):
            return "input_ids"
        return "messages" if self.kind == "chat" else "text"

    @property
    def hides_token_ids(self) -> bool:
        """The gateway asked for token ids in the stream, and the client did not."""
        return self.kind == "completions" and self.resume in BY_TOKENS

    @property
    def asks_for_token_ids(self) -> bool:
        """The gateway asks the overlay for token ids in the stream (`common.token_ids`)."""
        return self.kind == "chat" and self.resume in BY_TOKENS

    def rids(self, request_id: str) -> tuple[str, ...]:
        """The ids to cancel by at the replica: one a prompt, as SGLang wants them.

        With n > 1 SGLang gives the samples ids of its own; those are read from the stream.
        """
        if not self.is_batch:
            return (request_id,)
        digits = len(request_id) - 4
        return tuple(f"{request_id[:digits]}{index:04x}" for index in range(len(self.prompts)))

    def forwarded(self, request_id: str) -> bytes:
        """The body for the replica."""
        rids = self.rids(request_id)
        rid = msgspec.json.encode(rids if self.is_batch else rids[0])
        return self.encoded[:-1] + b',"rid":' + rid + b"}"


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
) -> Call:
    """The request in `raw`, for one of the models `names`, of a caller of this cache group, who may have answers of so
    many tokens. Raises `ApiError` with the reason if it is not one."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if most_output_tokens is not None:
        body = capped(kind, body, most_output_tokens)
    match kind:
        case "chat":
            return _chat(body, names, group)
        case "completions":
            return _completion(body, names, group)
        case "generate":
            return _generate(body, names, group)


def encode_body(kind: Kind, body: dict[str, Any], resume: Way | None) -> bytes:
    """`body` as replicas get it, without the `rid`."""
    ours = ("rid", "model") if kind == "generate" else ("rid",)  # /generate of SGLang knows no model
    sent = {key: value for key, value in body.items() if key not in ours}
    if kind != "generate" and body.get("stream"):
        sent["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        if kind == "completions" and resume in BY_TOKENS:
            sent["return_token_ids"] = True
    return msgspec.json.encode(sent)


def _chat(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, ChatRequest)
    if len(request.messages) > MAX_MESSAGES:
        raise ApiError(
            400,
            f"{len(request.messages)} messages; at most {MAX_MESSAGES}",
            code="too_many_messages",
            param="messages",
        )
    prompts: tuple[Prompt, ...] = () if request.input_ids is None else (request.input_ids,)
    limit = request.max_completion_tokens or request.max_tokens  # as SGLang reads them
    return _openai("chat", body, request, names, group, prompts, False, limit)


def _completion(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, CompletionRequest)
    if request.prompt is None:
        raise ApiError(400, "`prompt` is missing", code="invalid_prompt")
    prompts, is_batch = check_prompts(request.prompt, "prompt")
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
    return _call(kind, body, request, names, group, prompts, is_batch, sampling)


def _generate(body: dict[str, Any], names: Names, group: str | None) -> Call:
    request = check(body, GenerateRequest)
    if request.text is not None:
        prompts, is_batch = check_prompts(request.text, "text")
    elif request.input_ids is not None:
        prompts, is_batch = check_prompts(request.input_ids, "input_ids")
    else:
        raise ApiError(400, "`text` or `input_ids` must be given", code="invalid_prompt")
    given = request.sampling_params
    sampling = given if isinstance(given, list) else [given or SamplingParams()]
    asked = names.asked_for(request.model)
    if asked != names.model_of(asked) and not request.lora_path:
        body = body | {"lora_path": asked.removeprefix(f"{names.model_of(asked)}:")}
        request = check(body, GenerateRequest)
    return _call("generate", body, request, names, group, prompts, is_batch, sampling)


def _call(
    kind: Kind,
    body: dict[str, Any],
    request: Common,
    names: Names,
    group: str | None,
    prompts: tuple[Prompt, ...],
    is_batch: bool,
    sampling: Sequence[SamplingParams],
) -> Call:
    """`sampling` is one for all prompts or one for each."""
    body = _without_identity(body)
    model = names.model_of(names.asked_for(request.model)) or names.first
    salt = _salted(group, request.cache_salt)
    if salt is not None:
        body["cache_salt"] = salt
    each = [1 if one.n is None else one.n for one in sampling]
    samples = sum(each) if len(sampling) > 1 else each[0] * max(1, len(prompts))
    limit = sum(one.max_new_tokens or 0 for one in sampling) * (samples // len(sampling))
    resume = None if is_batch else continuation(kind, body)
    return Call(
        kind=kind,
        body=body,
        encoded=encode_body(kind, body, resume),
        prompts=prompts,
        stream=bool(request.stream),
        samples=samples,
        is_batch=is_batch,
        wants_usage=bool((request.stream_options or {}).get("include_usage")),
        max_output_tokens=limit,
        namespace=_namespace(body, request, model, group),
        user=request.user,
        model=model,
        resume=resume,
    )


def check_models(call: Call, models: Collection[str]) -> None:
    """Raises `ApiError` 404 if the request is for a model, or an adapter, that is not among `models`."""
    name, adapters = str(call.body.get("model") or call.model), call.body.get("lora_path")
    each = adapters if isinstance(adapters, list) and adapters else [adapters]
    asked = {f"{call.model}:{adapter}" if adapter else name for adapter in each}
    if name != call.model:
        asked.add(name)
    if others := asked - set(models):
        raise model_not_found(min(others))


def _without_identity(body: dict[str, Any]) -> dict[str, Any]:
    """`body` without any `custom_params.fair`: at the top (OpenAI), and in `sampling_params`."""
    clean = _drop_fair(body)
    sampling = clean.get("sampling_params")
    if isinstance(sampling, dict):
        return clean | {"sampling_params": _drop_fair(sampling)}
    if isinstance(sampling, list):
        dropped = [_drop_fair(one) if isinstance(one, dict) else one for one in sampling]
        return clean | {"sampling_params": dropped}
    return clean


def _drop_fair(holder: dict[str, Any]) -> dict[str, Any]:
    custom = holder.get("custom_params")
    if isinstance(custom, dict) and "fair" in custom:
        return holder | {"custom_params": _without_fair(custom)}
    if isinstance(custom, list):
        cleaned = [_without_fair(one) if isinstance(one, dict) else one for one in custom]
        return holder | {"custom_params": cleaned}
    return holder


def _without_fair(custom: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in custom.items() if key != "fair"}


def _salted(group: str | None, salt: Any) -> Any:
    """The `cache_salt` for the replica: of a text, or of each in a list. Raises `ApiError` for anything else of a
    caller with a group."""
    if isinstance(salt, list) and all(isinstance(one, str) for one in salt):
        return [salted(group, one) or "" for one in salt]
    if group is not None and not (salt is None or isinstance(salt, str)):
        raise ApiError(400, "`cache_salt` must be a text or a list of texts", param="cache_salt")
    return salted(group, salt) if salt is None or isinstance(salt, str) else salt


def _namespace(body: dict[str, Any], request: Common, model: str, group: str | None) -> str:
    """What distinguishes a model's cached prefixes besides their tokens: adapter, salt and extra key."""
    adapter = request.lora_path
    if not adapter and str(body.get("model", "")).startswith(f"{model}:"):
        adapter = str(body["model"])[len(model) + 1 :]
    return namespace(_text(adapter), salted(group, _text(request.cache_salt)), _text(request.extra_key))


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    return msgspec.json.encode(value).decode()  # a list, one a prompt: a namespace of its own
