"""The kinds of requests that replicas answer, and what distinguishes them."""

from collections.abc import Mapping
from typing import Literal

from router.gateway.errors import Style

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

PATHS: Mapping[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}

CHATS: frozenset[Kind] = frozenset({"chat", "responses", "messages"})
"""The model's chat template makes their prompts."""

WITHOUT_ENGINE: frozenset[Kind] = frozenset({"count_tokens", "tokenize", "detokenize"})
"""A replica answers them with its tokenizer alone. Its engine computes nothing, so nobody is charged."""

ANTHROPIC: frozenset[Kind] = frozenset({"messages", "count_tokens"})
"""Of Anthropic's API, whose errors have a shape of their own."""

BY_HEADER: frozenset[Kind] = frozenset({"messages", "embeddings"})
"""SGLang has no field for a cache salt in their bodies: the replica is told in a header (`common.caller`)."""


def style_of(kind: Kind) -> Style:
    """In which shape a request of this kind is told of an error."""
    return "anthropic" if kind in ANTHROPIC else "openai"
