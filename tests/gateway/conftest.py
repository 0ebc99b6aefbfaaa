"""Tests of the gateway may be coroutine functions, and have a cluster of their own in the loop that runs them."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.gateway.access import identity
from router.gateway.replicas import pool
from tests.gateway.clusters import Cluster, cluster
from tests.support.stand_in import make_tokenizer


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster(**options): of the fixture `c`")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test, given = pyfuncitem.obj, getattr(pyfuncitem.obj, "hypothesis", None)
    if given is not None:  # each example has a loop of its own
        inner = getattr(given.inner_test, "coroutine", given.inner_test)
        if inspect.iscoroutinefunction(inner):
            given.inner_test = _in_own_loop(inner, pyfuncitem.funcargs["loop_factory"])
    elif inspect.iscoroutinefunction(test):
        names = inspect.signature(test).parameters
        pyfuncitem.funcargs["runner"].run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True
    return None


def _in_own_loop(test: Callable[..., Any], loop_factory: Any) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(*args, **kwargs))

    run.coroutine = test  # type: ignore[attr-defined]
    return run


@pytest.fixture
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of the loop that runs a test; a module may have another one."""
    return None


@pytest.fixture(autouse=True)
def runner(loop_factory: Callable[[], asyncio.AbstractEventLoop] | None) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=loop_factory) as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and replicas are looked at again soon."""
    monkeypatch.setattr(identity, "LOOK_S", 0.02)
    monkeypatch.setattr(pool, "INTERVAL_S", 0.05)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer: one token a byte."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of `c`: those of the mark `cluster`, and the file of a test's fixture `tenants`. A module may add some."""
    marker = request.node.get_closest_marker("cluster")
    found = dict(marker.kwargs) if marker else {}
    if "tenants" in request.fixturenames:
        found["tenants"] = request.getfixturevalue("tenants")
    return found


@pytest.fixture
def c(runner: asyncio.Runner, tokenizer: Path, options: dict[str, Any]) -> Iterator[Cluster]:
    """A fresh cluster."""
    made = cluster(tokenizer, **options)
    try:
        yield runner.run(made.__aenter__())
    finally:
        runner.run(made.__aexit__(None, None, None))
