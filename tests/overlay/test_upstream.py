"""docs/upstream.md: the draft of a patch applies to the SGLang that is installed, and what it would replace is here."""

import ast
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/upstream.md").read_text(encoding="utf-8")
OVERLAY = Path(__file__).parents[2] / "sglang_fair/overlay"


def test_the_patch_applies_and_the_result_compiles(tmp_path: Path) -> None:
    found = find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    (patch,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, flags=re.M | re.S)
    changed = re.findall(r"^\+\+\+ b/sglang/(\S+)$", patch, flags=re.M)
    for file in changed:
        (tmp_path / "sglang" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(found.submodule_search_locations[0], file), tmp_path / "sglang" / file)
    done = subprocess.run(
        ["git", "apply", "--verbose", "-"],
        cwd=tmp_path,
        input=patch,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for file in changed:
        text = (tmp_path / "sglang" / file).read_text()
        compile(text, file, "exec")
        assert "SCHEDULE_POLIC" in text, "it was applied here, and not to a repository around"
    added, removed = (len(re.findall(rf"^[{sign}](?![{sign}]{{2}} )", patch, flags=re.M)) for sign in "+-")
    assert f"adds {added} lines, removes {removed}" in " ".join(PAGE.split())


def test_what_it_would_replace_is_here() -> None:
    rows = re.findall(r"^\| [12] \| (.+?) \| \d+ \| \d+ \|$", PAGE, flags=re.M)
    assert rows
    for row in rows:
        words = re.findall(r"`([\w.]+)`", row)
        for module, _, name in (word.partition(".") for word in words if "." in word):
            tree = ast.parse((OVERLAY / f"{module}.py").read_text(encoding="utf-8"))
            here = {getattr(node, "name", None): node for node in tree.body}
            assert name in here, f"{module}.{name}"
            if isinstance(made := here[name], ast.ClassDef):
                inside = {getattr(node, "name", None) for node in made.body}
                assert {word for word in words if "." not in word} <= inside | {"processed"}, row
