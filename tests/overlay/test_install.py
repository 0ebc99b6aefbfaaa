"""A server that says DLPM runs DLPM, or does not run: each way in which the overlay could be lost is loud."""

import json
import subprocess

import pytest

from sglang_fair.overlay import releases
from tests.support import fork_server

pytestmark = pytest.mark.engine

PROLOGUE = """
import os
from sglang_fair.engines import cpu
os.environ.update(cpu.environment())
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run("-c", PROLOGUE + code, environment=environment)


PARSE = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(["--model-path", sys.argv[1] if len(sys.argv) > 1 else "/nowhere", {arguments}])
print("policy", args.schedule_policy)
"""


def test_a_target_that_sglang_has_not_ends_the_process() -> None:
    """SGLang's loader would log it and serve on with its own scheduling."""
    done = run("""
import sglang_fair.overlay.hooks as hooks
hooks.HOOKS = (*hooks.HOOKS, hooks.HOOKS[-1]._replace(target="sglang.srt.managers.scheduler.Scheduler.gone"))
from sglang.srt.plugins import load_plugins
load_plugins()
print("served on")
""")
    assert done.returncode == 1
    assert "served on" not in done.stdout
    assert "sglang-fair: cannot attach to sglang" in done.stderr
    assert "gone" in done.stderr


UNTESTED = """
from sglang_fair.overlay import install, releases, sources
releases.TESTED = ("9.9.9",)
{first}
install()
print("served on, asked for", os.environ[releases.UNSUPPORTED])
"""


def test_a_release_that_is_not_tested_is_refused_unless_it_is_asked_for_and_fits() -> None:
    refused = run(UNTESTED.format(first=""))
    assert refused.returncode == 1
    assert "is not tested; 9.9.9 are. --unsupported-sglang" in refused.stderr
    asked = {releases.UNSUPPORTED: "1"}
    tried = run(UNTESTED.format(first=""), **asked)
    assert tried.stdout == f"served on, asked for {releases.found()}\n", (
        "the next process need not look again"
    )
    assert "is not tested: its functions have the names and parameters" in tried.stderr
    misfit = "\\nserver_args.ServerArgs\\n  gone(self)\\n  add_cli_args(other)"
    unfit = run(UNTESTED.format(first=f"sources.SIGNATURES += '{misfit}'"), **asked)
    assert unfit.returncode == 1
    assert "does not fit: server_args.ServerArgs has no gone(self), and 1 more" in unfit.stderr
    assert releases.is_tested(f"{releases.NEWEST}+cu130.g1a2b3c4"), "a builder's mark is no other version"


def test_without_the_overlay_sglang_refuses_our_policies() -> None:
    done = run(PARSE.format(arguments='"--schedule-policy", "dlpm"'), SGLANG_FAIR_DISABLE="1")
    assert done.returncode == 2
    assert "invalid choice: 'dlpm'" in done.stderr


def test_sglang_takes_what_a_replica_on_gpus_is_started_with() -> None:
    """Its own parser, without the rest of its start, which looks for the GPUs."""
    done = run("""
import argparse, json
from sglang_fair.engines import replica
from sglang_fair.models.catalog import ServedModel
options = replica.parse(["--device", "cuda", "--model", "big", "--port", "30003", "--kv-port", "30004",
                         "--policy", "vtc", "--client-weights", '{"gold": 2}', "--", "--tp", "2", "--pp-size", "2"])
argv = replica.server_arguments(options, ServedModel("big", "/models/big", "big"))
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
taken = parser.parse_args(argv)
print(json.dumps([taken.model_path, taken.schedule_policy, taken.tp_size, taken.pp_size, taken.device,
                  taken.attention_backend, taken.disable_overlap_schedule, json.loads(taken.fair_client_weights)]))
print(json.dumps(replica.environment(options)))
""")
    assert done.returncode == 0, done.stderr[-2000:]
    taken, environment = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert taken == ["/models/big", "vtc", 2, 2, None, None, False, {"gold": 2}], (
        "SGLang's own choices on a GPU"
    )
    assert not {"SGLANG_PLATFORM", "CUDA_VISIBLE_DEVICES"} & set(environment)
