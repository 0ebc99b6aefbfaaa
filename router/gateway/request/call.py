"""Read a request body once: what the gateway must know of it, and the body that goes to the replica.

Only what routing and accounting need is checked here; the replica judges the rest. The forwarded body is
the client's own, except for `rid` (ours, to cancel by), the model's name when it was "default",
`stream_options.include_usage` (to learn the usage of a stream), `return_token_ids` (to go on with a stream
elsewhere) and `custom_params.fair`, which names a client inside a replica and which nobody outside may set.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from router.gateway.errors import ApiError
from router.gateway.request.continuation import Kind, Way, resumption
from router.wire import namespace

DEFAULT_MODEL = "default"
"""The name under which any served model can be asked for."""

MAX_TOKEN_ID = (1 << 32) - 1
MAX_BATCH = 1024
"""Most prompts in one request, and most samples (`n`) of one prompt."""
MAX_MESSAGES = 10_000

LARGE_BODY_BYTES = 1 << 16
"""To parse more than this takes milliseconds."""
MAX_VALUES = 1 << 18
"""Texts, lists and objects in a large body. The parser makes an object of each while nobody else is served, and
a body of 16 MiB has room for millions."""

Prompt = str | list[int]


@dataclass(frozen=True)
class Call:
    """A checked request: enough to route it, account for it and send it on."""

    kind: Kind
    body: dict[str, Any]
    encoded: bytes
    """`body` as it is sent on, but for the `rid`: encoded once for all tries."""
    prompts: tuple[Prompt, ...]
    """Texts or token ids, one a prompt; empty for a chat without `input_ids`: its template makes the text."""
    stream: bool
    samples: int
    """Answers asked for, over all prompts."""
    is_batch: bool
    """The body holds a list of prompts, so the replica answers with a list."""
    wants_usage: bool
    """The client asked for the usage of its stream."""
    max_output_tokens: int
    namespace: str
    user: str | None
    resume: Way | None = None
    """How another replica could go on with this stream."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Where the options of sampling stand, of a body without a list of them."""
        return (self.body.get("sampling_params") or {}) if self.kind == "generate" else self.body

    @property
    def param(self) -> str:
        """Where its prompt stands."""
        if self.kind == "completions":
            return "prompt"
        if self.body.get("input_ids") is not None and (self.kind == "chat" or self.body.get("text") is None):
            return "input_ids"
        return "messages" if self.kind == "chat" else "text"

    @property
    def hides_token_ids(self) -> bool:
        """The stream carries token ids that the client has not asked for."""
        return self.kind == "completions" and self.resume == "tokens"

    def rids(self, request_id: str) -> tuple[str, ...]:
        """The ids to cancel by at the replica: one a prompt, as SGLang takes a list for a list.

        With n > 1 SGLang gives the samples ids of its own; those are learnt from the stream.
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
    """Raises `ApiError` for a body with more values than anybody means, before they are made.

    Counted by what is outside of texts: what is in them needs no more than to be copied.
    """
    plain = raw if b"\\" not in raw else raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = plain.count(b'"') // 2
    if texts <= MAX_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        values = texts + outside.count(b"[") + outside.count(b"{")
        if values <= MAX_VALUES and outside.count(b",") <= MAX_VALUES + max_prompt_tokens:
            return
    raise ApiError(400, "the body holds too many values", code="too_many_values")


def parse(kind: Kind, raw: bytes, model_name: str) -> Call:
    """Checks a body. Raises `ApiError` with the reason."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if kind != "generate":
        body = body | {"model": _model(body, model_name)}
    body = _without_identity(body)
    prompts, is_batch = _prompts(kind, body)
    sampling = _sampling(body) if kind == "generate" else [body]
    samples = sum(_integer(one, "n", 1, 1, MAX_BATCH) for one in sampling)
    if len(sampling) == 1:
        samples *= max(1, len(prompts))
    limit = sum(_output_limit(kind, one) for one in sampling) * (samples // len(sampling))
    options = _typed(body, "stream_options", dict, {})
    stream = _typed(body, "stream", bool, False)
    resume = None if is_batch else resumption(kind, body)
    return Call(
        kind=kind,
        body=body,
        encoded=encode_body(kind, body, resume),
        prompts=prompts,
        stream=stream,
        samples=samples,
        is_batch=is_batch,
        wants_usage=bool(options.get("include_usage")),
        max_output_tokens=limit,
        namespace=_namespace(body, model_name),
        user=_typed(body, "user", str, None),
        resume=resume,
    )


def encode_body(kind: Kind, body: dict[str, Any], resume: Way | None) -> bytes:
    """`body` as replicas get it, but for the `rid`."""
    sent = {key: value for key, value in body.items() if key != "rid"}
    if kind != "generate" and body.get("stream"):
        sent["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        if kind == "completions" and resume == "tokens":
            sent["return_token_ids"] = True
    return msgspec.json.encode(sent)


def _model(body: dict[str, Any], model_name: str) -> str:
    model: str = _typed(body, "model", str, DEFAULT_MODEL)
    if model in (DEFAULT_MODEL, model_name):
        return model_name
    if model.startswith(f"{model_name}:"):  # SGLang's base-model:adapter
        return model
    raise ApiError(404, f"the model {model[:200]!r} does not exist here", code="model_not_found")


def _without_identity(body: dict[str, Any]) -> dict[str, Any]:
    """`body` with every `custom_params.fair` dropped: at the top (OpenAI), and in `sampling_params`."""
    clean = _drop_fair(body)
    sampling = clean.get("sampling_params")
    if isinstance(sampling, dict):
        clean = clean | {"sampling_params": _drop_fair(sampling)}
    elif isinstance(sampling, list):
        dropped = [_drop_fair(one) if isinstance(one, dict) else one for one in sampling]
        clean = clean | {"sampling_params": dropped}
    return clean


def _drop_fair(holder: dict[str, Any]) -> dict[str, Any]:
    custom = holder.get("custom_params")
    if isinstance(custom, dict) and "fair" in custom:
        return holder | {"custom_params": {key: value for key, value in custom.items() if key != "fair"}}
    if isinstance(custom, list):
        return holder | {
            "custom_params": [
                {key: value for key, value in one.items() if key != "fair"} if isinstance(one, dict) else one
                for one in custom
            ]
        }
    return holder


def _prompts(kind: Kind, body: dict[str, Any]) -> tuple[tuple[Prompt, ...], bool]:
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ApiError(400, "`messages` must be a non-empty list of objects", code="invalid_messages")
        if len(messages) > MAX_MESSAGES:
            raise ApiError(
                400,
                f"{len(messages)} messages; at most {MAX_MESSAGES}",
                code="too_many_messages",
                param="messages",
            )
        if body.get("input_ids") is None:
            return (), False
        return (_ids(body["input_ids"], "input_ids"),), False
    if kind == "completions":
        if body.get("prompt") is None:
            raise ApiError(400, "`prompt` is missing", code="invalid_prompt")
        return _texts_or_ids(body["prompt"], "prompt")
    if body.get("text") is not None:
        return _texts_or_ids(body["text"], "text")
    if body.get("input_ids") is not None:
        return _texts_or_ids(body["input_ids"], "input_ids")
    raise ApiError(400, "`text` or `input_ids` must be given", code="invalid_prompt")


def _texts_or_ids(value: Any, name: str) -> tuple[tuple[Prompt, ...], bool]:
    if isinstance(value, str):
        return (value,), False
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"`{name}` must be a text, a list of texts, or token ids", code="invalid_prompt")
    if isinstance(value[0], str):
        if not all(isinstance(one, str) for one in value):
            raise ApiError(400, f"`{name}` mixes texts with something else", code="invalid_prompt")
        _bound_batch(value, name)
        return tuple(value), True
    if isinstance(value[0], list):
        _bound_batch(value, name)
        return tuple(_ids(one, name) for one in value), True
    return (_ids(value, name),), False


def _bound_batch(value: list[Any], name: str) -> None:
    if len(value) > MAX_BATCH:
        raise ApiError(
            400, f"`{name}` holds {len(value)} prompts; at most {MAX_BATCH}", code="batch_too_large"
        )


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"`{name}` must hold a non-empty list of token ids", code="invalid_prompt")
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID:
        raise ApiError(400, f"`{name}` holds something that is no token id", code="invalid_prompt")
    return value


def _sampling(body: dict[str, Any]) -> list[dict[str, Any]]:
    value = body.get("sampling_params")
    found = value if isinstance(value, list) else [{} if value is None else value]
    if not found or not all(isinstance(one, dict) for one in found):
        raise ApiError(400, "`sampling_params` must be an object or a list of objects")
    return found


def _output_limit(kind: Kind, sampling: dict[str, Any]) -> int:
    if kind == "generate":
        return _integer(sampling, "max_new_tokens", 0)
    if sampling.get("max_completion_tokens") is not None:
        return _integer(sampling, "max_completion_tokens", 0)
    return _integer(sampling, "max_tokens", 0)


def _namespace(body: dict[str, Any], model_name: str) -> str:
    def text(value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value or None
        return msgspec.json.encode(value).decode()  # lists, one a prompt: its own namespace

    adapter = body.get("lora_path")
    if not adapter and str(body.get("model", "")).startswith(f"{model_name}:"):
        adapter = str(body["model"])[len(model_name) + 1 :]
    return namespace(text(adapter), text(body.get("cache_salt")), text(body.get("extra_key")))


def _typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ApiError(400, f"`{name}` must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _integer(body: dict[str, Any], name: str, default: int, least: int = 0, most: int = 1 << 31) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise ApiError(400, f"`{name}` must be an integer from {least} to {most}")
    return value
