"""Replicas that come and go under load, by a file and by a DNS name: one that appears gets requests when it is ready,
and one that vanishes loses none. Processes are real, engines are stand-ins."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.lists_under_load import come_and_go
from tests.support.networks import may_unshare
from tests.support.site import Site
from tests.support.stand_in import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "replicas"

    async def main() -> None:
        site = Site(
            make_tokenizer(tmp_path), replicas=0, gateways=2, routers=2, step_s=0.01,
            router_options=("--replicas-file", str(path)),
        )  # fmt: skip
        for name in ("a", "b", "c"):
            site.add_replica(name)

        def listed(names: Sequence[str]) -> None:
            new = path.with_suffix(".new")
            new.write_text("".join(f"{name},http={urls[name]}\n" for name in names))
            new.rename(path)

        urls = dict(site.urls)
        async with site:
            await come_and_go(site, listed)

    asyncio.run(main())


def test_by_the_addresses_of_a_name() -> None:
    if not may_unshare():
        pytest.skip("this process may not make a network of its own (unshare -rmn)")
    if shutil.which("dnsmasq") is None:
        pytest.skip("there is no dnsmasq here (Debian's dnsmasq-base)")
    command = ["unshare", "-rmn", sys.executable, "-m", "tests.support.lists_under_load"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout[-2000:] + done.stderr[-3000:]
