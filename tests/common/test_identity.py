"""Who sent a request: every place, the order of places, and names that somebody made up to hurt."""

import hashlib
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_fair.common.identity import (
    ANONYMOUS,
    API_KEY,
    DEFAULT_ORDER,
    HEADER_CLIENT,
    HEADER_EXPECTED_OUTPUT,
    HEADER_UNBLOCKS,
    MAX_NAME_CHARS,
    MOST_ANNOUNCED,
    USER,
    announced,
    bounded,
    identify,
)
from sglang_fair.core.ledger import OTHERS, SYSTEM
from tests.support.budget import examples

HEADERS = [place for place in DEFAULT_ORDER if place not in (API_KEY, USER)]
IDENTITY = settings(max_examples=examples(100))


def test_the_first_place_of_the_order_wins():
    everywhere = {header: f"by-{header}" for header in HEADERS} | {"authorization": "Bearer secret"}
    for place, name in zip(DEFAULT_ORDER[:-2], HEADERS, strict=True):
        assert identify(everywhere, "me") == f"by-{name}"
        assert identify({place: "acme"}) == "acme"
        del everywhere[place]
    assert identify(everywhere, "me").startswith("key:")
    assert identify({}, "me") == "me"
    assert identify(everywhere, "me", order=(USER, API_KEY)) == "me"
    assert identify({HEADER_CLIENT: "liar"}, "liar", order=(API_KEY,)) == ANONYMOUS
    assert identify({"x-own": "acme"}, order=("x-own",)) == "acme"


def test_a_key_is_never_shown():
    name = identify({"authorization": "Bearer sk-secret"})
    assert name == "key:" + hashlib.sha256(b"sk-secret").hexdigest()[:12]
    assert name == identify({"authorization": "bearer   sk-secret "})
    assert name != identify({"authorization": "Bearer sk-other"})
    for no_key in ("", "Bearer", "Bearer ", "Bearer    ", "Basic dXNlcg==", "sk-secret"):
        assert identify({"authorization": no_key}) == ANONYMOUS


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_a_blank_name_is_none_and_space_around_one_makes_no_other(blank):
    assert identify({HEADER_CLIENT: blank}, blank) == ANONYMOUS
    assert identify({HEADER_CLIENT: blank}, "me") == "me"
    assert identify({}, None) == ANONYMOUS
    assert identify({HEADER_CLIENT: f"{blank}acme\t"}) == identify({}, "acme")


@IDENTITY
@given(name=st.text(min_size=1, max_size=400))
@example(name="x" * MAX_NAME_CHARS)
@example(name="x" * (MAX_NAME_CHARS + 1))
@example(name="é" * 100)
@example(name="a\r\nx-fair-client: b")
@example(name="\ud800")
@example(name="\udfff" * 200)
@example(name=SYSTEM)
@example(name=OTHERS)
def test_any_name_becomes_one_that_travels(name):
    """Whatever JSON can carry, lone surrogates included: the answer is short, goes into a header and into
    UTF-8, is not empty, and means the same client when the next process reads it."""
    client = identify({}, name)
    assert 0 < len(client) <= MAX_NAME_CHARS
    assert client not in (SYSTEM, OTHERS), "the accounts of the server"
    assert client.isascii()
    assert client.isprintable()
    assert json.loads(json.dumps(client)) == client
    assert identify({HEADER_CLIENT: client}) == client
    assert bounded(client) == client


@IDENTITY
@given(one=st.text(min_size=1, max_size=300), other=st.text(min_size=1, max_size=300))
@example(one="x" * 200 + "1", other="x" * 200 + "2")
@example(one="é", other="e")
def test_two_names_stay_two_clients(one, other):
    assert (identify({}, one) == identify({}, other)) == (
        (one.strip() or ANONYMOUS) == (other.strip() or ANONYMOUS)
    )


def test_what_a_request_announces_is_read():
    assert announced({}) == {}
    assert announced({HEADER_EXPECTED_OUTPUT: " 250 ", HEADER_UNBLOCKS: "0", "x-other": "3"}) == {
        "expected_output_tokens": 250,
        "unblocks": 0,
    }
    assert announced({HEADER_UNBLOCKS: str(MOST_ANNOUNCED)}) == {"unblocks": MOST_ANNOUNCED}


@IDENTITY
@given(text=st.text(max_size=30))
@example(text=str(MOST_ANNOUNCED + 1))
@example(text="9" * 5000)
@example(text="-1")
@example(text="+3")
@example(text="2.5")
@example(text="1_000")
@example(text="²")
@example(text="٣")
@example(text="nan")
def test_a_bad_announcement_was_not_made(text):
    """Whatever the header says, reading it neither fails nor gives anything but a bounded whole number."""
    found = announced({HEADER_EXPECTED_OUTPUT: text, HEADER_UNBLOCKS: "5"})
    assert found.pop("unblocks") == 5
    for value in found.values():
        assert text.strip().isdecimal()
        assert value == int(text) <= MOST_ANNOUNCED
