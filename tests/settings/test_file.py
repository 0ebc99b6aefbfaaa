"""A configuration file: what it sets, what wins over it, and how a mistake in it is reported."""

from pathlib import Path

import pytest
import yaml

from sglang_fair.cluster import __main__ as cluster_command
from sglang_fair.cluster.options import Options
from sglang_fair.settings import file
from sglang_fair.settings.program import load, parse
from sglang_fair.settings.setting import SettingError, command_line, settings_of
from sglang_fair.settings.table import SECTIONS, Cluster, Gateway

GOOD = """\
# A comment.
cluster:
  replicas: 4
  start-timeout: 90
  policy: vtc-noisy
  policy_options: {noise_percent: 12.5, seed: 7}
  gateway_options:
    max_in_flight: 100
  client_weights: {gold: 2}
  quiet_replicas: true
  quantum: 1e3
  sglang_arguments: [--tp, 2]
router:
  bind: tcp://127.0.0.1:5
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "fair.yaml"
    path.write_text(text)
    return path


def test_a_file_sets_what_the_command_line_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    found = load("cluster", {"replicas": "3"}, path)[0]
    assert found == Cluster(
        replicas=3, start_timeout_s=90.0, policy="vtc-noisy", policy_options="noise_percent=12.5,seed=7",
        gateway_options="max_in_flight=100", client_weights={"gold": 2.0}, quiet_replicas=True, quantum=1000.0,
        extra=("--tp", "2"),
    )  # fmt: skip
    assert load("router", {}, path)[0].bind == "tcp://127.0.0.1:5"
    assert load("replica", {}, path)[0] == load("replica", {})[0]
    assert load("cluster", {}, write(tmp_path, ""))[0] == Cluster()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster:\n  replicas: [\n", "3:1: not YAML: "),
        ("cluster:\n\treplicas: 1\n", "2:1: not YAML: found character '\\t'"),
        ("clutser:\n  replicas: 1\n", "1:1: there is no section called 'clutser'; did you mean cluster?"),
        ("- 1\n", "1:1: the file must be a mapping of names to values"),
        ("cluster: 3\n", "1:10: section cluster must be a mapping of names to values"),
        (
            "cluster:\n  replica: 1\n",
            "2:3: there is no setting in cluster called 'replica'; did you mean replicas?",
        ),
        ("cluster:\n  xyzzy: 1\n", "2:3: there is no setting in cluster called 'xyzzy'; there are "),
        ("cluster:\n  port: 1\n  port: 2\n", "3:3: port is given twice"),
        ("cluster:\n  replicas: two\n", "2:13: cluster.replicas must be a whole number, not 'two'"),
        ("cluster:\n  replicas: 1.5\n", "2:13: cluster.replicas must be a whole number, not 1.5"),
        ("cluster:\n  replicas: yes\n", "2:13: cluster.replicas must be a whole number, not True"),
        ("cluster:\n  replicas: 0\n", "2:13: cluster.replicas must be at least 1, not 0"),
        ("cluster:\n  port: 70000\n", "2:9: cluster.port must lie from 0 to 65535, not 70000"),
        ("cluster:\n  model: 7\n", "2:10: cluster.model must be a text, not 7"),
        ("cluster:\n  json: maybe\n", "2:9: cluster.json must be true or false, not 'maybe'"),
        ("cluster:\n  policy: magic\n", "2:11: unknown cluster.policy 'magic'; there are "),
        ("cluster:\n  time_scale: .inf\n", "2:15: cluster.time_scale must be a finite number, not inf"),
        ("cluster:\n  client_weights: [a]\n", "2:19: cluster.client_weights must map names to numbers"),
        ("cluster:\n  sglang_arguments: --tp 2\n", "2:21: cluster.sglang_arguments must be a list of texts"),
        ("gateway:\n  port:\n", "2:8: gateway.port must be a whole number"),
    ],
)
def test_a_mistake_has_a_place(text: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingError) as refused:
        load("cluster", {}, path)
    assert str(refused.value).startswith(f"{path}:{said}")
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"cannot read .*none\.yaml: No such file"):
        load("cluster", {}, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster:\n  policy_options:\n    quanta: 3\n", "3:5: policy dlpm has no option 'quanta'"),
        ("cluster:\n  policy: vtc\n  gateway_options: tries=0\n", "3:20: limit tries must be above 0"),
        ("cluster:\n  gpu: h100\n", "2:8: --gpu is for --engine emulated"),
    ],
)
def test_so_has_one_that_only_the_whole_shows(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text)
    assert cluster_command.main(["--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sglang-fair cluster: {path}:{said}")


def test_what_is_in_force_can_be_fed_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", str(write(tmp_path, GOOD)), "--port", "9", "--cost", "profiled"]
    assert cluster_command.main([*given, "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["cluster"]["port"] == 9
    again = write(tmp_path, shown)
    assert load("cluster", {}, again)[0] == parse("cluster", given)
    assert file.dump("cluster", load("cluster", {}, again)[0]) == shown


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_has_one_option_one_key_and_a_help(section: str) -> None:
    known = settings_of(SECTIONS[section]).values()
    assert len({setting.flag for setting in known}) == len({setting.key for setting in known}) == len(known)
    for setting in known:
        assert setting.help.endswith("."), setting.field
        if not setting.required:
            setting.check(setting.default, setting.flag)


def test_a_command_line_gives_the_same_settings_again() -> None:
    options = Options(replicas=3, client_weights={"a": 2.0}, json=True, identity="user", extra=("--tp", "2"))
    assert Options(**vars(parse("cluster", command_line(Cluster, vars(options))))) == options


def test_what_is_required_is_missed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("gateway", ["--port", "1", "--router", "tcp://x"])
    assert capsys.readouterr().err == "sglang-fair gateway: --model-name is missing\n"
    assert [name for name, setting in settings_of(Gateway).items() if setting.required] == [
        "router", "model_name", "tokenizer", "port"
    ]  # fmt: skip
