"""The tenants' file: what it may say, and that a mistake names its line and column."""

import os
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants import file, keys
from sglang_fair.tenants.model import Tenants, json_schema

DIGEST = keys.written(keys.digest("a"))

MISTAKES = [
    ("", "1:1: the file is empty"),
    ("tenants:\n", "1:9: tenants: this must be a mapping"),
    ("tenants: [1]", "1:10: tenants: this must be a mapping"),
    ("tenant: {}", "1:1: tenant: there is no 'tenant' here"),
    ("tenants: {}\ntenant: {}", "2:1: tenant: there is no 'tenant' here"),
    ("{}", "1:1: tenants is missing"),
    ("{x: 1}", "1:2: x: there is no 'x' here"),
    ("[", "1:2: not YAML"),
    (
        "tenants:\n  a:\n    weight: -1",
        "3:13: tenants.a.weight: input should be greater than or equal to 0.000001",
    ),
    ("tenants:\n  a: {weight: yes}", "2:15: tenants.a.weight: input should be a valid number"),
    ("tenants:\n  a: {weight: .nan}", "2:15: tenants.a.weight"),
    ("tenants:\n  a: {weigth: 1}", "2:7: tenants.a.weigth: there is no 'weigth' here"),
    ("tenants:\n  'a b': {}", "2:3: tenants.a b: string should match pattern"),
    ("tenants:\n  anonymous: {}", "2:3: tenants.anonymous: 'anonymous' is the client"),
    ("tenants:\n  a: {}\n  b: {}\n  a: {}", "4:3: a is given twice"),
    ("tenants:\n  a: {keys: [x]}", "2:14: tenants.a.keys.0: string should match"),
    (
        f"tenants:\n  a: {{keys: ['{DIGEST}']}}\n  b:\n    keys:\n      - {DIGEST}",
        "5:9: tenants.b.keys.0: tenant a has",
    ),
    ("tenants: {a: {limits: {concurrency: 1.5}}}", "1:37: tenants.a.limits.concurrency"),
    ("tenants: {a: {limits: {concurrency: 0}}}", "1:37: tenants.a.limits.concurrency"),
    ("tenants: {a: {weight: !!int x}}", "1:23: "),
    ("tenants: {a: {weight: 2001-99-99}}", "1:23: "),
    ("tenants: {a: !!python/object:os.system x}", "1:14: not YAML"),
    ("a: &x [*x]", "1:4: nested too deeply"),
    ("\x00", " not YAML"),
]


@pytest.mark.parametrize(("text", "error"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(SettingError) as found:
        file.read(path)
    assert str(found.value).startswith(f"{path}:{error}")
    assert "\n" not in str(found.value)


@pytest.mark.slow
def test_what_cannot_be_read_or_might_never_end_is_one_line(tmp_path: Path) -> None:
    pipe, huge, deep, many, other = (tmp_path / name for name in ("pipe", "huge", "deep", "many", "other"))
    os.mkfifo(pipe)
    with huge.open("wb") as out:
        out.truncate(1 << 40)
    deep.write_text("[" * 5000)
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    many.write_text("\n".join(rows))  # aliases that multiply
    other.write_bytes(b"\xff\xfe\xff")
    for path, error in (
        (tmp_path / "none.yaml", "No such file"),
        (other, "it is not UTF-8"),
        (pipe, "it is not a file"),
        (Path("/dev/zero"), "it is not a file"),
        (tmp_path, "Is a directory"),
        (huge, "bytes; at most"),
        (deep, "nested too deeply"),
        (many, "too much of it"),
    ):
        with pytest.raises(SettingError, match=error) as found:
            file.read(path)
        assert str(path) in str(found.value)


def test_the_schema_says_what_the_reader_accepts(tmp_path: Path) -> None:
    Draft202012Validator.check_schema(json_schema())
    judge, path = Draft202012Validator(json_schema()), tmp_path / "t.yaml"
    good = {
        "tenants": {
            "gold": {
                "keys": [DIGEST],
                "weight": 3,
                "models": ["m", "m:a"],
                "cache_group": "g",
                "limits": {"requests_per_minute": 1, "tokens_per_day": 9, "output_tokens": 4},
            },
            "12": {},
        }
    }
    path.write_text(Tenants.model_validate(good).model_dump_json(exclude_none=True))
    assert file.read(path) == Tenants.model_validate(good)
    assert judge.is_valid(good)
    assert not judge.is_valid({"tenants": {"a": {"weigth": 1}}})
    assert not judge.is_valid({"tenants": {"a": {"keys": ["x"]}}})
    assert not judge.is_valid({"tenants": {"a": {"limits": {"concurrency": 0}}}})


def test_the_page_has_every_key_with_its_meaning() -> None:
    page = " ".join(Path("docs/tenants-file.md").read_text(encoding="utf-8").split())
    parts = [json_schema(), *json_schema()["$defs"].values()]
    for name, about in ((name, one) for part in parts for name, one in part["properties"].items()):
        assert f"| `{name}` | " in page
        assert about.get("description", "") in page
