"""Token ids in streamed chats: each once, behind its text. `tests/whole/test_faults.py` has SGLang itself."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_fair.common.token_ids import HEADER, PREFIX
from sglang_fair.overlay import token_ids

CHAT = "sglang.srt.entrypoints.openai.serving_chat"


async def outputs(*said: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    for one in said:
        yield one


def step(ids: list[int], finish: str | None = None) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {"prompt_tokens": 4, "finish_reason": finish and {"type": finish}},
    }


class Chat:
    """SGLang's endpoint: one chunk for each token."""

    async def _generate_stream_content(
        self, content: dict[str, Any], index: int
    ) -> AsyncGenerator[str, None]:
        for number in range(index):
            yield f"data: {number}\n\n"


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Mine(Chat):
        pass

    module = ModuleType(CHAT)
    module.OpenAIServingChat = Mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, CHAT, module)
    token_ids.attach()
    token_ids.attach()
    return Mine()


def told(chat: Any, said: list[dict[str, Any]], *, are_new: bool) -> list[str]:
    async def body() -> list[str]:
        found = []
        async for content in token_ids.noted(outputs(*said), are_new=are_new):
            found += [chunk async for chunk in chat._generate_stream_content(content=content, index=2)]
        return found

    return asyncio.run(body())


@pytest.mark.parametrize("are_new", [True, False])
def test_each_id_comes_once_behind_its_text(chat: Any, are_new: bool) -> None:
    said = [step([1]), step([2, 3] if are_new else [1, 2, 3], "stop")]
    first, last = told(chat, said, are_new=are_new)
    for text, ids, finish in ((first, [1], None), (last, [2, 3], "stop")):
        *chunks, comment, rest = text.split("\n\n")
        assert (chunks, rest) == (["data: 0", "data: 1"], "")
        told_now = json.loads(comment.encode().removeprefix(PREFIX))
        assert told_now == {"prompt_tokens": 4, "ids": ids, "finish": finish}


def test_who_does_not_ask_gets_what_sglang_sends(chat: Any) -> None:
    async def body() -> list[str]:
        return [chunk async for chunk in chat._generate_stream_content(content=step([1]), index=2)]

    assert asyncio.run(body()) == ["data: 0\n\n", "data: 1\n\n"]
    assert token_ids.are_wanted(SimpleNamespace(headers={HEADER: "1"}))
    assert not token_ids.are_wanted(SimpleNamespace(headers={}))
    assert not token_ids.are_wanted(None)


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(CHAT)
    module.OpenAIServingChat = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, CHAT, module)
    with pytest.raises(SystemExit, match="_generate_stream_content"):
        token_ids.attach()
