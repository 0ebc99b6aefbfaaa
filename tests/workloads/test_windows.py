"""The VTC papers' measures on runs whose answers are known by hand, and what must hold on any run."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.core.cost import Cost, Linear, Profiled, Quadratic, Tiered
from sglang_fair.core.fairness import Curve
from tests.support.records import request as record
from workloads.records import End, Manifest, RequestRecord, Run
from workloads.windows import DifferenceTable, Windows, regular_times, sample_times, throughput

COSTS: tuple[Cost, ...] = (Linear(), Profiled(), Quadratic(context=True), Tiered(12))


def request(client: str, sent: float, *tokens_at: float, prompt: int | None = 10, **changes) -> RequestRecord:
    """A request whose output tokens come one by one at `tokens_at`; 4 of its prompt's tokens were cached."""
    changes = {"output_tokens": len(tokens_at), "max_output_tokens": max(1, len(tokens_at)), **changes}
    return record(
        client,
        sent,
        tokens_at[0] if tokens_at else None,
        tokens_at[-1] if tokens_at else 20.0,
        prompt_tokens=prompt,
        cached_tokens=None if prompt is None else 4,
        token_times=[(at, count) for count, at in enumerate(tokens_at, start=1)],
        **{"outcome": "ok" if tokens_at else "cancelled", **changes},
    )


def run_of(*requests: RequestRecord, clients: tuple[str, ...] = (), end_s: float = 20.0, **manifest) -> Run:
    run = Run(Manifest("w", "s", {name: {} for name in clients}, 20.0, **manifest))
    for row in (*requests, End(end_s)):
        run.add(row)
    return run


ONE = request("a", 0.0, 1.0, 2.0, 3.0)


# ---- when to look


def test_the_sample_times_of_the_papers_tables():
    times = sample_times(600.0)
    assert len(times) == 19
    assert (times[0], times[-1]) == (58.5, 571.5)
    assert {round(later - earlier, 9) for earlier, later in pairwise(times)} == {28.5}


def test_regular_times_have_their_windows_inside_the_run():
    assert regular_times(20.0, step_s=5.0, window_s=6.0) == (3.0, 8.0, 13.0)
    assert regular_times(20.0, step_s=5.0, since_s=4.0, window_s=6.0) == (7.0, 12.0, 17.0)
    assert regular_times(20.0, window_s=30.0) == ()
    assert regular_times(60.0) == (30.0,)


# ---- service


def test_the_artifact_spreads_a_requests_cost_from_first_token_to_end():
    windows = Windows(run_of(replace(ONE, t_done_s=5.0)), method="spread", window_s=2.0)
    assert windows.service_rate([2.0, 4.0, 5.0]) == {"a": (4.0, 4.0, 2.0)}


def test_cached_tokens_are_free_in_actual_service():
    assert Windows(run_of(ONE), side="actual").service(0.0, 20.0) == {"a": 12.0}
    quadratic = Quadratic()
    actual = Windows(run_of(ONE), cost=quadratic, side="actual").service(0.0, 20.0)
    assert actual == {"a": pytest.approx(quadratic(6, 3, 4))}


def test_service_is_divided_by_the_clients_weight():
    windows = Windows(run_of(ONE, request("b", 0.0, 1.0)), weights={"a": 4.0})
    assert windows.service(0.0, 20.0) == {"a": 4.0, "b": 12.0}
    assert windows.requested(0.0, 20.0) == {"a": 4.0, "b": 12.0}


# ---- what is not known


def test_an_answer_that_does_not_tell_its_prompt_makes_its_clients_service_unknown():
    windows = Windows(run_of(ONE, request("a", 0.0, 2.0, prompt=None), request("b", 0.0, 1.0)))
    assert windows.service(0.0, 20.0) == {"a": None, "b": 12.0}
    assert windows.service_rate([5.0])["a"] == (None,)
    assert windows.accumulated_difference([5.0]) == (None,)
    assert throughput(run_of(request("a", 0.0, 2.0, prompt=None))) is None


def test_an_answer_that_broke_off_without_telling_is_left_out_and_counted():
    broken = request("a", 0.0, 2.0, prompt=None, outcome="failed")
    windows = Windows(run_of(ONE, broken))
    assert windows.service(0.0, 20.0) == {"a": 16.0}
    assert windows.left_out == {"a": 1}


def test_what_a_failed_request_received_counts_by_events_and_not_as_the_artifact_has_it():
    broken = run_of(replace(ONE, outcome="failed"))
    assert Windows(broken).service(0.0, 20.0) == {"a": 16.0}
    assert Windows(broken, method="spread").service(0.0, 20.0) == {"a": 0.0}
    assert Windows(broken).requested(0.0, 20.0) == {"a": 0.0}
    assert Windows(broken).response_time([5.0]) == {"a": (None,)}


# ---- demand and response


def test_a_request_that_the_end_cut_off_asks_for_its_most_output():
    waiting = request("a", 4.0, max_output_tokens=30)
    assert Windows(run_of(waiting)).requested(0.0, 20.0) == {"a": 70.0}
    assert Windows(run_of(waiting)).service(0.0, 20.0) == {"a": 0.0}
    unknown = Windows(run_of(ONE, replace(waiting, prompt_tokens=None)), window_s=4.0)
    assert unknown.requested_rate([2.0, 6.0]) == {"a": (4.0, None)}


def test_response_time_by_when_a_request_was_sent():
    windows = Windows(run_of(ONE, request("a", 1.0, 5.0), request("a", 3.0)), window_s=4.0)
    assert windows.response_time([2.0, 6.0]) == {"a": ((1.0 + 4.0) / 2, None)}


# ---- differences


def test_the_accumulated_difference_is_the_largest_between_two_clients():
    run = run_of(ONE, request("b", 0.0, 1.0), request("c", 0.0, 4.0))
    windows = Windows(run)
    assert windows.accumulated_difference([0.5, 1.5, 10.0]) == (0.0, 12.0, 4.0)
    assert windows.accumulated_difference([10.0], since_s=2.0) == (12.0,)
    assert Windows(run_of(ONE)).accumulated_difference([1.0]) == (None,)


def test_the_service_difference_counts_what_was_asked_for_and_missed():
    # a gets 24 units; b gets 12 and asks for 12 more, c gets 12 and asks for no more.
    got_all = (request("a", 0.0, 1.0), request("a", 0.0, 1.0))
    run = run_of(*got_all, request("b", 0.0, 1.0), request("b", 0.0), request("c", 0.0, 1.0))
    windows = Windows(run, window_s=4.0)
    assert windows.service_difference([2.0]) == (12 / 4,)


def test_the_table_is_of_the_samples():
    assert DifferenceTable.of([1.0, 4.0, 7.0]) == DifferenceTable(7.0, 4.0, 6.0)
    assert DifferenceTable.of([1.0, None]) == DifferenceTable(None, None, None)
    assert DifferenceTable.of([]) == DifferenceTable(None, None, None)
    run = run_of(ONE, request("b", 0.0, 1.0), request("b", 4.0))
    windows = Windows(run, window_s=4.0)
    values = windows.service_difference([2.0, 6.0])
    assert windows.difference_table([2.0, 6.0]) == DifferenceTable(
        max(values), fmean(values), pvariance(values)
    )


def test_throughput_is_all_tokens_over_the_whole_time():
    assert throughput(run_of(ONE, request("b", 0.0, 1.0), end_s=4.0)) == (13 + 11) / 4
    cut = run_of(ONE)
    cut.end = None
    assert throughput(cut) is None


# ---- on any run


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A few clients with a few requests each; some end badly, some never begin."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    requests = []
    for _ in range(draw(st.integers(0, 12))):
        sent = rng.uniform(0, 15)
        times = sorted(sent + rng.expovariate(0.5) for _ in range(rng.randrange(9)))
        made = request(rng.choice("abc"), sent, *times, prompt=rng.randint(4, 20))
        requests.append(replace(made, t_done_s=made.t_done_s + rng.random()))
    return run_of(*requests, clients=("a", "b", "c"), end_s=100.0)


METHODS = st.sampled_from(["events", "spread"])


@given(runs(), st.sampled_from(COSTS), METHODS, st.floats(0.5, 40.0))
def test_windows_side_by_side_add_up_to_all_there_is(run, cost, method, window_s):
    windows = Windows(run, cost=cost, method=method, window_s=window_s)
    times = [window_s * (k + 0.5) for k in range(int(100 / window_s) + 1)]
    for name, rates in windows.service_rate(times).items():
        total = sum(
            cost(r.prompt_tokens, r.output_tokens) for r in run.requests if r.client == name and r.token_times
        )
        assert sum(rates) * window_s == pytest.approx(total)
        assert min(rates) >= -1e-9
    for name, rates in windows.requested_rate(times).items():
        asked = [
            cost(r.prompt_tokens, r.output_tokens or r.max_output_tokens)
            for r in run.requests
            if r.client == name
        ]
        assert sum(rates) * window_s == pytest.approx(sum(asked))


@given(runs(), st.lists(st.floats(0, 40), min_size=1, max_size=5))
def test_by_events_it_is_the_curve_of_the_events(run, times):
    curves = {}
    for name in "abc":
        mine = [record for record in run.requests if record.client == name and record.token_times]
        prompts = [(record.t_first_token_s, float(record.prompt_tokens)) for record in mine]
        tokens = [(at, 2.0) for record in mine for at, _ in record.token_times]
        curves[name] = Curve.of([*prompts, *tokens])
    rates = Windows(run, window_s=6.0).service_rate(times)
    for name, curve in curves.items():
        assert rates[name] == pytest.approx([curve.between(at - 3.0, at + 3.0) / 6.0 for at in times])


@given(st.integers(1, 30), st.integers(2, 40), st.sampled_from(COSTS), st.integers(1, 4))
def test_the_methods_agree_for_a_steady_stream(prompt, output, cost, side_by_side):
    """Equal requests one after the other: at any time they differ by less than what is under way costs."""
    requests = []
    for stream in range(side_by_side):
        for k in range(20):
            begin = 0.1 + 0.37 * stream + output * k
            requests.append(request("a", begin, *[begin + j for j in range(output)], prompt=prompt))
    run = run_of(*requests)
    times = [7.3 * k for k in range(1, 60)]
    exact, spread = (Windows(run, cost=cost, method=m).accumulated(times)["a"] for m in ("events", "spread"))
    under_way = side_by_side * cost(prompt, output)
    assert all(abs(one - other) <= under_way + 1e-6 for one, other in zip(exact, spread, strict=True))
