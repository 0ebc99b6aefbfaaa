"""The lines of a batch's file, as a reader judges them, and what becomes of a batch by them."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.batches.folder import open_blobs, open_store
from router.batches.lines import KEPT_CUSTOM_ID, Reader, split
from router.batches.model import StoredBatch
from router.feeder import intake

LONG = "x" * (KEPT_CUSTOM_ID + 1)


def batch(**more: Any) -> StoredBatch:
    return StoredBatch(
        id="b", client="gold", endpoint="/v1/completions", input_file_id="f", completion_window="1h",
        created_at=1, expires_at=2, models=("small", "large"), vocabularies={"small": 100, "large": 200}, **more,
    )  # fmt: skip


def line(custom_id: str, **body: object) -> bytes:
    whole = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "a", **body},
    }
    return msgspec.json.encode(whole)


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
def test_ids_beyond_the_vocabulary_of_the_line_s_model_are_wrong(field: str) -> None:
    made = Reader(batch(), 10, 1000)
    lines = [
        line("1", model="small", **{field: [99]}), line("2", model="small", **{field: [100]}),
        line("3", model="large:adapter", **{field: [199]}), line("4", model="large", **{field: [200]}),
        line("5", **{field: [100]}), line("6", model="default", **{field: [99]}),
    ]  # fmt: skip
    items = [made.read(one) for one in lines]
    assert [item is not None for item in items] == [True, False, True, False, False, True]
    found = [(issue.line, issue.code, issue.param) for issue in made.issues()]
    assert found == [(number, "invalid_value", f"body.{field}") for number in (2, 4, 5)]


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"{}", "missing_custom_id", "custom_id"),
        (line("a").replace(b'"a"', b"1", 1), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line("known"), "duplicate_custom_id", "custom_id"),
        (line(LONG), "duplicate_custom_id", "custom_id"),
        (line("a").replace(b"POST", b"GET"), "invalid_method", "method"),
        (line("a").replace(b"/v1/completions", b"/v1/embeddings"), "mismatched_url", "url"),
        (line("a").replace(b'{"prompt":"a"}', b"[]"), "invalid_body", "body"),
        (line("a", stream=True), "stream_not_supported", "body.stream"),
        (line("a", model="nobody's"), "model_not_found", "body.model"),
        (line("a", model=["small"]), "model_not_found", "body.model"),
        (line("a", prompt="x" * 1000), "line_too_long", None),
        (line("a", temperature="hot"), "invalid_value", "body.temperature"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(wrong: bytes, code: str, param: str | None) -> None:
    made = Reader(batch(), 10, 1000)
    assert [made.read(one) is not None for one in (line("known"), line(LONG), b" ")] == [True, True, False]
    assert made.read(wrong) is None
    assert [(issue.code, issue.line, issue.param) for issue in made.issues()] == [(code, 4, param)]


def test_a_client_has_the_models_that_it_may_ask_for() -> None:
    made = Reader(batch(allowed=("large", "small:x")), 10, 1000)
    asked = ["large", "small:x", "small", None, "large:y"]
    assert [made.read(line(str(one), model=one)) is not None for one in asked] == [
        True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_are_split_wherever_pieces_end(size: int) -> None:
    content = b"a\n\r\nlong line\r\nlast"
    pieces = (content[start : start + size] for start in range(0, len(content), size))
    assert [*split(pieces, 5)] == [b"a", b"", b"long l", b"last"]


@pytest.mark.parametrize(
    ("lines", "status", "codes"),
    [
        ([line(str(number)) for number in range(5)], "in_progress", []),
        ([line("a"), b"", line("b", prompt=[99])], "in_progress", []),
        ([line("a"), line("a"), b"{"], "failed", ["duplicate_custom_id", "invalid_json_line"]),
        ([b"", b""], "failed", ["empty_file"]),
        ([line(str(number)) for number in range(9)], "failed", ["too_many_requests"]),
        (None, "failed", ["file_unreadable"]),
    ],
)  # fmt: skip
def test_all_lines_are_accepted_or_none(
    lines: list[bytes] | None, status: str, codes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "COMMIT_ITEMS", 2)
    store, blobs = open_store(str(tmp_path)), open_blobs(str(tmp_path))
    if lines is not None:
        writing = blobs.create("f")
        writing.write(b"\n".join(lines))
        writing.keep()
    store.renew("feeder", time.time() + 9)
    store.add_batch(batch())
    made = store.claim("feeder", ())
    assert made is not None
    for _ in intake.validation(store, blobs, made, "feeder", Reader(made, 8, 1000), 1000):
        pass
    [found] = store.batches("gold", after=None, limit=9) or ()
    count = 0 if lines is None or codes else sum(map(bool, lines))
    assert (found.status, found.request_counts.total) == (status, count)
    assert [one.code for one in found.errors.data] == codes if found.errors else not codes
    store.shut()
