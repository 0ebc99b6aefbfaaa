"""Token ids in streamed chats, for the gateway that asks for them (`common.token_ids`). Runs where HTTP is answered."""

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sglang_fair.common.token_ids import HEADER, comment

_KEY = "sglang_fair_token_ids"
"""Key in one step's output: the ids that are new in it."""


def are_wanted(request: Any) -> bool:
    """Whether this HTTP request asks for token ids."""
    return request is not None and HEADER in request.headers


async def noted(outputs: AsyncGenerator[Any, None], *, are_new: bool) -> AsyncGenerator[Any, None]:
    """`outputs`, each with the ids that are new in it; `are_new`: they hold no others."""
    seen = 0
    async with aclosing(outputs):
        async for output in outputs:
            ids = output.get("output_ids") or [] if isinstance(output, dict) else []
            new = list(ids) if are_new else list(ids[seen:])
            seen += len(new)
            yield {**output, _KEY: new} if new else output


def attach() -> None:
    """Has SGLang's chat endpoint stream the ids that `noted` has left, if this process serves HTTP."""
    serving = sys.modules.get("sglang.srt.entrypoints.openai.serving_chat")
    if serving is None:
        return
    chat = serving.OpenAIServingChat
    original = getattr(chat, "_generate_stream_content", None)
    if original is None:
        raise SystemExit("sglang-fair: SGLang's chat endpoint has no _generate_stream_content")
    if getattr(original, "streams_token_ids", False):
        return

    async def streamed(
        self: Any, content: dict[str, Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        ids = content.get(_KEY)
        if ids is None:
            async for chunk in original(self, content, *args, **kwargs):
                yield chunk
            return
        # In one piece, so that whoever has the text has its ids, too.
        chunks = [chunk async for chunk in original(self, content, *args, **kwargs)]
        meta = content["meta_info"]
        finish = (meta.get("finish_reason") or {}).get("type")
        yield "".join(chunks) + comment(meta["prompt_tokens"], ids, finish)

    streamed.streams_token_ids = True  # type: ignore[attr-defined]
    chat._generate_stream_content = streamed
