"""Traces: what is read, what is refused and where, what stands in, and prompts that share what they should."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.budget import examples
from workloads.programs import Call, Execution, PackedCodec, TextCodec, TokenCodec
from workloads.traces import (
    BLOCK_TOKENS,
    Profile,
    Trace,
    TraceRequest,
    arena,
    day,
    mix,
    mooncake,
    production,
    servegen,
)
from workloads.traces.mooncake import conversation_of
from workloads.traces.servegen import Window, lengths_of

BYTES = TokenCodec(lambda text: list(text.encode()))


def prompt(client, index: int) -> Call:
    ((_, call),) = Execution(client.program(index)).start()
    return call


# ---- replaying


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.sampled_from("abc"), st.integers(1, 300), st.integers(1, 9)),
        min_size=1,
        max_size=12,
    )
)
def test_clients_send_the_traces_requests_at_its_times_and_of_its_lengths(rows):
    trace = Trace.of("t", [TraceRequest(*row) for row in rows])
    clients = trace.clients(BYTES)
    assert [client.name for client in clients] == list(dict.fromkeys(r.client for r in trace.requests))
    for client in clients:
        wanted = [request for request in trace.requests if request.client == client.name]
        times = client.arrival_times(until_s=trace.duration_s)
        assert times == tuple(request.arrival_s for request in wanted)
        calls = [prompt(client, k) for k in range(len(times))]
        assert [(len(call.prompt), call.max_output_tokens) for call in calls] == [
            (request.input_tokens, request.output_tokens) for request in wanted
        ]


def test_prompts_are_the_same_for_the_same_seed_and_else_share_nothing():
    trace = Trace.of("t", [TraceRequest(k, f"c{k % 2}", 500, 5) for k in range(6)])

    def prompts(seed: str) -> list[tuple[int, ...]]:
        return [prompt(client, k).prompt for client in trace.clients(BYTES, seed=seed) for k in range(3)]

    assert prompts("1") == prompts("1")
    assert len({text[:12] for text in prompts("1") + prompts("2")}) == 12


BLOCKS = st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.integers(0, 2)] * n))


def chained(choices: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that stand for all blocks up to theirs."""
    return tuple(int("1" + "".join(map(str, choices[: k + 1])) + "0") for k in range(len(choices)))


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(BLOCKS, st.integers(1, BLOCK_TOKENS)), min_size=2, max_size=5),
    st.sampled_from([BYTES, PackedCodec(), TextCodec()]),
)
def test_prompts_share_exactly_the_leading_blocks_that_are_equal(rows, codec):
    unit = {BYTES: 1, PackedCodec(): 4, TextCodec(): 4}[codec]
    requests = [
        TraceRequest(k, "c", BLOCK_TOKENS * (len(blocks) - 1) + rest, 1, chained(blocks))
        for k, (blocks, rest) in enumerate(rows)
    ]
    (client,) = Trace.of("t", requests).clients(codec)
    prompts = [prompt(client, k).prompt for k in range(len(requests))]
    for k, one in enumerate(requests):
        assert len(prompts[k]) == one.input_tokens * unit
        for j, other in enumerate(requests[:k]):
            equal = next(
                (n for n, (a, b) in enumerate(zip(one.blocks, other.blocks, strict=False)) if a != b),
                min(len(one.blocks), len(other.blocks)),
            )
            shared = min(equal * BLOCK_TOKENS, one.input_tokens, other.input_tokens) * unit
            assert prompts[k][:shared] == prompts[j][:shared]
            beyond = shared + 12 * unit
            if min(len(prompts[k]), len(prompts[j])) >= beyond:
                assert prompts[k][:beyond] != prompts[j][:beyond]


def test_a_part_of_a_trace_begins_at_its_start_and_a_faster_one_keeps_proportions():
    trace = Trace.of("t", [TraceRequest(float(k), "c", 10, 1) for k in range(100)])
    part = trace.between(20.0, 60.0)
    assert [request.arrival_s for request in part.requests] == [float(k) for k in range(40)]
    assert (part.duration_s, part.rate_per_s) == (40.0, 1.0)
    faster = part.at_rate(4.0)
    assert faster.rate_per_s == pytest.approx(4.0)
    assert [request.arrival_s for request in faster.requests] == [k / 4 for k in range(40)]
    with pytest.raises(ValueError, match="no request"):
        trace.between(99.5, 100.0)
    for start_s, until_s in ((-1.0, 5.0), (5.0, 5.0)):
        with pytest.raises(ValueError, match="a part goes"):
            trace.between(start_s, until_s)
    with pytest.raises(ValueError, match="positive number"):
        trace.at_rate(0.0)


# ---- the arena


GOOD = '{"arrival_s": 0.5, "client": "a", "input_tokens": 3, "output_tokens": 2}'


ASKED = '"input_tokens": 1, "output_tokens": 1'
BLOCKED = '"input_length": 600, "output_length": 1'


@pytest.mark.parametrize(
    ("reads", "line", "message"),
    [
        (arena, "{", r"t\.jsonl:2: "),
        (arena, "[1]", r"t\.jsonl:2: Expected `object`"),
        (arena, f'{{"arrival_s": 1, "client": 3, {ASKED}}}', r":2: .*\$\.client"),
        (arena, f'{{"arrival_s": -1, "client": "a", {ASKED}}}', ":2: a request must"),
        (arena, f'{{"arrival_s": NaN, "client": "a", {ASKED}}}', ":2: JSON is malformed"),
        (arena, GOOD.replace("3", "1.5"), r":2: .*\$\.input_tokens"),
        (arena, GOOD.replace("3", "0"), ":2: lengths must"),
        (arena, GOOD.replace(', "output_tokens": 2', ""), ":2: .*`output_tokens`"),
        (mooncake, f'{{"timestamp": 0, {BLOCKED}, "hash_ids": [1]}}', ":1: 1 blocks cannot"),
        (mooncake, f'{{"timestamp": 0, {BLOCKED}}}', r":1: .*hash_ids"),
        (mooncake, f'{{"timestamp": 0, {BLOCKED}, "hash_ids": [1, true]}}', r":1: .*hash_ids"),
        (mooncake, f'{{{BLOCKED}, "hash_ids": [1, 2]}}', ":1: .*`timestamp`"),
        (arena, None, "no request"),
    ],
)
def test_a_bad_line_is_named(tmp_path, reads, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text("\n" if line is None else line if reads is mooncake else f"{GOOD}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        reads(path)


def test_the_stand_in_has_the_papers_statistics():
    """VTC Figures 11 and 20; the artifact's file has 1,500 requests, the paper's text 2,100."""
    trace = arena()
    sent = Counter(request.client for request in trace.requests)
    assert len(sent) == pytest.approx(27, abs=2)
    top = sum(count for _, count in sent.most_common(3)) / len(trace.requests)
    assert 0.35 < top < 0.6
    inputs = [request.input_tokens for request in trace.requests]
    outputs = [request.output_tokens for request in trace.requests]
    assert mean(inputs) == pytest.approx(136, rel=0.1)
    assert mean(outputs) == pytest.approx(256, rel=0.1)
    assert (min(inputs), min(outputs)) >= (2, 2)
    assert (max(inputs), max(outputs)) <= (1021, 977)
    assert trace.rate_per_s == pytest.approx(3.5, rel=0.06)
    assert trace == arena(seed="0") != arena(seed="1")


# ---- Mooncake


@pytest.fixture(scope="module")
def stand_in() -> Trace:
    return mooncake()


@pytest.mark.slow
def test_conversations_belong_to_one_client_each_and_clients_are_skewed(stand_in):
    owners: dict[tuple[int, ...], set[str]] = {}
    for request in stand_in.requests:
        owners.setdefault(conversation_of(request), set()).add(request.client)
    assert {len(clients) for clients in owners.values()} == {1}
    held = Counter(next(iter(clients)) for clients in owners.values())
    assert held["mooncake-1"] / held["mooncake-2"] == pytest.approx(2.0, rel=0.15)
    assert len(held) > 95


@pytest.mark.slow
def test_the_stand_in_is_like_mooncake(stand_in):
    """The file's averages: 12,035 and 343 tokens, 37 % seen before, 3.4 requests a second."""
    assert stand_in.rate_per_s == pytest.approx(3.4, rel=0.05)
    inputs = [request.input_tokens for request in stand_in.requests]
    assert mean(inputs) == pytest.approx(12_035, rel=0.08)
    assert median(inputs) == pytest.approx(6_909, rel=0.15)
    assert mean(request.output_tokens for request in stand_in.requests) == pytest.approx(343, rel=0.05)
    seen: set[int] = set()
    shared = 0
    for request in stand_in.requests:
        known = next((k for k, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        shared += min(known * BLOCK_TOKENS, request.input_tokens)
        seen.update(request.blocks)
    assert shared / sum(inputs) == pytest.approx(0.374, abs=0.05)
    assert stand_in.between(0.0, 120.0).rate_per_s == pytest.approx(3.4, rel=0.15), "in the midst of it"
    assert stand_in == mooncake(seed="0") != mooncake(seed="1")


def test_mooncakes_lines_are_read(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 500 * k, "input_length": 600, "output_length": 9, "hash_ids": [7, k]} for k in range(2)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = [
        (one.arrival_s, one.input_tokens, one.output_tokens, one.blocks) for one in mooncake(path).requests
    ]
    assert found == [(0.0, 600, 9, (7, 0)), (0.5, 600, 9, (7, 1))]


# ---- ServeGen


@pytest.mark.parametrize(
    ("family", "shape"), [("Gamma", 0.15), ("Gamma", 3.0), ("Weibull", 0.4), ("Weibull", 2.0)]
)
def test_gaps_average_to_one_and_a_start_amid_one_is_fair(family, shape):
    window, rng = Window(1.0, family, shape), Random(1)
    drawn = [window.gap(rng) for _ in range(60_000)]
    assert mean(drawn) == pytest.approx(1.0, rel=0.05)
    squares = mean(gap**2 for gap in drawn)
    rests = [window.rest_of_gap(rng) for _ in range(60_000)]
    assert mean(rests) == pytest.approx(squares / 2, rel=0.1), "the mean rest of a gap is E[X^2] / 2 E[X]"


def made(profile_rate: float = 1.0, shape: float = 1.0, windows: int = 36) -> Profile:
    lengths = (lengths_of([(100, 0.25), (200, 0.75)]), lengths_of([(10, 1.0)]))
    return Profile("p", [Window(profile_rate, "Gamma", shape)] * windows, [lengths])


def test_a_mix_has_its_rate_its_shares_and_its_lengths():
    trace = mix([made(), made(shape=0.2)], clients=10, rate_per_s=20.0, duration_s=2000.0)
    assert trace.rate_per_s == pytest.approx(20.0, rel=0.05)
    sent = Counter(request.client for request in trace.requests)
    assert len(sent) == 10
    assert sent["servegen-1"] / sent["servegen-3"] == pytest.approx(3.0, rel=0.15)
    assert mean(request.input_tokens for request in trace.requests) == pytest.approx(175, rel=0.02)
    assert {request.output_tokens for request in trace.requests} == {10}


def test_a_day_is_sent_as_it_was():
    """Each client in the windows in which it sent, with its part of the requests."""
    lengths = lengths_of([(10, 1.0)]), lengths_of([(5, 1.0)])

    def profile(name: str, rates: dict[int, float]) -> Profile:
        windows = [Window(rates.get(place, 0.0)) for place in range(3 * 144)]
        return Profile(name, windows, [lengths] * 12)

    first, second = 144, 144 + 100
    known = [
        profile("a", {first: 3.0, second: 3.0}),
        profile("b", {second: 2.0}),
        profile("c", {0: 9.0}),
    ]
    sent = day(known, 1, rate_per_s=0.02)
    assert (sent.duration_s, len(sent.requests)) == (86_400.0, pytest.approx(1728, rel=0.1))
    counts = Counter((one.client, int(one.arrival_s // 600)) for one in sent.requests)
    assert counts.keys() == {("a", 0), ("a", 100), ("b", 100)}
    assert counts["a", 0] == pytest.approx(counts["a", 100], rel=0.2)
    assert counts["b", 100] == pytest.approx(counts["a", 0] * 2 / 3, rel=0.2)
    assert day(known, 1, rate_per_s=0.02) == sent
    with pytest.raises(ValueError, match="no request"):
        day(known, 2, rate_per_s=0.02)


def test_a_profile_sends_when_it_did_and_what_it_did():
    early, late = (lengths_of([(tokens, 1.0)]) for tokens in (1, 2))
    windows = [Window(1.0 if k % 2 == 0 else 0.0) for k in range(72)]
    profile = Profile("p", windows, [(early, early), (late, late)])
    trace = mix([profile], clients=1, rate_per_s=1.0, duration_s=72 * 600.0, seed="s")
    assert {int(request.arrival_s // 600) % 2 for request in trace.requests} == {0}
    lengths = [request.input_tokens for request in trace.requests]
    changes = sum(one != other for one, other in pairwise(lengths))
    assert Counter(lengths) == pytest.approx({1: len(lengths) / 2, 2: len(lengths) / 2}, rel=0.1)
    assert changes <= 2


def test_a_mix_depends_on_its_seed_alone_and_clients_not_on_each_other():
    def requests(clients: int, seed: str) -> Trace:
        return mix(servegen(count=5), clients=clients, rate_per_s=5.0, duration_s=300.0, seed=seed)

    assert requests(8, "a") == requests(8, "a") != requests(8, "b")
    alone = mix([made()], clients=1, rate_per_s=2.0, duration_s=500.0)
    both = mix([made()], clients=2, rate_per_s=3.0, duration_s=500.0)
    assert [r for r in both.requests if r.client == "servegen-1"] == list(alone.requests)


def folder(tmp_path: Path, rows: str, lengths: str) -> Path:
    (tmp_path / "chunk-3-trace.csv").write_text(rows)
    (tmp_path / "chunk-3-dataset.json").write_text(lengths)
    return tmp_path


LENGTHS = '{"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{1: 1e-3}"}}'


def test_a_profile_is_read_from_its_two_files(tmp_path):
    (profile,) = servegen(folder(tmp_path, "0,0,0,,0,0\n600,2.5,1.1,Weibull,0.9,0.4\n", LENGTHS))
    assert profile.name == "chunk-3"
    assert profile.windows == [Window(0.0), Window(2.5, "Weibull", 0.9)]
    assert profile.active == [1]
    assert profile.lengths_at(1)[0][0] == [10, 20]


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        ("0,1,1,Gamma,1\n", LENGTHS, r"trace\.csv:1: "),
        ("0,1,1,Gamma,1,1\n700,1,1,Gamma,1,1\n", LENGTHS, r"trace\.csv:2: a window must start at 600 s"),
        ("0,1,1,Pareto,1,1\n", LENGTHS, r"trace\.csv:1: gaps are Gamma or Weibull"),
        ("0,0,0,,0,0\n", LENGTHS, "no window has both"),
        ("0,1,1,Gamma,1,1\n", "{", r"dataset\.json: not lengths"),
        (
            "0,1,1,Gamma,1,1\n",
            '{"0": {"input_tokens": "{1: x}", "output_tokens": "{}"}}',
            "period 0: ",
        ),
        ("0,1,1,Gamma,1,1\n", '{"0": {"input_tokens": "{}"}}', "period 0: "),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(tmp_path, rows, lengths, message):
    with pytest.raises(ValueError, match=message):
        servegen(folder(tmp_path, rows, lengths))


# ---- both


def test_a_production_mix_has_the_clients_of_one_trace_and_the_prompts_of_another(stand_in):
    senders = mix(servegen(count=5), clients=12, rate_per_s=4.0, duration_s=300.0)
    content = stand_in.between(0.0, 60.0)
    trace = production(senders, content)
    assert [(r.arrival_s, r.client) for r in trace.requests] == [
        (r.arrival_s, r.client) for r in senders.requests
    ]
    assert len(trace.requests) > len(content.requests), "so the content begins again"
    turns: dict[tuple[int, ...], list[TraceRequest]] = {}
    for request in trace.requests:
        turns.setdefault(conversation_of(request), []).append(request)
    assert all(len({request.client for request in held}) == 1 for held in turns.values())
    assert all(
        one.input_tokens <= other.input_tokens for held in turns.values() for one, other in pairwise(held)
    )
    with pytest.raises(ValueError, match="does not tell which blocks"):
        production(senders, senders)
