"""Programs run against replies made up here: how many calls, in which order, sharing which prefixes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from workloads.clients import SCENARIOS, Scale
from workloads.datasets import read_articles, read_questions
from workloads.programs import (
    Call,
    Execution,
    Judge,
    Outcome,
    Program,
    Reply,
    TextCodec,
    TokenCodec,
    TreeOfThought,
)
from workloads.programs.prose import Articles, Given, WordProblems, draw, seeded

BYTES = TokenCodec(lambda text: list(text.encode()))
GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k_test.jsonl"


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


@pytest.mark.parametrize("source", [WordProblems(), Articles(), Given(("One two three.", "Four five."))])
@pytest.mark.parametrize("tokens", [1, 7, 40, 700])
def test_a_text_has_exactly_the_tokens_asked_for(source, tokens):
    assert len(draw(source, seeded("seed", tokens), BYTES, tokens)) == tokens


def test_generated_texts_are_many_and_differ_early():
    heads = {draw(WordProblems(), seeded("client", index), TextCodec(1.0))[:40] for index in range(300)}
    assert len(heads) > 295


def test_questions_end_with_a_question():
    text = bytes(draw(WordProblems(), seeded("q"), BYTES, 400)).decode()
    assert text.endswith("?")


@pytest.mark.parametrize("name", SCENARIOS)
def test_programs_are_the_same_for_the_same_seed_client_and_index(name):
    def prompts(seed: str, client: int, index: int) -> list[Call]:
        scale = Scale(thought_tokens=2, judgement_tokens=2, height=2)
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
        assert good.arrivals == bad.arrivals
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


def test_arrivals_differ_between_clients_and_not_between_runs():
    first, second = (
        SCENARIOS["tot-s1"].clients(scale=Scale(), rate_per_s=2.0, codec=BYTES) for _ in range(2)
    )
    times = [client.arrival_times(until_s=20.0) for client in first]
    assert times == [client.arrival_times(until_s=20.0) for client in second]
    assert len(set(times)) == len(times)


def test_articles_are_read_from_a_folder_and_from_a_file(tmp_path):
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.txt").write_text("First.\n\nStill first.")
    assert read_articles(tmp_path).texts == ("First.\n\nStill first.", "Second.")
    assert read_articles(tmp_path / "a.txt").texts == ("First.", "Still first.")


def test_a_bad_line_of_questions_is_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "Why?"}\n{"answer": 3}\n')
    with pytest.raises(ValueError, match=r"q\.jsonl:2"):
        read_questions(path)


@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs GSM8K's test questions at {GSM8K}")
def test_real_questions_make_trees():
    questions = read_questions(GSM8K)
    assert len(questions.texts) == 1319
    natural = draw(questions, seeded(1), TextCodec())
    assert natural in questions.texts
    assert len(draw(questions, seeded(1), BYTES, 5000)) == 5000
