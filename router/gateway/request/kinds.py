"""The kinds of requests that replicas answer: what distinguishes them, and the fields that the gateway reads of each.

Ranges, and the fields that only replicas read, are in `sglang_fair.common.fields`. `null` counts as left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from router.gateway.errors import Style
from sglang_fair.common.fields import MAX_BATCH, MAX_COUNT, MAX_TOKEN_ID

MAX_MESSAGES = 10_000

Prompt = str | list[int]

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_BATCH)]
TokenIdLists = Annotated[list[TokenIds], Meta(min_length=1, max_length=MAX_BATCH)]


def _any_of(*types: Any) -> dict[str, Any]:
    """The schema of a union that msgspec cannot decode, because two of its types are arrays."""
    return {"anyOf": [msgspec.json.schema(one) for one in types]}


User = Annotated[str | None, Meta(description="The client, where neither a header nor an API key names it.")]
Adapter = Annotated[Any, Meta(description="The adapter. Each adapter has prefixes of its own.")]
MAX_SALT_CHARS = 1024
OneSalt = Annotated[
    Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None,
    Meta(
        description="Requests share cached prefixes only with those of the same salt.",
        extra={"must": f"be a text of at most {MAX_SALT_CHARS} characters"},
    ),
]


class Common(msgspec.Struct):
    """What all kinds of requests have."""

    model: Annotated[
        str | None, Meta(description="A served model, `default`, or a model, a colon and an adapter.")
    ] = None
    ttl_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Milliseconds after which the request is dropped if it has not begun, as `x-fair-ttl-ms`.",
            extra={"must": "be a number of milliseconds above 0"},
        ),
    ] = None


class Generating(Common):
    """What requests for text in OpenAI's and SGLang's older interfaces have in common."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: User = None
    cache_salt: Annotated[
        Any, Meta(description="Requests share cached prefixes only with those of the same salt.")
    ] = None
    extra_key: Annotated[Any, Meta(description="As `cache_salt`.")] = None
    lora_path: Adapter = None


_SEED = Meta(
    description="Passed to the engine. It makes two equal requests give the same answer only where the engine is "
    "deterministic (`--enable-deterministic-inference`); by default they may differ, because what else is in a batch "
    "changes the arithmetic."
)


class OpenAIRequest(Generating):
    """What chats and completions have in common."""

    n: int | None = None
    max_tokens: int | None = None
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
    max_completion_tokens: int | None = None


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

    max_new_tokens: int | None = None
    n: int | None = None
    sampling_seed: Annotated[Any, _SEED] = None


class GenerateRequest(Generating):
    """`POST /generate`. One of `text` and `input_ids` is required; `input_ids` is not read beside a `text`."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Annotated[
        SamplingParams | Annotated[list[SamplingParams], Meta(min_length=1)] | None,
        Meta(extra={"must": "be an object or a list of objects"}),
    ] = None


Items = Annotated[list[dict[str, Any]], Meta(min_length=1)]
Tools = list[dict[str, Any]]
NOT_STORED = "responses are not stored here: leave it out, and send the whole conversation in `input`"
Unstored = Annotated[None, Meta(extra={"must": f"be left out, because {NOT_STORED}", "code": "not_stored"})]
Unserved = Annotated[None, Meta(extra={"must": "be left out: it is not served here", "code": "unsupported"})]
Never = Meta(extra_json_schema={"enum": [None, False]})


class ResponsesRequest(Common, kw_only=True):
    """`POST /v1/responses`. Nothing is stored, so what refers to an earlier response is refused."""

    input: Annotated[
        Annotated[str, Meta(min_length=1)] | Items,
        Meta(extra={"must": "be a text or a non-empty list of objects", "code": "invalid_input"}),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: Tools | None = None
    user: User = None
    cache_salt: OneSalt = None
    extra_key: OneSalt = None
    store: Annotated[bool | None, Never] = None
    background: Annotated[bool | None, Never] = None
    previous_response_id: Unstored = None
    conversation: Unstored = None
    prompt: Unserved = None
    lora_path: Unserved = None


class _Anthropic(Common, kw_only=True):
    messages: Annotated[
        Items, Meta(extra={"must": "be a non-empty list of objects", "code": "invalid_messages"})
    ]
    system: Annotated[
        str | list[dict[str, Any]] | None, Meta(extra={"must": "be a text or a list of objects"})
    ] = None
    tools: Tools | None = None


class MessagesRequest(_Anthropic, kw_only=True):
    """`POST /v1/messages`, Anthropic's API."""

    max_tokens: Annotated[int, Meta(extra={"must": f"be an integer from 1 to {MAX_COUNT}"})]
    stream: bool | None = None
    metadata: Annotated[
        dict[str, Any] | None,
        Meta(description="`user_id` names the client, where neither a header nor an API key does."),
    ] = None
    cache_salt: OneSalt = None


class CountTokensRequest(_Anthropic):
    """`POST /v1/messages/count_tokens`."""


class EmbeddingsRequest(Common, kw_only=True):
    """`POST /v1/embeddings`."""

    input: Annotated[
        Any,
        Meta(
            extra_json_schema=_any_of(str, TokenIds, Texts, TokenIdLists),
            extra={"missing": "is missing", "code": "invalid_input"},
        ),
    ]
    user: User = None
    cache_salt: OneSalt = None
    lora_path: Adapter = None


class EncodeRequest(Common):
    """`POST /encode`. One of `text` and `input_ids` is required, as for /generate."""

    text: Any = None
    input_ids: Any = None
    user: User = None
    cache_salt: OneSalt = None
    lora_path: Adapter = None


class TokenizeRequest(Common):
    """`POST /tokenize`. A replica's tokenizer answers it, and says what is wrong with it."""

    prompt: Annotated[Any, Meta(description="A text or a list of texts.")] = None
    messages: Annotated[Any, Meta(description="A chat, in place of `prompt`.")] = None


class DetokenizeRequest(Common):
    """`POST /detokenize`. The same."""

    tokens: Annotated[Any, Meta(description="Token ids, or lists of them.")] = None


TEXT_OR_IDS = Meta(
    extra_json_schema={
        "anyOf": [
            {"required": ["text"], "properties": {"text": _any_of(str, Texts)}},
            {
                "required": ["input_ids"],
                "properties": {"text": {"type": "null"}, "input_ids": _any_of(TokenIds, TokenIdLists)},
            },
        ]
    }
)
"""Which of SGLang's fields hold the prompt; a type cannot say it."""


Kind = Literal[
    "chat",
    "completions",
    "generate",
    "responses",
    "messages",
    "embeddings",
    "encode",
    "count_tokens",
    "tokenize",
    "detokenize",
]


class About(NamedTuple):
    """A kind."""

    path: str
    request: type[Common]
    """What the gateway reads of its bodies."""
    prompt: str
    """The field that holds the prompt."""
    summary: str
    lengths: tuple[str, ...] = ()
    """The fields that name the longest answer; the first one wins."""
    length: int | None = None
    """What SGLang 0.5.23 takes where none does; None: the rest of the context."""


KINDS: Mapping[Kind, About] = {
    "chat": About("/v1/chat/completions", ChatRequest, "messages", "Answer a chat.",
                  ("max_completion_tokens", "max_tokens")),
    "completions": About("/v1/completions", CompletionRequest, "prompt", "Continue a prompt.",
                         ("max_tokens",), 16),
    "generate": About("/generate", GenerateRequest, "text", "SGLang's own interface.", ("max_new_tokens",), 128),
    "responses": About("/v1/responses", ResponsesRequest, "input",
                       "Answer in OpenAI's Responses API. Nothing is stored.", ("max_output_tokens",)),
    "messages": About("/v1/messages", MessagesRequest, "messages", "Answer in Anthropic's Messages API.",
                      ("max_tokens",)),
    "embeddings": About("/v1/embeddings", EmbeddingsRequest, "input", "Embed texts, where the model can."),
    "encode": About("/encode", EncodeRequest, "text", "SGLang's own interface for embeddings."),
    "count_tokens": About("/v1/messages/count_tokens", CountTokensRequest, "messages",
                          "Count the tokens of a request to /v1/messages."),
    "tokenize": About("/tokenize", TokenizeRequest, "prompt", "The token ids of texts, or of a chat."),
    "detokenize": About("/detokenize", DetokenizeRequest, "tokens", "The texts of token ids."),
}  # fmt: skip

PATHS: Mapping[Kind, str] = {kind: one.path for kind, one in KINDS.items()}

CHATS: frozenset[Kind] = frozenset({"chat", "responses", "messages"})
"""The model's chat template makes their prompts."""

WITHOUT_ENGINE: frozenset[Kind] = frozenset({"count_tokens", "tokenize", "detokenize"})
"""A replica answers them with its tokenizer alone. Its engine computes nothing, so nothing is charged."""

EMBEDDING: frozenset[Kind] = frozenset({"embeddings", "encode"})
"""Their answers have no tokens."""

NATIVE: frozenset[Kind] = frozenset({"generate", "encode"})
"""Of SGLang's own API, which knows no names of models."""

ANTHROPIC: frozenset[Kind] = frozenset({"messages", "count_tokens"})
"""Of Anthropic's API, whose errors have a shape of their own."""

BY_HEADER: frozenset[Kind] = EMBEDDING | {"messages"}
"""SGLang has no field for a cache salt in their bodies: the replica gets it in a header (`common.caller`)."""


def style_of(kind: Kind) -> Style:
    """The shape of an error that answers a request of this kind."""
    return "anthropic" if kind in ANTHROPIC else "openai"
