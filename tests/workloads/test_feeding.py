"""A batch under a session of load, in virtual time: the feeder's own code over the simulated cluster."""

from collections.abc import Sequence

import numpy as np
import pytest

from sglang_fair.settings.table import Feeding as Settings
from workloads.arrivals import GammaArrivals
from workloads.clients import Client, fixed_length_client
from workloads.programs import PackedCodec
from workloads.programs.prose import filler
from workloads.records import Records
from workloads.session import Plan
from workloads.simulation import Site, describe
from workloads.simulation.feeding import BATCH, Fed, Feed, Line

CODEC = PackedCodec()
SITE = Site(target_tpot_ms=None, ignore_eos=False)
LENGTH_S = 30.0


def lines(count: int) -> Sequence[Line]:
    return [Line(bytes(filler(f"line {place}", CODEC, 300)), 40) for place in range(count)]


def client() -> Client:
    return fixed_length_client(
        "chats", input_tokens=200, output_tokens=60, arrivals=GammaArrivals(2.0), codec=CODEC, seed="0"
    )


def fed(feed: Feed | None, length_s: float = LENGTH_S) -> Fed:
    plan = Plan(length_s, sample_s=length_s)
    with Records(None, describe(SITE, [client()], plan)) as records:
        found = Fed(SITE, [client()], plan, records, feed=feed)
        found.run()
    return found


def tpot_ms(one: Fed) -> float:
    """The median of the interactive ones."""
    rows = [row for row in one._records.run.requests if row.outcome == "ok"]
    return float(np.median([1000 * (row.token_times[-1][0] - row.token_times[0][0]) / 59 for row in rows]))


def answered(one: Fed) -> int:
    assert one.feeding is not None
    return len(one.feeding.answered)


def test_each_line_is_answered_once_and_the_rest_is_as_before():
    alone, both = fed(None), fed(Feed(lines(100)))
    assert answered(both) == 100
    assert both.replicas[0].queue.status()["clients"][BATCH]["output_tokens"] == 100 * 40
    sent = [[(row.client, row.t_intended_s) for row in one._records.run.requests] for one in (alone, both)]
    assert sorted(sent[0]) == sorted(sent[1])


def test_no_more_are_in_flight_than_may_be():
    """With one at a time the lines take as long as one after the other does."""
    one, many = fed(Feed(lines(2_000), most_in_flight=1)), fed(Feed(lines(2_000)))
    assert 20 < answered(one) < LENGTH_S / (40 * 0.009)
    assert answered(many) > 5 * answered(one)


def test_tokens_come_in_time_where_the_feeder_keeps_the_pace():
    """Of the interactive requests, too; and what their time leaves is used."""
    alone, free = fed(None), fed(Feed(lines(5_000)))
    paced = fed(Feed(lines(5_000), token_s=0.018))
    assert tpot_ms(free) > 1.5 * tpot_ms(alone)
    assert tpot_ms(alone) < tpot_ms(paced) < 1.25 * 18
    assert answered(paced) > 0.2 * answered(free)


def test_lines_are_sent_within_their_hours():
    found = fed(Feed(lines(5_000), from_s=10.0, until_s=15.0))
    assert found.feeding is not None
    times = [one.t_s for one in found.feeding.answered]
    assert 10.0 < times[0] < 11.5
    assert 15.0 < times[-1] < LENGTH_S


def test_the_feed_has_the_feeders_defaults():
    assert Feed([]).most_in_flight == Settings.batch_in_flight
    assert Feed([]).token_s is Settings.batch_token_ms is None


@pytest.mark.parametrize("token_s", [None, 0.02])
def test_equal_arguments_give_equal_runs(token_s):
    runs = [fed(Feed(lines(300), token_s=token_s), 10.0) for _ in range(2)]
    assert runs[0]._records.run.requests == runs[1]._records.run.requests
