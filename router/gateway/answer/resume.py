"""Continues a stream whose replica has died: remembers what the client has, and has another replica write the rest.

A request is served in legs, one by each replica. The first leg passes through unchanged, and its text is remembered,
and its token ids if the engine streams them. A later leg begins at output token k (`request.continuation`):

    tokens   k is the last token before which all text was sent, and which no stop text can reach back to
    repeat   k = 0

What a later leg repeats is compared with what the client has, character by character, and left out. So the client's
text continues exactly, or the stream ends in an error; it never goes on in other words. Id, role and creation time
stay those of the first leg, and usage is that of the whole answer. Memory: the text, and 4 bytes a token.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from router.gateway.answer.sse import END_OF_EVENT, TOKEN_IDS, data_of
from router.gateway.request.call import Call, encode_body
from router.gateway.request.continuation import OUTPUT_FLOOR, OUTPUT_LIMIT, stop_reach

Decode = Callable[[Sequence[int], bool], str]
"""Token ids to text; the flag leaves special tokens out."""

CONTEXT_TOKENS = 5
"""SGLang decodes the first tokens of an answer together with this many of its prompt."""

REMEMBERED_BYTES = 1 << 16
"""Events are kept unparsed until there are this many bytes, or the replica dies."""

MAX_BACK = 64
"""How far to go back in search of k before the request is repeated instead."""

FINISHED = b"[DONE]"


class Diverged(Exception):
    """The stream cannot be continued exactly; the text says why."""


@dataclass(frozen=True)
class Leg:
    """What to ask the next replica. `tokens` are the prompt for the router; None: as for the first leg."""

    call: Call
    tokens: list[int] | None


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[_Id] | None = None
    prompt_token_ids: list[_Id] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, int | None] | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Event(msgspec.Struct):
    """The types that the parts of an event must have; other parts are not read."""

    text: str | None = None
    output_ids: list[_Id] | None = None
    meta_info: _Meta | None = None
    choices: Annotated[list[_Choice], msgspec.Meta(max_length=1)] | None = None
    usage: _Usage | None = None


_EVENTS = msgspec.json.Decoder(_Event)


class Resumable:
    """One stream, over all its legs."""

    def __init__(self, call: Call) -> None:
        """`call.resume` must not be None."""
        assert call.resume is not None
        self._call = call
        self._way = call.resume
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._texts: dict[str, str] = {}
        self._ids = array("I")
        self._prompt: list[int] = []
        self._head: dict[str, Any] = {}
        self._has_tools = False
        self._is_strange = False
        self._has_usage = False
        self._is_finished = False
        # Of the current leg:
        self._is_first = True
        self._kept = 0
        self._repeated: dict[str, str] = {}
        self._compared: dict[str, int] = {}

    @property
    def leg_tokens(self) -> int | None:
        """Output tokens of the current leg; None if their ids are not known."""
        self._read()
        return len(self._ids) - self._kept if self._ids else None

    @property
    def is_complete(self) -> bool:
        """The client has everything but the [DONE]."""
        self._read()
        needs_usage = self._call.kind != "generate" and self._call.wants_usage
        return self._is_finished and (self._has_usage or not needs_usage)

    def pass_on(self, events: bytes) -> bytes:
        """Takes whole events of the current leg, and returns what the client gets. Raises `Diverged`."""
        if not self._is_first:
            return b"".join(self._continued(events))
        if self._call.kind == "generate":
            self._keep_last(events)
        else:
            self._unread.append(events)
            self._unread_bytes += len(events)
            if self._unread_bytes > REMEMBERED_BYTES:
                self._read()
        return TOKEN_IDS.sub(b"", events) if self._call.hides_token_ids else events

    def next_leg(self, prompt: Sequence[int], decode: Decode) -> Leg:
        """Begins another leg. `prompt` are the request's tokens, as the router got them. Raises `Diverged`."""
        self._read()
        if self._is_strange:
            raise Diverged("its events cannot be read")
        if self._has_tools:
            raise Diverged("it had begun to call a tool")
        self._prompt = self._prompt or list(prompt)
        self._is_first = False
        at = self._cut(decode) if self._way == "tokens" and not self._is_finished else None
        kept, text = at or (0, 0)
        self._kept = kept
        del self._ids[kept:]
        self._repeated = {name: sent[text:] for name, sent in self._texts.items()}
        self._compared = dict.fromkeys(self._repeated, 0)
        if not kept:
            return Leg(self._call, None)
        tokens = self._prompt + list(self._ids)
        return Leg(_from_tokens(self._call, tokens, kept), tokens)

    # -- the first leg

    def _keep_last(self, events: bytes) -> None:
        """Keeps the last event alone: those of /generate are cumulative."""
        for event in reversed(events.split(END_OF_EVENT)):
            if event and data_of(event) != FINISHED:
                self._unread = [event + END_OF_EVENT]
                return

    def _read(self) -> None:
        events, self._unread, self._unread_bytes = b"".join(self._unread), [], 0
        for event in _split(events):
            if data_of(event) == FINISHED or self._is_strange:
                continue
            try:
                data = _read(event)
            except Diverged:
                self._is_strange = True
                continue
            if self._call.kind == "generate":
                self._texts["text"] = str(data.get("text") or "")
                self._ids = array("I", data.get("output_ids") or [])
                meta = data.get("meta_info") or {}
                self._head = {"id": meta.get("id"), "prompt_tokens": meta.get("prompt_tokens")}
                self._is_finished = meta.get("finish_reason") is not None
                if "error" in data:
                    self._is_strange = True
                if meta.get("completion_tokens") != len(self._ids):
                    self._way = "repeat"
                continue
            self._has_usage = self._has_usage or isinstance(data.get("usage"), dict)
            for choice in data.get("choices") or []:
                self._head = self._head or {"id": data.get("id"), "created": data.get("created")}
                self._note(choice)
                self._ids.extend(choice.get("token_ids") or [])
                self._prompt = choice.get("prompt_token_ids") or self._prompt

    def _note(self, choice: dict[str, Any]) -> None:
        holder = choice.get("delta") or choice
        for name in ("text", "content", "reasoning_content"):
            if holder.get(name):
                self._texts[name] = self._texts.get(name, "") + holder[name]
        self._has_tools = self._has_tools or bool(holder.get("tool_calls"))
        self._is_finished = self._is_finished or choice.get("finish_reason") is not None

    # -- between legs

    def _cut(self, decode: Decode) -> tuple[int, int] | None:
        """k, and how many characters were sent before it; None means repeat."""
        sampling = self._call.sampling
        sent, ids = self._texts.get("text", ""), list(self._ids)
        if self._call.kind == "generate" and self._head.get("prompt_tokens") != len(self._prompt):
            return None
        context = self._prompt[-CONTEXT_TOKENS:]
        hide_special = sampling.get("skip_special_tokens") is not False
        before = len(decode(context, hide_special))
        most = min(len(ids), sampling[OUTPUT_LIMIT[self._call.kind]] - 1)
        furthest = len(sent) - stop_reach(sampling)
        for kept in range(most, max(0, most - MAX_BACK), -1):
            text = decode(context + ids[:kept], hide_special)[before:]
            if len(text) <= furthest and sent.startswith(text):
                return kept, len(text)
        return None

    # -- later legs

    def _continued(self, events: bytes) -> Iterator[bytes]:
        for event in _split(events):
            if data_of(event) == FINISHED:
                yield event + END_OF_EVENT
                continue
            data = _read(event)
            if "error" in data:
                yield event + END_OF_EVENT
            elif found := self._generated(data) if self._call.kind == "generate" else self._chunk(data):
                yield b"data: " + msgspec.json.encode(found) + END_OF_EVENT

    def _chunk(self, data: dict[str, Any]) -> dict[str, Any] | None:
        data |= self._head
        choices = data.get("choices")
        if not choices:
            if isinstance(data.get("usage"), dict):
                data["usage"] = self._usage(data["usage"])
                self._has_usage = True
            return data
        [choice] = choices
        self._ids.extend(choice.get("token_ids") or [])
        choice.pop("prompt_token_ids", None)
        choice.pop("token_ids", None)
        holder = choice.get("delta") or choice
        says = False
        for name in ("text", "content", "reasoning_content"):
            if not holder.get(name):
                continue
            holder[name] = self._without_repeated(name, holder[name])
            self._texts[name] = self._texts.get(name, "") + holder[name]
            says = says or bool(holder[name])
        if holder.get("tool_calls"):
            says = self._has_tools = True
        is_end = choice.get("finish_reason") is not None and not self._is_finished
        if is_end:
            self._check_end()
            self._is_finished = True
        return data if says or is_end else None

    def _generated(self, data: dict[str, Any]) -> dict[str, Any] | None:
        meta = data.get("meta_info") or {}
        sent = self._texts.get("text", "")
        base = sent[: len(sent) - len(self._repeated.get("text", ""))]
        text = base + str(data.get("text") or "")
        ids = [*self._ids[: self._kept], *(data.get("output_ids") or [])]
        is_end = meta.get("finish_reason") is not None
        whole = base + self._repeated.get("text", "")
        if not (text.startswith(whole) or (whole.startswith(text) and not is_end) or self._is_trim(text)):
            raise Diverged("the other replica answers in other words")
        if len(text) < len(whole) and not is_end:
            return None
        if self._kept:
            meta["prompt_tokens"] = len(self._prompt)
            meta["completion_tokens"] = len(ids)
            if isinstance(why := meta.get("finish_reason"), dict) and "length" in why:
                why["length"] = len(ids)
            if meta.get("cached_tokens") is not None:
                meta["cached_tokens"] = min(meta["cached_tokens"], len(self._prompt))
        meta["id"] = self._head.get("id")
        self._is_finished = is_end
        self._texts["text"], self._repeated["text"] = text, text[len(base) :]
        self._ids = array("I", ids)
        return data | {"text": text, "output_ids": ids, "meta_info": meta}

    def _without_repeated(self, name: str, text: str) -> str:
        """The part of the leg's next text that the client does not have."""
        repeated, at = self._repeated.get(name, ""), self._compared.get(name, 0)
        overlap = min(len(text), len(repeated) - at)
        if text[:overlap] != repeated[at : at + overlap]:
            raise Diverged("the other replica answers in other words")
        self._compared[name] = at + overlap
        return text[overlap:]

    def _check_end(self) -> None:
        """By its end a leg must have repeated everything, except what a stop text took back."""
        for name, repeated in self._repeated.items():
            missing = len(repeated) - self._compared.get(name, 0)
            if missing > stop_reach(self._call.sampling):
                raise Diverged("the other replica stops before")

    def _is_trim(self, text: str) -> bool:
        sent = self._texts.get("text", "")
        return sent.startswith(text) and len(sent) - len(text) <= stop_reach(self._call.sampling)

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer, from that of the current leg."""
        if not self._kept:
            return usage
        completion = self._kept + int(usage.get("completion_tokens") or 0)
        prompt = len(self._prompt)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], prompt)
        return usage | {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _from_tokens(call: Call, tokens: list[int], kept: int) -> Call:
    """`call`, continued behind the first `kept` tokens of its answer, which are the last of `tokens`."""
    kind = call.kind
    shifted = {OUTPUT_LIMIT[kind]: call.sampling[OUTPUT_LIMIT[kind]] - kept}
    if call.sampling.get(OUTPUT_FLOOR[kind]):
        shifted[OUTPUT_FLOOR[kind]] = max(0, call.sampling[OUTPUT_FLOOR[kind]] - kept)
    if kind == "completions":
        body = call.body | shifted | {"prompt": tokens}
    else:
        body = {name: value for name, value in call.body.items() if name != "text"}
        body |= {"input_ids": tokens, "sampling_params": call.sampling | shifted}
    limit = shifted[OUTPUT_LIMIT[kind]]
    return replace(
        call,
        body=body,
        encoded=encode_body(kind, body, call.resume),
        prompts=(tokens,),
        max_output_tokens=limit,
    )


def _split(events: bytes) -> Iterator[bytes]:
    return (event for event in events.split(END_OF_EVENT) if event)


def _read(event: bytes) -> dict[str, Any]:
    """The event, checked against `_Event`. Raises `Diverged`."""
    data = data_of(event)
    try:
        _EVENTS.decode(data)
        found: dict[str, Any] = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Diverged("an event of the replica cannot be read") from error
    return found
