"""The lines of a batch's file, as a reader judges them."""

import msgspec
import pytest

from router.batches.lines import Reader
from router.batches.model import StoredBatch


def reader(**more: object) -> Reader:
    batch = StoredBatch(
        id="b", client="gold", endpoint="/v1/completions", input_file_id="f", completion_window="1h",
        created_at=1, expires_at=2, models=("small", "large"), vocabularies={"small": 100, "large": 200}, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return Reader(batch, 10, 1000)


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
    made = reader()
    lines = [
        line("1", model="small", **{field: [99]}), line("2", model="small", **{field: [100]}),
        line("3", model="large:adapter", **{field: [199]}), line("4", model="large", **{field: [200]}),
        line("5", **{field: [100]}), line("6", model="default", **{field: [99]}),
    ]  # fmt: skip
    items = [made.read(one) for one in lines]
    assert [item is not None for item in items] == [True, False, True, False, False, True]
    found = [(issue.line, issue.code, issue.param) for issue in made.issues()]
    assert found == [(number, "invalid_value", f"body.{field}") for number in (2, 4, 5)]
