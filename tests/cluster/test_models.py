"""Several models in one cluster: how replicas are dealt out, and what each process is told."""

import contextlib
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.__main__ import workers as workers_of
from router.gateway.__main__ import check as check_gateway
from sglang_fair.cluster.local import Additions
from sglang_fair.cluster.models import deal, fewest, in_turn
from sglang_fair.cluster.options import ConfigError, Options
from sglang_fair.cluster.plan import Model, Process, build
from sglang_fair.cluster.ports import Marks, Reservations
from sglang_fair.settings.program import parse
from sglang_fair.settings.setting import SettingError
from tests.cluster.test_cluster import MACHINE, PORTS, after

A, B = Model(Path("/m/a"), "a", "tiny"), Model(Path("/m/b"), "b", "/models/b")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(), ["", ""]),
        (Options(models="a=tiny,b=bench"), ["a", "b"]),
        (Options(models="a=tiny,b=bench", replicas=5), ["a", "b", "a", "b", "a"]),
        (Options(models="a=tiny:3,b=/models/b:1"), ["a", "b", "a", "a"]),
        (Options(models="a=tiny:3,b=/models/b:1", replicas=4), ["a", "b", "a", "a"]),
        (Options(models="only=/models/x:2:1"), ["only"]),
    ],
)
def test_replicas_are_dealt_out(options: Options, expected: list[str]) -> None:
    assert list(deal(options).first) == expected


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1))
def test_each_gets_what_it_asks_for_in_its_turn(counts: dict[str, int]) -> None:
    found = in_turn(counts, sum(counts.values()))
    assert Counter(found) == Counter(counts)
    for at in range(len(found)):
        so_far = Counter(found[: at + 1])
        assert all(so_far[name] >= min(counts[name], max(so_far.values()) - 1) for name in counts)


def test_every_process_is_told_its_models() -> None:
    options = Options(models="a=tiny,b=/models/b", replicas=3, slo_classes={"chat": 5.0, "night": 30_000.0})
    with contextlib.closing(Reservations("127.0.0.1")) as reservations:
        ports = reservations.choose(0, 3)
    plan = build(options, "cpu", MACHINE, [A, B, A], ports)
    replicas = [parse("replica", process.argv) for process in plan.of("replica")]
    assert [(one.model, one.served_name) for one in replicas] == [
        ("tiny", "a"), ("/models/b", "b"), ("tiny", "a"),
    ]  # fmt: skip
    (router,), (gateway,) = plan.of("router"), plan.of("gateway")
    told = workers_of(parse("router", router.argv[3:]))
    assert [(up.worker, up.models, up.loaded) for up in told] == [
        ("r0", ("a",), "a"), ("r1", ("b",), "b"), ("r2", ("a",), "a"),
    ]  # fmt: skip
    settings = parse("gateway", gateway.argv[3:])
    check_gateway(settings)
    assert (settings.model_name, settings.tokenizer, settings.more_models) == ("a", "/m/a", "b=/m/b")
    assert dict(settings.slo_classes) == {"chat": 5.0, "night": 30_000.0}


def test_a_further_replica_has_the_model_that_is_asked_for() -> None:
    options = Options(models="a=tiny,b=/models/b", replicas=2)
    with contextlib.closing(Reservations("127.0.0.1")) as reservations:
        ports = reservations.choose(0, 2)
        more = Additions(options, "cpu", [A, B], ports, reservations, Marks("gpu-test"), lambda: MACHINE)
        assert served(more.plan(2, "b", ["a", "b"])[0]) == ("b", "/models/b")
        assert served(more.plan(3, None, ["a", "a", "b"])[0]) == ("b", "/models/b")
        assert served(more.plan(4, None, ["a", "b"])[0]) == ("a", "tiny")
        with pytest.raises(ConfigError, match="there is no model 'c' here; there are a, b"):
            more.plan(5, "c", ["a", "b"])
    assert fewest(["x"], []) == "x"


def served(process: Process) -> tuple[str, str]:
    assert process.worker is not None
    settings = parse("replica", process.argv)
    assert settings.served_name == process.models[0]
    return process.models[0], settings.model


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--worker", "r0,http=http://x,model=a", "--worker", "r1,http=http://y"], "say model= of r1 too"),
        (["--worker", "r0,http=http://x,model="], "is not NAME,http=URL"),
    ],
)
def test_workers_name_their_models_all_or_none(words: list[str], wrong: str) -> None:
    with pytest.raises(SettingError, match=wrong):
        workers_of(parse("router", ["--bind", "tcp://127.0.0.1:*", *words]))


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--more-models", "a=/x"], "a is the first model already"),
        (["--more-models", "b"], "models are KEY=VALUE"),
        (["--slo-classes", json.dumps({"x y": 1})], "a class is called by"),
    ],
)
def test_a_gateway_s_models_and_classes_are_checked(words: list[str], wrong: str) -> None:
    own = ["--port", "1", "--router", "tcp://x", "--model-name", "a", "--tokenizer", "/x"]
    with pytest.raises(SettingError, match=wrong):
        check_gateway(parse("gateway", [*own, *words]))


# -- replicas that can load several


SEVERAL = "a=/m/a,b=/m/b,c=/m/c"


@pytest.mark.parametrize(
    ("options", "first", "expected"),
    [
        (Options(models=SEVERAL, replicas=3), "abc", {}),
        (Options(models=SEVERAL, replicas=1, swap="all"), "a", {0: ("a", "b", "c")}),
        (Options(models=SEVERAL, swap="all"), "ab", {0: ("a", "b", "c"), 1: ("b", "a", "c")}),
        (Options(models=SEVERAL, swap="r0=a+b,r1=c"), "ac", {0: ("a", "b")}),
        (Options(models=SEVERAL, swap="r1=a+c+b"), "ab", {1: ("b", "a", "c")}),
    ],
)
def test_which_replica_can_load_what(
    options: Options, first: str, expected: dict[int, tuple[str, ...]]
) -> None:
    assert "".join(deal(options).first) == first
    assert deal(options).loadable == expected


def test_each_replica_that_can_load_several_has_an_agent() -> None:
    options = Options(models="a=/m/a,b=/models/b", replicas=1, swap="all")
    plan = build(options, "cpu", MACHINE, (A,), PORTS, (), {0: (A, B)})
    (agent,) = plan.of("agent")
    assert (agent.name, after(agent.argv, "--worker")) == ("a0", "r0")
    assert after(agent.argv, "--models") == "a=/m/a,b=/models/b" or "b=" in after(agent.argv, "--models")
    assert after(plan.of("router")[0].argv, "--worker").endswith("model=a|b")
    (up,) = workers_of(parse("router", plan.of("router")[0].argv[3:]))
    assert (up.models, up.loaded) == (("a", "b"), ""), "its agent is going to say which it has"
    gateway = plan.of("gateway")[0].argv
    assert (after(gateway, "--model-name"), after(gateway, "--more-models")) == ("a", "b=/m/b")
