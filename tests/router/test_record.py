"""The record of placements: why a worker was chosen, what the next best was, and what it keeps."""

from typing import Any

import pytest

from router.core import Router
from router.events import (
    Arrive,
    Done,
    Explain,
    Explained,
    Running,
    WorkerDown,
    WorkerUp,
    decode_answer,
    encode,
)
from router.placement import PLACEMENTS, build
from router.wire import pack_tokens


def router(placement: str = "d2lpm-queue", workers: int = 3, **options: Any) -> Router:
    made = Router(build(placement, **options), name=placement, page_size=4)
    for number in range(workers):
        made.handle(WorkerUp(f"r{number}", f"http://r{number}"), 0.0)
    return made


def arrive(id: str, client: str = "c", tokens: int = 8, first: int = 0, **more: Any) -> Arrive:
    return Arrive(id, client, pack_tokens(range(first, first + tokens)), 10, **more)


def explained(made: Router, request: str, client: str | None = None, now_s: float = 9.0) -> tuple[Any, ...]:
    ((_, answer),) = made.handle(Explain("q", request, client), now_s, b"peer")
    decoded = decode_answer(encode(answer))
    assert isinstance(decoded, Explained)
    return decoded.placements


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_every_placement_is_explained(placement: str) -> None:
    made = router(placement)
    for number in range(6):
        made.handle(arrive(f"id{number}", f"c{number % 2}", request=f"name{number}"), float(number), b"g")
    for number in range(6):
        (found,) = explained(made, f"id{number}")
        assert found["client"] == f"c{number % 2}"
        assert found["request"] == f"name{number}"
        assert found["why"] in ("prefix", "load", "new")
        assert found["worker"]["worker"] != found["next_best"]["worker"]
        assert found["candidates"] == 3
        assert explained(made, f"name{number}") == (found,)


def test_why_and_the_next_best() -> None:
    made = router()
    made.handle(arrive("first", tokens=8000), 1.0, b"g")
    made.handle(Done("first"), 1.0, b"g")
    made.handle(arrive("other", client="other", first=10_000), 1.5, b"g")
    made.handle(arrive("same", tokens=8000), 2.0, b"g")
    (first,), (same,) = explained(made, "first"), explained(made, "same")
    assert first["why"] == "new"
    assert same["why"] == "prefix"
    assert same["worker"]["worker"] == first["worker"]["worker"]
    assert (same["worker"]["matched_tokens"], same["next_best"]["matched_tokens"]) == (8000, 0)
    assert same["worker"]["cost"] < same["next_best"]["cost"]
    assert same["worker"]["load"] == 0
    made.handle(Done("same", output_tokens=3, cached_tokens=7), 5.0, b"g")
    (same,) = explained(made, "same")
    assert (same["outcome"], same["cached_tokens"]) == ("ok", 7)


def test_what_was_excluded_and_what_was_the_only_one() -> None:
    made = router(workers=2)
    made.handle(arrive("id", request="name"), 1.0, b"g")
    made.handle(Done("id", outcome="failed"), 2.0, b"g")
    made.handle(arrive("again", request="name", exclude=("r0",)), 3.0, b"g")
    again, before = explained(made, "name")
    assert (before["outcome"], again["why"], again["excluded"]) == ("failed", "retry", ["r0"])
    assert again["next_best"] is None
    made.handle(arrive("nobody", exclude=("r0", "r1")), 4.0, b"g")
    (refused,) = explained(made, "nobody")
    assert refused["refused"] == "every worker that is up is excluded"
    assert refused["outcome"] == "refused"


def test_one_that_is_held_says_for_how_long_and_why() -> None:
    made = router("centralized_dlpm", workers=1, slots=1)
    made.handle(arrive("runs"), 1.0, b"g")
    made.handle(arrive("waits"), 2.0, b"g")
    (waits,) = explained(made, "waits", now_s=4.0)
    assert (waits["waited_s"], waits["worker"]) == (2.0, None)
    assert waits["waited_for"]
    made.handle(Done("runs"), 5.0, b"g")
    (waits,) = explained(made, "waits")
    assert (waits["waited_s"], waits["worker"]["worker"]) == (3.0, "r0")


def test_what_another_placed_and_what_is_lost_with_its_worker() -> None:
    made = router()
    made.handle(Running("id", "c", pack_tokens(range(8)), worker="r1"), 1.0, b"g")
    (told,) = explained(made, "id")
    assert (told["why"], told["worker"]["worker"]) == ("told", "r1")
    made.handle(WorkerDown("r1"), 2.0)
    (told,) = explained(made, "id")
    assert told["outcome"] == "failed"


def test_what_is_forgotten_is_found_by_no_id_and_no_other_clients_request_by_its_name() -> None:
    made = router()
    made.record._most = 10
    for number in range(30):
        made.handle(arrive(f"id{number}", f"c{number}", request="name"), 1.0, b"g")
        made.handle(Done(f"id{number}"), 1.0, b"g")
    assert [found["id"] for found in explained(made, "name", "c29")] == ["id29"]
    assert explained(made, "id29", "c28") == explained(made, "name", "c0") == ()
    assert len(made.record) == len(made.record._by_id) == 10
