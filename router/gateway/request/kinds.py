"""The kinds of requests that replicas answer, and what distinguishes them."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from router.gateway.errors import Style
from router.gateway.request.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    GenerateRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

Kind = Literal[
    "chat",
    "completions",
    "generate",
    "responses",
    "messages",
    "embeddings",
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

ANTHROPIC: frozenset[Kind] = frozenset({"messages", "count_tokens"})
"""Of Anthropic's API, whose errors have a shape of their own."""

BY_HEADER: frozenset[Kind] = frozenset({"messages", "embeddings"})
"""SGLang has no field for a cache salt in their bodies: the replica gets it in a header (`common.caller`)."""


def style_of(kind: Kind) -> Style:
    """The shape of an error that answers a request of this kind."""
    return "anthropic" if kind in ANTHROPIC else "openai"
