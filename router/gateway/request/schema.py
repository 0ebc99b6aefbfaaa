"""The fields of a request that the gateway reads, as types. They check bodies, and make the OpenAPI document.

Everything else in a body is the replica's to judge and is passed on unread. `null` counts as left out.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from router.gateway.errors import ApiError

Kind = Literal["chat", "completions", "generate"]

PATHS: Mapping[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}

MAX_TOKEN_ID = (1 << 32) - 1
MAX_COUNT = 1 << 31
MAX_BATCH = 1024
"""Prompts in one request, and samples (`n`) of one prompt."""
MAX_MESSAGES = 10_000

Prompt = str | list[int]

TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]], Meta(min_length=1)]
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_BATCH)]
TokenIdLists = Annotated[list[TokenIds], Meta(min_length=1, max_length=MAX_BATCH)]


def _any_of(*types: Any) -> dict[str, Any]:
    """The schema of a union that msgspec cannot decode, because two of its types are arrays."""
    return {"anyOf": [msgspec.json.schema(one) for one in types]}


Count = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None,
    Meta(extra={"must": f"be an integer from 0 to {MAX_COUNT}"}),
]
Samples = Annotated[
    Annotated[int, Meta(ge=1, le=MAX_BATCH)] | None,
    Meta(extra={"must": f"be an integer from 1 to {MAX_BATCH}"}),
]


class Common(msgspec.Struct):
    """What all three kinds of requests have."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: Annotated[
        str | None, Meta(description="The client, where neither a header nor an API key names it.")
    ] = None
    cache_salt: Annotated[
        Any, Meta(description="Requests share cached prefixes only with those of the same salt.")
    ] = None
    extra_key: Annotated[Any, Meta(description="As `cache_salt`.")] = None
    lora_path: Annotated[Any, Meta(description="The adapter. Each adapter has prefixes of its own.")] = None
    model: Annotated[
        str | None, Meta(description="A served model, `default`, or a model, a colon and an adapter.")
    ] = None


_SEED = Meta(
    description="Passed to the engine. It makes two equal requests give the same answer only where the engine is "
    "deterministic (`--enable-deterministic-inference`); by default they may differ, because what else is in a batch "
    "changes the arithmetic."
)


class OpenAIRequest(Common):
    """What OpenAI's two kinds of requests have in common."""

    n: Samples = None
    max_tokens: Count = None
    seed: Annotated[Any, _SEED] = None


class ChatRequest(OpenAIRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[
        Annotated[list[dict[str, Any]], Meta(min_length=1)],
        Meta(extra={"must": "be a non-empty list of objects", "code": "invalid_messages"}),
    ]
    input_ids: Annotated[
        TokenIds | None,
        Meta(
            description="The prompt's token ids, if they are known.",
            extra={"must": "hold a non-empty list of token ids", "code": "invalid_prompt"},
        ),
    ] = None
    max_completion_tokens: Count = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Any,
        Meta(
            extra_json_schema=_any_of(str, TokenIds, Texts, TokenIdLists),
            extra={"missing": "is missing", "code": "invalid_prompt"},
        ),
    ]


class SamplingParams(msgspec.Struct):
    """What the gateway reads of SGLang's sampling parameters."""

    max_new_tokens: Count = None
    n: Samples = None
    sampling_seed: Annotated[Any, _SEED] = None


class GenerateRequest(Common):
    """`POST /generate`. One of `text` and `input_ids` is required; `input_ids` is not read beside a `text`."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Annotated[
        SamplingParams | Annotated[list[SamplingParams], Meta(min_length=1)] | None,
        Meta(extra={"must": "be an object or a list of objects"}),
    ] = None


DocumentedGenerateRequest = Annotated[
    GenerateRequest,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"required": ["text"], "properties": {"text": _any_of(str, Texts)}},
                {
                    "required": ["input_ids"],
                    "properties": {"text": {"type": "null"}, "input_ids": _any_of(TokenIds, TokenIdLists)},
                },
            ]
        }
    ),
]
"""With the rule on `text` and `input_ids`, which a type cannot say."""

AnyRequest = TypeVar("AnyRequest", bound=Common)


def check(body: dict[str, Any], request: type[AnyRequest]) -> AnyRequest:
    """The fields of `body` that the gateway reads. Raises `ApiError`, which names the first that is wrong."""
    try:
        return msgspec.convert(body, request)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error


def check_prompts(value: Any, name: str) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts in the field `name`, and whether they are a list of several. Raises `ApiError`."""
    if isinstance(value, str):
        return (value,), False
    if not isinstance(value, list) or not value:
        raise _invalid(f"`{name}` must be a text, a list of texts, or token ids")
    first = value[0]
    if isinstance(first, str | list) and len(value) > MAX_BATCH:
        raise ApiError(
            400, f"`{name}` holds {len(value)} prompts; at most {MAX_BATCH}", code="batch_too_large"
        )
    try:
        if isinstance(first, str):
            return tuple(msgspec.convert(value, Texts)), True
        if isinstance(first, list):
            return tuple(msgspec.convert(value, TokenIdLists)), True
        return (msgspec.convert(value, TokenIds),), False
    except msgspec.ValidationError as error:
        if isinstance(first, str):
            raise _invalid(f"`{name}` mixes texts with something else") from error
        if "length" in str(error):
            raise _invalid(f"`{name}` must hold a non-empty list of token ids") from error
        raise _invalid(f"`{name}` holds something that is no token id") from error


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_prompt")


_RULES: dict[str, dict[str, Any]] = {
    name: meta.extra
    for request in (ChatRequest, CompletionRequest, SamplingParams, GenerateRequest)
    for name, hint in get_type_hints(request, include_extras=True).items()
    for meta in getattr(hint, "__metadata__", ())
    if meta.extra
}
"""How an error says what a field must be: the `extra` of its type."""

_MISSING = re.compile(r"missing required field `(\w+)`")
_FIELD = re.compile(r"\.(\w+)[^.]*`$")
_WRONG_TYPE = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)`")


def _refusal(error: str) -> ApiError:
    """msgspec's error in this API's words."""
    missing, field = _MISSING.search(error), _FIELD.search(error)
    found = missing or field
    if found is None:
        return ApiError(400, error)
    name = found[1]
    rule = _RULES.get(name, {})
    types = _WRONG_TYPE.search(error)
    if missing and "missing" in rule:
        problem = rule["missing"]
    elif "must" in rule:
        problem = f"must {rule['must']}"
    elif types is not None:
        problem = f"must be of type {types[1]}, not {types[2]}"
    else:
        problem = error
    return ApiError(400, f"`{name}` {problem}", code=rule.get("code"))
