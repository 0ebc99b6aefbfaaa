"""docs/errors.md lists every error that the gateway answers by itself, and no other."""

import re
from pathlib import Path

from router.suspects import ENDED, KNOWN, QUARANTINED
from router.throttling import BAD_LIMITS, NO_THROTTLE
from sglang_fair.common.deadlines import EXPIRED_CODE
from sglang_fair.core.throttle import APP, USER

ROOT = Path(__file__).parents[2]
DECIDED_ELSEWHERE = {EXPIRED_CODE, APP, USER, BAD_LIMITS, NO_THROTTLE, ENDED, KNOWN, QUARANTINED}
"""Codes that are constants of those who decide on them; the gateway passes them on."""
CODE = re.compile(r'code(?:=|": )"(\w+)"|_refused\(\s*"[^"]*",\s*"(\w+)"|_missing\("(\w+)"')


def test_the_page_has_the_codes_of_the_sources() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "router").rglob("*.py"))
    codes = {code for found in CODE.findall(sources) for code in found if code}
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.M)) == codes | DECIDED_ELSEWHERE
