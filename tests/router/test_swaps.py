"""Swaps at the router: a worker that is about to load another model, or does, is sent nothing, whatever comes."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    Agent,
    Arrive,
    Cut,
    Done,
    Exchange,
    Held,
    PeerGone,
    Place,
    Progress,
    Refuse,
    Running,
    Snapshot,
    Stored,
    Swap,
    WorkerDown,
    WorkerUp,
)
from router.placement import PLACEMENTS, build
from router.placement.centralized_dlpm import CentralizedDlpm
from router.swaps import ASK_S, LONGEST_RETRY_S, RETRY_S, Phase
from router.wire import pack_tokens
from tests.support.budget import examples

PEER = b"g"
PROMPT = pack_tokens(range(64))
SWAP_S = {"a": 1.0, "b": 1.0}


def up(name: str) -> WorkerUp:
    """A replica with an agent, which is going to say what it has."""
    return WorkerUp(name, f"http://{name}", kv=f"tcp://{name}", models=("a", "b"))


def says(name: str, loaded: str = "", **more: Any) -> Agent:
    return Agent("?", name, loaded, swap_s=SWAP_S, **more)


class Wishes(CentralizedDlpm):
    """One queue of all models, in which each worker wants what a test says."""

    loads = True
    wishes: dict[str, str]
    heard: list[tuple[str, str | None]]

    def __init__(self) -> None:
        super().__init__()
        self.wishes, self.heard = {}, []

    def wanted(self, worker: str) -> str | None:
        return self.wishes.get(worker)

    def next_models(self, worker: str) -> tuple[str, ...]:
        return ("b",)

    def equip(self, worker: str, has: Any, now_s: float) -> None:
        if (worker, has.loaded) not in self.heard[-1:]:
            self.heard.append((worker, has.loaded))


def site(placement: Any = "d2lpm", *names: str, has: str = "a", **options: Any) -> Router:
    made = Router(build(placement) if isinstance(placement, str) else placement, **options)
    for name in names:
        made.handle(up(name), 0.0)
        made.handle(says(name, has), 0.0, f"agent {name}".encode())
    return made


def ask(made: Router, name: str, model: str, now_s: float = 0.0) -> Any:
    """The answer; None if there is none yet."""
    arrive = Arrive(name, "c", PROMPT, model=model)
    answers = [one for _, one in made.handle(arrive, now_s, PEER) if getattr(one, "id", "") == name]
    found = [one for one in answers if not isinstance(one, Held)]
    return found[0] if found else None


def worker(made: Router, name: str) -> dict[str, Any]:
    found: Any = made.state()["workers"]
    return found[name]


def swap(made: Router, name: str) -> dict[str, Any]:
    found: Any = made.state()["swaps"]
    return found[name]


def test_a_worker_with_an_agent_serves_what_that_says_and_nothing_before() -> None:
    made = Router(build("d2lpm"))
    made.handle(up("r0"), 0.0)
    assert isinstance(ask(made, "q0", "a"), Refuse)
    ((peer, order),) = made.handle(says("r0", "b"), 1.0, b"x")
    assert (peer, order) == (b"x", Exchange("?", "r0"))
    refused = ask(made, "q1", "a")
    assert isinstance(refused, Refuse)
    assert refused.reason == "no worker of model a is up"
    assert ask(made, "q2", "b").worker == "r0"


def test_a_swap_from_order_to_end() -> None:
    made = site("d2lpm", "r0", "r1")
    made.handle(Stored("r0", (1, 2, 3, 4), None, PROMPT, 16), 0.0)
    assert worker(made, "r0")["tree_tokens"] == 64
    first = ask(made, "q0", "a")
    other = "r1" if first.worker == "r0" else "r0"
    assert any(isinstance(one, Snapshot) for _, one in made.handle(Swap("s", first.worker, "b"), 1.0, b"op"))
    assert worker(made, first.worker)["state"] == "swapping"
    assert [ask(made, f"n{number}", "a", 1.0).worker for number in range(9)] == [other] * 9
    sent = made.handle(Done("q0"), 2.0, PEER)
    assert sent == [(f"agent {first.worker}".encode(), Exchange("", first.worker, 1, "b"))]
    assert worker(made, first.worker)["tree_tokens"] == 0
    ((_, again),) = made.handle(says(first.worker, "a"), 2.1, b"new agent")
    assert (again.number, again.model) == (1, "b"), "an order that was lost is given again"
    made.handle(says(first.worker, busy=1, target="b"), 2.2, b"new agent")
    assert isinstance(ask(made, "q1", "b", 2.3), Refuse)
    made.handle(says(first.worker, "b", number=1), 3.0, b"new agent")
    assert ask(made, "q2", "b", 3.1).worker == first.worker
    assert ask(made, "q3", "a", 3.1).worker == other
    state = swap(made, first.worker)
    assert (state["swaps"], state["failed"], state["seconds"]) == (1, 0, 1.0)


def test_a_swap_that_fails_leaves_the_old_model_and_is_tried_again_later_each_time() -> None:
    placement = Wishes()
    made = site(placement, "r0")
    placement.wishes["r0"] = "b"
    now_s, waited = 1.0, RETRY_S
    for number in range(1, 12):
        made.handle(says("r0", "a", number=number - 1), now_s, b"agent")
        made.handle(says("r0", "a", number=number, error="no such file"), now_s, b"agent")
        assert swap(made, "r0")["phase"] == "serves"
        assert ask(made, f"q{number}", "a", now_s).worker == "r0"
        made.handle(Done(f"q{number}"), now_s, PEER)
        assert swap(made, "r0")["phase"] == "serves", "not before its time"
        assert swap(made, "r0")["failed"] == number
        assert swap(made, "r0")["error"] == "b: no such file"
        assert swap(made, "r0")["retry_in_s"] == {"b": waited}
        now_s += waited
        made.handle(says("r0", "a", number=number), now_s, b"agent")
        assert swap(made, "r0")["phase"] == "loads"
        waited = min(LONGEST_RETRY_S, 2 * waited)
    made.handle(says("r0", "b", number=12), now_s, b"agent")
    assert swap(made, "r0")["retry_in_s"] == {}
    assert placement.heard[1:5] == [("r0", "a"), ("r0", None), ("r0", "a"), ("r0", None)]


def test_held_requests_wait_for_a_model_that_can_be_loaded_and_for_no_other() -> None:
    placement = Wishes()
    made = site(placement, "r0")
    assert ask(made, "q0", "b") is None
    assert isinstance(ask(made, "q1", "c"), Refuse)
    placement.wishes["r0"] = "b"
    sent = made.handle(says("r0", "a"), 1.0, b"agent r0")
    assert (b"agent r0", Exchange("", "r0", 1, "b")) in sent
    sent = made.handle(says("r0", "b", number=1), 2.0, b"agent r0")
    assert [one.worker for _, one in sent if isinstance(one, Place)] == ["r0"]
    assert ask(made, "q2", "a", 2.0) is None
    sent = made.handle(PeerGone(), 3.0, b"agent r0")
    assert [(one.id, one.reason) for _, one in sent if isinstance(one, Refuse)] == [
        ("q2", "no worker of model a is up")
    ], "nobody can have it loaded any more"


def test_a_worker_at_work_is_asked_about_now_and_then_and_one_that_is_idle_at_once() -> None:
    placement = Wishes()
    made = site(placement, "r0", "r1")
    for number in range(4):
        ask(made, f"q{number}", "a", 1.0)
    assert [worker(made, name)["in_flight"] for name in ("r0", "r1")] == [2, 2]
    made.handle(Progress("q0", 1), 1.0, PEER)
    made.handle(Progress("q0", 2), 1.0 + ASK_S, PEER)
    placement.wishes["r1"] = "b"
    made.handle(Progress("q0", 3), 1.0 + 1.5 * ASK_S, PEER)
    assert worker(made, "r1")["state"] == "up"
    made.handle(Progress("q0", 4), 1.0 + 2 * ASK_S, PEER)
    assert worker(made, "r1")["state"] == "swapping"
    placement.wishes["r0"] = "b"
    mine = [f"q{number}" for number in range(4) if made.flights.by_id[f"q{number}"].worker.name == "r0"]
    for name in mine:
        assert worker(made, "r0")["state"] == "up"
        made.handle(Done(name), 1.0 + 2.1 * ASK_S, PEER)
    assert worker(made, "r0")["state"] == "swapping"


def test_what_runs_finishes_or_is_cut_when_it_has_had_its_time_if_somebody_can_go_on_with_it() -> None:
    made = site("d2lpm", "r0", "r1", swap_finish_s=5.0)
    at = {f"q{number}": ask(made, f"q{number}", "a").worker for number in range(4)}
    of_r0 = {name for name, where in at.items() if where == "r0"}
    assert of_r0
    made.handle(Swap("s", "r0", "b"), 1.0, b"op")
    assert made.handle(Progress("q0", 1), 5.9, PEER) == []
    cut = made.handle(Progress("q0", 2), 6.0, PEER)
    assert {one.id for to, one in cut if isinstance(one, Cut) and to == PEER} == of_r0
    assert made.handle(Progress("q0", 3), 7.0, PEER) == [], "once"
    alone = site("d2lpm", "r0")
    ask(alone, "q", "a")
    alone.handle(Swap("s", "r0", "b"), 1.0, b"op")
    assert alone.handle(Progress("q", 1), 100.0, PEER) == [], "nobody else has its model: it finishes"


def test_an_operator_changes_his_mind_or_asks_for_what_cannot_be() -> None:
    made = site("d2lpm", "r0")

    def asked(name: str, model: str) -> str:
        ((_, answer), *_) = made.handle(Swap("s", name, model), 1.0, b"op")
        return answer.reason if isinstance(answer, Refuse) else ""

    assert asked("r9", "b") == "there is no worker 'r9'"
    assert asked("r0", "c") == "worker r0 cannot load 'c'; it can load a, b"
    ask(made, "q", "a")
    assert asked("r0", "b") == ""
    assert worker(made, "r0")["state"] == "swapping"
    assert asked("r0", "a") == ""
    assert worker(made, "r0")["state"] == "up"
    assert asked("r0", "b") == ""
    made.handle(Done("q"), 1.0, PEER)
    assert asked("r0", "a") == "worker r0 is loading b"
    assert asked("r0", "b") == ""
    made.handle(WorkerUp("plain", "http://plain", models=("a",), loaded="a"), 1.0)
    assert asked("plain", "b") == "no agent answers for worker 'plain': it keeps the model that it has"


def test_an_agent_that_is_gone_calls_off_what_was_not_ordered() -> None:
    made = site("d2lpm", "r0")
    ask(made, "q", "a")
    made.handle(Swap("s", "r0", "b"), 1.0, b"op")
    made.handle(PeerGone(), 2.0, b"agent r0")
    assert worker(made, "r0")["state"] == "up"
    assert ask(made, "q2", "a", 2.0).worker == "r0"


def test_a_router_that_was_restarted_counts_on_and_waits_for_what_is_under_way() -> None:
    made = Router(build("d2lpm"))
    made.handle(up("r0"), 0.0)
    ((_, order),) = made.handle(says("r0", busy=7, number=6, target="b"), 0.0, b"x")
    assert (order.number, order.model) == (7, "b")
    assert worker(made, "r0")["state"] == "swapping"
    made.handle(says("r0", "b", number=7), 1.0, b"x")
    made.handle(Swap("s", "r0", "a"), 1.0, b"op")
    ((_, order),) = made.handle(says("r0", "b", number=7), 1.0, b"x")
    assert (order.number, order.model) == (8, "a")


def test_requests_that_ran_before_the_router_knew_the_model_are_told_again() -> None:
    made = Router(build("d2lpm"))
    made.handle(up("r0"), 0.0)
    made.handle(Running("q", "c", PROMPT, worker="r0"), 0.0, PEER)
    made.handle(says("r0", "a"), 0.5, b"x")
    assert worker(made, "r0")["in_flight"] == 0
    made.handle(Running("q", "c", PROMPT, worker="r0"), 1.0, PEER)
    assert worker(made, "r0")["in_flight"] == 1, "its gateway was asked, and it counts for its model"


def test_the_time_to_finish_is_a_time() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Router(build("d2lpm"), swap_finish_s=-1.0)


# ---- whatever comes, in whatever order

KINDS = [*3 * ["ask"], "done", "down", "up", "swap", "wish", "agent", "agent", "fail", "agent dies"]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.sampled_from(["a", "b"])), max_size=80
)


class Machine:
    """What one worker's agent and engine do: the truth."""

    def __init__(self) -> None:
        self.is_up, self.loaded, self.number, self.peer = False, "a", 0, b""
        self.order: Exchange | None = None


@pytest.mark.parametrize("name", [*PLACEMENTS, "wishes"])
@settings(max_examples=examples(40))
@given(steps=STEPS)
def test_no_worker_is_sent_anything_while_it_swaps(name: str, steps: list[tuple[str, int, str]]) -> None:
    placement: Any = Wishes() if name == "wishes" else build(name)
    made = Router(placement, page_size=4, swap_finish_s=3.0)
    machines = {f"w{index}": Machine() for index in range(3)}
    model_of: dict[str, str] = {}
    at: dict[str, str] = {}
    outcomes: Counter[str] = Counter()

    def take(actions: list[Any]) -> None:
        for _, answer in actions:
            match answer:
                case Place():
                    machine = machines[answer.worker]
                    assert machine.is_up
                    assert machine.order is None, "it loads"
                    assert machine.loaded == model_of[answer.id], "its model and no other"
                    assert swap(made, answer.worker)["phase"] == "serves"
                    at[answer.id] = answer.worker
                case Refuse(id=request) if request in model_of:
                    outcomes[request] += 1
                case Exchange(number=number) if number:
                    machine = machines[answer.worker]
                    if number > machine.number:
                        assert answer.worker not in at.values(), "nothing of the old model is left"
                        machine.order = answer
                case _:
                    pass

    def tell(event: Any, now_s: float, peer: bytes = PEER) -> None:
        take(made.handle(event, now_s, peer))

    def report(one: str, now_s: float) -> None:
        machine = machines[one]
        tell(says(one, machine.loaded, number=machine.number), now_s, machine.peer)

    for step, (what, index, model) in enumerate(steps):
        one, now_s, request = f"w{index}", float(step), f"q{step}"
        machine = machines[one]
        match what:
            case "ask":
                model_of[request] = model
                tokens = pack_tokens(range(index, index + 16))
                tell(Arrive(request, f"c{index}", tokens, model=model), now_s)
            case "done" if at:
                ended = list(at)[index % len(at)]
                del at[ended]
                outcomes[ended] += 1
                tell(Done(ended, output_tokens=index), now_s)
            case "up" if not machine.is_up:
                machine.is_up, machine.loaded, machine.peer = True, "a", f"agent {step}".encode()
                tell(up(one), now_s)
            case "down" if machine.is_up:
                machine.is_up, machine.order = False, None
                for lost in [lost for lost, where in at.items() if where == one]:
                    del at[lost]
                    outcomes[lost] += 1
                tell(WorkerDown(one), now_s)
            case "swap":
                tell(Swap("s", one, model), now_s)
            case "wish" if name == "wishes":
                placement.wishes[one] = model
            case "agent" if machine.is_up:
                if machine.order is not None:
                    machine.loaded, machine.number = machine.order.model, machine.order.number
                    machine.order = None
                report(one, now_s)
            case "fail" if machine.is_up and machine.order is not None:
                machine.number, machine.order = machine.order.number, None
                tell(says(one, machine.loaded, number=machine.number, error="no"), now_s, machine.peer)
            case "agent dies" if machine.is_up:
                if machine.order is None:
                    tell(PeerGone(), now_s, machine.peer)
                    machine.peer = f"agent {step}".encode()
                report(one, now_s)
            case _:
                pass
    state: Any = made.state()
    assert state["in_flight"] == len(at)
    waiting = {request for request in model_of if request not in at and not outcomes[request]}
    assert state["waiting"] == len(waiting), "each is placed, refused or waits"
    assert not waiting or made.placement.holds
    assert all(count == 1 for count in outcomes.values() if count)
    # When all is quiet, whoever can be served is.
    for round_ in range(8):
        for request in list(at):
            del at[request]
            tell(Done(request), 1e6 + round_)
        for one, machine in machines.items():
            if machine.is_up:
                if machine.order is not None:
                    machine.loaded, machine.number, machine.order = (
                        machine.order.model,
                        machine.order.number,
                        None,
                    )
                report(one, 1e6 + round_)
    for one, machine in machines.items():
        if machine.is_up and name != "wishes":
            assert swap(made, one)["phase"] == Phase.SERVES.value
            assert worker(made, one)["model"] == machine.loaded


@pytest.mark.parametrize("name", ["deadline", "qlm"])
def test_a_worker_that_empties_for_an_operator_gets_nothing_of_what_waits(name: str) -> None:
    made = site(build(name, kv_tokens=500, chunk_tokens=0), "r0", "r1")
    placed = {f"q{number}": ask(made, f"q{number}", "a") for number in range(12)}
    at = {request: place.worker for request, place in placed.items() if place is not None}
    assert set(at.values()) == {"r0", "r1"}
    assert len(at) < len(placed), "some wait"
    made.handle(Swap("s", "r0", "b"), 1.0, b"op")
    later = [
        one.worker
        for request, worker in at.items()
        for _, one in made.handle(Done(request), 2.0, PEER)
        if isinstance(one, Place)
    ]
    assert later, "the other one goes on"
    assert set(later) == {"r1"}


@pytest.mark.parametrize("name", [*PLACEMENTS, "wishes"])
def test_agents_of_workers_that_are_not_there_leave_nothing_behind(name: str) -> None:
    made = Router(Wishes() if name == "wishes" else build(name))
    for number in range(1000):
        ((_, answer),) = made.handle(says(f"x{number}", "a"), 0.0, b"liar")
        assert answer == Exchange("?", f"x{number}", complaint=f"there is no worker 'x{number}'")
    made.handle(up("r0"), 0.0)
    made.handle(says("r0", "a"), 0.0, b"agent")
    made.handle(WorkerDown("r0"), 1.0)
    assert list(made.state()["swaps"]) == ["r0"]  # type: ignore[call-overload]
    made.handle(PeerGone(), 2.0, b"agent")
    assert made.state()["swaps"] == {}
