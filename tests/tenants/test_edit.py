"""`sglang-fair tenants`: keys are shown once and kept as digests; comments stay; the file is whole at every moment."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_fair.tenants import edit, file, keys
from sglang_fair.tenants.__main__ import main
from sglang_fair.tenants.model import Limits, Tenant
from tests.support.budget import examples

TEXT = """\
# head
tenants:
  # gold pays more
  gold:   # inline
    weight: 3
    keys:
      # laptop
      - "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    limits: {concurrency: 3}  # few
  # silver is nice
  silver: {weight: 2}

  bronze:
  # end

# tail
""".replace("  bronze:\n", "  bronze: {}\n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "t.yaml"
    made.write_text(TEXT)
    return made


def comments(text: str) -> set[str]:
    return {line.partition("#")[2] for line in text.splitlines() if "#" in line}


def test_a_key_is_shown_once_and_kept_as_a_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.yaml"
    assert main(["add", "gold", "--tenants", str(path), "--weight", "2", "--tokens-per-day", "7"]) == 0
    key = capsys.readouterr().out.strip()
    assert len(key) >= len(keys.PREFIX) + 43
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    gold = file.read(path).tenants["gold"]
    assert gold == Tenant(keys=[keys.written(keys.digest(key))], weight=2.0, limits=Limits(tokens_per_day=7))
    assert main(["rotate", "gold", "--keep", "--tenants", str(path)]) == 0
    second = capsys.readouterr().out.strip()
    assert file.read(path).tenants["gold"].keys == [keys.written(keys.digest(one)) for one in (key, second)]
    assert main(["rotate", "gold", "--tenants", str(path)]) == 0
    third = capsys.readouterr().out.strip()
    assert file.read(path).tenants["gold"].keys == [keys.written(keys.digest(third))]
    assert main(["list", "--json", "--tenants", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["tenants"]["gold"]["weight"] == 2
    assert main(["list", "--tenants", str(path)]) == 0
    assert third not in capsys.readouterr().out
    assert main(["remove", "gold", "--tenants", str(path)]) == 0
    assert file.read(path).tenants == {}
    assert main(["schema"]) == 0
    assert "requests_per_minute" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["add", "gold"], ["add", "a b"], ["add", "x", "--weight", "0"], ["add", "x", "--concurrency", "0"],
        ["add", "x", "--cache-group", "a b"], ["rotate", "x"], ["remove", "x"],
    ],
)  # fmt: skip
def test_what_cannot_be_done_changes_nothing(
    path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--tenants", str(path)]) == 2
    assert path.read_text() == TEXT
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_bad_file_is_not_edited(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("tenants:\n  a: {weigth: 1}\n")
    assert main(["add", "b", "--tenants", str(path)]) == 2
    assert f"{path}:2:7:" in capsys.readouterr().err
    assert path.read_text() == "tenants:\n  a: {weigth: 1}\n"


def test_what_is_not_written_a_field_a_line_is_refused(path: Path) -> None:
    for text in (
        "tenants: {a: {weight: 2}, b: {}}\n",
        "x: &x {weight: 2}\n",
        "tenants: {a: &one {\n weight: 2}, b: *one}\n",
    ):
        path.write_text(text)
        with pytest.raises(ValueError):
            edit.remove(path, "a")
        assert path.read_text() == text


def test_comments_stay(path: Path) -> None:
    edit.add(path, "new", Tenant())
    edit.set_keys(path, "silver", lambda old: [keys.written(keys.digest("s"))])
    for name in ("gold", "silver", "bronze"):
        edit.set_weight(path, name, 0.5)
    assert comments(path.read_text()) == comments(TEXT)
    edit.set_keys(path, "gold", lambda old: [keys.written(keys.digest("g"))])
    assert comments(path.read_text()) == comments(TEXT) - {" laptop"}
    edit.remove(path, "gold")
    assert comments(path.read_text()) == comments(TEXT) - {" laptop", " inline", " few"}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "rotate", "weigh", "remove"]),
        st.sampled_from(["gold", "silver", "12", "n/1"]),
    ),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
@given(steps=STEPS)
def test_any_changes_leave_what_was_wanted(tmp_path: Path, steps: list[tuple[str, str]]) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(TEXT)
    wanted = dict(file.read(path).tenants)
    for number, (do, name) in enumerate(steps):
        key = keys.written(keys.digest(str(number)))
        if do == "add" and name not in wanted:
            wanted[name] = Tenant(keys=[key], weight=number + 1.0)
            edit.add(path, name, wanted[name])
        elif do == "rotate" and name in wanted:
            wanted[name] = wanted[name].model_copy(update={"keys": [key]})
            edit.set_keys(path, name, lambda old, key=key: [key])
        elif do == "weigh" and name in wanted:
            wanted[name] = wanted[name].model_copy(update={"weight": number + 0.5})
            edit.set_weight(path, name, number + 0.5)
        elif do == "remove" and name in wanted:
            del wanted[name]
            edit.remove(path, name)
        assert file.read(path).tenants == wanted
        assert list(path.parent.iterdir()) == [path]
    assert {" head", " tail", " end", " gold pays more", " silver is nice"} <= comments(path.read_text())


def test_two_at_once_both_happen_and_a_reader_sees_whole_files(path: Path) -> None:
    over, bad = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            try:
                file.read(path)
            except ValueError as error:
                bad.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    writers = [
        threading.Thread(target=lambda n=n: [edit.add(path, f"t{n}-{i}", Tenant()) for i in range(10)])
        for n in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    over.set()
    reader.join()
    assert not bad
    assert len(file.read(path).tenants) == 3 + 20


def test_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    edit.add(link, "new", Tenant())
    assert link.is_symlink()
    assert "new" in file.read(path).tenants


@pytest.mark.parametrize(
    ("name", "weight"), [("gold", 0.0), ("gold", float("nan")), ("gold", 1e7), ("nobody", 1.0)]
)
def test_a_weight_that_cannot_be_changes_nothing(path: Path, name: str, weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight|no tenant"):
        edit.set_weight(path, name, weight)
    assert path.read_text() == TEXT
