"""A client's request: what the gateway must know of it, and the body that goes to the replica.

The replica gets the client's own body, except for `rid` (ours, to cancel by), the model's name when it was "default",
which SGLang's /generate does not know and does not get, `stream_options.include_usage` (to learn a stream's usage),
`return_token_ids` (to continue a stream elsewhere) and `custom_params.fair`, which names a client inside a replica and
which nobody outside may set. Its `cache_salt` becomes that of its caller's cache group, with its own inside
(`common.caller`). /v1/responses calls the `rid` `request_id`, and is told to store nothing. Of what has no field for
an id or a salt, the replica learns both from headers.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.gateway.errors import ApiError
from router.gateway.request.continuation import can_go_on
from router.gateway.request.kinds import (
    BY_HEADER,
    CHATS,
    EMBEDDING,
    KINDS,
    NATIVE,
    WITHOUT_ENGINE,
    Common,
    Kind,
    Prompt,
    SamplingParams,
)
from router.wire import namespace
from sglang_fair.common.caller import salted
from sglang_fair.common.deadlines import FIELD_TTL
from sglang_fair.common.fields import MAX_BATCH

FAIR = ("custom_params", "fair")
FAIR_IN_PARAMS = ("sampling_params", *FAIR)
"""Where a body could name a client inside a replica: at the top (OpenAI), or in `sampling_params`."""
RESPONSE_PREFIX = "resp_"
"""The ids of responses begin with it."""


DEFAULT_MODEL = "default"
"""The name by which a client may ask for the first model."""


class Names:
    """The first one is what a request gets that names none. An adapter of a model is called by the model's name, a
    colon and its own, as SGLang has it."""

    def __init__(self, first: str, *more: str) -> None:
        self.first = first
        self._all = dict.fromkeys((first, *more))

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def asked_for(self, name: str | None) -> str:
        """The model and adapter that a request means by `name`. Raises `ApiError` 404 for a model that there is not."""
        if name is None or name == DEFAULT_MODEL:
            return self.first
        if name not in self._all and self.model_of(name) is None:
            raise model_not_found(name)
        return name

    def model_of(self, name: str) -> str | None:
        """The model that `name` names, or an adapter of which; None: none of these."""
        if name in self._all:
            return name
        owners = [model for model in self._all if name.startswith(f"{model}:")]
        return max(owners, key=len, default=None)


def model_not_found(asked: str) -> ApiError:
    return ApiError(404, f"the model {asked[:200]!r} does not exist here", code="model_not_found")


@dataclass(frozen=True)
class Call:
    """A checked request: enough to route it, to account for it and to send it on."""

    kind: Kind
    body: dict[str, Any]
    encoded: bytes
    """`body` as replicas get it, without the `rid`: encoded once for all attempts."""
    prompts: tuple[Prompt, ...]
    """Texts or token ids, one a prompt. Empty where the chat template makes it, and where there is none."""
    stream: bool
    samples: int
    """Answers asked for, over all prompts."""
    is_batch: bool
    """The body holds a list of prompts, so the replica answers with a list."""
    wants_usage: bool
    """The client asked for the usage of its stream."""
    max_output_tokens: int
    """Over all answers; 0 where the client names no limit."""
    unnamed: int
    """Answers for which the client names none."""
    namespace: str
    user: str | None
    model: str
    """Which of the served models answers it; `body` may name an adapter of that."""
    can_go_on: bool = False
    """Another replica could continue this stream, by its token ids."""
    salt: str | None = None
    """The cache salt, where it is told in a header."""
    ttl_s: float | None = None
    """Its time to live, if the body says one."""

    @property
    def is_chat(self) -> bool:
        """The chat template makes its prompt."""
        return self.kind in CHATS and not self.prompts

    @property
    def needs_engine(self) -> bool:
        """The engine computes something for it."""
        return self.kind not in WITHOUT_ENGINE

    @property
    def sampling(self) -> dict[str, Any]:
        """The object in the body that holds the sampling options, unless they are a list."""
        return (self.body.get("sampling_params") or {}) if self.kind == "generate" else self.body

    @property
    def param(self) -> str:
        """The field of the body that holds the prompt."""
        has_ids = (self.kind == "chat" or self.kind in NATIVE) and self.body.get("input_ids") is not None
        if has_ids and (self.kind == "chat" or self.body.get("text") is None):
            return "input_ids"
        return KINDS[self.kind].prompt

    @property
    def hides_token_ids(self) -> bool:
        """The gateway asked for token ids in the stream, and the client did not."""
        return self.kind == "completions" and self.can_go_on

    @property
    def asks_for_token_ids(self) -> bool:
        """The gateway asks the overlay for token ids in the stream (`common.token_ids`)."""
        return self.kind == "chat" and self.can_go_on

    def rids(self, request_id: str) -> tuple[str, ...]:
        """The ids to cancel by at the replica: one a prompt, as SGLang wants them.

        With n > 1 SGLang gives the samples ids of its own; those are read from the stream.
        """
        if not self.needs_engine:
            return ()
        if self.kind == "responses":
            return (RESPONSE_PREFIX + request_id,)
        if not self.is_batch:
            return (request_id,)
        digits = len(request_id) - 4
        return tuple(f"{request_id[:digits]}{index:04x}" for index in range(len(self.prompts)))

    def forwarded(self, request_id: str) -> bytes:
        rids, name = self.rids(request_id), b"rid"
        if not rids or self.kind == "messages":  # the overlay takes the id from a header
            return self.encoded
        if self.kind == "responses":
            name = b"request_id"
        rid = msgspec.json.encode(rids if self.is_batch else rids[0])
        return self.encoded[:-1] + b',"' + name + b'":' + rid + b"}"


def encode_body(kind: Kind, body: dict[str, Any], with_ids: bool) -> bytes:
    """`body` as replicas get it, without the `rid`; of completions `with_ids` of their tokens in the stream."""
    more = "model" if kind in NATIVE else "request_id" if kind == "responses" else ""
    sent = {key: value for key, value in body.items() if key not in ("rid", FIELD_TTL, more)}
    if kind in ("chat", "completions") and body.get("stream"):
        sent["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        if kind == "completions" and with_ids:
            sent["return_token_ids"] = True
    return msgspec.json.encode(sent)


def make_call(
    kind: Kind,
    body: dict[str, Any],
    request: Common,
    names: Names,
    group: str | None,
    prompts: tuple[Prompt, ...],
    is_batch: bool,
    sampling: Sequence[SamplingParams],
    *,
    goes_on: bool = True,
) -> Call:
    """`sampling` is one for all prompts or one for each. `goes_on`: streams may be continued elsewhere."""
    for path in (FAIR, FAIR_IN_PARAMS):
        body = _without(body, path)
    model = names.model_of(names.asked_for(request.model)) or names.first
    salt = _salted(group, getattr(request, "cache_salt", None))
    by_header = kind in BY_HEADER
    if by_header:
        body.pop("cache_salt", None)
    elif salt is not None:
        body["cache_salt"] = salt
    each = [1 if one.n is None else one.n for one in sampling]
    samples = sum(each) if len(sampling) > 1 else each[0] * max(1, len(prompts))
    if samples > MAX_BATCH:
        text = f"{samples} answers are asked for (prompts, times `n`); at most {MAX_BATCH}"
        raise ApiError(400, text, code="batch_too_large", param="n")
    limit = sum(one.max_new_tokens or 0 for one in sampling) * (samples // len(sampling))
    unnamed = sum(not one.max_new_tokens for one in sampling) * (samples // len(sampling))
    goes_on = goes_on and not is_batch and can_go_on(kind, body)
    return Call(
        kind=kind,
        body=body,
        encoded=encode_body(kind, body, goes_on),
        prompts=prompts,
        stream=bool(getattr(request, "stream", None)),
        samples=samples,
        is_batch=is_batch,
        wants_usage=bool((getattr(request, "stream_options", None) or {}).get("include_usage")),
        max_output_tokens=limit,
        unnamed=0 if kind in WITHOUT_ENGINE | EMBEDDING else unnamed,
        namespace=_namespace(body, request, model, group),
        user=user_in(kind, request),
        model=model,
        can_go_on=goes_on,
        salt=salt if by_header else None,
        ttl_s=None if request.ttl_ms is None else request.ttl_ms / 1e3,
    )


def user_in(kind: Kind, request: Common) -> str | None:
    """Whom a body names as its client: OpenAI's `user`, Anthropic's `metadata.user_id`."""
    if kind != "messages":
        return getattr(request, "user", None)
    named = (getattr(request, "metadata", None) or {}).get("user_id")
    return named if isinstance(named, str) else None


def check_models(call: Call, models: Collection[str]) -> None:
    """Raises `ApiError` 404 if the request is for a model, or an adapter, that is not among `models`."""
    name, adapters = str(call.body.get("model") or call.model), call.body.get("lora_path")
    each = adapters if isinstance(adapters, list) and adapters else [adapters]
    asked = {f"{call.model}:{adapter}" if adapter else name for adapter in each}
    if name != call.model:
        asked.add(name)
    if others := asked - set(models):
        raise model_not_found(min(others))


def _without(value: Any, path: Sequence[str]) -> Any:
    """`value` without what is at `path` in it, also in each item of a list on the way."""
    name, *rest = path
    if isinstance(value, list):
        return [_without(one, path) for one in value]
    if not isinstance(value, dict) or name not in value:
        return value
    if rest:
        inner = _without(value[name], rest)
        return value if inner is value[name] else value | {name: inner}
    return {key: one for key, one in value.items() if key != name}


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
    adapter, salt, extra_key = (
        getattr(request, name, None) for name in ("lora_path", "cache_salt", "extra_key")
    )
    if not adapter and str(body.get("model", "")).startswith(f"{model}:"):
        adapter = str(body["model"])[len(model) + 1 :]
    return namespace(_text(adapter), salted(group, _text(salt)), _text(extra_key))


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    return msgspec.json.encode(value).decode()  # a list, one a prompt: a namespace of its own
