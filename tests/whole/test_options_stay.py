"""Options that users' scripts rely on: none of them disappears or gets another default unnoticed."""

import re
import subprocess
import sys

import pytest

from sglang_fair import cli
from sglang_fair.settings.setting import settings_of
from sglang_fair.settings.table import SECTIONS

PROGRAMS = {
    "cluster": "replicas device engine model gpu cost-model time-scale policy placement host port quantum "
    "policy-options stall-ms target-tpot-ms payer identity worker-quantum placement-options cost extend-weight "
    "output-weight client-weights gateway-workers gateway-options dashboard dashboard-port json quiet-replicas "
    "log-level start-timeout",
    "replica": "device engine model gpu cost-model time-scale host port name policy quantum policy-options payer cost "
    "stall-ms target-tpot-ms extend-weight output-weight client-weights identity kv-port page-size kv-tokens "
    "max-running",
    "router": "bind placement worker worker-quantum quantum extend-weight output-weight client-weights parameter "
    "page-size max-tree-tokens peer-timeout log-level outlive-parent",
    "gateway": "host port router model-name tokenizer workers router-timeout max-in-flight max-connections "
    "max-body-bytes max-held-bytes max-prompt-tokens max-context-tokens tries connect-timeout head-timeout "
    "body-timeout idle-timeout health-timeout progress-interval drain log-level identity outlive-parent",
    "dashboard": "gateway host port every outlive-parent",
    "compare": "workloads s2 schedulers placements duration drain repeats seed load rates model tokenizer device "
    "engine gpu cost-model time-scale replicas quantum worker-quantum good-clients question-tokens thought-tokens "
    "article-tokens judgement-tokens paper-scale json out resume",
    "simulate": "gpu model cost-model kv-tokens max-running chunked-prefill replicas schedulers quantum "
    "worker-quantum policy-options placement-options cost payer stall-ms target-tpot-ms "
    "client-weights hop workloads trace rate load cv "
    "duration drain good-clients question-tokens thought-tokens article-tokens judgement-tokens repeats seed jobs "
    "out json",
    "reproduce": "quick jobs out again list page publish",
    "calibrate": "out context quick seed",
}
ACCESS = "tenants trusted-proxies limit-store admin-host admin-port otlp-traces-endpoint"
for _name in ("cluster", "gateway"):
    PROGRAMS[_name] += f" {ACCESS}"
BENCHES = {
    "scheduler": "json quick policies queued clients prompt-tokens steps seed",
    "router": "json quick placements prompt-tokens workers tree-tokens decisions seed throttle",
    "gateway": "json quick rates seconds sglang-router seed",
    "serve": "url api model api-key identity keys workload clients rate concurrency cv input output prefix "
    "paper-scale questions articles trace tokenizer duration warm-up drain timeout connections cost stop-at-eos "
    "temperature seed records json",
    "isolation": "quick attacks policies placement light replicas gpu model time-scale seconds repeats seed "
    "sglang-router records json",
    "soak": "minutes rate every replicas seed logs json",
}
"""The options of each command, without their dashes."""

DEFAULTS = {
    "cluster": {
        "replicas": 2, "device": "auto", "engine": "auto", "model": "default", "time_scale": 1.0, "policy": "dlpm",
        "placement": "d2lpm-queue", "host": "127.0.0.1", "port": 8000, "quantum": None, "payer": "first",
        "stall_ms": 100.0, "target_tpot_ms": None,
        "worker_quantum": None, "extend_weight": None, "output_weight": None, "gateway_workers": 1,
        "log_level": "info", "start_timeout_s": None,
    },
    "replica": {
        "device": "cpu", "engine": "auto", "model": "default", "time_scale": 1.0, "host": "127.0.0.1",
        "port": 30000, "name": "r0", "policy": "dlpm", "quantum": None, "policy_options": "", "payer": "first",
        "stall_ms": 100.0, "target_tpot_ms": None,
        "cost": None, "extend_weight": None, "output_weight": None, "identity": None, "kv_port": None,
        "page_size": 16, "kv_tokens": None, "max_running": None,
    },
    "router": {
        "placement": "d2lpm-queue", "worker_quantum": None, "quantum": None, "extend_weight": None,
        "output_weight": None, "client_weights": None, "page_size": 16, "max_tree_tokens": 8_000_000,
        "peer_timeout_s": 10.0, "log_level": "info", "outlive_parent": False,
    },
    "gateway": {
        "host": "127.0.0.1", "workers": 1, "router_timeout_s": 5.0, "max_in_flight": 4096,
        "max_connections": 8192, "max_body_bytes": 16_777_216, "max_held_bytes": 536_870_912,
        "max_prompt_tokens": 131_072, "max_context_tokens": 0, "tries": 3, "connect_timeout_s": 2.0,
        "head_timeout_s": 15.0, "body_timeout_s": 300.0, "idle_timeout_s": 600.0, "health_timeout_s": 10.0,
        "progress_interval_s": 1.0, "drain_s": 30, "log_level": "info", "outlive_parent": False,
        "identity": "x-fair-client,x-tenant-id,x-smg-tenant-id,x-llm-d-inference-fairness-id,"
        "x-gateway-inference-fairness-id,api-key,user",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options"),
    [
        *((cli.PROGRAMS[name].module, options) for name, options in PROGRAMS.items()),
        *((cli.BENCHES[name].module, options) for name, options in BENCHES.items()),
    ],
    ids=[*PROGRAMS, *BENCHES],
)
def test_a_command_has_its_options(module: str, options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    shown = set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", done.stdout))
    assert {f"--{name}" for name in options.split()} <= shown


@pytest.mark.parametrize("section", DEFAULTS)
def test_a_program_has_its_defaults(section: str) -> None:
    known = settings_of(SECTIONS[section])
    assert {name: known[name].default for name in DEFAULTS[section]} == DEFAULTS[section]
    assert {setting.flag for setting in known.values()} >= {f"--{name}" for name in PROGRAMS[section].split()}
