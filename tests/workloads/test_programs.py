"""Programs run against replies made up here: how many calls, in which order, sharing which prefixes."""

from collections.abc import Callable

import pytest

from workloads.arrivals import EvenArrivals
from workloads.clients import SCENARIOS, Scale, chat_client, fixed_length_client
from workloads.experiments.dlpm_table2 import statistics
from workloads.load import read_questions
from workloads.programs import (
    Call,
    Chat,
    Codec,
    DocumentQa,
    Execution,
    Judge,
    Outcome,
    PackedCodec,
    Program,
    Reply,
    Single,
    TextCodec,
    TokenCodec,
    TreeOfThought,
    Turn,
)
from workloads.programs.prose import ARTICLES, PASSAGES, WORD_PROBLEMS, draw, given, seeded

BYTES = TokenCodec(lambda text: list(text.encode()))
WORDS = TokenCodec(lambda text: [len(word) for word in text.split()])


def unique_thought(number: int, call: Call) -> Reply:
    """Tokens that no other reply has; 300 is above every byte."""
    return Reply(f"<{number}>", tuple([300 + number] * call.max_output_tokens))


def run(program: Program, answer: Callable[[int, Call], Reply] = unique_thought) -> list[Call]:
    """All calls of a program, answered one at a time, oldest first."""
    execution = Execution(program)
    queue, calls = execution.start(), []
    while queue:
        number, call = queue.pop(0)
        assert number == len(calls), "calls are numbered in the order they become ready"
        calls.append(call)
        queue += execution.reply(number, answer(number, call))
    assert execution.outcome is not None
    assert execution.running == 0
    return calls


@pytest.mark.parametrize(("branches", "requests"), [(2, 30), (3, 120), (4, 340)])
def test_a_tree_has_the_papers_number_of_requests(branches, requests):
    tree = TreeOfThought(branches=branches, thought_tokens=2)
    assert tree.requests == requests
    assert len(run(tree.program(BYTES.encode("Why?"), BYTES))) == requests


def test_a_child_extends_its_parents_prompt_by_the_thought_that_came_back():
    calls = run(TreeOfThought(branches=2, height=3, thought_tokens=4).program(BYTES.encode("Why?"), BYTES))
    paths = [call.prompt + unique_thought(number, call).tokens for number, call in enumerate(calls)]
    question = BYTES.encode("Why?")
    for call in calls:
        parents = [path for path in paths if call.prompt[: len(path)] == path]
        depth = {"plan": 0, "execute": 1, "answer": 2}[call.stage]
        assert len(parents) == depth
        assert call.prompt[: len(question)] == question
    assert len({call.prompt for call in calls}) == len(calls), "siblings ask different things"


def test_a_subtree_goes_on_while_its_sibling_is_still_waiting():
    execution = Execution(
        TreeOfThought(branches=2, height=2, thought_tokens=1).program(BYTES.encode("Q"), BYTES)
    )
    (first, _), (second, _) = execution.start()
    grandchildren = execution.reply(first, Reply(tokens=(7,)))
    assert [call.stage for _, call in grandchildren] == ["answer", "answer"]
    for number, _ in grandchildren:
        assert execution.reply(number, Reply(tokens=(7,))) == []
    assert execution.outcome is None
    for number, _ in execution.reply(second, Reply(tokens=(7,))):
        execution.reply(number, Reply(tokens=(7,)))
    assert execution.outcome is Outcome.OK


def test_a_failed_thought_has_no_children_and_spoils_the_program():
    tree = TreeOfThought(branches=2, height=2, thought_tokens=1)
    execution = Execution(tree.program(BYTES.encode("Q"), BYTES))
    (first, _), (second, _) = execution.start()
    assert execution.reply(first, Reply(outcome=Outcome.FAILED)) == []
    for number, _ in execution.reply(second, Reply(tokens=(7,))):
        execution.reply(number, Reply(tokens=(7,)))
    assert execution.outcome is Outcome.FAILED
    assert execution.calls == 4


@pytest.mark.parametrize("dimensions", [1, 2, 16, 20])
def test_a_judge_solves_each_dimension_over_one_prefix_and_merges(dimensions):
    judge = Judge(dimensions=dimensions, judgement_tokens=3)
    article = BYTES.encode("An article.")
    calls = run(judge.program(article, BYTES))
    assert len(calls) == judge.requests == dimensions + 1
    assert [call.stage for call in calls] == ["solve"] * dimensions + ["merge"]
    assert all(call.prompt[: len(article)] == article for call in calls)
    assert len({call.prompt for call in calls}) == len(calls)
    for number in range(dimensions):
        assert 300 + number in calls[-1].prompt, "the merge reads every judgement"


def test_a_judge_merges_what_it_has_and_asks_for_no_verdict_on_nothing():
    judge = Judge(dimensions=2)
    calls = run(
        judge.program("An article.", TextCodec()),
        lambda number, _: Reply("fine", outcome=Outcome.FAILED if number == 0 else Outcome.OK),
    )
    assert "On clarity" not in calls[-1].prompt
    assert "On accuracy: fine" in calls[-1].prompt
    assert len(run(judge.program("x", TextCodec()), lambda *_: Reply(outcome=Outcome.FAILED))) == 2


def test_a_program_may_run_programs_and_calls_side_by_side_and_get_their_values():
    def inner(word: str) -> Program:
        reply = yield Call(word, 1)
        return reply.text * 2

    seen = []

    def outer() -> Program:
        nothing = yield ()
        seen.append(nothing)
        answers = yield (inner("a"), Call("b", 1), inner("c"))
        seen.append((answers[0], answers[1].text, answers[2]))

    run(outer(), lambda _, call: Reply(call.prompt.upper()))
    assert seen == [(), ("AA", "B", "CC")]


@pytest.mark.parametrize(
    "source", [WORD_PROBLEMS, ARTICLES, PASSAGES, given(("One two three.", "Four five."))]
)
@pytest.mark.parametrize("tokens", [1, 7, 40, 700])
def test_a_text_has_exactly_the_tokens_asked_for(source, tokens):
    assert len(draw(source, seeded("seed", tokens), BYTES, tokens)) == tokens
    assert len(draw(source, seeded("seed", tokens), WORDS, tokens)) == tokens
    assert len(draw(source, seeded("seed", tokens), PackedCodec(), tokens)) == 4 * tokens


@pytest.mark.parametrize("name", SCENARIOS)
def test_programs_are_the_same_for_the_same_seed_client_and_index(name):
    def prompts(seed: str, client: int, index: int) -> list[Call]:
        scale = Scale(thought_tokens=2, judgement_tokens=2, height=2, document_tokens=100)
        clients = SCENARIOS[name].clients(scale=scale, rate_per_s=1.0, codec=BYTES, seed=seed)
        return run(clients[client].program(index))

    assert prompts("s", 0, 1) == prompts("s", 0, 1)
    for other in (("t", 0, 1), ("s", 1, 1), ("s", 0, 2)):
        assert prompts("s", 0, 1) != prompts(*other)


def test_the_bad_client_of_each_scenario_misbehaves_as_in_the_paper():
    def begun(name: str) -> tuple[list[tuple[int, Call]], list[tuple[int, Call]], int, int]:
        clients = SCENARIOS[name].clients(scale=Scale(), rate_per_s=1.0, codec=BYTES)
        good, bad = clients[0], clients[-1]
        assert (good.well_behaved, bad.well_behaved) == (True, False)
        assert (good.arrivals == bad.arrivals) == (name != "qa-s1")
        return (
            Execution(good.program(0)).start(),
            Execution(bad.program(0)).start(),
            good.requests,
            bad.requests,
        )

    assert begun("tot-s1")[2:] == (30, 340)
    assert begun("judge-s1")[2:] == (3, 17)
    good, bad, *requests = begun("tot-s2")
    assert requests == [30, 30]
    assert len(bad[0][1].prompt) - len(good[0][1].prompt) == 9 * 546
    good, bad, *requests = begun("judge-s2")
    assert requests == [3, 3]
    assert len(bad[0][1].prompt) - len(good[0][1].prompt) == 600
    assert begun("qa-s1")[2:] == (8, 8)
    assert begun("qa-s2")[2:] == (8, 8)


def test_a_bad_line_of_questions_is_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "Why?"}\n{"answer": 3}\n')
    with pytest.raises(ValueError, match=r"q\.jsonl:2"):
        read_questions(path)


def test_document_questions_share_the_document_and_are_asked_side_by_side():
    questions = [BYTES.encode(f"? {k}") for k in range(3)]
    execution = Execution(DocumentQa(3, 15).program(BYTES.encode("Document."), questions, BYTES))
    ready = execution.start()
    assert [call.prompt for _, call in ready] == [BYTES.encode("Document.") + q for q in questions]
    assert {call.max_output_tokens for _, call in ready} == {15}
    for number, _ in ready:
        execution.reply(number, Reply())
    assert execution.outcome is Outcome.OK


@pytest.mark.parametrize("codec", [BYTES, PackedCodec(), TextCodec()], ids=["ids", "packed", "text"])
def test_a_turns_prompt_begins_with_the_one_before_and_what_the_model_said(codec: Codec):
    def answer(number: int, call: Call) -> Reply:
        text = f"<{number}>" * call.max_output_tokens
        return Reply(text, tuple(text.encode()), packed=text.encode("utf-32-le"))

    turns = [Turn(codec.encode(f"words {k}"), 5 + k, 1.5 * k) for k in range(4)]
    calls = run(Chat().program(turns, codec), answer)
    assert [call.max_output_tokens for call in calls] == [5, 6, 7, 8]
    assert [call.after_s for call in calls] == [0.0, 1.5, 3.0, 4.5]
    said = None
    for number, (turn, call) in enumerate(zip(turns, calls, strict=True)):
        expected = turn.words if said is None else codec.join(said, codec.encode("\n"), turn.words)
        assert call.prompt == expected
        said = codec.join(call.prompt, codec.answer(answer(number, call)))


def test_conversations_have_the_papers_lengths_on_average():
    client = chat_client("c", arrivals=EvenArrivals(1.0), codec=PackedCodec())
    found = statistics(client.program(k) for k in range(4000))
    assert found.requests_per_program == pytest.approx(1.28, rel=0.03)
    assert found.common_tokens == pytest.approx(56, rel=0.06)
    assert found.shared_tokens == pytest.approx(56, rel=0.15)
    assert found.output_tokens == pytest.approx(142, rel=0.05)


@pytest.mark.parametrize("after_s", [-1.0, float("inf"), float("nan")])
def test_a_call_cannot_be_made_before_its_step(after_s):
    with pytest.raises(ValueError, match="after 0 s or more"):
        Call("x", 1, after_s=after_s)


def first_prompt(client, index: int) -> tuple[int, ...]:
    (call,) = run(client.program(index))
    return call.prompt


def agreeing(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def test_requests_of_fixed_lengths_share_their_prefix_and_no_more():
    def client(name: str, prefix_tokens: int):
        return fixed_length_client(
            name,
            input_tokens=256,
            output_tokens=64,
            arrivals=EvenArrivals(1.0),
            codec=BYTES,
            prefix_tokens=prefix_tokens,
        )

    one, other, alone = client("a", 100), client("b", 100), client("c", 0)
    prompts = {(c.name, k): first_prompt(c, k) for c in (one, other, alone) for k in range(2)}
    assert {len(prompt) for prompt in prompts.values()} == {256}
    assert 100 <= agreeing(prompts["a", 0], prompts["a", 1]) < 105
    assert agreeing(prompts["a", 0], prompts["b", 0]) < 5
    assert agreeing(prompts["c", 0], prompts["c", 1]) < 5
    (call,) = run(one.program(0))
    assert call.max_output_tokens == 64
    with pytest.raises(ValueError, match="beyond its prefix"):
        client("d", 256)


def test_statistics_find_what_is_shared_with_any_earlier_request():
    programs = [Single(2).program(text) for text in ("abcdefgh", "zzzz", "abcdzzzz", "abcdefzz")]
    found = statistics(programs)
    assert found.shared_tokens == (0 + 0 + 4 + 6) / 4 / 4
    assert found.common_tokens == found.prompt_tokens
    with pytest.raises(ValueError, match="no requests"):
        statistics([])
