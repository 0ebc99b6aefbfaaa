"""Which calls belong together, against a model that keeps everything in one list."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_fair.common.deadlines import Promise
from sglang_fair.core.interactions import Interaction, Interactions
from tests.support.budget import examples

SILENCE_S, MOST_CALLS, MOST_OPEN, FEW = 10.0, 4, 3, 6
NAME = Interaction("c", "chat", "1")
names = st.builds(
    Interaction, st.sampled_from("abcd"), st.just("chat"), st.sampled_from(["1", "2", "3", "4", "5"])
)


@dataclass
class Kept:
    """One open interaction, in the model."""

    name: Interaction
    calls: int = 0
    under_way: int = 0
    silent_s: float = 0.0


@dataclass
class Model:
    """The rules, one after the other, over a list in order of when each was opened, taken up again or fell silent."""

    now_s: float = 0.0
    open: list[Kept] = field(default_factory=list)

    def find(self, name: Interaction) -> Kept | None:
        return next((one for one in self.open if one.name == name), None)

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        self.open = [one for one in self.open if one.under_way or one.silent_s + SILENCE_S > now_s]

    def of(self, client: str) -> list[Kept]:
        return [one for one in self.open if one.name.client == client]

    def close_one_of(self, client: str) -> None:
        own = self.of(client)
        self.open.remove(next((one for one in own if not one.under_way), own[0]))

    def accept(self, name: Interaction, begun: int) -> int:
        one = self.find(name)
        if one is None:
            if len(self.of(name.client)) >= MOST_OPEN:
                self.close_one_of(name.client)
            elif len(self.open) >= FEW:
                clients = {kept.name.client for kept in self.open}
                self.close_one_of(min(clients, key=lambda client: (-len(self.of(client)), client)))
            self.open.append(one := Kept(name, begun))
        elif not one.under_way:
            self.open.remove(one)
            self.open.append(one)
        one.calls = one.calls + 1 if one.calls < MOST_CALLS else 1
        one.under_way += 1
        return one.calls

    def end(self, name: Interaction, is_answered: bool) -> None:
        one = self.find(name)
        if one is None or not one.under_way:
            return
        one.under_way -= 1
        if is_answered:
            self.open.remove(one)
        elif not one.under_way:
            one.silent_s = self.now_s
            self.open.remove(one)
            self.open.append(one)


class Against(RuleBasedStateMachine):
    """The same calls to both."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.made = Interactions(SILENCE_S, most_calls=MOST_CALLS, most_open=MOST_OPEN, most=FEW)

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        now_s = self.model.now_s + seconds
        self.model.tick(now_s)
        self.made.tick(now_s)

    @rule(name=names, begun=st.sampled_from([0, 0, 0, 2, 4, 9]))
    def call(self, name: Interaction, begun: int) -> None:
        one = self.model.find(name)
        calls = one.calls if one else begun
        number = self.made.go_on(name, begun)
        assert (number > 0) == (0 < calls < MOST_CALLS)
        assert (number or self.made.accept(name, begun)) == self.model.accept(name, begun)

    @rule(name=names, is_answered=st.booleans())
    def ends(self, name: Interaction, is_answered: bool) -> None:
        self.model.end(name, is_answered)
        self.made.end(name, is_answered=is_answered)

    @invariant()
    def they_agree(self) -> None:
        assert len(self.made) == len(self.model.open)
        for client in "abcd":
            for id in "12345":
                name = Interaction(client, "chat", id)
                one = self.model.find(name)
                assert self.made.calls(name) == (one.calls if one else 0)


Against.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestAgainstTheModel = Against.TestCase


def test_a_call_without_an_id_is_one_by_itself() -> None:
    made = Interactions()
    alone = Interaction("a", "chat", "")
    assert [made.accept(alone) for _ in range(3)] == [1, 1, 1]
    assert not made.go_on(alone, begun=5)
    made.end(alone)
    assert len(made) == 0


def test_who_opens_one_more_than_it_may_closes_its_own_that_is_silent() -> None:
    made = Interactions(most_open=2)
    busy, silent, third = (Interaction("a", "chat", id) for id in "123")
    for name in (busy, silent):
        made.accept(name)
    made.end(silent)
    made.accept(third)
    assert list(map(made.calls, (busy, silent, third))) == [1, 0, 1]
    assert len(made) == 2


def test_all_calls_of_an_interaction_are_due_when_its_first_one_is() -> None:
    made = Interactions(most_calls=3)
    first, later = Promise("batch", 60.0, 60.0), Promise("interactive", 20.0, 21.0)
    assert made.promised(NAME) is None
    assert made.promise(NAME, later) == later, "no call of it was accepted: nothing is kept"
    made.accept(NAME)
    assert made.promise(NAME, first) == first
    assert made.promise(NAME, first) == first, "asked again, or tried again"
    made.accept(NAME)
    assert (made.promised(NAME), made.promise(NAME, later)) == (first, first)
    made.accept(NAME)
    assert made.promised(NAME) is None, "the next one begins anew"
    made.accept(NAME)
    assert made.promise(NAME, later) == later


@given(st.lists(st.tuples(st.sampled_from(["call", "end", "tick"]), st.integers(0, 3)), max_size=80))
def test_no_deadline_is_older_than_its_interaction(steps: list[tuple[str, int]]) -> None:
    """Whoever goes on with one name for ever gains at most `most_calls` calls, or what `silence_s` allows."""
    made, now_s, began_s = Interactions(10.0, most_calls=4), 0.0, dict[Interaction, float]()
    for what, number in steps:
        name = Interaction("c", "", f"{number}")
        if what == "call":
            if made.accept(name) == 1:
                began_s[name] = now_s
            kept = made.promise(name, Promise("a", 5.0, now_s + 5.0))
            assert kept.due_s == began_s[name] + 5.0
        elif what == "end":
            made.end(name)
        else:
            now_s += number * 4.0
            made.tick(now_s)
