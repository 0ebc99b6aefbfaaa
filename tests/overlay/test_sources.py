"""A release is judged by its sources: what the overlay needs of it, by name and by parameters."""

import re
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

from sglang_fair.overlay import releases, sources


@pytest.mark.engine
def test_the_release_that_is_installed_has_all_that_is_needed_and_every_hook_is_known(sglang: None) -> None:
    from sglang_fair.engines.emulated import hooks as emulated
    from sglang_fair.overlay import hooks

    root = sources.installed()
    assert root is not None
    assert sources.faults(root, releases.found()) == []
    known = {f"sglang.srt.{need.owner}.{need.name}" for need in sources.needs(releases.NEWEST)}
    targets = {hook.target for hook in (*hooks.HOOKS, *emulated.HOOKS) if releases.has(hook.since)}
    assert {one for one in targets - known if one.startswith("sglang")} == UNSIGNED


UNSIGNED = {
    "sglang.srt.managers.scheduler_components.load_publisher.resolve_load_pub_range",  # which is imported there
    "sglang.srt.managers.tp_worker.TpModelWorker.__init__",  # of which nothing is read
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__",
}


SOURCE = """
class Scheduler:
    waiting_queue: list
    def __init__(self):
        self.chunked_req = None
    def took(self, batch, proxy=None): ...
    async def named(self, batch, *, level): ...
    @property
    def policy(self): ...
"""


@pytest.mark.parametrize(
    ("need", "fault"),
    [
        ("took(self, batch)", None),
        ("took(self, batch, proxy)", None),
        ("took(self, proxy)", "takes (self, batch, proxy), and not"),
        ("took(self, batch, proxy, more)", "takes"),
        ("took(self)", "takes"),
        ("took(self, ...)", None),
        ("named(self, batch, *, level)", None),
        ("named(self, batch)", "takes (self, batch, *, level), and not"),
        ("gone(self)", "has no gone(self)"),
        (".waiting_queue .chunked_req .policy", None),
        (".gone", "has no attribute gone"),
        ("gone(self)  since 0.6.0", None),
        ("gone(self)  until 0.5.9", "has no gone"),
        ("gone(self)  until 0.5.1", None),
    ],
)
def test_what_is_known_is_compared_by_place_and_name(
    need: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "sglang.whl"
    with ZipFile(wheel, "w") as made:
        made.writestr("sglang/srt/managers/scheduler.py", SOURCE)
    monkeypatch.setattr(sources, "SIGNATURES", f"managers.scheduler.Scheduler\n  {need}")
    found = sources.faults(ZipPath(wheel), "0.5.9")
    assert [bool(re.search(re.escape(fault), one)) for one in found] == [True] if fault else found == []


def test_releases_are_compared_by_number() -> None:
    assert releases.number("0.5.9") < releases.number("0.5.22rc1") == releases.number("0.5.22.post1")
    assert [one.since for one in releases.lacking("0.5.21")] == sorted(
        (one.since for one in releases.LACKS if one.since > "0.5.21"), reverse=True
    )
    assert releases.lacking(releases.NEWEST) == []
