"""A list of replicas that many machines write: right whoever writes when, without those that are gone."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.replica_lists import specs
from sglang_fair.cluster.listed import __main__ as listed
from sglang_fair.cluster.listed.parts import STALE_S, OwnPart, Part, merged
from sglang_fair.settings.commands import Mistake, run


def line(name: str) -> str:
    return f"{name},http=http://10.0.0.7:30000,kv=tcp://10.0.0.7:30001,replay=tcp://10.0.0.7:30002"


def names(path: Path) -> list[str]:
    return [up.worker for up in specs.lines(path.read_text())]


def test_each_writes_its_own_line_and_takes_it_away(tmp_path: Path) -> None:
    path = tmp_path / "new" / "replicas"
    one, other = OwnPart(path, "j1-0"), OwnPart(path, "j1-1")
    assert one.look(line("j1-0"))
    assert other.look(line("j1-1"))
    assert names(path) == ["j1-0", "j1-1"]
    before = path.stat()
    assert not one.look(line("j1-0")), "what is right is not written"
    assert path.stat() == before
    assert one.look(None)
    assert names(path) == ["j1-1"]
    assert other.look(None)
    assert path.read_text() == "", "nobody is listed, which drains all"


def test_a_list_that_another_has_overwritten_is_right_after_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    one, other = OwnPart(path, "one"), OwnPart(path, "other")
    one.look(line("one"))
    stale = path.read_text()
    other.look(line("other"))
    path.write_text(stale)  # by one that read the parts before, and was slower
    assert other.look(line("other"))
    assert names(path) == ["one", "other"]


def test_whose_machine_is_gone_is_listed_no_more(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    one, other = OwnPart(path, "one"), OwnPart(path, "other")
    one.look(line("one"))
    other.look(line("other"))
    long_ago_s = time.time() - 2 * STALE_S
    os.utime(tmp_path / "replicas.d" / "one", (long_ago_s, long_ago_s))
    assert other.look(line("other"))
    assert names(path) == ["other"]
    assert one.look(line("one")), "it was not gone"
    assert names(path) == ["one", "other"]


def test_what_is_no_part_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    one = OwnPart(path, "one")
    one.look(line("one"))
    (tmp_path / "replicas.d" / ".other").write_text("half a li")
    (tmp_path / "replicas.d" / ".leave-7").touch()
    for name, left in (("empty", b""), ("zeros", bytes(40)), ("torn", "two,http=http://ä".encode()[:-1])):
        (tmp_path / "replicas.d" / name).write_bytes(left)  # as a machine that crashes may leave it
    assert not one.look(line("one"))
    assert names(path) == ["one"]


@pytest.mark.parametrize("name", ["", ".one", "a/b", "../a", "a b", "a,b", "a\nb", "x" * 200])
def test_a_name_that_is_no_files_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        OwnPart(tmp_path / "replicas", name)


NAMES = ("a", "b", "c")


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.floats(0, 100)), max_size=20),
    st.floats(0, 200),
)
def test_everybody_makes_the_same_list_of_the_same_parts(
    written: list[tuple[str, bool, float]], now_s: float
) -> None:
    parts: dict[str, Part] = {}
    for name, stays, at_s in written:
        if stays:
            parts[name] = Part(line(name), at_s)
        else:
            parts.pop(name, None)
    found = merged(parts, now_s)
    assert found == merged(dict(reversed(parts.items())), now_s)
    fresh = sorted(name for name, part in parts.items() if now_s - part.touched_s <= STALE_S)
    assert [up.worker for up in specs.lines(found)] == fresh


def test_a_machines_address_is_one_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listed.own_address("127.0.0.1") == "127.0.0.1", "as it is said"

    def resolved(*addresses: str) -> Any:
        return lambda name, port, **more: [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolved("127.0.1.1", "fd00::7", "10.0.0.7"))
    assert listed.own_address(None) == "10.0.0.7"
    monkeypatch.setattr(socket, "getaddrinfo", resolved("127.0.1.1"))
    with pytest.raises(Mistake, match=r"is 127\.0\.1\.1, which no other machine reaches; say --address"):
        listed.own_address(None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--name", "a/b", "--address", "127.0.0.1"], "letters, digits"),
        (["--name", "a", "--", "--policy", "nonsense"], "unknown --policy"),
        (["--name", "a", "--address", "no-such-host.invalid"], "has no address"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    try:
        code = run(listed.main, "listed", [str(tmp_path / "replicas"), *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1
