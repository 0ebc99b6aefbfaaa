"""The lines of a batch's files: what a request is, what is wrong with it, and how a result is written.

Every line of an input file is one object, as OpenAI has it:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": …}}

Blank lines count as lines and are passed over. Pure.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from router.batches.model import MOST_NUMBER, BatchIssue, Item, StoredBatch
from sglang_fair.common.fields import WIDEST, Facts, Wrong, judge

MOST_ISSUES = 1000
"""Of one batch; a last one says how many more lines are wrong."""

MOST_CUSTOM_ID = 512
"""Characters."""

KEPT_CUSTOM_ID = 40
"""A longer one is found again by its digest, so that few bytes are kept of each."""

EXPIRED = "batch_expired", "This request could not be executed before the completion window expired."
CANCELLED = "batch_cancelled", "This request was not executed because its batch was cancelled."


class _Refused(Exception):
    """What is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.code, self.message, self.param = code, message, param


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_LINES = msgspec.json.Decoder(_Line)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


class Reader:
    """Reads the lines of one batch. What is wrong is in `issues`; `items` counts what is right."""

    def __init__(
        self, batch: StoredBatch, most_items: int, most_line_bytes: int, facts: Facts = WIDEST
    ) -> None:
        """`facts` is what the operator allows clients to ask."""
        self._endpoint = batch.endpoint
        self._models = batch.models
        self._allowed = batch.allowed
        self._facts = {
            model: facts._replace(vocabulary=batch.vocabularies.get(model)) for model in batch.models
        }
        self._model = lru_cache(64)(self._model_of)
        self._most_items = min(most_items, MOST_NUMBER - 1)
        self._most_line_bytes = most_line_bytes
        self._seen: set[str | bytes] = set()
        self._line = 0
        self.wrong = 0
        """Lines."""
        self._issues: list[BatchIssue] = []
        self.items = 0

    @property
    def is_too_long(self) -> bool:
        """It need not be read any further."""
        return self.items > self._most_items

    def read(self, line: bytes) -> Item | None:
        """The next line, without its end, as an item. None if it is blank or wrong."""
        self._line += 1
        if not line.strip():
            return None
        try:
            found, model = self._judged(line)
        except _Refused as refused:
            self.wrong += 1
            if len(self._issues) < MOST_ISSUES:
                self._issues.append(BatchIssue(refused.code, refused.message, self._line, refused.param))
            return None
        self.items += 1
        return Item(self.items, found.custom_id, model, bytes(found.body))

    def issues(self) -> tuple[BatchIssue, ...]:
        """What is wrong with all that was read, by line."""
        if self.is_too_long:
            return (BatchIssue("too_many_requests", f"the file has more than {self._most_items} requests"),)
        found = tuple(self._issues)
        if self.wrong > len(found):
            found += (BatchIssue("more_errors", f"{self.wrong - len(found)} more lines are wrong"),)
        if not found and not self.items:
            return (BatchIssue("empty_file", "the file has no requests"),)
        return found

    def _judged(self, line: bytes) -> tuple[_Line, str]:
        """With the served model that is meant. Raises `_Refused`."""
        if len(line) > self._most_line_bytes:
            raise _Refused("line_too_long", f"the line has more than {self._most_line_bytes} bytes")
        try:
            found = _LINES.decode(line)
            body = msgspec.json.decode(found.body)
            if not isinstance(body, dict):
                raise ValueError(f"it is {type(body).__name__}")
        except _UNREADABLE as error:
            raise _unreadable(line, error) from None
        if not 1 <= len(found.custom_id) <= MOST_CUSTOM_ID:
            message = f"custom_id must have 1 to {MOST_CUSTOM_ID} characters"
            raise _Refused("invalid_custom_id", message, "custom_id")
        if found.method != "POST":
            raise _Refused("invalid_method", f"method must be POST, not {found.method!r:.40}", "method")
        if found.url != self._endpoint:
            raise _Refused("mismatched_url", f"url must be {self._endpoint}, not {found.url!r:.80}", "url")
        if body.get("stream"):
            raise _Refused("stream_not_supported", "a request of a batch cannot be streamed", "body.stream")
        asked = body.get("model", "default")
        model = self._model(asked) if asked is None or isinstance(asked, str) else None
        if model is None:
            raise _Refused("model_not_found", f"the model {asked!r:.200} does not exist here", "body.model")
        try:
            judge(self._endpoint, body, self._facts[model])
        except Wrong as wrong:
            raise _Refused("invalid_value", str(wrong), f"body.{wrong.field}") from None
        known: str | bytes = found.custom_id
        if len(found.custom_id) > KEPT_CUSTOM_ID:
            known = hashlib.blake2b(found.custom_id.encode(), digest_size=16).digest()
        if known in self._seen:
            message = f"the custom_id {found.custom_id!r:.80} stands twice"
            raise _Refused("duplicate_custom_id", message, "custom_id")
        self._seen.add(known)
        return found, model

    def _model_of(self, asked: str | None) -> str | None:
        """The served model that is meant, or an adapter of which; None: none."""
        if asked is None or asked == "default":
            asked = self._models[0]
        if self._allowed is not None and asked not in self._allowed:
            return None
        owners = [model for model in self._models if asked == model or asked.startswith(f"{model}:")]
        return max(owners, key=len, default=None)


def _unreadable(line: bytes, error: Exception) -> _Refused:
    """Whether it is no JSON, or not the JSON of a request."""
    try:
        whole = msgspec.json.decode(line)
    except _UNREADABLE:
        whole = None
    if not isinstance(whole, dict):
        return _Refused("invalid_json_line", "the line is no JSON object")
    for field in ("custom_id", "method", "url", "body"):
        if field not in whole:
            return _Refused(f"missing_{field}", f"{field} is missing", field)
        if field != "body" and not isinstance(whole[field], str):
            return _Refused(f"invalid_{field}", f"{field} must be a text", field)
    return _Refused("invalid_body", f"body must be an object: {error}", "body")


def split(pieces: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """The lines in a file that is read piece by piece. Of one that is longer than `most_bytes` only a beginning comes,
    of so many bytes and one more."""
    kept = b""
    for piece in pieces:
        first, *more = piece.split(b"\n")
        kept += first[: most_bytes + 1 - len(kept)]
        for line in more:
            yield kept.removesuffix(b"\r")
            kept = line[: most_bytes + 1]
    if kept:
        yield kept.removesuffix(b"\r")


def result_id(batch: str, number: int) -> str:
    """The name of a result, the same whoever writes it."""
    return f"batch_req_{batch.removeprefix('batch_')}_{number}"


def answered(batch: str, item: Item, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an item that was answered, also of one that was refused. `body` is JSON; ValueError if not."""
    try:
        found, raw = msgspec.json.decode(body), msgspec.Raw(body)
    except _UNREADABLE as error:
        raise ValueError(f"the answer is no JSON: {error}") from None
    if b"\n" in body or b"\r" in body:
        raw = msgspec.Raw(msgspec.json.encode(found))
    return _line(batch, item, {"status_code": status, "request_id": request_id, "body": raw}, None)


def unanswered(batch: str, item: Item, code: str, message: str) -> bytes:
    """The line of an item that has no answer."""
    return _line(batch, item, None, {"code": code, "message": message})


def _line(batch: str, item: Item, response: object, error: object) -> bytes:
    name = result_id(batch, item.number)
    return msgspec.json.encode(
        {"id": name, "custom_id": item.custom_id, "response": response, "error": error}
    )
