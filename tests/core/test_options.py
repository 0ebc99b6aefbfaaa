"""A policy's own options as text: typed by the policy, refused in one line, and handed on by a cluster."""

from pathlib import Path

import pytest

from sglang_fair.cluster.options import ConfigError, Options, check
from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES, option_values
from sglang_fair.core.options import make, parse
from sglang_fair.engines import replica
from sglang_fair.models import catalog as models
from sglang_fair.overlay.config import SETTINGS


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_runs_with_can_be_said_again(policy: str) -> None:
    default = make(policy, "", quantum=2000, weights=Weights())
    said = {option: value for option, value in option_values(default).items() if value is not None}
    text = ", ".join(f"{option} = {value}" for option, value in said.items())
    assert parse(policy, text) == said
    assert option_values(make(policy, text, quantum=2000, weights=Weights())) == option_values(default)


@pytest.mark.parametrize(
    ("policy", "text", "said"),
    [
        ("nobody", "", "unknown policy 'nobody'"),
        ("fcfs", "a=1", "policy fcfs has no option 'a'; it has none"),
        ("dlpm", "quantum=5", "policy dlpm has no option 'quantum'; there are patience"),
        ("dlpm", "patience=2.5", "option patience must be a whole number, not '2.5'"),
        ("vtc-noisy", "noise_percent=much", "option noise_percent must be a number, not 'much'"),
        ("dlpm", "patience", "'patience' is not one"),
        ("dlpm", "patience=1,patience=1", "option 'patience' is given twice"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(policy: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
        parse(policy, text)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(policy_options="seed=1"), "policy dlpm has no option 'seed'"),
        (Options(policy="rpm", policy_options="limit=0"), "limit must be at least one"),
        (Options(policy="sglang:lpm", policy_options="limit=1"), "sglang:lpm is SGLang's own"),
    ],
)
def test_a_cluster_refuses_them_before_anything_starts(options: Options, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as refusal:
        check(options)
    assert said in str(refusal.value)


def test_every_setting_of_fairness_reaches_sglang_s_server(tmp_path: Path) -> None:
    (apps := tmp_path / "apps.json").write_text("{}")
    given = {
        "--fair-quantum": "500.0",
        "--fair-options": "patience=3",
        "--fair-stall-ms": "50.0",
        "--fair-mixed-chunk": "off",
        "--fair-target-tpot-ms": "20.0",
        "--fair-payer": "equal",
        "--fair-cost": "linear",
        "--fair-extend-weight": "2.0",
        "--fair-output-weight": "3.0",
        "--fair-client-weights": '{"gold": 2.0}',
        "--fair-identity": "user,key",
        "--fair-cache-share": "on",
        "--fair-metrics-clients": "7",
        "--fair-apps": str(apps),
        "--fair-hang-timeout": "30.0",
        "--fair-max-logprobs": "5",
        "--fair-allow-fields": "stop_regex",
    }
    assert set(given) == {setting.argument for setting in SETTINGS.values()}, "a setting without a value here"
    flags = {setting.argument: setting.flag for setting in SETTINGS.values()}
    own = replica.parse([word for name, text in given.items() for word in (flags[name], text)])
    words = replica.server_arguments(own, models.ServedModel("tiny", "/models/tiny", "tiny"))
    assert {name: words[words.index(name) + 1] for name in given if name in words} == given


@pytest.mark.parametrize(
    ("words", "mixed"),
    [
        ("--device cpu", ["off"]),
        ("--device cpu --mixed-chunk on", ["on"]),
        ("--device cuda", []),
        ("--engine emulated --gpu a100-80g --model llama-3.1-8b", []),
    ],
)
def test_plain_pytorch_on_a_cpu_mixes_no_steps_unless_it_is_told_to(words: str, mixed: list[str]) -> None:
    own = replica.parse(words.split())
    found = replica.server_arguments(own, models.ServedModel("tiny", "/models/tiny", "tiny"))
    assert [found[at + 1] for at, word in enumerate(found) if word == "--fair-mixed-chunk"] == mixed
