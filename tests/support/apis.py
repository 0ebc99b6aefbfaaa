"""Answers of /v1/responses, /v1/messages, /v1/embeddings and the tokenizer's paths, in the shapes of SGLang 0.5.23.

Pure: made of the pieces of an answer, its ids and its counts.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"text": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/embeddings": {"input": "hi"},
    "/encode": {"text": "hi"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
"""The smallest body of each path."""


SECRETS: dict[str, Any] = {
    "launch_command": "--api-key secret", "host": "10.0.0.7", "kv_events_config": "tcp://10.0.0.7:30004",
    "fair": {"clients": {"somebody": {"service": 45.0}}},
}  # fmt: skip
"""Of what SGLang tells at /server_info."""
FOLDERS: dict[str, Any] = {"model_path": "/home/op/secret-v3", "tokenizer_path": "/home/op/secret-v3"}
MODEL_INFO: dict[str, Any] = {
    **FOLDERS, "served_model_name": "theirs", "is_generation": True, "load_format": "auto", "embedding": {},
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
SERVER_INFO: dict[str, Any] = {
    **FOLDERS, **SECRETS, "served_model_name": "theirs", "version": "0.5.23", "max_total_num_tokens": 24576,
    "internal_states": [{**FOLDERS, **SECRETS, "dp_size": 1, "last_gen_throughput": 3.0}],
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Tokens of an answer."""

    prompt: int
    output: int
    cached: int = 0


def whole(path: str, id: str, text: str, model: str, counts: Counts) -> dict[str, Any]:
    """The answer without a stream."""
    match path:
        case "/v1/responses":
            return _response(id, text, model, counts, "completed")
        case "/v1/messages":
            return {
                "id": f"msg_{id}",
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                "model": model,
                "stop_reason": "max_tokens",
                "usage": _anthropic(counts, input=True, output=counts.output),
            }
        case "/v1/embeddings":
            usage = {"prompt_tokens": counts.prompt, "total_tokens": counts.prompt, "completion_tokens": 0}
            row = {"object": "embedding", "embedding": [0.5, 0.25], "index": 0}
            return {"object": "list", "data": [row], "model": model, "usage": usage}
        case "/encode":
            counted = {"id": id, "prompt_tokens": counts.prompt, "completion_tokens": 0}
            return {"embedding": [0.5, 0.25], "meta_info": counted}
        case "/v1/messages/count_tokens":
            return {"input_tokens": counts.prompt}
        case "/tokenize":
            return {"tokens": [1, 2], "count": 2, "max_model_len": 64}
        case "/detokenize":
            return {"text": text}
    raise ValueError(path)


def events(path: str, id: str, pieces: Iterable[str], model: str, prompt_tokens: int) -> Iterator[bytes]:
    """The stream: whole events, one for each piece and those around them. Each piece is a token."""
    text, tokens = "", 0
    if path == "/v1/messages":
        start = whole(path, id, "", model, Counts(prompt_tokens, 0)) | {"content": []}
        yield _named("message_start", {"message": start})
        yield _named("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
        for piece in pieces:
            tokens += 1
            yield _named("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": piece}})
        yield _named("content_block_stop", {"index": 0})
        usage = _anthropic(Counts(prompt_tokens, tokens), input=False, output=tokens)
        yield _named("message_delta", {"delta": {"stop_reason": "max_tokens"}, "usage": usage})
        yield _named("message_stop", {})
        return
    number = 0

    def numbered(kind: str, data: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return _named(kind, data | {"sequence_number": number - 1})

    begun = _response(id, "", model, None, "in_progress")
    yield numbered("response.created", {"response": begun})
    yield numbered("response.in_progress", {"response": begun})
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    yield numbered("response.output_item.added", {"output_index": 0, "item": item})
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    for piece in pieces:
        text, tokens = text + piece, tokens + 1
        yield numbered("response.output_text.delta", place | {"delta": piece, "logprobs": []})
    yield numbered("response.output_text.done", place | {"text": text, "logprobs": []})
    done = _response(id, text, model, Counts(prompt_tokens, tokens), "completed")
    yield numbered("response.completed", {"response": done})


def _response(id: str, text: str, model: str, counts: Counts | None, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": [part]}
    usage = counts and {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.output,
    }
    return {
        "id": id,
        "object": "response",
        "created_at": 1,
        "model": model,
        "output": [message] if text else [],
        "status": status,
        "usage": usage,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "store": False,
    }


def _anthropic(counts: Counts, *, input: bool, output: int) -> dict[str, int]:
    said = {"input_tokens": counts.prompt - counts.cached} if input else {}
    cached = {"cache_read_input_tokens": counts.cached} if input and counts.cached else {}
    return {**said, **cached, "output_tokens": output}


def _named(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data}, separators=(',', ':'))}\n\n".encode()
