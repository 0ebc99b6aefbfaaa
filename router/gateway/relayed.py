"""What replicas answer, as operations: each kind of request with the type by which its body is checked.

Fields that a type does not name go to the replica, which judges them; its errors are passed on, with any status from
400 on, in the shape of the API that was asked (`answer.refused`).
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.gateway.errors import AnthropicErrorBody, ErrorBody
from router.gateway.operations import JSON, Operation
from router.gateway.record import REQUEST_ID
from router.gateway.request.kinds import ANTHROPIC, PATHS, WITHOUT_ENGINE, Kind
from router.gateway.request.schema import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    DocumentedGenerateRequest,
    EmbeddingsRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

REQUESTS: Mapping[Kind, tuple[Any, str]] = {
    "chat": (ChatRequest, "Answer a chat."),
    "completions": (CompletionRequest, "Continue a prompt."),
    "generate": (DocumentedGenerateRequest, "SGLang's own interface."),
    "responses": (ResponsesRequest, "Answer in OpenAI's Responses API. Nothing is stored."),
    "messages": (MessagesRequest, "Answer in Anthropic's Messages API."),
    "embeddings": (EmbeddingsRequest, "Embed texts, where the model can."),
    "count_tokens": (CountTokensRequest, "Count the tokens of a request to /v1/messages."),
    "tokenize": (TokenizeRequest, "The token ids of texts, or of a chat."),
    "detokenize": (DetokenizeRequest, "The texts of token ids."),
}

ANSWER = (
    "The replica's answer, whole or, with `stream`, as server-sent events. Sampled answers are not repeatable, not "
    "even with a `seed`, unless the engine is deterministic. A stream whose replica is lost is continued by another "
    "one from the tokens it has: a greedy one in the same words, a sampled one as a sample of the same distribution. "
    "It ends in an `error` event without `[DONE]` if that cannot be done: with logprobs, `n` above 1, tools, a "
    "grammar, or sampling that looks back on its own output (presence and repetition penalties). Streams of "
    "/v1/responses and /v1/messages are not continued, and end in the `error` event of their API."
)


WHOLE: frozenset[Kind] = WITHOUT_ENGINE | {"embeddings"}
"""Of these the answer is never a stream."""


class Sender(msgspec.Struct):
    """What a sender's headers may say."""

    client: Annotated[str | None, Meta(description="Who asks.")] = msgspec.field(
        default=None, name="x-fair-client"
    )
    name: Annotated[
        str | None, Meta(description="The sender's name for the request; without one it gets one.")
    ] = msgspec.field(default=None, name=REQUEST_ID)


def _relayed(kind: Kind) -> Operation:
    body, summary = REQUESTS[kind]
    answer = dict[str, Any] | list[Any] if kind == "generate" else dict[str, Any]
    return Operation(
        "POST",
        PATHS[kind],
        summary,
        body=body,
        headers=Sender,
        content={JSON: answer} if kind in WHOLE else {JSON: answer, "text/event-stream": None},
        answer_headers=(
            "x-fair-worker",
            "x-fair-client",
            "x-fair-request-id",
            "x-fair-matched-tokens",
            REQUEST_ID,
        ),
        described="The replica's answer." if kind in WHOLE else ANSWER,
        errors=(400, 401, 404, 408, 413, 429, 500, 502, 503),
        error=AnthropicErrorBody if kind in ANTHROPIC else ErrorBody,
    )


RELAYED = {kind: _relayed(kind) for kind in PATHS}
