"""The overlay's settings: arguments and environment, good and bad. Needs no engine."""

import argparse

import pytest

from sglang_fair.core import POLICIES
from sglang_fair.overlay import config


def adopt(arguments: list[str], environ: dict[str, str]) -> argparse.Namespace:
    """SGLang's parser in miniature, with our arguments on it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule-policy", choices=["lpm", "fcfs"], default="fcfs")
    parser.add_argument("--enable-priority-scheduling", action="store_true")
    config.add_arguments(parser)
    namespace = parser.parse_args(arguments)
    config.adopt_arguments(namespace, environ)
    return namespace


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--fair-quantum", "-5"], {}, "quantum must be a positive number"),
        (["--fair-quantum", "many"], {}, "SGLANG_FAIR_QUANTUM must be a number"),
        (["--fair-extend-weight", "-1"], {}, "extend weight"),
        (["--fair-extend-weight", "0", "--fair-output-weight", "0"], {}, "cannot both be 0"),
        (["--fair-client-weights", "{gold: 2"], {}, "SGLANG_FAIR_CLIENT_WEIGHTS is not JSON"),
        (["--fair-client-weights", "[1]"], {}, "must map client names"),
        (["--fair-client-weights", '{"gold": 0}'], {}, "weight of client 'gold'"),
        (["--schedule-policy", "dlpm", "--enable-priority-scheduling"], {}, "cannot be combined"),
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
    assert settings.cost(1, 1) == 3 + 2
    assert settings.client_weights == {"gold": 2}
    assert settings.identity == ("x-team", "user")


def test_every_policy_can_be_named_without_hiding_sglangs_own() -> None:
    assert set(config.SERVER_POLICIES.values()) == set(POLICIES)
    assert not set(config.SERVER_POLICIES) & set(config.STOCK_POLICIES)
