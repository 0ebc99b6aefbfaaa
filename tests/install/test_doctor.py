"""The doctor's lines: what does not fit is red, says what to do, and makes the exit code 1."""

import socket
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from sglang_fair.cluster.options import Options
from sglang_fair.common import curve
from sglang_fair.install import doctor
from sglang_fair.overlay import releases, sources
from sglang_fair.settings.commands import run


def wheel(folder: Path, version: str, source: str) -> Path:
    made = folder / f"sglang-{version}-py3-none-any.whl"
    with ZipFile(made, "w") as file:
        file.writestr(f"sglang-{version}.dist-info/METADATA", f"Name: sglang\nVersion: {version}\n")
        file.writestr("sglang/srt/server_args.py", source)
    return made


@pytest.fixture(autouse=True)
def few_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SIGNATURES", "server_args\n  parse(args)")


@pytest.mark.parametrize(
    ("version", "source", "more", "code", "said"),
    [
        (releases.NEWEST, "def parse(args): ...", (), 0, "1 functions and attributes are as they are known"),
        (releases.NEWEST, "def parse(argv): ...", (), 1, "server_args.parse takes (argv), and not (args)"),
        ("0.9.0", "def parse(args): ...", (), 1, "or start with --unsupported-sglang"),
        ("0.9.0", "def parse(args): ...", ("--", "--unsupported-sglang"), 0, "0.9.0 is not tested"),
        ("0.9.0", "", ("--", "--unsupported-sglang"), 1, "server_args has no parse(args)"),
    ],
)
def test_a_wheel_is_looked_through(
    version: str, source: str, more: tuple[str, ...], code: int, said: str, tmp_path: Path, capsys: Any
) -> None:
    file = wheel(tmp_path, version, source)
    assert run(doctor.main, "sglang-fair doctor", ["--wheel", str(file), *more]) == code
    out = capsys.readouterr().out
    assert said in out
    assert ("WRONG" in out, "→" in out) == (code == 1, code == 1)


def test_another_file_is_no_wheel_of_sglang(capsys: Any) -> None:
    assert run(doctor.main, "sglang-fair doctor", ["--wheel", __file__]) == 2
    assert "is no wheel of SGLang: pip download" in capsys.readouterr().err


def lines(**settings: Any) -> dict[str, doctor.Line]:
    return {line.what: line for line in doctor.of_cluster(Options(model="tiny", **settings))}


def test_what_a_cluster_needs_is_tried(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = lines(port=port, keys=str(tmp_path / "none"))
        assert "in use" in found["port"].says
        assert found["port"].do == "choose another with --port"
    assert (found["model"].do, found["keys"].do) == (None, None)
    curve.make(tmp_path / "keys")
    assert lines(keys=str(tmp_path / "keys"))["keys"].do is None
    (tmp_path / "keys/router.key").unlink()
    assert "sglang-fair keys" in (lines(keys=str(tmp_path / "keys"))["keys"].do or "")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    found = {line.what: line for line in doctor.of_cluster(Options(model=str(tmp_path / "empty")))}
    assert "has no tokenizer.json" in found["model"].says
    wrong = lines(policy_options="patience=x")["settings"]
    assert wrong.do is not None
