"""docs/tenants-file.md says what the model of the file says."""

from pathlib import Path

from sglang_fair.tenants import reference

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    written = (ROOT / reference.PAGE).read_text(encoding="utf-8")
    assert written == reference.page(), "run: python -m sglang_fair.tenants.reference --write"
