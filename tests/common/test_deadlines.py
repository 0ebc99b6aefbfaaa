"""What clients may ask to be promised, and what becomes of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.common.deadlines import (
    DEFAULT_CLASSES,
    HEADER_CLASS,
    HEADER_SLACK,
    HEADERS_SLO,
    MOST_SLO_S,
    BadDeadline,
    Classes,
    Promise,
    attained,
    make_classes,
    read_class,
    read_slack,
)

CLASSES = Classes()


@pytest.mark.parametrize(
    ("headers", "slo_class", "slo_s"),
    [
        ({}, "interactive", 20.0),
        ({"x-fair-class": "batch-2"}, "batch-2", 3600.0),
        ({"x-fair-class": " batch-1 "}, "batch-1", 60.0),
        ({"x-fair-slo-ms": "1500"}, "interactive", 1.5),
        ({"x-fair-slo-ms": "2.5e3", "x-fair-class": "batch-1"}, "batch-1", 2.5),
        ({"x-sgl-ttft-slo-ms": "250"}, "interactive", 0.25),
        ({"x-llm-d-slo-ttft-ms": "604800000"}, "interactive", MOST_SLO_S),
        ({"x-llm-d-slo-ttft-ms": "1", "x-fair-slo-ms": "2"}, "interactive", 0.002),
    ],
)
def test_what_is_promised(headers: dict[str, str], slo_class: str, slo_s: float) -> None:
    assert CLASSES.promise(headers, 100.0) == Promise(slo_class, slo_s, 100.0 + slo_s)


@pytest.mark.parametrize("header", HEADERS_SLO)
@pytest.mark.parametrize(
    "text",
    ["", " ", "soon", "0", "-1", "-0.0", "nan", "inf", "1_000", "0x10", "\u0661", "604800001", "1e999", "1 2", "5ms",
     "9" * 400],
)  # fmt: skip
def test_a_time_that_cannot_be_is_refused_by_its_header_s_name(header: str, text: str) -> None:
    with pytest.raises(BadDeadline, match=f"^{header} must be a number of milliseconds above 0") as caught:
        CLASSES.promise({header: text}, 0.0)
    assert caught.value.header == header


@pytest.mark.parametrize("text", ["", "Interactive", "batch-3", "interactive,batch-1"])
def test_an_unknown_class_is_refused_and_the_known_ones_are_named(text: str) -> None:
    with pytest.raises(BadDeadline, match=r"^x-fair-class must be one of interactive, batch-1, batch-2$"):
        CLASSES.promise({"x-fair-class": text}, 0.0)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([HEADER_CLASS, *HEADERS_SLO]), st.text(max_size=12)))
def test_whatever_stands_there_a_promise_is_one_that_can_be_kept(headers: dict[str, str]) -> None:
    try:
        promise = CLASSES.promise(headers, 5.0)
    except BadDeadline:
        return
    assert promise.slo_class in DEFAULT_CLASSES
    assert 0 < promise.slo_s <= MOST_SLO_S
    assert promise.due_s == 5.0 + promise.slo_s


@given(
    slo_s=st.floats(0.001, MOST_SLO_S),
    passed_s=st.floats(0, 7200),
    name=st.sampled_from(list(DEFAULT_CLASSES)),
)
def test_a_replica_reads_what_a_gateway_says(slo_s: float, passed_s: float, name: str) -> None:
    headers = Promise(name, slo_s, slo_s).headers(passed_s)
    slack_s = read_slack(headers[HEADER_SLACK])
    assert slack_s is not None
    assert math.isclose(slack_s, slo_s - passed_s, abs_tol=1e-4)
    assert read_class(headers[HEADER_CLASS]) == name


@pytest.mark.slow
@given(st.text(max_size=20))
def test_a_slack_is_a_number_or_nothing(text: str) -> None:
    slack_s = read_slack(text)
    assert slack_s is None or abs(slack_s) <= 2 * MOST_SLO_S
    assert read_class(text) in ("", text)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ({}, "there must be 1 to 32 classes, not 0"),
        ({f"c{number}": 1.0 for number in range(33)}, "not 33"),
        ({"a b": 1.0}, "a class is called by"),
        ({"": 1.0}, "a class is called by"),
        ({"a": 0.0}, "class a: its time must be above 0 and at most a week, not 0.0 s"),
        ({"a": MOST_SLO_S + 1}, "class a"),
        ({"a": math.nan}, "class a"),
    ],
)
def test_classes_that_cannot_be(content: dict[str, float], wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"^--slo-classes: .*{wrong}"):
        make_classes(content, "--slo-classes")


@pytest.mark.parametrize(
    ("first_s", "ended_s", "outcome", "found"),
    [
        (11.9, 30.0, "ok", "met"),
        (12.0, 30.0, "failed", "met"),
        (12.1, 30.0, "ok", "missed"),
        (None, 10.5, "failed", "missed"),
        (None, 10.5, "left", "neither"),
        (None, 13.0, "left", "missed"),
        (None, 13.0, "refused", "neither"),
    ],
)
def test_what_was_attained(first_s: float | None, ended_s: float, outcome: str, found: str) -> None:
    """Of a later call of an interaction, too: its own time counts from its own arrival."""
    for due_s in (12.0, -100.0):
        assert attained(Promise("a", 2.0, due_s), 10.0, first_s, ended_s, outcome) == found


def test_a_stream_that_goes_on_is_due_as_if_it_came_now():
    assert Promise("batch-1", 60.0, 60.0).renewed(500.0) == Promise("batch-1", 60.0, 560.0)
