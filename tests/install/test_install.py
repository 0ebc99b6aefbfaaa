"""`sglang-fair install`: what is installed in which order, with which installer, and what is said when it fails."""

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fair.common import installed
from sglang_fair.install import __main__ as command
from sglang_fair.install.__main__ import CPU_LOCK, MODEL_TOOLS, install_steps, locked
from sglang_fair.overlay.releases import NEWEST
from sglang_fair.settings.commands import Mistake, run
from tests.whole.test_setup import RUNS as SHIPPED


class TestSteps:
    def test_torch_comes_first_and_with_its_dependencies_then_the_lock_alone(self) -> None:
        torch, lock = install_steps("cpu", torch_index="https://torch.example")
        wheels = [f"{name}=={SHIPPED[name]}" for name in ("torch", "torchvision")]
        assert torch == (*wheels, "--index-url", "https://torch.example")
        assert lock == ("--no-deps", "-r", str(CPU_LOCK))

    def test_on_gpus_it_is_sglang_s_own_choice(self) -> None:
        sglang, models = install_steps("cuda")
        assert sglang == (f"sglang=={NEWEST}",)
        assert models == ("--no-deps", *(f"{name}=={SHIPPED[name]}" for name in MODEL_TOOLS))

    def test_what_the_lock_does_not_have_is_an_error(self) -> None:
        with pytest.raises(KeyError):
            locked(["nothing"], "something==1\n")


class TestCommand:
    def test_a_dry_run_prints_each_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        for profile in ("cpu", "cuda"):
            assert run(command.main, "sglang-fair install", [profile, "--dry-run"]) == 0
            *installs, check = map(shlex.split, capsys.readouterr().out.splitlines())
            for words, step in zip(installs, install_steps(profile), strict=True):
                assert tuple(words[-len(step) :]) == step
            assert check == [sys.executable, "-m", "sglang_fair.install.check", profile]

    def test_an_unknown_profile_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(command.main, "sglang-fair install", ["tpu"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "'cpu', 'cuda'" in line

    def test_without_pip_it_is_uv_for_this_python(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(command.metadata, "distributions", lambda **_: iter(()))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(Mistake, match="neither pip nor uv"):
            command.installer()
        uv = tmp_path / "uv"
        uv.write_text("#!/bin/sh\n")
        uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
        assert command.installer() == [str(uv), "pip", "install", "--python", sys.executable]

    def test_the_first_command_that_fails_is_the_last(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A stand-in for pip that writes down what it is asked, and then fails."""
        asked = tmp_path / "asked"
        pip = tmp_path / "pip"
        pip.write_text(f'#!/bin/sh\necho "$PYTHONPATH|$@" >> {asked}\nexit 3\n')
        pip.chmod(0o755)
        monkeypatch.setenv("PYTHONPATH", os.getcwd())
        monkeypatch.setattr(command, "installer", lambda: [str(pip)])
        assert run(command.main, "sglang-fair install", ["cpu"]) == 1
        assert asked.read_text() == f"|torch=={SHIPPED['torch']} torchvision=={SHIPPED['torchvision']}\n"
        assert "failed, with exit code 3" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_without_an_engine_a_cluster_says_what_installs_it(tmp_path: Path) -> None:
    """In a process in which neither can be found."""
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name in ('torch', 'sglang') else real(name, *more)\n"
        "from sglang_fair.cluster.__main__ import main\n"
        "sys.exit(main(['--engine', 'emulated', '--gpu', 'a100-80g', '--model', 'llama-3.1-8b', '--port', '0']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "sglang-fair: sglang and torch not installed beside this package; run: sglang-fair install cpu "
        "(with GPUs: sglang-fair install cuda)\n"
    )


def test_with_one_nothing_is_said() -> None:
    assert installed.missing_engine() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "main", "words"),
    [
        ("python_multipart", "sglang_fair.cluster.__main__", "--batches here"),
        (
            "python_multipart",
            "router.gateway.__main__",
            "--router tcp://127.0.0.1:9 --model-name m --tokenizer . --port 1 --batches here",
        ),
        (
            "redis",
            "router.gateway.__main__",
            "--router tcp://127.0.0.1:9 --model-name m --tokenizer . --port 1 --limit-store redis://h",
        ),
    ],
)
def test_a_missing_extra_is_named_in_one_line(package: str, main: str, words: str, tmp_path: Path) -> None:
    """Nothing but what needs it imports it."""
    (tmp_path / "hide.py").write_text(
        "import sys\n"
        "class Hiding:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] == hidden: raise ModuleNotFoundError(name)\n"
        "hidden = sys.argv[1]\n"
        "sys.meta_path.insert(0, Hiding())\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == hidden else real(name, *more)\n"
        "from importlib import import_module\n"
        "module = import_module(sys.argv[2])\n"
        "sys.argv = sys.argv[2:]\n"
        "main = module.main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "hide.py", package, main, *words.split()],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert "pip install 'sglang-fair[" in line
