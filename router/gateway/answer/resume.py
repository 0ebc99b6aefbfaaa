"""Continues a stream whose replica has died: remembers what the client has, and has another replica write the rest.

A request is served in legs, one by each replica. The first leg passes through unchanged, and its text and token ids are
remembered. A later leg has all of these ids behind its prompt, so nothing is computed, drawn or sent twice, and the
whole is what one replica would have written (`request.continuation`). If the last token is half a character, the next
replica takes that half for prompt and leaves the character out, so it is made up here from the token ids (`_Owed`).

Id, role and creation time stay those of the first leg, and usage is that of the whole answer. Memory: the text, and 4
bytes a token.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from router.gateway.answer.sse import (
    COMMENT,
    DONE,
    END_OF_EVENT,
    TOKEN_IDS,
    data_of,
    split,
    without_comments,
)
from router.gateway.request.call import Call, encode_body
from router.gateway.request.continuation import (
    FREQUENCY,
    OUTPUT_FLOOR,
    OUTPUT_LIMITS,
    begins_stop,
)
from sglang_fair.common import token_ids

Decode = Callable[[Sequence[int], bool], str]
"""Token ids to text; the flag leaves special tokens out."""

CONTEXT_TOKENS = 5
"""SGLang decodes the first tokens of an answer together with this many of its prompt."""

REMEMBERED_BYTES = 1 << 16
"""Events are kept unparsed until there are this many bytes, or the replica dies."""

FINISHED = b"[DONE]"

UNREADABLE = "an event of the replica cannot be read"
MALFORMED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What reading an event raises that is no event of this API. Then nothing more of its stream is read."""

UNFINISHED = "\ufffd"
"""What a tokenizer makes of half a character."""


class Diverged(Exception):
    """The stream cannot be continued exactly; the text says why."""


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Ids(msgspec.Struct):
    """A comment of `common.token_ids`."""

    prompt_tokens: int
    ids: list[_Id]
    finish: str | None = None


_COMMENTS = msgspec.json.Decoder(_Ids)


class _Owed:
    """Text of tokens that the client has no text of, and that the next replica leaves out.

    A replica makes text of its new tokens by decoding them behind its prompt, and cutting off as many characters as
    the prompt has. Where the prompt ends in half a character, that cuts off the whole one. So of the text of all
    tokens, what lies behind the characters sent and before those of the prompt is owed.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], ids: Sequence[int], sent: str) -> None:
        """`decode` makes text of the output's tokens, of which `ids` are known and `sent` was sent.

        Raises `Diverged` if the text is not that of the tokens.
        """
        text = decode(ids)
        if not text.startswith(sent) or (len(text) > len(sent) and not text.endswith(UNFINISHED)):
            raise Diverged("its text is not that of its tokens")
        self._decode = decode
        self._at, self._until = len(sent), len(text)

    def __bool__(self) -> bool:
        return self._at < self._until

    def next(self, ids: Sequence[int], *, is_all: bool) -> str:
        """What can be made up by now; `is_all`: a character that is still half is all that comes."""
        if not self:
            return ""
        text = self._decode(ids)
        if not is_all:
            text = text.rstrip(UNFINISHED)
        found = text[self._at : self._until]
        self._at = self._until if is_all else self._at + len(found)
        return found


@dataclass
class _Leg:
    """What one replica writes."""

    owed: _Owed | None = None
    """None: it is the first leg."""
    kept: int = 0
    """Output tokens before it."""
    before: str = ""
    """The text before it, and what was owed and has been made up."""
    unknown: bytes = b""
    """Events of a chat whose token ids have not come yet."""
    has_ids: bool = False
    """Of a chat: it has some."""


class Resumable:
    """One stream, over all its legs."""

    def __init__(self, call: Call) -> None:
        """`call.can_go_on` must be true."""
        assert call.can_go_on
        self._call = call
        self._leg = _Leg()
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._text = ""
        """That the client has."""
        self._ids = array("I")
        self._prompt: list[int] = []
        self._prompt_tokens: int | None = None
        """Of the first leg, as its replica says; None where it says its ids."""
        self._head: dict[str, Any] = {}
        self._obstacle = ""
        """Why no other replica can continue it."""
        self._has_usage = False
        self._is_finished = False
        self._finish: str | None = None
        """Why the answer ended, where only its token ids say so."""

    @property
    def leg_tokens(self) -> int | None:
        """Output tokens of the current leg; None if their ids are not known."""
        self._read_all()
        return len(self._ids) - self._leg.kept if self._ids else None

    @property
    def is_complete(self) -> bool:
        """The client has everything but what `closing` makes, and the [DONE]."""
        self._read_all()
        return self._is_finished or self._finish is not None

    def closing(self) -> bytes:
        """What the client lacks of a complete answer before its [DONE]."""
        events: list[dict[str, Any]] = []
        if not self._is_finished:
            events.append(self._named([{"index": 0, "delta": {}, "finish_reason": self._finish}]))
        if self._call.kind != "generate" and self._call.wants_usage and not self._has_usage:
            prompt = self._prompt_tokens or len(self._prompt)
            events.append(self._named([]) | {"usage": _counted(prompt, len(self._ids))})
        return b"".join(map(_written, events))

    def pass_on(self, events: bytes) -> bytes:
        """Takes whole events of the current leg, and returns what the client gets. Raises `Diverged`."""
        if self._call.asks_for_token_ids:
            events = self._known(events)
        if self._leg.owed is not None:
            try:
                return b"".join(self._continued(events))
            except MALFORMED as error:
                raise Diverged(UNREADABLE) from error
        if self._call.kind == "generate":
            self._keep_last(events)
        else:
            self._unread.append(events)
            self._unread_bytes += len(events)
            if self._unread_bytes > REMEMBERED_BYTES:
                self._read_all()
        if self._call.hides_token_ids:
            return TOKEN_IDS.sub(b"", events)
        return without_comments(events)[0] if self._call.asks_for_token_ids else events

    def next_leg(self, prompt: Sequence[int], decode: Decode) -> tuple[Call, list[int] | None]:
        """Begins another leg: what to ask the next replica, and its prompt for the router; None: as for the first leg.
        `prompt` are the request's tokens, as the router got them. Raises `Diverged`."""
        call, tokens, owed = self._following(prompt, decode)
        self._prompt = self._prompt or list(prompt)
        self._leg = _Leg(owed, len(self._ids), self._text)
        return call, tokens

    def can_go_on(self, prompt: Sequence[int], decode: Decode) -> bool:
        """Whether `next_leg` could begin another leg now. Changes nothing."""
        try:
            self._following(prompt, decode)
        except Diverged:
            return False
        return True

    def _following(self, prompt: Sequence[int], decode: Decode) -> tuple[Call, list[int] | None, _Owed]:
        """The rest of the stream, behind all its tokens, and what its client is owed before that."""
        self._read_all()
        if self._obstacle:
            raise Diverged(self._obstacle)
        if not self._ids:
            if self._text:
                raise Diverged("its token ids are not known")
            return self._call, None, _Owed(lambda ids: "", (), "")  # the client has nothing of it yet
        first = self._prompt or list(prompt)
        if self._prompt_tokens not in (None, len(first)):
            raise Diverged("its prompt's tokens are not known")
        if begins_stop(self._call.sampling, self._text):
            raise Diverged("it may have begun a stop text")
        context = first[-CONTEXT_TOKENS:]
        hide_special = self._call.sampling.get("skip_special_tokens") is not False
        before = len(decode(context, hide_special))
        owed = _Owed(lambda ids: decode([*context, *ids], hide_special)[before:], self._ids, self._text)
        tokens = first + list(self._ids)
        return _from_tokens(self._call, tokens, len(self._ids)), tokens, owed

    # -- reading, in all legs

    def _known(self, events: bytes) -> bytes:
        """`events` of a chat as far as their token ids are known, which come behind them: else a replica that dies in
        between would leave text that nobody can continue. The rest waits. Before the first ids nothing does, because
        a replica without the overlay sends none, unless something is owed that is made of ids."""
        leg = self._leg
        events, leg.unknown = leg.unknown + events, b""
        last = events.rfind(COMMENT) + len(END_OF_EVENT)
        if last >= len(END_OF_EVENT) or events.startswith(token_ids.PREFIX):
            leg.has_ids = True
            end = events.index(END_OF_EVENT, last) + len(END_OF_EVENT)
            if b'"finish":"' in events[last:end]:
                return events
        else:
            end = 0
        if end == len(events) or events.endswith(DONE) or not (leg.has_ids or leg.owed):
            return events
        leg.unknown = events[end:]
        return events[:end]

    def _take_ids(self, event: bytes) -> None:
        found = _COMMENTS.decode(event.removeprefix(token_ids.PREFIX))
        if self._leg.owed is None:
            self._prompt_tokens = found.prompt_tokens
        self._ids.extend(found.ids)
        if found.finish in ("stop", "length"):
            self._finish = found.finish

    def _take_choice(self, choice: dict[str, Any]) -> str:
        """Notes what a choice says beside its token ids; its text."""
        holder = choice.get("delta") or choice
        text: str = holder.get("text") or holder.get("content") or ""
        self._text += text
        self._is_finished = self._is_finished or choice.get("finish_reason") is not None
        if holder.get("reasoning_content"):
            self._obstacle = "the model had begun to reason"
        if holder.get("tool_calls"):
            self._obstacle = "it had begun to call a tool"
        return text

    def _take_generated(self, data: dict[str, Any]) -> None:
        """Notes what an event of /generate says, which is cumulative over its leg."""
        leg, text = self._leg, data.get("text") or ""
        self._is_finished = (data.get("meta_info") or {}).get("finish_reason") is not None
        ids = self._ids[: leg.kept] + array("I", data.get("output_ids") or [])
        if leg.owed:
            leg.before += leg.owed.next(ids, is_all=self._is_finished or bool(text))
        self._text, self._ids = leg.before + text, ids

    # -- the first leg

    def _keep_last(self, events: bytes) -> None:
        """Keeps the last event alone: those of /generate are cumulative."""
        for event in reversed(events.split(END_OF_EVENT)):
            if event and data_of(event) != FINISHED:
                self._unread = [event]
                return

    def _read_all(self) -> None:
        events, self._unread, self._unread_bytes = b"".join(self._unread), [], 0
        for event in split(events):
            if data_of(event) == FINISHED or self._obstacle:
                continue
            try:
                if event.startswith(token_ids.PREFIX):
                    self._take_ids(event)
                else:
                    self._take_first(msgspec.json.decode(data_of(event)))
            except MALFORMED:
                self._obstacle = UNREADABLE

    def _take_first(self, data: dict[str, Any]) -> None:
        if self._call.kind == "generate":
            meta = data.get("meta_info") or {}
            self._head, self._prompt_tokens = {"id": meta.get("id")}, meta.get("prompt_tokens")
            self._take_generated(data)
            if "error" in data or meta.get("completion_tokens") != len(self._ids):
                self._obstacle = "its token ids are not known"
            return
        self._has_usage = self._has_usage or isinstance(data.get("usage"), dict)
        for choice in data.get("choices") or []:
            self._head = self._head or {"id": data.get("id"), "created": data.get("created")}
            self._ids.extend(choice.get("token_ids") or [])
            if choice.get("prompt_token_ids"):
                self._prompt = array("I", choice["prompt_token_ids"]).tolist()
            self._take_choice(choice)

    # -- later legs

    def _continued(self, events: bytes) -> Iterator[bytes]:
        owed, kind = self._leg.owed, self._call.kind
        events, comments = without_comments(events)
        for comment in comments:
            self._take_ids(comment)
        found = [
            (event, None if data_of(event) == FINISHED else msgspec.json.decode(data_of(event)))
            for event in split(events)
        ]
        if owed and kind == "chat":
            is_all = self._finish is not None or any(data is None or _says(data) for _, data in found)
            if text := owed.next(self._ids, is_all=is_all):
                self._text += text
                delta = {"content": text}
                yield _written(self._named([{"index": 0, "delta": delta, "finish_reason": None}]))
        for event, data in found:
            if data is None or "error" in data:
                yield event + END_OF_EVENT
            elif made := self._generated(data) if kind == "generate" else self._chunk(data):
                yield _written(made)

    def _chunk(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """What the client gets of a chunk of a chat or a completion, if anything."""
        data |= self._head
        if not data.get("choices"):
            if isinstance(usage := data.get("usage"), dict):
                data["usage"], self._has_usage = self._whole(usage), True
            return data
        [choice] = data["choices"]
        choice.pop("prompt_token_ids", None)
        self._ids.extend(choice.pop("token_ids", None) or [])
        owed, was_finished = self._leg.owed, self._is_finished
        if owed and self._call.kind == "completions":
            text = choice.get("text") or ""
            is_all = choice.get("finish_reason") is not None or bool(text)
            choice["text"] = owed.next(self._ids, is_all=is_all) + text
        text = self._take_choice(choice)
        if self._obstacle:
            raise Diverged(self._obstacle)
        return data if text or self._is_finished is not was_finished else None

    def _generated(self, data: dict[str, Any]) -> dict[str, Any]:
        self._take_generated(data)
        meta = data.get("meta_info") or {}
        if self._leg.kept:
            meta["prompt_tokens"], meta["completion_tokens"] = len(self._prompt), len(self._ids)
            if isinstance(why := meta.get("finish_reason"), dict) and "length" in why:
                why["length"] = len(self._ids)
            if meta.get("cached_tokens") is not None:
                meta["cached_tokens"] = min(meta["cached_tokens"], len(self._prompt))
        meta["id"] = self._head.get("id")
        return data | {"text": self._text, "output_ids": list(self._ids), "meta_info": meta}

    def _whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer, from that of the current leg."""
        if not self._leg.kept:
            return usage
        prompt, details = len(self._prompt), usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], prompt)
        return usage | _counted(prompt, self._leg.kept + int(usage.get("completion_tokens") or 0))

    def _named(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An event of ours, with what all events of the stream have in common."""
        kind = "chat.completion.chunk" if self._call.kind == "chat" else "text_completion"
        return {**self._head, "object": kind, "model": self._call.body.get("model"), "choices": choices}


def _from_tokens(call: Call, tokens: list[int], kept: int) -> Call:
    """`call`, continued behind the first `kept` tokens of its answer, which are the last of `tokens`.

    Raises `Diverged` if it may have no more.
    """
    kind, sampling = call.kind, call.sampling
    limits = {name: sampling[name] - kept for name in OUTPUT_LIMITS[kind] if sampling.get(name) is not None}
    if any(left <= 0 for left in limits.values()):
        raise Diverged("all its tokens were sent, but not how it ended")
    shifted: dict[str, Any] = dict(limits)
    if sampling.get(OUTPUT_FLOOR[kind]):
        shifted[OUTPUT_FLOOR[kind]] = max(0, sampling[OUTPUT_FLOOR[kind]] - kept)
    if penalty := sampling.get(FREQUENCY):
        bias = {str(token): value for token, value in (sampling.get("logit_bias") or {}).items()}
        for token, times in Counter(tokens[-kept:]).items():
            bias[str(token)] = bias.get(str(token), 0.0) - penalty * times
        shifted["logit_bias"] = bias
    if kind == "generate":
        body = {name: value for name, value in call.body.items() if name != "text"}
        body |= {"input_ids": tokens, "sampling_params": sampling | shifted}
    else:
        body = call.body | shifted | {"prompt" if kind == "completions" else "input_ids": tokens}
    return replace(
        call,
        body=body,
        encoded=encode_body(kind, body, call.can_go_on),
        prompts=(tokens,),
        max_output_tokens=min(limits.values(), default=0),
    )


def _says(data: dict[str, Any]) -> bool:
    return any((choice.get("delta") or {}).get("content") for choice in data.get("choices") or ())


def _written(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + END_OF_EVENT


def _counted(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
