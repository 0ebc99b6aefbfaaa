"""What no machine could start is one line, before anything is started."""

from pathlib import Path

import pytest

from router.gateway.__main__ import check as check_gateway
from sglang_fair.cluster.__main__ import main
from sglang_fair.cluster.options import ConfigError, Options, check, extra_argument
from sglang_fair.core import POLICIES
from sglang_fair.settings.program import parse
from sglang_fair.settings.setting import SettingError

SEVERAL = "a=/m/a,b=/m/b,c=/m/c"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(replicas=0), "--replicas must be at least 1, not 0"),
        (
            Options(gateway_options="max-in-fly=3"),
            "a gateway has no limit 'max-in-fly'; there are max-in",
        ),
        (Options(device="tpu"), "unknown --device 'tpu'; there are auto, cpu, cuda"),
        (
            Options(policy="magic"),
            f"unknown --policy 'magic'; there are {', '.join(POLICIES)}, and sglang:NAME",
        ),
        (Options(placement="luck"), "unknown --placement 'luck'; there are d2lpm"),
        (Options(log_level="loud"), "unknown --log-level 'loud'"),
        (Options(port=70000), "--port must lie from 0 to 65535"),
        (Options(worker_quantum=0.0), "--worker-quantum must be above 0"),
        (Options(cost="cheap"), "unknown cost 'cheap'; there are linear, profiled"),
        (Options(client_weights={"gold": 0.0}), "gold"),
        (Options(payer="nobody"), "unknown payer 'nobody'"),
        (Options(policy_options="quanta=3"), "no option 'quanta'"),
        (Options(placement_options="threshold=3"), "placement d2lpm-queue has no parameter threshold"),
        (Options(extra=("tiny",)), "unexpected argument 'tiny'"),
        (
            Options(extra=("--port", "1")),
            "the cluster sets --port of each replica itself; use --port before",
        ),
        (Options(extra=("--model-path=x",)), "use --model before the --"),
        (Options(extra=("--kv-events-config", "{}")), "it cannot be given"),
        (Options(extra=("--tp", "two")), "--tp must be a whole number from 1, not 'two'"),
        (Options(extra=("--page-size",)), "--page-size needs a value"),
        (Options(extra=("--dp-size", "2")), "use --replicas"),
        (Options(models="a=tiny,b=bench,c=tiny"), "--replicas 2 are too few for 3 models"),
        (Options(models="a=tiny:2,b=bench"), "say of b too how many replicas"),
        (Options(models="a=tiny:2,b=bench:1", replicas=7), "asks for 3 replicas, and --replicas for 7"),
        (Options(models="a=tiny,a=bench"), "model 'a' is given twice"),
        (Options(models="tiny"), "'tiny' is not one"),
        (Options(models="a=,b=tiny"), "a= is not NAME=MODEL"),
        (Options(models="a=tiny:0,b=tiny:1"), "is not NAME=MODEL"),
        (Options(models="a=:2"), "is not NAME=MODEL"),
        (Options(models="default=tiny,b=tiny"), "a name is of letters"),
        (Options(models="a:b=tiny,b=tiny"), "a name is of letters"),
        (Options(models="a=tiny,b=bench", model="tiny"), "--model and --models: give one of them"),
        (Options(models="a=tiny,b=llama-3.1-8b", engine="emulated", gpu="h100"), "unknown --model 'tiny'"),
        (
            Options(models="a=llama-3.1-8b,b=llama-2-7b", engine="emulated", gpu="h100", cost_model="x"),
            "--cost-model is of one model",
        ),
        (Options(slo_classes={}), "--slo-classes: there must be 1 to 32 classes"),
        (Options(slo_classes={"a": -1.0}), "--slo-classes: class a: its time must be above 0"),
        (Options(swap="all"), "--swap is for several --models"),
        (Options(models=SEVERAL, replicas=3, swap="some"), "--swap: none, all, or as r0=a+b"),
        (Options(models=SEVERAL, replicas=3, swap="r3=a+b"), "there is no replica 'r3'; there are r0 to r2"),
        (Options(models=SEVERAL, replicas=3, swap="x=a+b"), "there is no replica 'x'"),
        (Options(models=SEVERAL, replicas=3, swap="r0=a+z"), "there is no model 'z'; there are a, b, c"),
        (Options(models=SEVERAL, swap="r0=a+b"), "no replica can load c"),
        (
            Options(models="a=llama-3.1-8b,b=llama-2-7b", engine="emulated", gpu="a100-80g", swap="all"),
            "--swap needs weights, which an emulated replica has not",
        ),
        (Options(scale_up=2), "--scale-up is for --placement deadline or qlm"),
        (Options(placement="qlm", scale_up=-1), "--scale-up must be at least 0"),
        (Options(extra=("--base-gpu-id", "2")), "say in CUDA_VISIBLE_DEVICES which the cluster may use"),
        (Options(extra=("--gpu-id-step=2",)), "say in CUDA_VISIBLE_DEVICES which the cluster may use"),
        (Options(extra=("--nnodes", "2")), "all replicas of a cluster run on this machine"),
        (Options(extra=("--pp", "2")), "write --pp-size"),
        (Options(extra=("--node-rank=1",)), "all replicas of a cluster run on this machine"),
        (Options(extra=("--dist-init-addr", "h:1")), "each finds an address of its own"),
        (Options(extra=("--nccl-port", "9000")), "each has a port of its own"),
        (Options(extra=("--base-gpu", "2")), "write --base-gpu-id in full, not --base-gpu"),
        (Options(extra=("--nnode", "2")), "write --nnodes in full"),
        (Options(extra=("--tensor-parallel=2",)), "write --tensor-parallel-size in full"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: Options, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_can_be_is_not() -> None:
    check(Options(extra=("--tp", "2", "--model-impl", "auto")))
    check(Options(placement="qlm", scale_up=2))


def test_the_last_of_two_values_counts() -> None:
    assert extra_argument(("--tp", "2", "--x", "--tp=4"), "--tp", "--tp-size") == "4"
    assert extra_argument(("--tp-size=8",), "--tp", "--tp-size") == "8"
    assert extra_argument(("--tpx", "2"), "--tp") is None


GATEWAYS = [
    ("--tenants FILE", "tenants:\n  gold: {wieght: 3}\n", ":2:10: tenants.gold.wieght: there is no 'wieght' here"),
    ("--tenants /none.yaml", "", "cannot read /none.yaml"),
    ("--trusted-proxies 10.0.0.1/8", "", "--trusted-proxies: 10.0.0.1/8 has host bits set"),
    ("--limit-store file:x", "", "--limit-store must be memory or redis://"),
    ("--admin-port 0", "", "--admin-port must lie from 1 to 65535"),
    ("--apps FILE", '{"a": "chat"}', "must have a list"),
]  # fmt: skip
"""What a gateway alone refuses too."""


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        *GATEWAYS,
        ("--limits FILE", "{}", "--limits are for --throttle"),
        ("--throttle oit --limits FILE", '{"user": 0}', "at `$.user`"),
        ("--throttle oit --limits FILE", '{"low": 0.9, "high": 0.5}', "low must be below high"),
        ("--throttle oit --limits FILE", '{"high": 2}', "at `$.high`"),
        ("--throttle oit --limits FILE", "{", "is not a JSON file"),
        ("--throttle oit --limits /no/such", "", "cannot read /no/such"),
        ("--policy wsc --cost profiled", "", "the cost must be linear"),
        ("--policy wsc --payer equal", "", "needs payer first"),
        ("--policy wsc --policy-options lead=-1", "", "lead must be"),
        ("--throttle all", "", "throttle"),
    ],
)
def test_so_is_what_is_wrong_in_a_file(
    tmp_path: Path, words: str, content: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    arguments = words.replace("FILE", str(path)).split()
    assert main(["--model", "tiny", *arguments]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line
    if (words, content, said) in GATEWAYS:
        own = ["--port", "1", "--router", "tcp://127.0.0.1:1", "--model-name", "tiny", "--tokenizer", "/m"]
        with pytest.raises((SettingError, SystemExit)):
            check_gateway(parse("gateway", [*own, *arguments]))
