"""Throttling and applications on the command line: what cannot be, and what the processes are started with."""

import contextlib
import json
from pathlib import Path

import pytest

from sglang_fair.cluster.__main__ import main
from sglang_fair.cluster.options import Options
from sglang_fair.cluster.plan import build
from sglang_fair.cluster.ports import Reservations
from tests.cluster.test_cluster import MACHINE, MODEL


@pytest.mark.parametrize(
    ("arguments", "content", "words"),
    [
        (["--limits", "FILE"], "{}", "--limits are for --throttle"),
        (["--throttle", "oit", "--limits", "FILE"], '{"user": 0}', "at `$.user`"),
        (["--throttle", "oit", "--limits", "FILE"], '{"low": 0.9, "high": 0.5}', "low must be below high"),
        (["--throttle", "oit", "--limits", "FILE"], '{"high": 2}', "at `$.high`"),
        (["--throttle", "oit", "--limits", "FILE"], "{", "is not a JSON file"),
        (["--throttle", "oit", "--limits", "/no/such"], "", "cannot read /no/such"),
        (["--apps", "FILE"], '{"a": "chat"}', "must have a list"),
        (["--policy", "wsc", "--cost", "profiled"], "", "the cost must be linear"),
        (["--policy", "wsc", "--payer", "equal"], "", "needs payer first"),
        (["--policy", "wsc", "--policy-options", "lead=-1"], "", "lead must be"),
        (["--throttle", "all"], "", "throttle"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(
    tmp_path: Path, arguments: list[str], content: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    assert main(["--model", "tiny", *(str(path) if one == "FILE" else one for one in arguments)]) == 2
    said = capfd.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_replicas_of_a_throttled_cluster_publish_their_load(tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"user": 3}))
    options = Options(throttle="oit", limits=str(limits), normal=str(tmp_path / "normal.json"), replicas=2)
    with contextlib.closing(Reservations("127.0.0.1")) as reservations:
        ports = reservations.choose(0, 2, loads=True)
    plan = build(options, "cpu", MACHINE, MODEL, ports)
    for index, replica in enumerate(plan.of("replica")):
        argv, port = list(replica.argv), ports.replicas[index].load
        assert argv[argv.index("--load-port") + 1] == str(port)
        assert argv[argv.index("--fair-normal") + 1] == str(tmp_path / f"normal.json.r{index}")
        assert replica.worker is not None
        assert replica.worker.load == f"tcp://127.0.0.1:{port}"
    [router] = plan.of("router")
    assert f"load=tcp://127.0.0.1:{ports.replicas[0].load}" in " ".join(router.argv)
    assert list(router.argv)[list(router.argv).index("--limits") + 1] == str(limits)
