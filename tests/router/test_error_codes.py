"""docs/errors.md lists every error that the gateway answers by itself."""

import ast
from pathlib import Path

import pytest

from router import error_codes
from router.error_codes import SOURCES, WORDS, Raised, raised
from router.throttling import BAD_LIMITS, NO_THROTTLE
from sglang_fair.core.throttle import APP, USER

ROOT = Path(__file__).parents[2]
DECIDED_ELSEWHERE = {APP, USER, BAD_LIMITS, NO_THROTTLE}
"""Codes that are constants of those who decide on them; the gateway passes them on."""


def test_the_page_is_current() -> None:
    written = (ROOT / error_codes.PAGE).read_text(encoding="utf-8")
    assert written == error_codes.page(), "run: python -m router.error_codes --write"


def test_every_code_has_words_and_every_word_a_code() -> None:
    codes = {one.code for one in raised()} | DECIDED_ELSEWHERE
    assert codes == set(WORDS)


def test_codes_are_written_where_errors_are_raised() -> None:
    """So that none is missed: what is no literal is one that somebody else decided on, or that a field's rules name."""
    others = set()
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ApiError":
                code = next((word.value for word in node.keywords if word.arg == "code"), None)
                if code is not None and not isinstance(code, ast.Constant):
                    others.add(ast.unparse(code))
    assert others == {"answer.code", "refuse.code", "rule.get('code')", "code"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise ApiError(400, "wrong", code="one")', [Raised(400, "one", "wrong")]),
        ('raise ApiError(409 if late else 400, f"a {b} c", code="one")', [Raised(0, "one", "a … c")]),
        ('return Problem(503, text, code="two")', [Raised(503, "two", "")]),
        ('raise _refused("no", "three")', [Raised(401, "three", "no")]),
        ('Meta(extra_json_schema={"code": "four"})', [Raised(400, "four", "")]),
        ("raise ApiError(400, text)", []),
    ],
)
def test_what_is_read_from_the_sources(source: str, found: list[Raised]) -> None:
    assert list(error_codes._in(ast.parse(source))) == found
