"""What a gateway has room for: bounded, and no client's alone."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.shared_limit import SharedLimit

CLIENTS = st.sampled_from("abcde")
STEPS = st.lists(st.tuples(st.booleans(), CLIENTS, st.integers(0, 7)), max_size=60)


@given(st.integers(1, 40), STEPS)
def test_what_is_held_adds_up_and_never_exceeds_the_size(
    size: int, steps: list[tuple[bool, str, int]]
) -> None:
    room, held = SharedLimit(size), Counter[str]()
    for takes, client, amount in steps:
        if takes:
            held[client] += amount if room.take(client, amount) else 0
        else:
            amount = min(amount, held[client])
            room.give(client, amount)
            held[client] -= amount
        assert {name: room.held(name) for name in "abcde"} == {name: held[name] for name in "abcde"}
        assert room.taken == held.total() <= size
        assert room.most(5) == {name: count for name, count in held.most_common() if count}


@given(st.integers(1, 40), STEPS, CLIENTS, CLIENTS, st.integers(1, 7))
def test_whoever_holds_less_is_not_refused_what_another_gets(
    size: int, steps: list[tuple[bool, str, int]], one: str, other: str, amount: int
) -> None:
    room = SharedLimit(size)
    for _, client, more in steps:
        room.take(client, more)
    if room.held(one) > room.held(other):
        one, other = other, one
    fits = amount <= size - room.taken - room.held(one)
    assert room.take(one, amount) == fits
    if not fits:
        assert not room.take(other, amount)


@given(st.integers(1, 3000), st.integers(1, 12))
def test_floods_leave_as_much_as_each_of_them_holds(size: int, floods: int) -> None:
    room = SharedLimit(size)
    names = [f"flood{number}" for number in range(floods)]
    while sum(room.take(name) for name in names):
        pass
    share = size / (floods + 1)
    assert all(abs(room.held(name) - share) <= 1 for name in names)
    modest = 0
    while room.take("modest"):
        modest += 1
    assert modest >= (size - room.taken) >= (share - floods) // 2 - 1


@given(st.integers(8, 200), st.integers(1, 5))
def test_those_who_came_first_do_not_keep_it(size: int, late: int) -> None:
    """The first takes all it may; then for each place that becomes free the late are asked after the first."""
    room = SharedLimit(size)
    while room.take("first"):
        pass
    names = [f"late{number}" for number in range(late)]
    for _ in range(2 * size):
        for name in ("first", *names):
            while room.take(name):
                pass
        most = next(iter(room.most(1)))
        room.give(most)
    held = [room.held(name) for name in ("first", *names)]
    assert max(held) - min(held) <= 2
