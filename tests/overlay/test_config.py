"""The overlay's settings: arguments and environment, good and bad. Needs no engine."""

import argparse

import pytest

from sglang_fair.core import POLICIES, option_values
from sglang_fair.core.cost import Cost, Linear, Profiled, Quadratic, Tiered
from sglang_fair.overlay import config

BAD_REQUESTS: tuple[tuple[object, str], ...] = (
    (None, "must be a JSON object with client_weights"),
    ([1], "must be a JSON object with client_weights"),
    ({}, "must be a JSON object with client_weights"),
    ({"weights": {"a": 1}}, "cannot change 'weights'; there is client_weights"),
    ({"client_weights": {"a": 1}, "quantum": 5}, "cannot change 'quantum'"),
    ({"client_weights": None}, "must map client names to numbers, not None"),
    ({"client_weights": ["a"]}, "must map client names to numbers"),
    ({"client_weights": {"": 1}}, "a client's name has 1 to 128 characters"),
    ({"client_weights": {"(system)": 1}}, "is known here by the name '%28system)'"),
    *(
        ({"client_weights": {"a": 1, "b": bad}}, "weight of client 'b' must be a positive number")
        for bad in (0, -1, True, "2", None, [1], float("nan"), float("inf"), 10**400, 1e-300)
    ),
)
"""Bodies of a POST /fair that cannot be meant, and words of the refusal."""


def adopt(arguments: list[str], environ: dict[str, str]) -> argparse.Namespace:
    """SGLang's parser in miniature, with our arguments on it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule-policy", choices=["lpm", "fcfs"], default="fcfs")
    parser.add_argument("--enable-priority-scheduling", action="store_true")
    parser.add_argument("--dllm-algorithm")
    parser.add_argument("--grpc-mode", action="store_true")
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--enable-mixed-chunk", action="store_true")
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--pp-size", type=int, default=1)
    config.add_arguments(parser)
    namespace = parser.parse_args(arguments)
    config.adopt_arguments(namespace, environ)
    return namespace


@pytest.mark.parametrize(
    ("arguments", "mixes"),
    [
        ("--schedule-policy dlpm", True),
        ("--schedule-policy dlpm --fair-mixed-chunk off", False),
        ("--schedule-policy dlpm --fair-mixed-chunk off --enable-mixed-chunk", True),
        ("--schedule-policy dlpm --fair-stall-ms 0", False),
        ("--schedule-policy fair-fcfs", False),
        ("--schedule-policy lpm", False),
        ("--schedule-policy dlpm --speculative-algorithm EAGLE", False),
        ("--schedule-policy dlpm --pp-size 2", False),
    ],
)
def test_steps_are_mixed_where_they_are_shared_and_sglang_can(arguments: str, mixes: bool) -> None:
    assert adopt(arguments.split(), {}).enable_mixed_chunk is mixes


def test_a_replica_has_the_shipped_option_unless_it_is_given_another_value() -> None:
    def borrow(policy: str, options: str) -> float:
        found = config.Config(policy_options=options).make_policy(policy)
        return found.borrow  # type: ignore[attr-defined, no-any-return]

    assert borrow("dlpm", "") == borrow("dlpm", "patience=3") == 0.3
    assert borrow("dlpm", "borrow=0,patience=3") == 0
    assert borrow("slo", "") == 0


def test_what_excludes_mixed_steps_is_called_so_by_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {action.dest: action.default for action in parser._actions}
    assert known.keys() >= {*config.UNMIXED, "enable_mixed_chunk"}
    assert {known[name] for name in config.UNMIXED} <= {None, False, 1}


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--fair-cache-share", "maybe"], {}, "SGLANG_FAIR_CACHE_SHARE"),
        (["--fair-quantum", "-5"], {}, "quantum must be a positive number"),
        (["--fair-quantum", "many"], {}, "SGLANG_FAIR_QUANTUM must be a number"),
        (["--fair-extend-weight", "-1"], {}, "extend weight"),
        (["--fair-client-weights", "{gold: 2"], {}, "SGLANG_FAIR_CLIENT_WEIGHTS is not JSON"),
        (["--fair-client-weights", "[1]"], {}, "must map names"),
        (["--fair-client-weights", '{"gold": 0}'], {}, "weight of client 'gold'"),
        (["--fair-client-weights", '{"Jos\u00e9": 2}'], {}, "is known here by the name 'Jos%C3%A9'"),
        (["--fair-cost", "cheap"], {}, "unknown cost 'cheap'; there are linear, profiled"),
        (["--fair-output-weight", "2"], {"SGLANG_FAIR_COST": "quadratic"}, "not to 'quadratic'"),
        (["--schedule-policy", "dlpm", "--enable-priority-scheduling"], {}, "cannot be combined"),
        (["--schedule-policy", "dlpm", "--dllm-algorithm", "LowConfidence"], {}, "--dllm-algorithm cannot"),
        (["--schedule-policy", "dlpm", "--grpc-mode"], {}, "--grpc-mode cannot"),
        (["--schedule-policy", "dlpm"], {"SGLANG_RUST_SERVER": "True"}, "SGLANG_RUST_SERVER=True cannot"),
        (["--schedule-policy", "vtc", "--disaggregation-mode", "decode"], {}, "--disaggregation-mode cannot"),
        (["--schedule-policy", "vtc", "--fair-options", "patience=3"], {}, "vtc has no option 'patience'"),
        (["--fair-options", "patience=3"], {"SGLANG_FAIR_POLICY": "vtc"}, "has no option 'patience'"),
        (["--schedule-policy", "lpm", "--fair-options", "patience=3"], {}, "lpm is SGLang's own"),
        (["--schedule-policy", "dlpm"], {"SGLANG_FAIR_OPTIONS": "quantum=3"}, "no option 'quantum'"),
        ([], {"SGLANG_FAIR_POLICY": "fairest"}, "SGLANG_FAIR_POLICY=fairest is unknown"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    arguments: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SystemExit, match=r"^sglang-fair: ") as refusal:
        adopt(arguments, environ)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "environ", "policy"),
    [
        ([], {}, "fcfs"),
        (["--schedule-policy", "dlpm"], {}, "dlpm"),
        (["--schedule-policy", "fair-lpm"], {}, "fair-lpm"),
        (["--schedule-policy", "lpm"], {}, "lpm"),
        ([], {"SGLANG_FAIR_POLICY": "vtc"}, "vtc"),
        (["--schedule-policy", "lpm"], {"SGLANG_FAIR_POLICY": "dlpm"}, "dlpm"),
    ],
)
def test_the_policy_is_chosen_by_argument_or_environment(
    arguments: list[str], environ: dict[str, str], policy: str
) -> None:
    assert adopt(arguments, environ).schedule_policy == policy


def test_arguments_reach_the_processes_that_sglang_starts() -> None:
    environ = {"SGLANG_FAIR_EXTEND_WEIGHT": "3"}
    adopt(
        ["--fair-quantum", "700", "--fair-client-weights", '{"gold": 2}', "--fair-identity", "X-Team, user"],
        environ,
    )
    settings = config.read(environ)
    assert settings.quantum == 700
    assert settings.charges(1, 1) == 3 + 2
    assert settings.client_weights == {"gold": 2}
    assert config.read_identity(environ) == ("x-team", "user")


def test_a_policys_own_options_reach_it() -> None:
    environ: dict[str, str] = {}
    adopt(["--schedule-policy", "vtc-noisy", "--fair-options", "noise_percent=12.5, seed=7"], environ)
    policy = config.read(environ).make_policy("vtc-noisy")
    assert option_values(policy) == {"remembered_clients": 10_000, "noise_percent": 12.5, "seed": 7}


@pytest.mark.parametrize(
    ("arguments", "environ", "cost"),
    [
        ([], {}, Linear()),
        (["--fair-cost", "linear", "--fair-output-weight", "4"], {}, Linear(1, 4)),
        (["--fair-extend-weight", "3"], {"SGLANG_FAIR_COST": ""}, Linear(3, 2)),
        ([], {"SGLANG_FAIR_COST": "profiled"}, Profiled()),
        (["--fair-cost", "quadratic:d=500"], {"SGLANG_FAIR_COST": "profiled"}, Quadratic(500)),
        (["--fair-cost", "tiered:4096,factor=3"], {}, Tiered(4096, 3)),
    ],
)
def test_the_cost_reaches_the_processes_that_sglang_starts(
    arguments: list[str], environ: dict[str, str], cost: Cost
) -> None:
    adopt(arguments, environ)
    assert config.read(environ).charges == cost


class TestWeightsAtRunTime:
    def test_they_replace_those_of_the_same_clients(self) -> None:
        settings = config.Config(client_weights={"gold": 2.0, "silver": 1.5})
        assert settings.with_weights({"gold": 3}).client_weights == {"gold": 3.0, "silver": 1.5}
        assert config.Config().with_weights({"new": 1}).client_weights == {"new": 1.0}

    def test_a_request_is_read(self) -> None:
        assert config.requested_weights({"client_weights": {"gold": 2, "key:1f": 0.5}}) == {
            "gold": 2.0,
            "key:1f": 0.5,
        }
        assert config.requested_weights({"client_weights": {"a" * 128: 1}})

    @pytest.mark.parametrize(("body", "said"), BAD_REQUESTS)
    def test_a_bad_request_is_refused_in_one_line(self, body: object, said: str) -> None:
        with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
            config.requested_weights(body)
        assert said in str(refusal.value)


def test_every_policy_can_be_named_without_hiding_sglangs_own() -> None:
    assert set(config.SERVER_POLICIES.values()) == set(POLICIES)
    assert not set(config.SERVER_POLICIES) & set(config.STOCK_POLICIES)
