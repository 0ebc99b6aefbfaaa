"""Clients that send programs, told as JSON: what is the same in their prompts, and when they arrive."""

import json
from random import Random

import pytest

from workloads.experiments.senders import CHAT, clients_of, judge, sender, tot, traffic
from workloads.programs.call import Call


def first_calls(client, index=0):
    step = next(client.program(index))
    return [
        one if isinstance(one, Call) else next(one) for one in (step if isinstance(step, tuple) else (step,))
    ]


def common_tokens(one, other):
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length // 4


def test_programs_depend_on_the_seed_alone_and_survive_json():
    told = traffic("t", sender("a", tot(2), 0.5), sender("b", judge(3), 0.5), sender("c", CHAT, 0.5))
    assert json.loads(json.dumps(told.arguments)) == told.arguments
    for mine, again, other in zip(*(clients_of(told, seed) for seed in "001"), strict=True):
        assert first_calls(mine) == first_calls(again) != first_calls(other)
        assert first_calls(mine, 0) != first_calls(mine, 1)
    assert [client.requests for client in clients_of(told, "0")] == [30, 4, None]


def test_instructions_are_the_clients_own_and_in_all_its_programs():
    told = traffic("t", *(sender(name, tot(2, 200, instructions=100), 1.0) for name in "ab"))
    a, b = clients_of(told, "0")
    prompts = [first_calls(a, index)[0].prompt for index in (0, 1)]
    assert 100 <= common_tokens(*prompts) < 300
    assert common_tokens(prompts[0], first_calls(b)[0].prompt) < 100
    assert len(prompts[0]) // 4 > 300


def test_rates_follow_one_another():
    told = traffic("t", sender("a", CHAT, (10.0, 100.0), (1.0, 200.0)))
    [client] = clients_of(told, "0")
    times = client.arrivals.schedule(Random(0), until_s=200.0)
    assert sum(time_s < 100 for time_s in times) > 5 * sum(time_s >= 100 for time_s in times) > 0


def test_a_shape_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no programs of kind 'never'"):
        clients_of(traffic("t", sender("a", {"kind": "never"}, 1.0)), "0")
