"""What is remembered of requests by their names, which anybody may choose: no name hides another's or costs memory."""

from dataclasses import dataclass

from sglang_fair.common.record import MOST_FOUND, MOST_NAME, Recent


@dataclass(eq=False)
class Entry:
    client: str


def remembered(recent: Recent[Entry], client: str, *names: str, ends: bool = True) -> Entry:
    entry = Entry(client)
    recent.add(entry, *names)
    if ends:
        recent.end(entry)
    return entry


def test_a_request_is_found_by_each_of_its_names_by_its_client_alone() -> None:
    recent = Recent[Entry]()
    entry = remembered(recent, "a", "mine", "mine", "", ends=False)
    recent.name(entry, "attempt")
    for name in ("mine", "attempt"):
        assert recent.find(name) == recent.find(name, "a") == [entry]
        assert recent.find(name, "b") == []
    assert recent.find("another") == recent.find("") == []
    later = remembered(recent, "b", "mine")
    assert recent.find("mine") == [later, entry], "the latest first"
    long = remembered(recent, "a", "x" * 10_000)
    assert recent.find("x" * 10_000) == recent.find("x" * MOST_NAME) == [long]


def test_names_that_lie_hide_no_request_and_cost_no_memory() -> None:
    recent = Recent[Entry](100)
    waits = remembered(recent, "victim", "name", ends=False)
    for number in range(10_000):
        remembered(
            recent, f"liar {number}", "name" if number % 2 else f"{number}" + "x" * 10_000, f"id {number}"
        )
    own = remembered(recent, "victim", "name")
    for _ in range(50):
        remembered(recent, "liar", "name")
    assert recent.find("name", "victim") == [own, waits]
    assert len(recent.find("name")) == MOST_FOUND
    assert len(recent) == 101
    assert sum(map(len, recent._by_name.values())) <= 201
    assert max(map(len, recent._by_name)) <= MOST_NAME


def test_the_latest_come_first_and_the_forgotten_not_at_all() -> None:
    recent = Recent[Entry](3)
    ended = [remembered(recent, "ab"[number % 2], f"n{number}") for number in range(6)]
    waits = remembered(recent, "a", "waits", ends=False)
    assert recent.latest(None, 10) == [waits, *ended[:2:-1]]
    assert recent.latest("a", 10) == [waits, ended[4]]
    assert recent.latest(None, 2) == [waits, ended[5]]
    assert recent.latest("nobody", 10) == []
