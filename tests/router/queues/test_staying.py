"""A worker keeps its model while nobody is later by that."""

from hypothesis import given
from hypothesis import strategies as st

from router.queues.problem import Demand, Queue, slots
from router.queues.staying import stays

SWAP_S = {"a": 5.0, "b": 5.0}


def demand(number: int, model: str, slack_s: float, drain_s: float = 10.0, tier: int = 0) -> Demand:
    return Demand(
        number, model, slack_s, {"w": drain_s}, {"w": 1.0}, tier=tier, last_slack_s=slack_s + 2 * drain_s
    )


def queue(loaded: str = "a") -> Queue:
    return Queue("w", loaded, SWAP_S, 0.0, 0.0)


def test_it_stays_while_the_others_have_time() -> None:
    assert stays(queue(), [demand(1, "b", 100.0), demand(2, "a", 100.0)])
    assert not stays(queue(), [demand(1, "b", 15.0), demand(2, "a", 100.0)]), "10 s, a swap, and one to spare"
    assert stays(queue(), [demand(1, "b", 21.0), demand(2, "a", 100.0)])


def test_there_is_nothing_to_stay_for() -> None:
    assert not stays(queue(), [])
    assert not stays(queue(), [demand(1, "b", 100.0)])
    assert not stays(queue(), [demand(1, "a", 100.0), demand(2, "b", 1.0)]), "its own is first anyway"
    assert not stays(Queue("w", "a", {}, 0.0, 0.0), [demand(1, "b", 100.0), demand(2, "a", 100.0)])


def test_who_is_ahead_of_its_share_keeps_nobody_waiting() -> None:
    order = [demand(1, "b", 1000.0, tier=0), demand(2, "a", 1000.0, tier=1)]
    assert not stays(queue(), order)
    assert stays(queue(), [demand(1, "b", 1000.0, tier=1), demand(2, "a", 1000.0, tier=0)])


DEMANDS = st.lists(
    st.tuples(st.sampled_from("ab"), st.floats(-10.0, 200.0), st.floats(0.1, 30.0), st.integers(0, 1)),
    max_size=8,
)


@given(rows=DEMANDS)
def test_nobody_of_another_model_is_later_by_it(rows: list[tuple[str, float, float, int]]) -> None:
    order = [demand(number, *row) for number, row in enumerate(rows)]
    if not stays(queue(), order):
        return
    first = order[0]
    mine = [one for one in order if one.model == "a" and one.tier <= first.tier]
    others = [one for one in order if one not in mine]
    before = {slot.demand.number: slot.late_s for slot in slots(queue(), order)}
    after = {slot.demand.number: slot.late_s for slot in slots(queue(), [*mine, *others])}
    assert all(after[one.number] <= before[one.number] for one in others)
    assert all(one.tier <= first.tier for one in mine)
