"""docs/settings.md says what the table says."""

from pathlib import Path

from sglang_fair.settings import reference

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    written = (ROOT / reference.PAGE).read_text(encoding="utf-8")
    assert written == reference.page(), "run: python -m sglang_fair.settings.reference --write"
