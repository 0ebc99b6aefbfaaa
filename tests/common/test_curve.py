"""Keys: who may connect, who is refused and counted, and what a folder of keys is."""

import stat
from pathlib import Path

import pytest

from router import keys as command
from sglang_fair.common.curve import ROLES, Keys, make
from sglang_fair.settings.commands import BAD_INPUT, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "keys")
    return tmp_path / "keys"


def test_secret_keys_are_their_owners_and_never_overwritten(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{role}.{end}" for role in ROLES for end in ("key", "key_secret")
    )
    for role in ROLES:
        assert stat.S_IMODE((folder / f"{role}.key_secret").stat().st_mode) == 0o600
        assert "secret-key" not in (folder / f"{role}.key").read_text()
    before = (folder / "router.key_secret").read_bytes()
    (folder / "gateway.key").unlink()
    with pytest.raises(FileExistsError):
        make(folder)
    assert (folder / "router.key_secret").read_bytes() == before
    assert not (folder / "gateway.key").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.main, "keys", [str(tmp_path / "k")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert run(command.main, "keys", [str(tmp_path / "k")]) == BAD_INPUT
    assert "is there already" in capsys.readouterr().err


def test_a_process_needs_its_own_secret_key_and_the_others_public_ones(folder: Path) -> None:
    for role, needless in (("router", ()), ("gateway", ("replica",)), ("replica", ("gateway",))):
        for other in needless:
            (folder / f"{other}.key").rename(folder / "away")
            assert Keys.read(folder, role)  # type: ignore[arg-type]
            (folder / "away").rename(folder / f"{other}.key")
    (folder / "router.key").unlink()
    for role in ("gateway", "replica"):
        with pytest.raises(ValueError, match=f"has no keys for a {role}"):
            Keys.read(folder, role)  # type: ignore[arg-type]
    (folder / "router.key_secret").write_text('curve\n    public-key = "x"\n    secret-key = "y"\n')
    with pytest.raises(ValueError, match="has no keys for a router: a key has 40 characters"):
        Keys.read(folder, "router")


@pytest.mark.parametrize("text", ["", "curve", "x", "#" * 40, "~" * 40, "ä" * 40, "x" * 39])
@pytest.mark.parametrize("which", ["router.key_secret", "router.key", "gateway.key"])
def test_what_is_no_key_is_one_line(folder: Path, which: str, text: str) -> None:
    (folder / which).write_text(f'curve\n    public-key = "{text}"\n    secret-key = "{text}"\n')
    with pytest.raises(ValueError, match=r"has no keys for a router: [^\n]+$"):
        Keys.read(folder, "router")


def test_keys_of_two_folders_do_not_go_together(folder: Path, tmp_path: Path) -> None:
    """Half of a folder was copied anew: nobody would be let in, and nothing would say why."""
    make(tmp_path / "new")
    (tmp_path / "new" / "router.key").replace(folder / "router.key")
    with pytest.raises(ValueError, match=r"router\.key and router\.key_secret are not of one pair"):
        Keys.read(folder, "router")
    (folder / "router.key").unlink()
    assert Keys.read(folder, "router"), "its own public key is for others"
    secret = (folder / "router.key_secret").read_text()
    strange = (tmp_path / "new" / "router.key_secret").read_text()
    ours, theirs = (text.partition("public-key = ")[2][:42] for text in (secret, strange))
    (folder / "router.key_secret").write_text(secret.replace(ours, theirs))
    with pytest.raises(ValueError, match="are not of one pair"):
        Keys.read(folder, "router")
