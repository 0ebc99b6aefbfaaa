"""Which requests may come from a page in a browser, and which come from one of another site."""

import pytest

from sglang_fair.common.guard import objection

NAMES = {"gw.example.com"}
HERE = {"host": "127.0.0.1:8000"}
BODY = {"content-length": "2", "content-type": "application/json; charset=utf-8"}


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000", "[::1]:80", "10.1.2.3:9001", "localhost:8000", "gateway:8000", "GW.example.com",
        "gw.example.com.:443", "a.fair.svc.cluster.local:8001", "a.localhost", "",
    ],
)  # fmt: skip
def test_names_that_no_stranger_can_give_are_ours(host: str) -> None:
    assert objection("GET", {"host": host}, NAMES) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example:80", "127.0.0.1.evil.example", "gw.example.com.evil.example", "evil.svc.io", "a.[", "["],
)
def test_other_names_are_not_but_for_who_shows_a_key(host: str) -> None:
    assert "not known by the name" in (objection("GET", {"host": host}, NAMES) or "")
    assert objection("GET", {"host": host}, NAMES, is_known=True) is None


LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(
    ("method", "more", "may"),
    [
        ("POST", {}, True),
        ("POST", {"origin": "http://127.0.0.1:8000"}, True),
        ("POST", {"origin": "http://127.0.0.1:8001"}, False),
        ("POST", {"origin": "http://evil.example"}, False),
        ("POST", {"origin": "null"}, False),
        ("POST", {"origin": "http://["}, False),
        ("POST", {"origin": "null", "sec-fetch-site": "same-origin"}, True),
        ("POST", {"sec-fetch-site": "none"}, True),
        ("POST", LINK, False),
        ("GET", LINK, True),
        ("GET", LINK | {"sec-fetch-dest": "iframe"}, False),
        ("GET", {"sec-fetch-site": "same-site"}, False),
        ("GET", {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:8000"}, False),
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_pages_of_other_sites_may_not_ask(
    method: str, more: dict[str, str], may: bool, is_known: bool
) -> None:
    assert (objection(method, HERE | BODY | more, NAMES, is_known=is_known) is None) is may


def test_a_body_is_of_the_one_type() -> None:
    for more in (
        {"content-length": "2"},
        {"transfer-encoding": "chunked"},
        BODY | {"content-type": "text/plain"},
    ):
        assert "content-type application/json" in (objection("POST", HERE | more, NAMES) or "")
        assert objection("POST", HERE | more, NAMES, content=None) is None
    assert objection("POST", HERE | BODY, NAMES) is None
    assert objection("POST", HERE | {"content-length": "0"}, NAMES) is None
    assert (
        objection("POST", HERE | BODY | {"content-type": "text/plain"}, NAMES, content="text/plain") is None
    )
