"""What a call says of its interaction, and which applications a client may name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.common.identity import MAX_NAME_CHARS
from sglang_fair.common.interaction import MOST_CHARS, OTHER, Apps, Part, make_apps, part_of, read_count

values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.text(min_size=MOST_CHARS + 1), st.lists(st.text())
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "x-fair-app",
                "x-fair-interaction",
                "x-fair-stage",
                "x-fair-last",
                "x-fair-session",
                "session-id",
            ]
        ),
        st.text(),
    ),
    st.one_of(
        values, st.dictionaries(st.sampled_from(["app", "interaction", "stage", "last", "session"]), values)
    ),
)
def test_whatever_is_said_makes_names_that_can_travel(headers: dict[str, str], metadata: object) -> None:
    part = part_of(headers, metadata)
    for name in (*part[:3], part.session):
        assert len(name) <= MAX_NAME_CHARS
        assert name.isascii()
        assert not name.startswith("(")
    assert part_of(part.headers()) == part


def test_a_header_goes_before_the_body() -> None:
    metadata = {"app": "body", "interaction": "7", "stage": "plan", "last": "1"}
    assert part_of({}, metadata) == Part("body", "7", "plan", True)
    assert part_of({"x-fair-app": "chat", "x-fair-last": "0"}, metadata) == Part("chat", "7", "plan", False)
    assert part_of({"x-fair-last": "yes"}) == Part()
    assert part_of({}, ["app"]) == Part()
    assert part_of({}, {"app": "x" * (MOST_CHARS + 1), "last": True}) == Part()


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-session-affinity": "ses_1"}, "ses_1"),
        ({"x-session-affinity": "ses_2", "x-parent-session-id": "ses_1"}, "ses_1"),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "child"}, "c"),
        ({"session-id": "root", "thread-id": "child", "x-codex-parent-thread-id": "root"}, "root"),
        ({"session_id": "older"}, "older"),
        ({"x-fair-session": "mine", "session-id": "its"}, "mine"),
        ({"x-fair-session": " ", "session-id": "its"}, "its"),
        ({"x-llm-d-inference-fairness-id": "client"}, ""),
    ],
    ids=["opencode", "its child", "claude code", "codex", "codex before", "said", "blank", "none"],
)
def test_a_session_is_what_coding_agents_say_and_a_child_is_of_its_parents(
    headers: dict[str, str], session: str
) -> None:
    assert part_of(headers).session == session
    assert part_of(headers, {"session": "body"}).session == (session or "body")


def test_an_application_that_is_not_bound_is_another_one() -> None:
    assert Apps().of("a", "anything") == "anything"
    apps = make_apps({"a": ["chat", "José"], "b": []}, "apps.json")
    assert [apps.of("a", app) for app in ("chat", "Jos%C3%A9", "code", "")] == [
        "chat",
        "Jos%C3%A9",
        OTHER,
        "",
    ]
    assert apps.of("b", "chat") == apps.of("stranger", "chat") == OTHER


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (["a"], "apps.json must map clients"),
        ({"a": "chat"}, "'a' must have a list"),
        ({"a": [""]}, "'a' must have a list"),
        ({"a": [1]}, "'a' must have a list"),
    ],
)
def test_a_binding_that_is_none_is_refused_in_one_line(content: object, words: str) -> None:
    with pytest.raises(ValueError, match=r"^apps\.json") as refusal:
        make_apps(content, "apps.json")
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.0", "١", "9" * 30, "1e3", " 1"])
def test_a_number_that_no_gateway_says_is_none(text: str) -> None:
    assert read_count(text) is None
    assert read_count("12") == 12
