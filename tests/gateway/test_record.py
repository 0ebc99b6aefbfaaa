"""What a gateway remembers of its requests: their names, which anybody may choose, and what is forgotten."""

import json
import logging
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.events import Place
from router.gateway.logs import JsonLines, request_ended
from router.gateway.record import Exchange, RequestRecord, own_name
from sglang_fair.common.record import MOST_NAME


def served(record: RequestRecord, name: str, client: str, attempts: int = 1) -> Exchange:
    exchange = record.came("chat", name)
    exchange.client = client
    record.enter(exchange)
    for number in range(attempts):
        one = record.tried(exchange, f"{name}-{client}-{number}-asked")
        record.placed(exchange, one, Place(f"{name}-{client}-{number}", "r0", "http://r0", 3), itself=False)
        one.outcome = "ok"
    record.ended(exchange, "ok")
    return exchange


@given(st.none() | st.text())
def test_a_name_can_stand_in_a_header_and_in_a_log(given: str | None) -> None:
    name = own_name(given)
    assert 0 < len(name) <= MOST_NAME
    assert name.isascii()
    assert name.isprintable()
    assert " " not in name
    is_good = bool(given) and given == name
    assert is_good or len(name) == 32


def test_what_is_shown_of_one_that_went_out_twice() -> None:
    record = RequestRecord()
    exchange = served(record, "mine", "a", attempts=2)
    for name in ("mine", "mine-a-0", "mine-a-1"):
        assert record.find(name, "a") == record.latest(None, 9) == [exchange]
    shown = exchange.shown(exchange.ended_s or 0.0)
    assert (shown["retries"], shown["outcome"], len(shown["tries"])) == (1, "ok", 2)
    waits = record.came("chat", "waits")
    row = waits.row(waits.came_s + 7)
    assert (row["id"], row["state"], row["waited_s"]) == ("waits", "waiting", 7)


def test_of_those_who_may_not_ask_nothing_is_remembered() -> None:
    """Ten thousand invented keys push nobody out."""
    record = RequestRecord(most=10)
    own = served(record, "own", "a")
    for _ in range(10_000):
        record.ended(record.came("chat", "own"), "refused")
    assert record.find("own") == [own]
    assert len(record) == 1


def test_json_lines_have_one_object_a_request() -> None:
    lines: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonLines().format(record)))

    logger, handler = logging.getLogger("gateway.requests"), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        record = RequestRecord(log=request_ended)
        served(record, "a-name", "client\nwith a line break")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    [line] = lines
    assert line["request"] == "a-name"
    assert line["client"] == "client\nwith a line break"
    assert (line["outcome"], line["replica"], line["id"]) == ("ok", "r0", line["id"])
    assert {"model", "reason", "router_wait_s", "replica_wait_s", "input_tokens", "cached_tokens"} <= set(
        line
    )
