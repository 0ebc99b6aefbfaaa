"""What the table lets through, and what it says of the rest. tests/whole/test_fields.py asks real engines."""

from typing import Any

import pytest

from sglang_fair.common.fields import MAX_BATCH, MAX_NESTING, RISKS, ROUTES, Facts, Wrong, is_simple, judge

FACTS = Facts(vocabulary=100)
ALLOWED = Facts(vocabulary=100, allowed=frozenset(RISKS))


def problem(route: str, body: dict[str, Any], facts: Facts = FACTS, *, at_replica: bool = False) -> str:
    try:
        judge(route, body, facts, at_replica=at_replica)
    except Wrong as wrong:
        return str(wrong)
    return ""


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


KILLERS: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"input_ids": [1, 100]}, "`input_ids` must be `int` <= 99"),
    ("/generate", {"input_ids": [[1], [-1]]}, "`input_ids` must be `int` >= 0"),
    ("/v1/completions", {"prompt": [1 << 40]}, "`prompt` must be `int` <= 99"),
    ("/v1/embeddings", {"input": [[100]]}, "`input` must"),
    ("/detokenize", {"tokens": [100]}, "`tokens` must"),
    *[(route, {"top_k": 1 << 40}, "`top_k` must be `int` <= 100")
      for route in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")],
    ("/generate", {"sampling_params": {"top_k": 101}}, "`top_k` must"),
    ("/v1/completions", {"logprobs": 100_000}, "`logprobs` must be `int` <= 20"),
    ("/v1/chat/completions", {"top_logprobs": 100_000}, "`top_logprobs` must"),
    ("/v1/responses", {"top_logprobs": 21}, "`top_logprobs` must"),
    ("/generate", {"top_logprobs_num": [1, 100_000]}, "`top_logprobs_num` must"),
    ("/v1/completions", {"min_tokens": 5, "stop_token_ids": [100]}, "`stop_token_ids` must"),
    ("/generate", {"positional_embed_overrides": {}}, "`positional_embed_overrides` must be left out"),
    ("/v1/completions", {"repetition_penalty": 1e-46}, "`repetition_penalty` must be `float` >= 0.01"),
    ("/v1/completions", {"logit_bias": {"1": 1e39}}, "`logit_bias` must be `float` <= 10000"),
    ("/v1/completions", {"logit_bias": {"100": 1}}, "`logit_bias` must be an object by token ids"),
    ("/v1/completions", {"temperature": float("nan")}, "`temperature` must"),
    ("/v1/completions", {"temperature": float("inf")}, "`temperature` must"),
    ("/generate", {"sampling_params": {"is_normalized": True, "stop_regex_strs": ["(a+)+b"]}}, "is_normalized"),
    ("/generate", {"sampling_params": {"beam_width": 9}}, "must not have a field 'beam_width'"),
    ("/generate", {"rid": []}, "`rid` must be `array` of length >= 1"),
    ("/generate", {"conversation_id": "x"}, "`conversation_id` is no field that clients may set here"),
    ("/v1/chat/completions", {"custom_params": {"__sglang_reasoning_end_token_ids": [1]}}, "two underscores"),
    ("/v1/chat/completions", {"custom_params": {"a": 1 << 64}}, "64 bits"),
    ("/v1/completions", {"ebnf": 'root ::= root root root | "a"'}, "--allow-fields ebnf"),
    ("/v1/completions", {"stop": ["x"] * 33}, "`stop` must be `array` of length <= 32"),
    ("/v1/completions", {"json_schema": '{"type":"string","pattern":"(a?){999}"}'}, "has a `pattern` that"),
    ("/v1/chat/completions", {"response_format": {"type": "structural_tag"}}, "--allow-fields structural_tag"),
    ("/v1/chat/completions", {"tools": [{"x": {"pattern": "(a*)*"}}]}, "`tools` has a `pattern`"),
    ("/v1/messages", {"output_config": {"schema": {"pattern": "(a*)*"}}}, "has a `pattern`"),
    ("/v1/completions", {"custom_logit_processor": "80049"}, "--allow-fields custom_logit_processor"),
    ("/generate", {"image_data": "http://127.0.0.1/"}, "`image_data` must be left out"),
    ("/v1/completions", {"bootstrap_host": "10.0.0.1"}, "`bootstrap_host` must be left out"),
    ("/v1/completions", {"anything": deep(MAX_NESTING)}, "must not nest deeper"),
    ("/v1/completions", {"json_schema": "[" * 200}, "must not nest deeper"),
    ("/v1/completions", {"n": MAX_BATCH + 1}, "`n` must be `int` <= 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "said"), KILLERS)
def test_what_ends_an_engine_is_refused(route: str, body: dict[str, Any], said: str) -> None:
    with pytest.raises(Wrong, match=said):
        judge(route, body, FACTS)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (
            "/generate",
            {"input_ids": [0, 99], "sampling_params": [{"top_k": 100, "stop_token_ids": [99]}, {}]},
        ),
        (
            "/generate",
            {"log_metrics": True, "image_data": None, "return_logprob": [True], "top_logprobs_num": 20},
        ),
        (
            "/v1/completions",
            {"prompt": "x", "logprobs": 0, "logit_bias": {"0": -100, "99": 1.5}, "temperature": 0},
        ),
        ("/v1/completions", {"an_option_of_tomorrow": 1 << 99, "stop_regex": "", "seed": -1, "top_k": -1}),
        ("/v1/chat/completions", {"tools": [deep(90)], "custom_params": {"thinking_budget": 9}, "stop": "x"}),
        ("/v1/messages", {"max_tokens": 1, "stop_sequences": ["x"], "metadata": {"user_id": "a"}}),
    ],
)
def test_what_clients_send_is_taken(route: str, body: dict[str, Any]) -> None:
    assert problem(route, body) == ""


def test_what_is_not_known_is_the_replicas_to_judge() -> None:
    assert (
        problem("/generate", {"input_ids": [1 << 30], "sampling_params": {"top_k": 1 << 30}}, Facts()) == ""
    )
    assert problem("/generate", {"input_ids": [1 << 31]}, Facts()) != ""
    sessions: dict[str, Any] = {"session_params": {"id": "a"}}
    assert problem("/generate", sessions) != problem("/generate", sessions, at_replica=True) == ""


BOMBS = [
    "(?=.{60})([a-z ]|[a-z ])+\\d[0-9]X", "(a+)+b", "([a-zA-Z]+)*1", "(a|aa)+b", "(a|a?)+b", "(.*a){20}b",
    "^(([a-z])+.)+[A-Z]([a-z])+$", "(x+x+)+y", "(\\w*)*\\d", "([^/]*/)*[^/]*x$",
]  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_no_pattern_can_backtrack_without_end(bomb: str, route: str) -> None:
    def sent(value: Any) -> dict[str, Any]:
        return {"sampling_params": {"stop_regex": value}} if route == "/generate" else {"stop_regex": value}

    assert "--allow-fields stop_regex" in problem(route, sent(bomb))
    assert "--allow-fields stop_regex" in problem(route, sent([bomb]))
    assert problem(route, sent(bomb), ALLOWED) == ""


@pytest.mark.parametrize(
    ("pattern", "simple"),
    [
        ("[a-z]{1,64}@[a-z]+", True), ("(,\\d{3})*", True), ("^(?:ab|c)+$", True), ("\\(a+\\)+", True),
        ("[(]a+[)]+", True), ("a+?b*", True), ("(\\d{1,3}\\.){3}\\d{1,3}", True),
        ("-?\\d+(\\.\\d+)?", True), ("(a?){11}", True), ("(a?){11}(b?){2}", False), ("(a?){13}", False),
        ("(a+){2}", False), ("a+{2}", False), ("\\d{4}-\\d{2}-\\d{2}", True), ("", True), (")", True),
        ("(a+)+", False), ("((a|b?)c)*", False), ("(a?){1000}", False), (".{0,100}.{0,100}", False),
        ("a{100000}", False), ("([)]a+)+", False), ("(\\)a+){2}", False), ("a{1,}{2}{999999999999}", False),
    ],
)  # fmt: skip
def test_repetitions_that_multiply(pattern: str, simple: bool) -> None:
    assert is_simple(pattern) is simple
    assert ("--allow-fields regex" in problem("/v1/completions", {"regex": pattern})) is not simple
    assert problem("/v1/completions", {"regex": pattern}, ALLOWED) == ""


@pytest.mark.parametrize("name", RISKS)
def test_an_operator_may_allow_it(name: str) -> None:
    facts = Facts.allowing(5, f" {name} ,")
    assert facts.most("logprobs") == 5
    assert facts.allowed == {name}
    with pytest.raises(ValueError, match="there are stop_regex"):
        Facts.allowing(5, "everything")


def test_every_row_has_a_type() -> None:
    """A value that nothing can be is refused by each row, but for those that are the gateway's own to judge."""
    own = {"model", "text", "stream_options", "user", "cache_salt", "extra_key", "metadata"}
    for route, rows in ROUTES.items():
        for name in rows.keys() - own - {"input_ids", "prompt", "input", "tokens", "token_ids_logprob"}:
            assert problem(route, {name: object()}) != "", (route, name)
